"""The quick loss and the quick LoRA equal torch's and peft's own.

Run: pytest tests/trainer/model/test_loss_and_lora.py
"""

import copy

import peft
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from unisono.trainer.model.layers import head_log_probs, head_loss, logits_loss, speed_up_lora


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 127, 128, 300])
def test_the_chunked_head_equals_cross_entropy_over_all_logits(rows: int, smoothing: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(50, 16).requires_grad_()
    labels = torch.randint(0, 50, (rows,))
    mine = head_loss(hidden, weight, labels, count=77, dtype=torch.float32, smoothing=smoothing)
    theirs = logits_loss(hidden @ weight.t(), labels, count=77, smoothing=smoothing)
    assert torch.allclose(mine, theirs, rtol=1e-6)
    for a, b in zip(
        torch.autograd.grad(mine * 3, (hidden, weight)),
        torch.autograd.grad(theirs * 3, (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_evaluation_computes_no_gradient_of_the_head() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 16), torch.randn(50, 16).requires_grad_()
    labels = torch.randint(0, 50, (300,))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        found = head_loss(hidden, weight, labels, count=300, dtype=torch.float32)
    assert counter.get_total_flops() == 2 * 300 * 50 * 16  # the logits alone
    wanted = head_loss(hidden, weight, labels, count=300, dtype=torch.float32)
    assert torch.allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_quick_lora_equals_pefts_own_arithmetic(*, bias: bool) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_bias=bias,
    )
    slow = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    for name, parameter in slow.named_parameters():
        if "lora_B" in name or name.endswith("bias"):  # both begin at zero, where nothing would show
            torch.nn.init.normal_(parameter, std=0.1)
    quick = copy.deepcopy(slow)
    assert speed_up_lora(quick) == 14
    ids = torch.randint(0, 60, (2, 9))
    outputs = [model(input_ids=ids).logits for model in (quick, slow)]
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-6)
    for output in outputs:
        (output**2).sum().backward()
    for (name, mine), (_, theirs) in zip(quick.named_parameters(), slow.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            assert torch.allclose(
                mine.grad, theirs.grad, rtol=1e-4, atol=1e-4 * float(theirs.grad.abs().max())
            ), name


def test_quick_loras_output_can_be_changed_in_place() -> None:
    """As Gemma 3n does."""
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 6))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    assert speed_up_lora(model) == 1
    rows = torch.randn(1, 5, 8)
    trained = [p for p in model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad((model(rows) * 3).square().sum(), trained)
    out = model(rows)
    out *= 3
    for mine, theirs in zip(torch.autograd.grad(out.square().sum(), trained), wanted, strict=True):
        assert torch.allclose(mine, theirs)


def test_layers_with_dropout_or_dora_keep_pefts_way() -> None:
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    for options in ({"lora_dropout": 0.1}, {"use_dora": True}):
        model = peft.get_peft_model(
            transformers.LlamaForCausalLM(config),
            peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options),
        )
        assert speed_up_lora(model) == 0


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rows", [1, 127, 300])
def test_log_probs_and_their_gradients_equal_those_of_log_softmax(*, rows: int, trained: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    draw = [torch.randn(*shape, generator=generator) for shape in ((rows, 16), (50, 16), (rows,))]
    labels = torch.randint(0, 50, (rows,), generator=generator)
    found: list[torch.Tensor | None] = []
    wanted: list[torch.Tensor | None] = []
    for out in (found, wanted):
        hidden, weight = draw[0].clone().requires_grad_(), draw[1].clone().requires_grad_(trained)
        if out is found:
            values = head_log_probs(hidden, weight, labels, dtype=torch.float32)
        else:
            values = torch.log_softmax(hidden @ weight.t(), 1).gather(1, labels[:, None])[:, 0]
        (values * draw[2]).sum().backward()
        out += [values.detach(), hidden.grad, weight.grad]
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
