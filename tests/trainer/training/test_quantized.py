"""Adapters on a base model with quantized weights. Run: pytest tests/trainer/training/test_quantized.py"""

import gc
import math
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tests import needs
from tests.peft_by_hand import loaded_again, losses_by_hand
from unisono.base.errors import ModelError
from unisono.trainer.batches.table import TableRows, TableSource
from unisono.trainer.config import RunConfig
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model import file_settings
from unisono.trainer.model.decoder import FastForward, slow_down_layers
from unisono.trainer.model.forward import Rows, choose_forward
from unisono.trainer.model.kernels import load_kernels
from unisono.trainer.model.load import load_for_training
from unisono.trainer.model.quantization import (
    dequantized,
    is_quantized,
    times,
    times_transposed,
    weight_bytes,
)
from unisono.trainer.plan import SequenceStream
from unisono.trainer.plan.memory import packed_bytes
from unisono.trainer.training.join import make_rank_report

bitsandbytes = needs.package("bitsandbytes")
Train = Callable[..., Any]
_CONSTANT = {"lr": 1e-2, "schedule": "constant", "warmup": "0%", "max_grad_norm": None}


def _rows(run: Any) -> Rows:
    """Two rows of its data."""
    table = TokenTable.open(Path(run.plan.data.cache_dir), "train")
    return TableRows(table, torch.device("cpu")).load([0, 1]).rows


def _by_hand(
    run: Any, settings: transformers.BitsAndBytesConfig, dtype: torch.dtype, table: torch.Tensor | None = None
) -> list[float]:
    """The losses of peft and bitsandbytes: their own layers, each row alone, torch's cross entropy
    and AdamW; `table` replaces the embedding.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        run.plan.model.directory, quantization_config=settings, dtype=dtype, device_map={"": "cpu"}
    )
    if table is not None:
        model.get_input_embeddings().weight.data = table
    return losses_by_hand(run, model, targets="all-linear")


def _four_bits(kind: str, dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "adapter"),
    [("nf4", "bfloat16", "lora"), ("fp4", "float32", "rslora"), ("int8", "float32", "lora"), ("nf4", "float32", "dora")],
)  # fmt: skip
def test_five_steps_have_the_losses_of_peft_and_bitsandbytes(
    train_here: Train, kind: str, dtype: str, adapter: str
) -> None:
    run = train_here(
        model={"quantize": kind, "dtype": dtype},
        adapter={"kind": adapter},
        data={"packing": False},
        batch={"global": 4},
        optim=_CONSTANT,
        duration="5 steps",
    )
    (ready,) = run.of_kind("ready")
    assert ready["facts"]["quick"] is (adapter != "dora")
    torch_dtype = getattr(torch, dtype)
    eight = transformers.BitsAndBytesConfig(load_in_8bit=True)
    theirs = _by_hand(run, eight if kind == "int8" else _four_bits(kind, torch_dtype), torch_dtype)
    assert run.losses == pytest.approx(theirs, rel=1e-3 if dtype == "bfloat16" else 1e-5)
    assert run.losses[-1] < run.losses[0], "it trains"


def test_quantized_embeddings_compute_as_if_the_files_had_their_values(train_here: Train) -> None:
    run = train_here(
        model={"quantize": "nf4", "quantize_embeddings": True},
        data={"packing": False},
        batch={"global": 4},
        optim=_CONSTANT,
        duration="5 steps",
    )
    (ready,) = run.of_kind("ready")
    assert ready["facts"]["quick"]
    embedding = loaded_again(run).base.get_input_embeddings()
    table = embedding.dense(torch.float32)
    settings = _four_bits("nf4", torch.float32)
    assert run.losses == pytest.approx(_by_hand(run, settings, torch.float32, table.data), rel=1e-5)
    assert run.losses == pytest.approx(_by_hand(run, settings, torch.float32), rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_head_in_blocks_are_those_with_all_of_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-127, 128, (2500, 24), dtype=torch.int8, generator=generator)
    scale = torch.rand(2500, generator=generator)
    x, grad = (torch.randn(5, size, generator=generator).to(dtype) for size in (24, 2500))
    dense = dequantized(packed, scale, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    close = {"rtol": tolerance, "atol": tolerance * 10}
    assert torch.allclose(times_transposed(x, packed, scale), x @ dense.t(), **close)
    assert torch.allclose(times(grad, packed, scale), grad @ dense, **close)


def test_a_row_of_zeros_stays_zero_and_the_others_are_within_half_a_step(
    train_here: Train, model_dir: Path, tmp_path: Path
) -> None:
    stored = tmp_path / "zeros"
    shutil.copytree(model_dir, stored)
    model = transformers.AutoModelForCausalLM.from_pretrained(stored)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0
    model.save_pretrained(stored)
    run = train_here(
        model={"path": str(stored), "quantize": "nf4", "quantize_embeddings": True}, duration="1 steps"
    )
    loaded = loaded_again(run)
    table = loaded.base.get_input_embeddings()
    wanted, found = model.get_input_embeddings().weight.detach(), table.dense(torch.float32)
    assert not found[7].any()
    assert ((found - wanted).abs() <= wanted.abs().amax(1, keepdim=True) / 127 * 0.501).all()
    assert table.weight is loaded.base.get_output_embeddings().weight, "tied weights are quantized once"
    assert loaded.parameters - loaded.trainable_parameters == run.plan.model.parameters


class _Dense(TorchDispatchMode):
    """Counts the dequantized weights that exist at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.most, self._alive = 0, 0, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.bitsandbytes.dequantize_4bit.default:
            self.made += 1
            self._alive.add(found.untyped_storage())
            self.most = max(self.most, len(self._alive))
        return found


