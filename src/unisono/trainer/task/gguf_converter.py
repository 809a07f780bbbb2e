"""llama.cpp's own converter as a subprocess, for models that are not written here, and how what it
wrote compares with the model.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, dequantize

from unisono.base.errors import IntegrityError, UnfitError
from unisono.base.text import one_line
from unisono.trainer.model.gguf import TEXTS

_ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
_TEST_TEXTS = "models/ggml-vocab-*.gguf.inp"  # beside the converter, where the repository is whole
_BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"


def convert(converter: Path, model: Path, file: Path, *, dtype: str, name: str) -> None:
    """Runs `convert_hf_to_gguf.py` with this interpreter.

    Args:
        converter: the script.
        model: a directory of transformers.
        file: to write.
        dtype: f32, f16 or bf16.
        name: of the model, for the file.

    Raises:
        UnfitError: if it fails.
    """
    command = [sys.executable, str(converter), str(model), "--outfile", str(file), "--outtype", dtype]
    done = subprocess.run(
        [*command, "--model-name", name],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0 and file.is_file():
        return
    last = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()][-1:] or ["no message"]
    raise UnfitError.of(
        f"llama.cpp's converter ended with {done.returncode}: {one_line(last[0], limit=300)}",
        where=str(converter),
        why=f"it was to write {dtype} from the merged model; nothing was left behind",
        fix=(
            "if it does not know the model, update llama.cpp; if a module is missing, install the"
            " requirements of the converter"
        ),
    )


@dataclass(frozen=True, slots=True)
class ConvertedTensors:
    """Tensors of a converted file.

    Attributes:
        architecture: llama.cpp's name of it.
        equal: how many have the values of the model, in its order or in another order.
        others: names of those that the converter has joined, split or computed.
    """

    architecture: str
    equal: int
    others: tuple[str, ...]


def compare_tensors(file: Path, model: Any) -> ConvertedTensors:
    """Compares the tensors of a converted file with a model.

    Names are matched by the table of the package `gguf`. llama.cpp has the rows of some matrices in
    another order, so a tensor is equal if it has the same values, rounded as the file has them.

    Raises:
        IntegrityError: if no tensor is that of the model, or one is not finite.
    """
    reader = GGUFReader(file)
    architecture = str(reader.fields["general.architecture"].contents())
    config = model.config.get_text_config()
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    equal = set()
    for name, tensor in model.state_dict().items():
        here = stored.get(str(names.get_name(name, try_suffixes=(".weight", ".bias"))))
        if here is not None and _has_values(here, tensor):
            equal.add(here.name)
    others = tuple(sorted(stored.keys() - equal))
    broken = next((name for name in others if not np.isfinite(_values(stored[name])).all()), None)
    if broken is not None or not equal:
        raise IntegrityError.of(
            "llama.cpp's converter has not written this model",
            where=file.name,
            why=f"{broken} has values that are not finite" if broken else "no tensor has values of the model",
            fix="nothing was written; update llama.cpp, or report it to llama.cpp with the config.json",
        )
    return ConvertedTensors(architecture, len(equal), others)


def _values(tensor: Any) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return dequantize(np.asarray(tensor.data), tensor.tensor_type).astype(np.float32).reshape(-1)


def _has_values(here: Any, tensor: torch.Tensor) -> bool:
    kinds = {gguf.GGMLQuantizationType.F16: torch.float16, gguf.GGMLQuantizationType.BF16: torch.bfloat16}
    expected = tensor.detach().to(kinds.get(here.tensor_type, torch.float32)).float().reshape(-1).numpy()
    values = _values(here)
    if values.shape != expected.shape:
        return False
    return np.array_equal(values, expected) or np.array_equal(np.sort(values), np.sort(expected))


def comparison_texts(converter: Path) -> Iterator[str]:
    """Texts whose tokens are compared: llama.cpp's own for its vocabularies, where they are beside
    the converter, and this package's.
    """
    yield from TEXTS
    for file in sorted(converter.resolve().parent.glob(_TEST_TEXTS))[:1]:  # all have the same
        yield from file.read_text(encoding="utf-8", errors="replace").split(_BETWEEN_TEXTS)
