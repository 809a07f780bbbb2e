"""The estimate of memory against models on the meta device, and the page made of it.

Run: pytest tests/trainer/plan/test_memory.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

import memory_page
from tests import needs
from tests.trainer.model.test_decoder import _full_model, _inputs, _model
from tests.trainer.plan import memory_grid
from unisono.base.events import Reporter
from unisono.base.messages import Message
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.trainer.config import RunConfig
from unisono.trainer.model import attention, decoder, layers
from unisono.trainer.model.directory import inspect_model
from unisono.trainer.plan import DataSummary, ModelFacts, PlanInputs, RunPlan, estimate_memory, resolve_plan
from unisono.trainer.plan.run_plan import expects_fast_layers
from unisono.trainer.plan.task_requests import PrepareRequest
from unisono.trainer.task import data_tasks


class _Without(Reporter):
    def __init__(self) -> None:
        super().__init__(None)

    def send(self, message: Message) -> None:
        del message


def _on_meta(shape: str) -> Any:
    """The model with quantized layers, without data."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**memory_page.SHAPES[shape]))
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    return replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=settings)


@pytest.mark.parametrize("shape", ["8 B", "70 B"])
def test_weights_and_adapter_of_an_estimate_are_those_of_the_model(shape: str) -> None:
    bitsandbytes = needs.package("bitsandbytes")
    model = _on_meta(shape)
    matrices = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    packed = sum(layer.in_features * layer.out_features for layer in matrices)
    rest = sum(p.numel() for p in model.parameters()) - packed
    blocks = packed / 64
    wanted = packed / 2 + blocks + 4 * blocks / 256 + 2 * rest
    found = memory_page.estimate(shape, "QLoRA", devices=1)
    assert found.weights == pytest.approx(wanted, rel=1e-3)
    assert memory_page.estimate(shape, "LoRA", devices=1).weights == 2 * (packed + rest)
    adapter = sum(memory_page.RANK * (layer.in_features + layer.out_features) for layer in matrices)
    assert found.trainable == 16 * adapter


def test_a_model_with_heads_of_a_size_of_its_own_is_counted_exactly() -> None:
    shape = memory_page.SHAPES["0.6 B"]
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    norms_of_heads = 2 * 128 * 28  # too few to matter, and not in the estimate
    assert memory_page.facts("0.6 B", "LoRA").parameters == model.num_parameters() - norms_of_heads


def _planned(folder: Path, model_dir: Path, rows_file: Path, shape: str, quantize: str | None) -> RunPlan:
    """The plan of a dry run on eight devices."""
    model = folder / "model"
    model.mkdir()
    for file in model_dir.glob("token*"):
        shutil.copyfile(file, model / file.name)
    shutil.copyfile(model_dir / "chat_template.jinja", model / "chat_template.jinja")
    (model / "config.json").write_text(
        json.dumps({**memory_page.SHAPES[shape], "model_type": "llama", "max_position_embeddings": 8192})
    )
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "weights": "random", "quantize": quantize, "dtype": "bfloat16"},
            "adapter": {"rank": memory_page.RANK},
            "data": {"train": str(rows_file), "max_length": memory_page.TOKENS},
            "batch": {"global": 8, "micro": 1},
            "memory": {"gradient_checkpointing": True},
            "parallel": {"strategy": "fsdp"},
            "output_dir": str(folder / "out"),
        }
    )
    prepared = data_tasks.prepare(PrepareRequest(config, folder / "cache"), _Without())
    device = DeviceChoice(kind="cuda", name="gpu", memory_bytes=80 * 10**9, bfloat16=True, compiles=True)
    data = DataSummary.model_validate(prepared["data"])
    split = data.train.model_copy(
        update={"longest_sequence": memory_page.TOKENS, "longest_row": memory_page.TOKENS}
    )
    ranks = [
        RankPlace(rank=rank, node_rank=0, local_rank=rank, host="here", device=device) for rank in range(8)
    ]
    return resolve_plan(
        PlanInputs(
            config=config, run_id="test", output_dir="out", host="here", threads=1, threads_origin="", device=device, ranks=ranks,
            model=ModelFacts.model_validate(prepared["model"]), data=data.model_copy(update={"train": split}), resume=None,
            resume_reason="",
        )
    )  # fmt: skip


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("shape", ["8 B", "70 B"])
def test_a_dry_run_of_random_weights_has_the_figures_of_the_page(
    tmp_path: Path, model_dir: Path, rows_file: Path, shape: str, quantize: str | None
) -> None:
    if quantize:
        needs.package("bitsandbytes")
    plan = _planned(tmp_path, model_dir, rows_file, shape, quantize)
    assert plan.memory == memory_page.estimate(shape, "QLoRA" if quantize else "LoRA", devices=8)


# ---- what the fast layers keep on a GPU, counted without one


