"""A model that lacks something is refused with the place and the remedy.

Run: pytest tests/trainer/model/test_load.py
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import xxhash
from safetensors.torch import load_file, save_file

from tests.trainer.architectures.tiny_models import write_tiny_model
from unisono.base.errors import ModelError
from unisono.base.files import SETTINGS_BYTES, TEMPLATE_BYTES
from unisono.trainer.config import RunConfig
from unisono.trainer.model.directory import inspect_model, locate_model, locate_tokenizer
from unisono.trainer.model.files import read_contents
from unisono.trainer.model.forward import choose_forward
from unisono.trainer.model.load import LoadedModel, load_for_training

Change = Callable[[Path], None]


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def _config(path: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": str(path)}, "data": {"train": "x"}, "output_dir": "out", **sections}
    )


def _load(path: Path, **sections: Any) -> LoadedModel:
    config = _config(path, **sections)
    inspect_model(config)
    torch.manual_seed(0)
    return load_for_training(
        config,
        directory=locate_model(str(path)),
        tokenizer_directory=locate_tokenizer(config),
        dtype="float32",
        device=torch.device("cpu"),
    )


def _without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _with_another_shape(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _cut_short(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _odd(dtype: torch.dtype, value: float) -> Change:
    """The last number of a tensor becomes NaN or infinite, and the file is of another dtype."""

    def change(path: Path) -> None:
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / "model.safetensors").items()}
        tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = value
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return change


def _header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    def change(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        text = json.dumps(edit(header) or header).encode()
        (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return change


def _entry(**changes: Any) -> Change:
    return _header(lambda header: header["model.norm.weight"].update(changes))


def _write(name: str, data: bytes) -> Change:
    return lambda path: _ignore((path / name).write_bytes(data))


def _ignore(_: object) -> None:
    return None


def _edit(name: str, **changes: Any) -> Change:
    def change(path: Path) -> None:
        value = json.loads((path / name).read_text()) | changes
        (path / name).write_text(json.dumps(value))

    return change


def _remove(name: str) -> Change:
    return lambda path: (path / name).unlink()


def _pipe(name: str) -> Change:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return change


def _pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _index_with_a_missing_file(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}})
    )


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        (_without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
        (_with_another_shape, "model.norm.weight has the shape (31,), but config.json requires (32,)"),
        (
            _edit("config.json", vocab_size=349),
            "model.embed_tokens.weight has the shape (319, 32), but config.json requires (349, 32)",
        ),
        (_cut_short, "is truncated"),
        (_remove("model.safetensors"), "the model has no weights"),
        (_remove("config.json"), "no config.json"),
        (_pickled, "pickle"),
        (_index_with_a_missing_file, "model-00002-of-00002.safetensors"),
        (_edit("config.json", model_type="lama"), "did you mean 'llama'?"),
        (_edit("config.json", model_type="own", auto_map={"AutoModel": "x.Y"}), "trust_remote_code"),
        (_edit("config.json", vocab_size=10), "config.json"),
        *[
            (_odd(dtype, value), f"model.layers.1.mlp.up_proj.weight contains {printed}")
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            for value, printed in ((float("nan"), "NaN"), (float("-inf"), "infinity"))
        ],
        (_write("model.safetensors", b""), "it is empty"),
        (_write("model.safetensors", b"abc"), "it has only 3 bytes"),
        (_write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (_write("model.safetensors", (2).to_bytes(8, "little") + b"[]"), "its header is not a JSON object"),
        (
            _write("model.safetensors", (8000).to_bytes(8, "little") + b"[" * 4000 + b"]" * 4000),
            "its header is not JSON",
        ),
        (_header(lambda header: header.update({"model.norm.weight": 5})), "model.norm.weight"),
        (_entry(dtype="F33"), "'F33'"),
        (_entry(dtype=["F32"]), "['F32']"),
        (_entry(shape=["a"]), "an invalid shape or offset for model.norm.weight"),
        (_entry(shape=[3]), "the size of model.norm.weight does not match shape"),
        (_entry(data_offsets=[0]), "model.norm.weight"),
        (_write("config.json", b""), "it is empty"),
        (_write("config.json", b"{,"), "it is not JSON: line 1, column 2"),
        (_write("config.json", b"\xff\xfe\x00"), "it is not UTF-8 text"),
        (_write("config.json", b"[" * 100_000), "more than 100 levels of nested lists and objects"),
        (_write("config.json", b"[]"), "config.json is not a JSON object"),
        (_edit("config.json", model_type=["llama"]), "model_type in config.json is ['llama']"),
        (_edit("config.json", model_type=None), "has no model_type"),
        (_edit("config.json", num_hidden_layers="two"), "num_hidden_layers is 'two'"),
        (_edit("config.json", num_attention_heads=7), "transformers says: "),
        (_edit("config.json", num_hidden_layers=10**6), "num_hidden_layers is 1000000"),
        (_edit("config.json", num_hidden_layers=-1), "num_hidden_layers is -1"),
        (_edit("config.json", vocab_size=10**12), "vocab_size is 1000000000000"),
        (_edit("config.json", text_config={"n_head": 0}), "n_head is 0"),
        *[
            (_edit("config.json", **{name: size}), "config.json belongs to a larger model")
            for name, size in (
                ("num_hidden_layers", 9999),
                ("hidden_size", 10**9),
                ("vocab_size", 10**9),
                ("intermediate_size", 10**9),
                ("head_dim", 10**9),
            )
        ],
        *[
            (_pipe(name), f"{name} is a named pipe, not a regular file")
            for name in (
                *("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"),
                *("tokenizer.json", "vocab.txt", "model.safetensors", "model.safetensors.index.json"),
            )
        ],
        (_edit("generation_config.json", x="x" * SETTINGS_BYTES), "the maximum is 16,777,216"),
        (_write("chat_template.jinja", b"x" * (TEMPLATE_BYTES + 1)), "the maximum is 1,000,000"),
        (_write("model.safetensors", (2).to_bytes(8, "little") + b"{}"), "its header lists no tensors"),
        (
            _header(lambda header: header | {"__metadata__": {"a": "x" * 33_554_432}}),
            "the maximum is 33,554,432",
        ),
        (_entry(shape=[2**62] * 100_000), "an invalid shape or offset for model.norm.weight"),
        (_entry(shape=[2**70]), "an invalid shape or offset for model.norm.weight"),
        (
            _edit("config.json", hidden_act="gelatin"),
            "does not support 'gelatin' (hidden_act in config.json)",
        ),
        (_edit("config.json", text_config=5), "text_config in config.json is not a JSON object"),
        (_write("model.safetensors.index.json", b"hello"), "model.safetensors.index.json cannot be read"),
        (_write("model.safetensors.index.json", b'{"weight_map": {"a": 1}}'), "weight_map must be"),
        (
            _write("model.safetensors.index.json", b'{"weight_map": {"a": "../x.safetensors"}}'),
            "weight files must be in the directory of the index",
        ),
        (
            _write("model.safetensors.index.json", b'{"weight_map": {"a": "/etc/passwd"}}'),
            "in the index of the weights the name '/etc/passwd' is not a relative path",
        ),
        (
            _write("model.safetensors.index.json", b'{"weight_map": {"a": "\\u001b[31m"}}'),
            "in the index of the weights the name '\\x1b[31m' has a control character",
        ),
        (_write("generation_config.json", b"hello"), "generation_config.json cannot be read"),
        (_write("generation_config.json", b"[]"), "generation_config.json is not a JSON object"),
        (_write("tokenizer.json", b"hello"), "tokenizer.json cannot be read"),
        (_write("tokenizer_config.json", b"[]"), "tokenizer_config.json is not a JSON object"),
        (_write("tokenizer.json", b"{}"), "the tokenizer cannot be loaded"),
        (_write("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja cannot be read"),
    ],
)
def test_a_model_whose_files_are_wrong_is_refused_by_name(copy: Path, change: Change, printed: str) -> None:
    change(copy)
    with pytest.raises(ModelError) as caught:
        _load(copy)
    assert caught.value.exit_code == 2
    assert printed in "\n".join(caught.value.lines())
    assert any(problem.fix for problem in caught.value.problems)


def test_every_number_of_a_file_is_checked_and_its_digest_covers_all_bytes(tmp_path: Path) -> None:
    """Also in the last item of a block, and behind a tensor whose size is no multiple of the items'
    width.
    """
    file = tmp_path / "x.safetensors"
    tensors = {
        "bytes": torch.zeros(3, dtype=torch.uint8),
        "large": torch.zeros(1_500_000, dtype=torch.bfloat16),
    }
    for place in (0, (1 << 19) - 1, 1 << 19, 1_499_999):
        tensors["large"].zero_()[place] = float("nan")
        save_file(tensors, file)
        found = read_contents(file, tensors=True)
        assert found.odd == {"large": "NaN"}
        assert (found.bytes, found.digest) == (
            file.stat().st_size,
            xxhash.xxh3_128_hexdigest(file.read_bytes()),
        )
        assert found.tensors["large"] == xxhash.xxh3_64_hexdigest(tensors["large"].view(torch.uint8).numpy())
    tensors["large"].fill_(torch.finfo(torch.bfloat16).max)
    save_file(tensors, file)
    assert not read_contents(file).odd


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/place", "a/b/c", "builtin:tinny"])
def test_a_place_without_a_model_is_refused(path: str) -> None:
    with pytest.raises(ModelError) as caught:
        locate_model(path)
    assert caught.value.problems[0].fix


def test_the_files_report_how_many_parameters_there_are(model_dir: Path) -> None:
    facts = inspect_model(_config(model_dir))
    loaded = _load(model_dir, adapter=None)
    assert facts.parameters == loaded.parameters == loaded.trainable_parameters
    assert facts.layers == 2


@pytest.mark.parametrize("kind", ["mpt", "nemotron_h"])
def test_layers_are_counted_where_config_json_stores_no_usual_number(kind: str, tmp_path: Path) -> None:
    configs = {
        "mpt": transformers.MptConfig(d_model=32, n_heads=4, n_layers=3, vocab_size=320),
        "nemotron_h": transformers.NemotronHConfig(
            vocab_size=320, hidden_size=32, intermediate_size=64, layers_block_type=["mamba", "attention", "moe"],
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, mamba_num_heads=4, mamba_head_dim=16,
            ssm_state_size=16, n_groups=1,
            n_routed_experts=4, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
        ),
    }  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(configs[kind]).save_pretrained(tmp_path)
    facts = inspect_model(_config(tmp_path))
    assert (facts.layers, facts.hidden_size) == (3, 32)


@pytest.mark.parametrize(
    ("trains", "where", "fix"),
    [(True, "adapter.targets", "set adapter.targets"), (False, "RUN|MODEL", "pip install --upgrade")],
)
def test_an_adapter_with_which_the_model_fails_is_refused(
    tmp_path: Path, where: str, fix: str, *, trains: bool
) -> None:
    """DeepSeek V4 has a linear layer for groups of heads, whose product is not that of peft's."""
    write_tiny_model("deepseek_v4", tmp_path)
    loaded = _load(tmp_path, adapter={"targets": "all-linear"})
    with pytest.raises(ModelError, match="fails on two short rows with its adapter") as refused:
        choose_forward(
            loaded, dtype="float32", quick_adapter=True, gradient_checkpointing=False, trains=trains
        )
    (problem,) = refused.value.problems
    assert problem.where == where
    assert problem.fix.startswith(fix)


