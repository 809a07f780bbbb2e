"""What a model's files say, read without torch: parameters, shapes, sizes. Refuses files that are missing or torn."""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from unisono.config.schema import RunConfig
from unisono.errors import ModelError
from unisono.model.locate import locate_model
from unisono.plan.model import ModelFacts

_HEADER_LIMIT = 100_000_000  # the bound of the safetensors format itself
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a safetensors file: its name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def inspect_model(config: RunConfig) -> ModelFacts:
    """The figures of the config's model; downloads it first if it is a hub id.

    Raises:
        ModelError: if files are missing, torn, or do not belong together.
    """
    directory = locate_model(config.model.path, config.model.revision)
    settings = read_model_config(directory)
    text = settings.get("text_config", settings)
    if config.model.weights == "random":
        return _facts_from_config(directory, settings, text)
    files = weight_files(directory)
    headers = [header for file in files for header in read_safetensors_header(file)]
    matrices = [h.shape for h in headers if len(h.shape) == 2 and not is_embedding(h.name)]
    return ModelFacts(
        directory=str(directory),
        model_type=str(settings.get("model_type", "unknown")),
        parameters=sum(_count(h.shape) for h in headers),
        hidden_size=_whole(text, "hidden_size", "n_embd", "d_model"),
        layers=_whole(text, "num_hidden_layers", "n_layer", "num_layers"),
        intermediate_size=_whole(
            text, "intermediate_size", "n_inner", default=4 * _whole(text, "hidden_size", "n_embd", "d_model")
        ),
        vocab_size=_whole(text, "vocab_size"),
        linear_parameters=sum(_count(shape) for shape in matrices),
        linear_in_out=sum(sum(shape) for shape in matrices),
        weight_bytes=sum(file.stat().st_size for file in files),
        digest=_digest([directory / "config.json", *files]),
    )


def read_model_config(directory: Path) -> dict[str, Any]:
    """config.json as a mapping.

    Raises:
        ModelError: if it is missing or no JSON object.
    """
    file = directory / "config.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError.of(
            f"{directory} has no config.json", where=str(file), fix="give a model in the Hugging Face layout"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError.of(
            "config.json cannot be read", where=str(file), why=str(error), fix="copy it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError.of("config.json is no JSON object", where=str(file), fix="copy it again")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the weights, all of which exist.

    Raises:
        ModelError: if there are none, or one that the index names is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError.of(
                "the index of the weights cannot be read",
                where=str(index),
                why=str(error),
                fix="copy it again",
            ) from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError.of(
                f"the model lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:4])}", where=str(directory),
                why=f"{index.name} names them", fix="copy or download the missing files",
            )  # fmt: skip
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if list(directory.glob("*.bin")) or list(directory.glob("*.pt")):
        raise ModelError.of(
            "the weights are pickled files", where=str(directory), why="loading a pickle runs whatever code it holds",
            fix="convert them once to safetensors (transformers: model.save_pretrained), from a source that you trust",
        )  # fmt: skip
    raise ModelError.of(
        "the model has no weights", where=str(directory), why="there is neither model.safetensors nor an index of it",
        fix="copy the weights, or set model.weights: random to start from nothing",
    )  # fmt: skip


def read_safetensors_header(file: Path) -> list[TensorHeader]:
    """Names, dtypes and shapes in a safetensors file whose size is what its header says.

    Raises:
        ModelError: if it is torn or no safetensors file.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _HEADER_LIMIT):
                raise ValueError("its header would be longer than the file")  # noqa: TRY301 - one place words the refusal
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = [
            TensorHeader(name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()
        ]
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError.of(
            "a weight file is damaged", where=str(file), why=str(error), fix="copy or download it again"
        ) from error
    if 8 + length + end != size:
        raise ModelError.of(
            "a weight file is cut short" if size < 8 + length + end else "a weight file is longer than its header says",
            where=str(file), why=f"it has {size} bytes where its header says {8 + length + end}", fix="copy or download it again",
        )  # fmt: skip
    return tensors


def _facts_from_config(directory: Path, settings: dict[str, Any], text: dict[str, Any]) -> ModelFacts:
    """Figures of a model that has no weights yet, by the shape of a Llama block; the worker counts them exactly."""
    hidden = _whole(text, "hidden_size", "n_embd", "d_model")
    layers = _whole(text, "num_hidden_layers", "n_layer", "num_layers")
    intermediate = _whole(text, "intermediate_size", "n_inner", default=4 * hidden)
    vocab = _whole(text, "vocab_size")
    heads = _whole(text, "num_attention_heads", "n_head", default=1)
    kv = hidden // heads * _whole(text, "num_key_value_heads", default=heads)
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate
    in_out = 4 * hidden + 2 * (hidden + kv) + 3 * (hidden + intermediate)
    embeddings = vocab * hidden * (1 if text.get("tie_word_embeddings", True) else 2)
    parameters = layers * (block + 2 * hidden) + embeddings + hidden
    return ModelFacts(
        directory=str(directory), model_type=str(settings.get("model_type", "unknown")), parameters=parameters, hidden_size=hidden,
        layers=layers, intermediate_size=intermediate, vocab_size=vocab, linear_parameters=layers * block,
        linear_in_out=layers * in_out, weight_bytes=0, digest=_digest([directory / "config.json"]),
    )  # fmt: skip


def _whole(settings: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = settings.get(name)
        if isinstance(value, int) and value > 0:
            return value
    if default is not None:
        return default
    raise ModelError.of(
        f"config.json of the model does not say its {names[0]}", where=names[0],
        why="this is no language model that we can read, or an unknown type", fix="use a causal language model in the Hugging Face layout",
    )  # fmt: skip


def is_embedding(name: str) -> bool:
    """Whether a tensor of this name turns tokens into vectors, or back; adapters leave these alone."""
    return any(word in name for word in ("embed", "wte", "wpe", "lm_head"))


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def _digest(files: list[Path]) -> str:
    """A digest of the names and contents of files."""
    total = hashlib.sha256()
    for file in files:
        one = xxhash.xxh3_128()
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                one.update(block)
        total.update(f"{file.name} {one.hexdigest()}\n".encode())
    return total.hexdigest()[:32]
