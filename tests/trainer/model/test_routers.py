"""Router losses are those of the papers for any partition of the tokens, and a model that cannot
have them is refused.

Run: pytest tests/trainer/model/test_routers.py
"""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.trainer.model.test_forward import _rows
from unisono.base.errors import ModelError
from unisono.trainer.config.training_sections import RouterLossSection
from unisono.trainer.model.forward import Forward, Rows, choose_forward
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.model.routers import Decisions
from unisono.trainer.plan import ModelFacts, estimate_memory

_COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "num_experts_per_tok": 2, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3_moe": {"head_dim": 8, "norm_topk_prob": True},
    "olmoe": {},
    "gpt_oss": {"head_dim": 8},
    "granitemoe": {},
    "deepseek_v3": _DEEPSEEK,
}
_OTHERS: dict[str, dict[str, Any]] = {"jetmoe": {"kv_channels": 8}}
_BALANCED = RouterLossSection(load_balancing=0.1)


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**_COMMON, **(_FAMILIES | _OTHERS).get(kind, {})})
    base = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # first weights are small: all experts would be equally likely
        for parameter in base.parameters():
            parameter.mul_(5.0)
    return base


def _forward(
    base: Any,
    section: RouterLossSection | None = _BALANCED,
    *,
    layout: str = "flat",
    checkpointing: bool = False,
) -> Forward:
    loaded = LoadedModel(base, base, None, dict(base.named_parameters()), 0)
    forward = choose_forward(
        loaded,
        dtype="float32",
        quick_adapter=False,
        gradient_checkpointing=checkpointing,
        router_loss=section,
    )
    if layout == "padded":
        base.set_attn_implementation(forward.own_attention)
        forward.layout = "padded"
    return forward


