"""Adapters on base models in the files of GPTQ and AWQ.

Run: pytest tests/trainer/training/test_gptq_and_awq.py

The last test compares with gptqmodel, where it is installed: `pip install gptqmodel optimum`, then
`pytest -m long tests/trainer/training/test_gptq_and_awq.py`.
"""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import needs
from tests.grouped_files import write_grouped
from tests.peft_by_hand import loaded_again, losses_by_hand
from unisono.base.errors import ModelError
from unisono.trainer.batches.table import TableRows, TableSource
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model import file_settings
from unisono.trainer.model.directory import inspect_model
from unisono.trainer.model.forward import choose_forward
from unisono.trainer.model.kernels import load_kernels
from unisono.trainer.model.quantization import Groups, dequantized, quantized_layers, state_of, weight_bytes
from unisono.trainer.plan import SequenceStream
from unisono.trainer.training.join import make_rank_report

Train = Callable[..., Any]
_CPU = torch.device("cpu")
_MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_FILES: dict[str, dict[str, Any]] = {
    "gptq": {"layout": "gptq"},
    "gptq in any order": {"layout": "gptq", "shuffled": True},
    "gptq_v2, 8 bits": {"layout": "gptq_v2", "bits": 8, "group": 32},
    "gptq, 2 bits": {"layout": "gptq", "bits": 2},
    "awq": {"layout": "gemm"},
}