class _KernelsOfGpu:
    """Keeps what CudaKernels keeps; the values of attention are not computed."""

    has_products = True

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        factor = torch.rsqrt(x.float().square().mean(1) + eps)
        return weight * (x.float() * factor[:, None]).to(x.dtype), factor

    def wide_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, factor = self.norm(x, weight, eps)
        return y.bfloat16(), factor

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    def has_low_rank(self, rank: int, width: int) -> bool:
        del rank, width
        return False

    def attention(self, inputs: Any, *_others: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept = [attention._aligned(part) for part in inputs]
        out = torch.zeros(inputs[0].shape, dtype=torch.bfloat16)
        sums = torch.zeros(out.shape[1], len(out))  # float32, as those of the flash kernels
        return out, [*kept, out, sums, torch.zeros(2), torch.zeros(0)]


class _Flash(torch.autograd.Function):
    """Keeps what FlashAttention keeps."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        out, kept = _KernelsOfGpu().attention(inputs)
        ctx.save_for_backward(*kept)
        return out


def _kept_bytes(model: Any) -> int:
    """Of all tensors that backward needs, but not of weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # holds them, so that no two have the same place

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**_inputs())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


_SHAPE = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
_KINDS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,  # products with a bias
    "qwen3": transformers.Qwen3Config,  # norms of heads
}


def _facts_of(folder: Path, config: Any) -> ModelFacts:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return inspect_model(
        RunConfig.model_validate({"model": {"path": str(folder)}, "data": {"train": "d"}, "output_dir": "o"})
    )


_CASES = [(kind, rank) for kind in _KINDS for rank in (8, 4, None)]
_CASES.remove(("qwen2", 4))  # its products with a bias are not joined, so nothing is copied


@pytest.mark.parametrize(("kind", "rank"), _CASES)
def test_the_estimate_counts_what_the_fast_layers_keep_on_a_gpu(
    kind: str, rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, estimated = [], []
    for n in (1, 3):  # what is not of a layer is not counted
        config = _KINDS[kind](**_SHAPE, num_hidden_layers=n)
        facts = _facts_of(tmp_path / str(n), config)
        if rank is None:
            model = _full_model(config).requires_grad_()
        else:
            model = _model(config, dtype=torch.bfloat16, targets="all-linear", rank=rank)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank is None):
            with torch.no_grad():
                model(**_inputs())  # attentions note their settings
            with monkeypatch.context() as patched:
                patched.setattr(attention, "_on_cpu", lambda q, k, v, *_others: _Flash.apply(q, k, v))
                for module in (decoder, layers):
                    patched.setattr(module, "kernels_of", lambda _device: _KernelsOfGpu())
                decoder.speed_up_layers(model)
                kept.append(_kept_bytes(model))
        tokens = _inputs()["input_ids"].numel()
        estimate = estimate_memory(
            facts, dtype="bfloat16", adapter_rank=rank, micro_tokens=tokens, longest_row=1, gradient_checkpointing=False,
            on_gpu=True, fast_layers=True,
        )  # fmt: skip
        estimated.append(estimate.activations)
    ratio = (estimated[1] - estimated[0]) / (kept[1] - kept[0])
    # Sums of softmax and factors of norms, some values for each head of 32, are not estimated.
    assert 0.96 < ratio < 1.06, ratio


def test_the_fast_layers_are_expected_only_where_they_will_be_used(tmp_path: Path) -> None:
    facts = {
        kind: _facts_of(tmp_path / kind, config(**_SHAPE, num_hidden_layers=2))
        for kind, config in _KINDS.items()
    }
    assert all(one.has_plain_mlps for one in facts.values())
    assert [kind for kind, one in facts.items() if one.norms_heads] == ["qwen3"]
    for odd in ({"hidden_act": "gelu"}, {"mlp_bias": True}):
        config = transformers.LlamaConfig(**_SHAPE, num_hidden_layers=2, **odd)
        assert not _facts_of(tmp_path / next(iter(odd)), config).has_plain_mlps
    gpu = DeviceChoice(kind="cuda", name="gpu", memory_bytes=1, bfloat16=True, compiles=True)

    def expects(
        *devices: DeviceChoice, dtype: str = "bfloat16", objective: str = "sft", **adapter: Any
    ) -> bool:
        body = {"model": "m", "data": {"train": "d"}, "output_dir": "o", "objective": objective}
        config = RunConfig.model_validate(body | {"adapter": adapter or None})
        return expects_fast_layers(config, facts["llama"], dtype=dtype, devices=devices or [gpu, gpu])

    assert expects()
    assert expects(kind="lora")
    assert expects(kind="rslora", objective="reward")
    assert expects(targets=["q_proj", "v_proj"])
    assert not expects(objective="reward")
    assert not expects(gpu, gpu.model_copy(update={"compiles": False}))
    assert not expects(dtype="float16")
    assert not expects(kind="dora")
    assert not expects(dropout=0.1)
    assert not expects(modules_to_save=["lm_head"])
    assert not expects(targets=["q_proj", "up_proj"])  # an MLP with layers of two kinds


def test_the_figures_of_every_setting_are_those_that_were_frozen() -> None:
    assert memory_grid.figures() == json.loads(memory_grid.FIGURES.read_text())
