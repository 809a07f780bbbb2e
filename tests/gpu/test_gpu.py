"""What needs one CUDA device. Run: pytest -m gpu tests/gpu"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import needs
from unisono.guard.facts.machine import probe_nvidia
from unisono.trainer.config import RunConfig
from unisono.trainer.model.attention import flat_attention
from unisono.trainer.model.forward import Rows, choose_forward
from unisono.trainer.model.load import LoadedModel, load_for_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window: int | None
) -> torch.Tensor:
    """(1, H, T, D) → (1, T, H, D), in float64 under a mask."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    position = torch.arange(q.shape[2], device=q.device)
    sees = (row[:, None] == row[None]) & (position[:, None] >= position[None])
    if window:
        sees &= position[:, None] - position[None] < window
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q.double() @ k.double().transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
    return (weights @ v.double()).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 64])
def test_flash_attention_over_rows_equals_dense_attention(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = [3, 130, 500, 1]
    tokens = sum(lengths)
    shapes = ((1, 8, tokens, 64), (1, 2, tokens, 64), (1, 2, tokens, 64))
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes
    )
    ends = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out, _ = flat_attention(
        torch.nn.Module(), q, k, v, None, sliding_window=window, cu_seq_lens_q=ends, max_length_q=max(lengths)
    )
    wanted = _dense(q, k, v, lengths, window)
    assert (out - wanted).abs().max() < 0.03  # bfloat16 has eight bits
    weight = torch.randn_like(out)
    mine = torch.autograd.grad(out, (q, k, v), weight)
    theirs = torch.autograd.grad(wanted, (q, k, v), weight.double())
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


def test_the_loss_of_a_bfloat16_model_is_flat_and_that_of_each_row_alone() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    base = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    loaded = LoadedModel(base, base, None, dict(base.named_parameters()), 0)
    forward = choose_forward(loaded, dtype="bfloat16", quick_adapter=False, gradient_checkpointing=False)
    assert (forward.layout, forward.head) == ("flat", "chunked"), forward.why
    lengths = [40, 7, 300]
    ids = torch.randint(0, 512, (sum(lengths),), device="cuda")
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    index = (positions[1:] > 0).nonzero()[:, 0]
    together = forward.loss(Rows(ids, positions, lengths, index, ids[index + 1]), count=len(index))
    alone = []
    for row in ids.split(lengths):
        place = torch.arange(len(row) - 1, device="cuda")
        one = Rows(row, torch.arange(len(row), device="cuda"), [len(row)], place, row[1:])
        alone.append(forward.loss(one, count=len(index)))
    assert torch.allclose(together, torch.stack(alone).sum(), rtol=5e-3)


def test_the_driver_is_asked_without_a_cuda_context() -> None:
    gpus, note = probe_nvidia()
    assert gpus, note
    assert gpus[0].uuid.startswith("GPU-")
    assert 0 < gpus[0].memory_free_bytes <= gpus[0].memory_bytes


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_quantized_weights_give_the_loss_and_gradients_of_a_cpu(model_dir: Path, kind: str) -> None:
    needs.package("bitsandbytes")
    config = RunConfig.model_validate(
        {"model": {"path": str(model_dir), "quantize": kind}, "data": {"train": "-"}, "output_dir": "-"}
    )
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        loaded = load_for_training(
            config,
            directory=model_dir,
            tokenizer_directory=model_dir,
            dtype="float32",
            device=torch.device(device),
        )
        forward = choose_forward(loaded, dtype="float32", quick_adapter=True, gradient_checkpointing=False)
        assert forward.quick
        ids = torch.arange(40, device=device)
        loss = forward.loss(Rows(ids, ids, [40], ids[:-1], ids[1:]), count=39)
        loss.backward()
        grads = [p.grad.cpu() for p in loaded.trainable.values() if p.grad is not None]
        found.append((loss.detach().cpu(), torch.cat([grad.reshape(-1) for grad in grads])))
    (cpu, mine), (cuda, theirs) = found
    assert torch.allclose(cpu, cuda, rtol=1e-3)
    assert (mine - theirs).norm() < 0.01 * mine.norm()