@pytest.fixture(scope="session")
def grouped(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of a model in the files of one of _FILES; made once."""
    folder = tmp_path_factory.mktemp("grouped")

    def made(name: str) -> Path:
        if not (folder / name).exists():
            values = write_grouped(model_dir, folder / name, **_FILES[name])
            save_file(values, folder / f"{name}.safetensors")
        return folder / name

    return made


def _exact(directory: Path) -> dict[str, torch.Tensor]:
    """The values of the quantized weights of such a model."""
    return load_file(directory.with_name(f"{directory.name}.safetensors"))


def _five_steps(train_here: Train, directory: Path, *, kind: str = "lora", dtype: str = "float32") -> Any:
    return train_here(
        model={"path": str(directory), "dtype": dtype},
        adapter={"kind": kind},
        data={"packing": False},
        batch={"global": 4},
        optim={"lr": 1e-2, "schedule": "constant", "warmup": "0%", "max_grad_norm": None},
        duration="5 steps",
    )


@pytest.mark.parametrize("name", _FILES)
def test_weights_have_the_values_of_the_files_and_the_estimated_memory(
    train_here: Train, grouped: Callable[..., Path], name: str
) -> None:
    run = train_here(model={"path": str(grouped(name))}, duration="1 steps")
    loaded, wanted = loaded_again(run), _exact(grouped(name))
    layers = {n.replace(".base_layer", ".weight"): layer for n, layer in quantized_layers(loaded.base)}
    assert layers.keys() == wanted.keys()
    for weight, layer in layers.items():
        assert torch.equal(dequantized(layer.weight, state_of(layer), torch.float32), wanted[weight]), weight
    adapters = sum(4 * p.numel() for p in loaded.trainable.values())
    order = sum(8 * layer.in_features for layer in layers.values() if state_of(layer).places is not None)
    assert weight_bytes(loaded.model) - adapters - order == pytest.approx(run.plan.memory.weights, rel=0.001)
    assert loaded.parameters - loaded.trainable_parameters == run.plan.model.parameters
    unread = run.plan.config.model_copy(
        update={"model": run.plan.config.model.model_copy(update={"weights": "random"})}
    )
    facts = inspect_model(unread)
    assert (facts.quantized_bits, facts.quantized_bytes) == pytest.approx(
        (run.plan.model.quantized_bits, run.plan.model.quantized_bytes)
    )


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [("gptq in any order", "float32", "lora"), ("awq", "float32", "dora"), ("awq", "bfloat16", "rslora")],
)
def test_five_steps_have_the_losses_of_peft_on_the_values_of_the_files(
    train_here: Train, model_dir: Path, grouped: Callable[..., Path], name: str, dtype: str, kind: str
) -> None:
    run = _five_steps(train_here, grouped(name), kind=kind, dtype=dtype)
    (ready,) = run.of_kind("ready")
    assert ready["facts"]["quick"] is (kind != "dora")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir)
    model.load_state_dict(_exact(grouped(name)), strict=False)
    theirs = losses_by_hand(run, model.to(getattr(torch, dtype)), targets=_MATRICES)
    assert run.losses == pytest.approx(theirs, rel=1e-3 if dtype == "bfloat16" else 1e-5)
    assert run.losses[-1] < run.losses[0], "it trains"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_most_one_weight_is_dequantized_at_a_time(
    train_here: Train, grouped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    run = train_here(model={"path": str(grouped("awq")), "dtype": dtype}, duration="1 steps")
    loaded = loaded_again(run)
    forward = choose_forward(loaded, dtype=dtype, quick_adapter=True, gradient_checkpointing=False)
    assert (forward.fast_layers > 0) is (dtype == "bfloat16" and load_kernels() is not None)
    loaded.model.train()
    alive, counts, dequantize = weakref.WeakSet[Any](), [], Groups.dequantized

    def counted(*args: Any) -> torch.Tensor:
        found = dequantize(*args)
        alive.add(found.untyped_storage())
        counts.append(len(alive))
        return found

    monkeypatch.setattr(Groups, "dequantized", counted)
    table = TokenTable.open(Path(run.plan.data.cache_dir), "train")
    rows = TableRows(table, _CPU).load([0, 1]).rows
    gc.collect()
    forward.loss(rows, count=len(rows.labels)).backward()
    assert len(counts) >= 14 * 2 - 3, (
        "forward and backward; three input projections have an input without gradient"
    )
    assert max(counts) == 1


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_compiled_function_dequantizes_as_torch_does(bits: int, *, in_order: bool) -> None:
    if load_kernels() is None:
        pytest.skip("needs cc")
    generator = torch.Generator().manual_seed(bits)
    packed = torch.randint(0, 256, (37, 6 * 40 * bits // 8), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 2**bits, (37, 6), dtype=torch.uint8, generator=generator)
    places = None if in_order else torch.randperm(240, generator=generator)
    groups = Groups(bits, torch.rand(37, 6, generator=generator).half(), zeros, places)
    found = groups.dequantized(packed, torch.bfloat16)
    assert torch.equal(found, groups.dequantized(packed, torch.float32).bfloat16())


def test_resumed_run_is_bit_equal_and_checkpoint_has_the_weights_digest(
    train_here: Train, grouped: Callable[..., Path]
) -> None:
    model = {"path": str(grouped("gptq in any order"))}
    straight = train_here(model=model, checkpoint={"every": "3 steps"})
    path = straight.directory / "checkpoints" / "step-00000003"
    assert json.loads((path / "state.json").read_text())["state"]["base"]["quantized"] == "gptq"
    resumed = train_here(model=model, checkpoint={"every": "3 steps"}, resume=(3, path))
    assert resumed.losses == straight.losses[3:]
    assert all(torch.equal(resumed.weights()[name], tensor) for name, tensor in straight.weights().items())
    assert set(straight.weights()) == {name for name in straight.weights() if "lora_" in name}
    assert not [m for m in resumed.of_kind("warning") if m["code"] == "quantized_differently"]


def test_flipped_bit_in_weights_scales_or_zeros_changes_compared_digest(
    train_here: Train, grouped: Callable[..., Path]
) -> None:
    """The digest is the one that ranks compare; the zeros are the zero points."""
    run = train_here(model={"path": str(grouped("gptq in any order"))}, duration="1 steps")
    loaded = loaded_again(run)
    layer = loaded.base.model.layers[1].mlp.up_proj.base_layer

    def digest() -> str:
        table = TokenTable.open(Path(run.plan.data.cache_dir), "train")
        plan = run.plan
        rows, stream = TableRows(table, _CPU), SequenceStream(table.sequences, 0)
        data = TableSource(rows, stream, plan.global_batch, plan.micro_batch, plan.total_sequences)
        return make_rank_report(
            plan, plan.ranks[0], device=_CPU, loaded=loaded, data=data, store_port=None
        ).frozen_values_digest

    before = digest()
    for tensor in (layer.weight.data, *layer.quant_state.tensors().values()):
        tensor.view(torch.uint8).view(-1)[3] ^= 1
        assert digest() != before
        tensor.view(torch.uint8).view(-1)[3] ^= 1
    assert digest() == before


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ to 3 bits"),
        ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "AWQ to 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "AWQ in the layout 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ in the layout 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "GPTQ in the layout 'marlin'"),
    ],
)
def test_other_widths_and_layouts_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], what: str
) -> None:
    with pytest.raises(ModelError, match=what) as error:
        file_settings.stored_quantization(tmp_path, {"quantization_config": settings})
    assert "use the model's original files" in error.value.problems[0].fix


def _changed(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model with other tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(
        {name: t.clone().contiguous() for name, t in tensors.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    return target


_LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.update({f"{_LAYER}.scales": t[f"{_LAYER}.scales"][:, :8]}), f"the tensors of {_LAYER} do not form"),
        (lambda t: t.pop(f"{_LAYER}.qzeros"), f"the tensors of {_LAYER} do not form"),
        (lambda t: t[f"{_LAYER}.g_idx"].fill_(1), "32 numbers of a g_idx do not form 2 groups"),
        (lambda t: t.update({f"lm_head.{p}": t[f"{_LAYER}.{p}"] for p in ("qweight", "qzeros", "scales")}), "lm_head is quantized"),
        (lambda t: t.update({f"model.layers.1.mlp.other.{p}": t[f"{_LAYER}.{p}"] for p in ("qweight", "qzeros", "scales")}), "for model.layers.1.mlp.other, but the model has no such linear layer"),
        (lambda t: [t.pop(name) for name in list(t) if name.rpartition(".")[2] in ("qweight", "qzeros", "scales", "g_idx")], "no weight is quantized with GPTQ"),
    ],
    ids=["width", "missing", "groups", "head", "experts", "none"],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(
    train_here: Train, grouped: Callable[..., Path], tmp_path: Path, change: Any, what: str
) -> None:
    with pytest.raises(ModelError, match=what) as error:
        train_here(model={"path": str(_changed(grouped("gptq"), tmp_path / "changed", change))})
    assert error.value.problems[0].fix


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"model": {"quantize": "nf4"}}, "already quantized as awq"),
        ({"adapter": None}, "cannot be trained themselves"),
        ({"adapter": {"init": "pissa"}}, "cannot be changed"),
    ],
)
def test_weights_that_are_not_to_change_are_refused(
    train_here: Train, grouped: Callable[..., Path], sections: dict[str, Any], what: str
) -> None:
    model = {"path": str(grouped("awq")), **sections.get("model", {})}
    with pytest.raises(ModelError, match=what):
        train_here(**{**sections, "model": model})


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # gptqmodel leaves folders to the garbage collector
@pytest.mark.parametrize(("layout", "shuffled"), [("gptq", False), ("gptq", True), ("gemm", False)])
def test_five_steps_have_the_losses_of_peft_and_gptqmodel(
    train_here: Train, model_dir: Path, tmp_path: Path, layout: str, *, shuffled: bool
) -> None:
    """Its layers want wider matrices than those of the other tests.

    It compiles functions when it is first used.
    """
    needs.package("gptqmodel")
    needs.package("optimum")
    dense, stored = tmp_path / "dense", tmp_path / "stored"
    config = transformers.AutoConfig.from_pretrained(model_dir)
    config.update({"hidden_size": 128, "intermediate_size": 256, "head_dim": 32})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(dense)
    transformers.AutoTokenizer.from_pretrained(model_dir).save_pretrained(dense)
    write_grouped(
        dense, stored, layout=layout, group=32, shuffled=shuffled, sym=False, backend="auto_trainable"
    )
    run = _five_steps(train_here, stored, dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        stored, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    assert any(type(module).__module__.startswith("gptqmodel.") for module in theirs.modules())
    assert run.losses == pytest.approx(losses_by_hand(run, theirs, targets=_MATRICES), rel=1e-3)