def _losses(
    forward: Forward, parts: list[Rows], *, together: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load balancing loss and z-loss of some micro batches, and their gradient by the weights of the
    first router.
    """
    forward.loaded.model.train()
    decisions = []
    for rows in parts:
        forward.loss(rows, count=1)
        decisions.append(_taken(forward))
    load = torch.stack([part.load() for part in decisions]).sum(0)
    tokens = sum(sum(rows.lengths) for rows in parts)
    balancing = sum(part.load_balancing(load, tokens=tokens, together=together) for part in decisions)
    z_loss = sum(part.z_loss(tokens=tokens) for part in decisions)
    weight = next(value for name, value in forward.loaded.base.named_parameters() if _is_router(name))
    (gradient,) = torch.autograd.grad(balancing + z_loss, [weight])
    return balancing.detach(), z_loss.detach(), gradient


def _taken(forward: Forward) -> Decisions:
    assert forward.routers is not None
    decisions = forward.routers.take()
    assert decisions is not None
    return decisions


def _is_router(name: str) -> bool:
    return "gate.weight" in name or "router" in name


def _halves() -> tuple[Rows, list[Rows], list[torch.Tensor]]:
    whole, alone = _rows([7, 2, 40, 31])
    parts = []
    for ids in alone:
        index = torch.arange(len(ids) - 1)
        parts.append(Rows(ids, torch.arange(len(ids)), [len(ids)], index, ids[1:]))
    return whole, parts, alone


@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("kind", _FAMILIES)
def test_parts_of_a_batch_give_its_losses_and_gradient(kind: str, layout: str) -> None:
    forward = _forward(_model(kind), layout=layout)
    whole, parts, _ = _halves()
    for together in (False, True):
        one = _losses(forward, [whole], together=together)
        four = _losses(forward, parts, together=together)
        for mine, other in zip(four, one, strict=True):
            assert (mine - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_recomputed_activations_give_the_same_gradients(layout: str) -> None:
    whole, _, _ = _halves()
    gradients = []
    for checkpointing in (False, True):
        base = _model("mixtral")
        forward = _forward(base, layout=layout, checkpointing=checkpointing)
        base.train()
        loss, decisions = forward.loss(whole, count=len(whole.labels)), _taken(forward)
        tokens = sum(whole.lengths)
        balancing = decisions.load_balancing(decisions.load(), tokens=tokens, together=False)
        (loss + balancing + decisions.z_loss(tokens=tokens)).backward()
        gradients.append({name: parameter.grad for name, parameter in base.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.any()
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("kind", [kind for kind in _FAMILIES if kind != "deepseek_v3"])
def test_layers_together_have_the_load_balancing_loss_of_transformers(kind: str) -> None:
    base = _model(kind)
    whole, _, alone = _halves()
    mask = torch.zeros(4, 40, dtype=torch.long)
    ids = torch.zeros(4, 40, dtype=torch.long)
    for row, one in enumerate(alone):
        ids[row, : len(one)], mask[row, : len(one)] = one, 1
    logits = base(
        input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False
    ).router_logits
    logits = tuple(one.detach() for one in logits)
    expected = load_balancing_loss_func(logits, 6, 2, mask)
    found, z_loss, _ = _losses(_forward(base), [whole], together=True)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    real = torch.stack(logits)[:, mask.flatten().bool()]
    assert float(z_loss) == pytest.approx(float(real.logsumexp(-1).square().mean()), rel=1e-5)


def test_the_load_of_each_layer_is_balanced_though_layers_together_are() -> None:
    """Two layers that send all tokens to different experts are balanced together, and not each."""
    logits = [torch.tensor([[9.0, 0.0]]), torch.tensor([[0.0, 9.0]])]
    decisions = Decisions(logits, [torch.tensor([[0]]), torch.tensor([[1]])], lambda x: x.softmax(-1))
    load = decisions.load()
    assert float(decisions.load_balancing(load, tokens=1, together=True)) == pytest.approx(1.0, rel=1e-3)
    assert float(decisions.load_balancing(load, tokens=1, together=False)) == pytest.approx(2.0, rel=1e-3)


def test_a_sigmoid_router_has_the_shares_of_its_scores() -> None:
    forward = _forward(_model("deepseek_v3"))
    whole, _, _ = _halves()
    forward.loaded.model.train()
    forward.loss(whole, count=1)
    decisions = _taken(forward)
    scores = decisions.logits[0].sigmoid()
    assert torch.allclose(decisions.probabilities(decisions.logits[0]), scores / scores.sum(-1, keepdim=True))
    assert len(decisions.logits) == 2, "the first layer has no experts"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("llama", "no routers"),
        ("phimoe", "neither a softmax nor a sigmoid"),
        ("jetmoe", "something other than logits"),
    ],
)
def test_a_model_without_such_routers_is_refused(kind: str, why: str) -> None:
    base = _model(kind)
    with pytest.raises(ModelError) as refused:
        _forward(base)
    assert why in str(refused.value.problems[0].why)
    assert refused.value.problems[0].where == "optim.router_loss"
    assert _forward(_model(kind), None).routers is None


def test_the_estimate_of_router_losses_is_what_their_backward_keeps() -> None:
    layers, experts, tokens, hidden = 3, 8, 1000, 32
    logits = [torch.randn(tokens, experts, dtype=torch.bfloat16, requires_grad=True) for _ in range(layers)]
    chosen = [one.topk(2).indices for one in logits]
    kept: dict[int, torch.Tensor] = {}  # holds them, so that no two have the same place

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    decisions = Decisions(logits, chosen, lambda values: values.softmax(-1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        balancing = decisions.load_balancing(decisions.load(), tokens=tokens, together=False)
        (balancing + decisions.z_loss(tokens=tokens)).backward()
    wanted = sum(tensor.untyped_storage().nbytes() for tensor in [*kept.values(), *logits])
    facts = ModelFacts(
        directory="", model_type="", parameters=1, hidden_size=hidden, layers=layers, intermediate_size=64, vocab_size=9,
        linear_parameters=1, linear_in_out=1, weight_bytes=1, digest="", parts={"router": layers * experts * hidden},
    )  # fmt: skip
    settings: Any = {"dtype": "bfloat16", "adapter_rank": 4, "micro_tokens": tokens, "longest_row": tokens}
    with_loss, without = (
        estimate_memory(facts, gradient_checkpointing=True, router_loss=flag, **settings).activations
        for flag in (True, False)
    )
    assert with_loss - without == pytest.approx(wanted, rel=0.1)