def test_flipped_bit_in_packed_weights_or_scales_changes_compared_digest(
    train_here: Train,
) -> None:
    """The digest is the one that ranks compare."""
    run = train_here(model={"quantize": "nf4", "quantize_embeddings": True}, duration="1 steps")
    loaded = loaded_again(run)
    layer = loaded.base.model.layers[1].mlp.up_proj.base_layer

    def digest() -> str:
        table = TokenTable.open(Path(run.plan.data.cache_dir), "train")
        rows, stream, plan = (
            TableRows(table, torch.device("cpu")),
            SequenceStream(table.sequences, 0),
            run.plan,
        )
        data = TableSource(rows, stream, plan.global_batch, plan.micro_batch, plan.total_sequences)
        return make_rank_report(
            run.plan, run.plan.ranks[0], device=torch.device("cpu"), loaded=loaded, data=data, store_port=None
        ).frozen_values_digest  # fmt: skip

    before = digest()
    table = loaded.base.get_input_embeddings()
    packed = (layer.weight.data, layer.quant_state.absmax, layer.quant_state.state2.absmax)
    for tensor in (*packed, table.weight.data, table.scale):
        tensor.view(torch.uint8).view(-1)[3] ^= 1
        assert digest() != before
        tensor.view(torch.uint8).view(-1)[3] ^= 1
    assert digest() == before


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "wanted"),
    [
        ("float32", False, 14 * 2 - 3),  # three input projections have an input without gradient
        ("float32", True, 14 * 3),  # forward again
        ("bfloat16", False, 14 * 2 - 3),  # in the fast layers, too
    ],
)
def test_at_most_one_weight_is_dequantized_at_a_time(
    train_here: Train, dtype: str, *, checkpointing: bool, wanted: int
) -> None:
    run = train_here(model={"quantize": "nf4", "dtype": dtype}, duration="1 steps")
    loaded = loaded_again(run)
    forward = choose_forward(loaded, dtype=dtype, quick_adapter=True, gradient_checkpointing=checkpointing)
    assert (forward.fast_layers > 0) is (dtype == "bfloat16" and load_kernels() is not None)
    loaded.model.train()
    rows = _rows(run)
    gc.collect()
    with _Dense() as dense:
        forward.loss(rows, count=len(rows.labels)).backward()
    assert dense.made == wanted
    assert dense.most == 1


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_fast_layers_match_separate_products_on_quantized_weights(train_here: Train, kind: str) -> None:
    run = train_here(model={"quantize": kind, "dtype": "bfloat16"}, duration="1 steps")
    rows = _rows(run)
    found = {}
    for fast in (True, False):
        loaded = loaded_again(run)
        for parameter in loaded.trainable.values():
            torch.nn.init.normal_(
                parameter, std=0.05, generator=torch.Generator().manual_seed(len(parameter))
            )
        forward = choose_forward(loaded, dtype="bfloat16", quick_adapter=True, gradient_checkpointing=False)
        if not fast:
            modules = loaded.model.modules()
            slow_down_layers([one for one in modules if isinstance(one.forward, FastForward)])
        loss = forward.loss(rows, count=len(rows.labels))
        loss.backward()
        gradients = [p.grad.flatten() for p in loaded.trainable.values() if p.grad is not None]
        found[fast] = loss.item(), torch.cat(gradients)
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-3)
    difference = (found[True][1] - found[False][1]).norm() / found[False][1].norm()
    assert difference < 0.03, "roundings of bfloat16"


