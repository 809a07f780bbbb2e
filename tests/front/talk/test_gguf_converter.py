"""GGUF files that llama.cpp's converter writes are compared with the model.

Run: pytest tests/front/talk/test_gguf_converter.py
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests import front_server, needs
from tests.front.talk.conftest import Listening, Trained
from tests.front.talk.test_gguf import CONFIGS, SHAPE, export, save
from unisono.base.errors import IntegrityError, UnfitError
from unisono.trainer.plan.task_requests import GgufRequest, RequestedModel
from unisono.trainer.task import gguf_export
from unisono.trainer.task.gguf_converter import ConvertedTensors, compare_tensors, comparison_texts

ROOT = Path(__file__).parents[3]


def write_converter(folder: Path, *more: str, text: str = "") -> Path:
    """A script with the arguments of convert_hf_to_gguf.py."""
    script = folder / "convert_hf_to_gguf.py"
    runs = f"sys.path.insert(0, {str(ROOT)!r}); sys.argv += {list(more)!r}; runpy.run_module('tests.front.talk.converts')"
    script.write_text(f"import runpy, sys\n{text or runs}\n")
    return script


@pytest.mark.processes
def test_what_a_converter_writes_is_the_merged_model(
    train_here: Callable[..., Trained], tmp_path: Path
) -> None:
    out, trained = tmp_path / "out", train_here()
    request = GgufRequest(
        model=RequestedModel(str(trained.directory)),
        out=str(out),
        quantize="f32",
        converter=str(write_converter(tmp_path)),
    )
    done = gguf_export.run(request, Listening())
    assert done["converted"] is not None
    assert done["converted"]["others"] == []
    assert done["files"] == ["Modelfile", "model-f32.gguf"]
    ours = export(trained.directory, tmp_path / "ours")
    assert (out / "Modelfile").read_text() == (tmp_path / "ours" / "Modelfile").read_text()
    assert done["architecture"] == ours["architecture"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("more", "text", "error", "why"),
    [
        (("--verbose",), "", IntegrityError, "no tensor has values of the model"),
        ((), "raise NotImplementedError('Architecture is not supported!')", UnfitError, "not supported!"),
        ((), "sys.exit(0)", UnfitError, "no message"),
    ],
    ids=["other-model", "unknown-model", "no-file"],
)
def test_a_converter_that_writes_something_else_leaves_nothing(
    more: tuple[str, ...], text: str, error: type[Exception], why: str, make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:  # fmt: skip
    save(CONFIGS["qwen2"], tmp_path / "model", make_tokenizer())
    converter = write_converter(tmp_path, *more, text=text)
    request = GgufRequest(
        model=RequestedModel(str(tmp_path / "model")),
        out=str(tmp_path / "out"),
        quantize="f16",
        converter=str(converter),
    )
    with pytest.raises(error) as caught:
        gguf_export.run(request, Listening())
    problem = caught.value.problems[0]  # type: ignore[attr-defined]
    assert why in f"{problem.what} {problem.why}"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["convert_hf_to_gguf.py", "model"]


def test_tensors_in_another_order_are_equal_and_computed_ones_are_listed(
    make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    """llama.cpp has the rows of `q_proj` and `k_proj` of Llama in another order."""
    model = save(CONFIGS["llama"], tmp_path / "model", make_tokenizer())
    file = tmp_path / "out" / export(tmp_path / "model", tmp_path / "out", quantize="bf16")["file"]
    number = len(model.state_dict())
    assert compare_tensors(file, model) == ConvertedTensors("llama", number, ())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert compare_tensors(file, model) == ConvertedTensors("llama", number - 1, ("blk.0.ffn_up.weight",))


def test_llama_cpps_own_texts_are_those_beside_the_converter(tmp_path: Path) -> None:
    texts = list(comparison_texts(write_converter(tmp_path)))
    (tmp_path / "models").mkdir()
    for name in ("a", "b"):
        (tmp_path / "models" / f"ggml-vocab-{name}.gguf.inp").write_text("one\n__ggml_vocab_test__\n two ")
    assert list(comparison_texts(tmp_path / "convert_hf_to_gguf.py")) == [*texts, "one", " two "]


@pytest.mark.processes
def test_the_command_names_the_script_and_what_it_wrote(
    make_tokenizer: Callable[[], Any], tmp_path: Path
) -> None:
    model = save(CONFIGS["qwen2"], tmp_path / "model", make_tokenizer())

    def run(*words: str) -> Any:
        command = [sys.executable, "-m", "unisono", "export", "model", "out", *words]
        return front_server.run(command, cwd=tmp_path, timeout=240)

    for words, fix in (
        (("--converter", "a.py"), "add --format gguf"),
        (("--converter", "a.py", "--format", "gguf"), "in a clone of llama.cpp"),
        (("--converter", "a.py", "--format", "gguf", "--adapter"), "convert_lora_to_gguf.py"),
    ):
        refused = run(*words)
        assert refused.returncode == 2
        assert fix in refused.stderr
    write_converter(tmp_path)
    done = run("--converter", "convert_hf_to_gguf.py", "--format", "gguf", "--quantize", "f32")
    assert done.returncode == 0, done.stderr
    number = len(model.state_dict())
    assert f"{number} of {number} tensors have the values of the model" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_llama_cpps_converter_writes_a_model_that_llama_cpp_computes(name: str, tmp_path: Path) -> None:
    """With a clone of llama.cpp in LLAMA_CPP. Its converter knows tokenizers of SentencePiece
    without a list of their names.
    """
    sentencepiece, llama_cpp = needs.package("sentencepiece"), needs.llama_cpp()
    clone = os.environ.get("LLAMA_CPP")
    if not clone:
        pytest.skip("needs LLAMA_CPP")
    (tmp_path / "words.txt").write_text("call me today\nwhat day is it\nremind the fox at five please\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "words.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, pad_id=3,
    )  # fmt: skip
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(tmp_path / "tokenizer.model", model)
    tokenizer = transformers.LlamaTokenizer.from_pretrained(model)
    sizes = SHAPE | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    layers = {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "use_mamba_kernels": False,
    }
    config = transformers.AutoConfig.for_model(name, **sizes | (layers if name == "jamba" else {}))
    made = save(config, model, tokenizer)
    script = Path(clone) / "convert_hf_to_gguf.py"
    done = export(model, tmp_path / "out", converter=str(script))
    converted = json.loads(json.dumps(done["converted"]))
    assert converted["equal"] >= 21
    assert [name for name in converted["others"] if "ssm_a" not in name and "exps" not in name] == []
    ids = tokenizer("call me at five please").input_ids
    with torch.no_grad():
        wanted = made(torch.tensor([ids])).logits[0].numpy()
    with llama_cpp.Llama(tmp_path / "out" / "model-f32.gguf") as llama:
        difference = np.abs(np.asarray(llama.read(ids)) - wanted).max() / wanted.std()
    assert difference < 1e-4