def test_an_adapter_that_peft_would_not_load_again_is_refused(tmp_path: Path) -> None:
    write_tiny_model("laguna", tmp_path)
    with pytest.raises(ModelError, match=r"peft would not load the adapter of .*shared_experts"):
        _load(tmp_path, adapter={"targets": "all-linear"})
    assert _load(tmp_path, adapter={"targets": "attention"}).trainable


def test_the_estimate_of_an_adapter_is_exact_for_all_linear(model_dir: Path) -> None:
    facts = inspect_model(_config(model_dir))
    assert _load(model_dir, adapter={"rank": 4}).trainable_parameters == 4 * facts.linear_in_out


@pytest.mark.parametrize(
    ("adapter", "printed"),
    [
        ({"targets": ["q_porj"]}, "the names of the linear layers end in down_proj"),
        ({"modules_to_save": ["embed_token"]}, "did you mean 'embed_tokens'?"),
    ],
)
def test_an_adapter_that_the_model_has_no_place_for_is_refused(
    model_dir: Path, adapter: dict[str, Any], printed: str
) -> None:
    with pytest.raises(ModelError) as caught:
        _load(model_dir, adapter=adapter)
    assert printed in "\n".join(caught.value.lines())


def test_targets_are_patterns(model_dir: Path) -> None:
    loaded = _load(model_dir, adapter={"targets": [r"layers\.0\..*(q|v)_proj"]})
    assert {name.split(".")[4] for name in loaded.trainable} == {"0"}
    assert len(loaded.trainable) == 4


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_adapters_are_trained_in_float32_and_the_rest_is_frozen(model_dir: Path, kind: str) -> None:
    loaded = _load(model_dir, adapter={"kind": kind, "rank": 4})
    assert all("lora_" in name for name in loaded.trainable)
    assert {p.dtype for p in loaded.trainable.values()} == {torch.float32}


def test_freezing_by_pattern_leaves_the_rest(model_dir: Path) -> None:
    loaded = _load(model_dir, adapter=None, freeze=[r"layers\.0\.", "embed"])
    assert all("layers.0." not in name and "embed" not in name for name in loaded.trainable)
    with pytest.raises(ModelError, match="no parameter matches 'nothing'"):
        _load(model_dir, adapter=None, freeze=["nothing"])


def test_tied_weights_stay_tied(model_dir: Path) -> None:
    loaded = _load(model_dir, adapter=None)
    assert loaded.base.get_input_embeddings().weight is loaded.base.get_output_embeddings().weight


def test_tokenizer_larger_than_the_model_is_refused_or_embedding_grows(copy: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(copy)
    with pytest.raises(ModelError, match="does not match the model"):
        _load(copy)
    grown = _load(copy, adapter=None, model={"path": str(copy), "resize_vocabulary": True})
    assert grown.base.get_input_embeddings().weight.shape[0] == len(tokenizer)


def test_random_weights_need_no_weight_file_and_follow_the_seed(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    random = {"path": str(copy), "weights": "random"}
    one, two = (_load(copy, adapter=None, model=random) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.trainable.values(), two.trainable.values(), strict=True))