def test_the_compiled_function_dequantizes_int8_as_torch_does() -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-127, 128, (37, 65), dtype=torch.int8, generator=generator)
    scale = torch.rand(37, generator=generator)
    wanted = packed.to(torch.bfloat16).mul_(scale[:, None] * (1 / 127))
    assert torch.equal(dequantized(packed, scale, torch.bfloat16), wanted)


def test_an_evaluation_changes_nothing_in_training(train_here: Train, rows_file: Path) -> None:
    # On a CPU with AVX512-BF16 bitsandbytes repacks weights in evaluation mode, and products with
    # them have no gradient; DoRA calls them.
    common: dict[str, Any] = {"model": {"quantize": "nf4"}, "adapter": {"kind": "dora"}, "optim": _CONSTANT}
    plain = train_here(**common)
    evaluated = train_here(**common, data={"eval": str(rows_file)}, eval={"every": "2 steps"})
    assert evaluated.losses == plain.losses


@pytest.mark.parametrize("embeddings", [False, True])
def test_resumed_run_is_bit_equal_and_checkpoint_says_what_it_trained_on(
    train_here: Train, *, embeddings: bool
) -> None:
    common: dict[str, Any] = {
        "model": {"quantize": "nf4", "quantize_embeddings": embeddings},
        "checkpoint": {"every": "3 steps"},
        "optim": {"lr": 1e-2},
    }
    straight = train_here(**common)
    path = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(**common, resume=(3, path))
    assert resumed.losses == straight.losses[3:]
    assert all(torch.equal(resumed.weights()[name], tensor) for name, tensor in straight.weights().items())
    assert set(straight.weights()) == {name for name in straight.weights() if "lora_" in name}
    assert not [m for m in resumed.of_kind("warning") if m["code"] == "quantized_differently"]
    changed = {"quantize": "nf4" if embeddings else "fp4"}
    other = train_here(**{**common, "model": changed}, resume=(3, path))
    (warning,) = [m for m in other.of_kind("warning") if m["code"] == "quantized_differently"]
    assert "differ from the weights that the checkpoint was trained on" in warning["text"]


def test_the_reference_of_a_preference_run_is_the_quantized_base(
    train_here: Train, pair_files: tuple[Path, Path]
) -> None:
    run = train_here(
        model={"quantize": "nf4"}, objective="dpo", data={"train": str(pair_files[0]), "packing": False}
    )
    assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6), "B is 0: both give the same"
    assert run.losses[-1] < run.losses[0]


def test_already_quantized_files_train_like_those_quantized_on_loading(
    train_here: Train, model_dir: Path, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, quantization_config=_four_bits("nf4", torch.float32), device_map={"": "cpu"}
    )
    stored = tmp_path / "stored"
    model.save_pretrained(stored)
    transformers.AutoTokenizer.from_pretrained(model_dir).save_pretrained(stored)
    run = train_here(model={"path": str(stored)})
    assert (run.plan.model.quantized, run.plan.model.quantized_double) == ("nf4", True)
    assert run.losses == train_here(model={"quantize": "nf4"}).losses
    for settings, what in (
        ({"model": {"quantize": "int8"}}, "already quantized as nf4"),
        ({"model": {"quantize": "nf4", "quantize_embeddings": True}}, "already quantized as nf4"),
        ({"adapter": None}, "cannot be trained themselves"),
        ({"adapter": {"init": "pissa"}}, "cannot be changed"),
    ):
        sections = {**settings, "model": {"path": str(stored), **settings.get("model", {})}}  # type: ignore[dict-item]
        with pytest.raises(ModelError, match=what):
            train_here(**sections)


@pytest.mark.parametrize(("kind", "embeddings"), [("nf4", False), ("nf4", True), ("int8", False)])
def test_the_weights_take_the_memory_of_the_estimate(
    train_here: Train, kind: str, *, embeddings: bool
) -> None:
    run = train_here(
        model={"quantize": kind, "quantize_embeddings": embeddings, "dtype": "bfloat16"}, duration="1 steps"
    )
    base = loaded_again(run)
    assert is_quantized(base.base)
    adapters = sum(4 * p.numel() for p in base.trainable.values())
    assert weight_bytes(base.model) - adapters == pytest.approx(run.plan.memory.weights, rel=0.02)
    assert packed_bytes(run.plan.model) < 1.2
    assert base.parameters - base.trainable_parameters == run.plan.model.parameters


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc/self/maps")
def test_the_files_do_not_stay_in_memory_beside_the_quantized_weights(
    train_here: Train, model_dir: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    run = train_here(model={"path": str(copy), "quantize": "nf4"}, duration="1 steps")
    loaded = loaded_again(run)
    assert is_quantized(loaded.base)
    assert str(copy) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("sections", "wanted"),
    [
        ({"adapter": None}, "model.quantize: nf4 weights cannot be trained themselves; set `adapter: {kind: lora}`"),
        ({"adapter": {"init": "pissa"}}, "adapter.init: it changes the base weights"),
        ({"adapter": {"merge": ["other"]}}, "adapter.merge: it changes the base weights"),
        ({"model": {"quantize": None}}, "model.quantize_embeddings: embeddings are quantized only if the linear layers are; set `model.quantize: nf4`"),
        ({"model": {"resize_vocabulary": True}}, "model.resize_vocabulary: it trains embedding and head, which are quantized"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_quantized_weights_is_refused(
    train_here: Train, sections: dict[str, Any], wanted: str
) -> None:
    model = {"quantize": "nf4", "quantize_embeddings": True, **sections.get("model", {})}
    with pytest.raises(ValueError, match="(?s)" + wanted.replace("{", r"\{")):
        train_here(**{**sections, "model": model})


def test_a_quantized_embedding_cannot_be_trained(train_here: Train) -> None:
    with pytest.raises(ModelError, match="embed_tokens is quantized, and cannot be trained"):
        train_here(
            model={"quantize": "nf4", "quantize_embeddings": True},
            adapter={"modules_to_save": ["embed_tokens"]},
        )


@pytest.mark.parametrize("version", [None, "0.49.1"])
def test_missing_or_old_library_is_refused_with_the_install_command(
    train_here: Train, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    monkeypatch.setattr(file_settings, "installed", lambda _name: version)
    with pytest.raises(ModelError) as error:
        train_here(model={"quantize": "nf4"})
    assert "pip install bitsandbytes accelerate" in error.value.problems[0].fix


def test_files_of_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        file_settings.stored_quantization(tmp_path, {"quantization_config": {"quant_method": "hqq"}})
    (problem,) = error.value.problems
    assert "hqq" in problem.what
    assert "use the model's original files" in problem.fix


def test_quantized_files_with_dense_experts_are_refused(tmp_path: Path, model_dir: Path) -> None:
    """As transformers writes them: it quantizes linear layers only."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(plain)
    transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=_four_bits("nf4", torch.float32), device_map={"": "cpu"}
    ).save_pretrained(stored)
    given = RunConfig.model_validate(
        {"model": {"path": str(stored)}, "data": {"train": "x"}, "output_dir": "y"}
    )
    with pytest.raises(ModelError, match="the weights of this model cannot be quantized as nf4") as error:
        load_for_training(
            given, directory=stored, tokenizer_directory=model_dir, dtype="float32", device=torch.device("cpu")
        )  # fmt: skip
    (problem,) = error.value.problems
    assert "experts" in problem.why
    assert "use the model's original files" in problem.fix


def test_bitsandbytes_without_the_device_is_refused(
    train_here: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    with pytest.raises(ModelError, match="does not support the device cpu"):
        train_here(model={"quantize": "nf4"})
