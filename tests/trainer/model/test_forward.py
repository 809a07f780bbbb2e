"""However a model's rows are computed, the loss is that of each row alone.

Run: pytest tests/trainer/model/test_forward.py
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers

from unisono.base.errors import ModelError
from unisono.trainer.model import forward as forwards
from unisono.trainer.model.decoder import speed_up_layers
from unisono.trainer.model.forward import Forward, Rows, choose_forward
from unisono.trainer.model.load import LoadedModel

_SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


_STATES = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}


def _config(kind: str) -> Any:  # noqa: C901 - a table
    match kind:
        case "llama" | "untied llama":
            return transformers.LlamaConfig(**_SMALL | {"tie_word_embeddings": kind == "llama"})
        case "qwen3":
            return transformers.Qwen3Config(**_SMALL, head_dim=8)
        case "mistral with a window of 5":
            return transformers.MistralConfig(**_SMALL, sliding_window=5, head_dim=8)
        case "gemma2":
            return transformers.Gemma2Config(**_SMALL, head_dim=8, sliding_window=5)
        case "granite":
            return transformers.GraniteConfig(**_SMALL, logits_scaling=4.0)
        case "granite with scaled residuals":
            return transformers.GraniteConfig(**_SMALL, residual_multiplier=0.5)
        case "gpt2":
            return transformers.GPT2Config(
                vocab_size=97, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
            )
        case "llama 4":
            return transformers.Llama4TextConfig(
                **_SMALL | {"tie_word_embeddings": False},
                intermediate_size_mlp=48,
                head_dim=8,
                num_local_experts=2,
                moe_layers=[1],
                pad_token_id=None,
            )
        case "bamba":
            return transformers.BambaConfig(**_SMALL, **_STATES, attn_layer_indices=[1])
        case "granite hybrid":
            return transformers.GraniteMoeHybridConfig(
                **_SMALL,
                **_STATES,
                layer_types=["mamba", "attention"],
                num_local_experts=0,
                num_experts_per_tok=0,
                shared_intermediate_size=48,
            )
        case "lfm2":
            return transformers.Lfm2Config(
                **_SMALL, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
            )
        case "qwen3.5":
            return transformers.Qwen3_5TextConfig(
                **_SMALL,
                head_dim=8,
                layer_types=["linear_attention", "full_attention"],
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
            )
        case "mamba":
            return transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
        case _:
            raise AssertionError(kind)


# What the probe should find: the layout and the head. A model that is not in this table is tried
# just the same.
_EXPECTED = {
    "llama": ("flat", "chunked"),
    "untied llama": ("flat", "chunked"),
    "qwen3": ("flat", "chunked"),
    "mistral with a window of 5": ("flat", "chunked"),
    "gemma2": ("padded", "model"),
    "granite": ("flat", "model"),
    "granite with scaled residuals": ("flat", "chunked"),
    "gpt2": ("flat", "chunked"),
    "llama 4": ("padded", "chunked"),
    "bamba": ("flat", "chunked"),
    "granite hybrid": ("flat", "chunked"),
    "lfm2": ("flat", "chunked"),
    "qwen3.5": ("flat", "chunked"),
    "mamba": ("padded", "chunked"),
}


def _loaded(kind: str) -> LoadedModel:
    return _loaded_from(_config(kind))


def _loaded_from(config: Any) -> LoadedModel:
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # first weights are small, and would hide a row that sees another
        for parameter in base.parameters():
            parameter.mul_(3.0)
    trainable = dict(base.named_parameters())
    return LoadedModel(base, base, None, trainable, sum(p.numel() for p in base.parameters()))


def _rows(lengths: list[int], *, seed: int = 1) -> tuple[Rows, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    alone = [torch.randint(0, 97, (length,), generator=generator) for length in lengths]
    ids = torch.cat(alone)
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    index = [s + j for s, length in zip(starts, lengths, strict=True) for j in range(length - 1) if j % 3]
    return Rows(ids, positions, lengths, torch.tensor(index), ids[torch.tensor(index) + 1]), alone


def _reference(base: Any, alone: list[torch.Tensor], *, count: int) -> torch.Tensor:
    losses = []
    for ids in alone:
        logits = base(input_ids=ids[None], use_cache=False).logits[0].float()
        wanted = [j for j in range(len(ids) - 1) if j % 3]
        if wanted:
            index = torch.tensor(wanted)
            losses.append(torch.nn.functional.cross_entropy(logits[index], ids[index + 1], reduction="sum"))
    return torch.stack(losses).sum() / count


def _choose(loaded: LoadedModel) -> Forward:
    return choose_forward(loaded, dtype="float32", quick_adapter=False, gradient_checkpointing=False)


@pytest.mark.parametrize("kind", _EXPECTED)
def test_the_loss_and_its_gradient_are_those_of_each_row_alone(kind: str) -> None:
    loaded = _loaded(kind)
    plain = copy.deepcopy(loaded.base)
    forward = _choose(loaded)
    assert (forward.layout, forward.head) == _EXPECTED[kind], forward.why
    rows, alone = _rows([7, 2, 140, 31])
    count = len(rows.labels)

    found = forward.loss(rows, count=count)
    wanted = _reference(plain, alone, count=count)
    assert torch.allclose(found, wanted, rtol=1e-5)

    found.backward()
    wanted.backward()
    for (name, mine), (_, theirs) in zip(
        loaded.base.named_parameters(), plain.named_parameters(), strict=True
    ):
        if theirs.grad is not None:
            assert mine.grad is not None, name
            # float32 sums in another order, over 180 tokens that partly cancel: the worst seen is
            # 3e-5 of the largest entry
            assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max() + 1e-9, name


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "mistral with a window of 5", "granite with scaled residuals"]
)
def test_last_layers_mlp_runs_at_loss_tokens_alone_if_it_changes_nothing(kind: str) -> None:
    forward = _choose(loaded := _loaded(kind))
    assert forward.shortens == ("granite" not in kind)
    rows, _ = _rows([7, 2, 140, 31])
    tokens: list[int] = []
    for layer in loaded.base.model.layers:
        layer.mlp.register_forward_hook(lambda _m, _i, out: tokens.append(out.shape[1]))
    forward.loss(rows, count=9)
    assert tokens == [len(rows.input_ids), len(rows.labels if forward.shortens else rows.input_ids)]


def test_dropout_on_attention_is_trained_with_the_models_own_attention() -> None:
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)
    )
    plain = copy.deepcopy(base).eval()
    loaded = LoadedModel(base.train(), base, None, dict(base.named_parameters()), 1)
    before = torch.get_rng_state()
    forward = _choose(loaded)
    assert torch.equal(torch.get_rng_state(), before), "the choice draws no numbers of the run"
    assert (forward.layout, forward.why) == ("padded", "its attention needs dropout of 0.1 in training")
    rows, alone = _rows([7, 2, 140, 31])
    first, second = (forward.loss(rows, count=9) for _ in range(2))
    assert first.isfinite()
    assert first != second, "dropout is applied"
    first.backward()
    assert base.get_input_embeddings().weight.grad.isfinite().all()
    base.eval()
    assert torch.allclose(forward.loss(rows, count=9), _reference(plain, alone, count=9), rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mamba"])
def test_noise_is_added_to_the_embeddings_of_its_own_tokens(kind: str) -> None:
    loaded = _loaded(kind)
    plain = copy.deepcopy(loaded.base)
    forward = _choose(loaded)
    rows, alone = _rows([7, 2, 140, 31])
    noise = torch.randn(180, 32, generator=torch.Generator().manual_seed(4))
    parts = iter(noise.split(rows.lengths))
    plain.get_input_embeddings().register_forward_hook(lambda _m, _i, output: output + next(parts))
    wanted = _reference(plain, alone, count=9)
    found = forward.loss(dataclasses.replace(rows, noise=noise), count=9)
    assert torch.allclose(found, wanted, rtol=1e-5)
    assert not torch.allclose(found, forward.loss(rows, count=9), rtol=1e-3)


@pytest.mark.parametrize("kind", _EXPECTED)
def test_common_beginnings_are_computed_once_with_same_loss_and_gradient(kind: str) -> None:
    loaded = _loaded(kind)
    plain = copy.deepcopy(loaded.base)
    forward = _choose(loaded)
    assert forward.merges == (_EXPECTED[kind][0] == "flat" and not forward.states), forward.why
    rows, alone = _rows([7, 9, 140, 131, 3, 3])
    common = [0, 4, 0, 129, 0, 3]
    for number, length in enumerate(common):
        alone[number][:length] = alone[number - 1][:length]
    ids = torch.cat(alone)
    rows = dataclasses.replace(rows, input_ids=ids, labels=ids[rows.label_index + 1], common=common)
    tokens: list[int] = []
    loaded.base.get_input_embeddings().register_forward_hook(lambda _m, _i, out: tokens.append(out.shape[1]))
    count = len(rows.labels)

    found = forward.loss(rows, count=count)
    wanted = _reference(plain, alone, count=count)
    assert torch.allclose(found, wanted, rtol=1e-5)
    if forward.merges:
        assert tokens == [len(ids) - sum(common)]

    found.backward()
    wanted.backward()
    for (name, mine), (_, theirs) in zip(
        loaded.base.named_parameters(), plain.named_parameters(), strict=True
    ):
        if theirs.grad is not None:
            assert mine.grad is not None, name
            # With AVX-512 the sums of mamba round to 1.6e-4.
            assert (mine.grad - theirs.grad).abs().max() <= 1e-3 * theirs.grad.abs().max() + 1e-9, name


@pytest.mark.parametrize(
    ("kind", "padded"),
    [
        ("llama", ""),
        ("bamba", "layers with a state: 1 × BambaMixer"),
        (
            "mamba",
            "all layers: rows in one sequence influence each other; layers with a state: 2 × MambaMixer",
        ),
    ],
)
def test_layers_that_compute_padded_rows_are_named(kind: str, padded: str) -> None:
    assert _choose(_loaded(kind)).padded == padded


def test_kernels_that_reset_a_state_get_the_row_of_each_token() -> None:
    """The arguments by which flash-linear-attention, mamba-ssm and causal-conv1d know the rows."""
    rows, _ = _rows([3, 2])
    inputs: Any = forwards._flat_inputs(rows, None, numbered=True)
    assert inputs["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 3, 5]


def test_noise_is_different_in_equal_beginnings() -> None:
    loaded = _loaded("llama")
    forward = _choose(loaded)
    rows, _ = _rows([9, 9])
    ids = torch.cat([rows.input_ids[:9], rows.input_ids[:9]])
    noise = torch.randn(18, 32, generator=torch.Generator().manual_seed(4))
    rows = dataclasses.replace(rows, input_ids=ids, labels=ids[rows.label_index + 1], noise=noise)
    merged = dataclasses.replace(rows, common=[0, 9])
    assert torch.equal(forward.loss(rows, count=4), forward.loss(merged, count=4))


def test_gradient_checkpointing_changes_nothing() -> None:
    rows, _ = _rows([7, 2, 140, 31])
    gradients = []
    for checkpointing in (False, True):
        loaded = _loaded("llama")
        forward = choose_forward(
            loaded, dtype="float32", quick_adapter=False, gradient_checkpointing=checkpointing
        )
        loaded.model.train()
        forward.loss(rows, count=len(rows.labels)).backward()
        gradients.append([p.grad for p in loaded.base.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


def test_generation_uses_own_attention_and_training_returns_to_flat() -> None:
    loaded = _loaded("llama")
    forward = _choose(loaded)
    with forward.ready_to_generate():
        assert loaded.base.config._attn_implementation == forward.own_attention
    assert loaded.base.config._attn_implementation == "unisono_flat"


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


def _without_gradient(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What a function with a wrong backward pass would be: its outputs are right."""
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.forward = lambda x: _NoGradient.apply(type(mlp).forward(mlp, x))
    return [mlp]


def _failing(model: torch.nn.Module) -> list[torch.nn.Module]:
    raise RuntimeError("ptxas does not know this GPU")


@pytest.mark.parametrize(
    ("speed_up", "why"),
    [(speed_up_layers, ""), (_without_gradient, "values differ"), (_failing, "RuntimeError: ptxas does not")],
)
def test_layers_compiled_at_first_call_need_right_gradients_to_be_used(
    monkeypatch: pytest.MonkeyPatch, speed_up: Any, why: str
) -> None:
    """As on a GPU, here with the functions for CPUs."""
    monkeypatch.setattr(forwards, "_try_layers", lambda *_, **__: None)
    loaded = _loaded("llama")
    forward = choose_forward(loaded, dtype="bfloat16", quick_adapter=False, gradient_checkpointing=False)
    assert (forward.layout, forward.head) == ("flat", "chunked")
    monkeypatch.undo()
    monkeypatch.setattr(forwards, "speed_up_layers", speed_up)
    loaded.model.eval()
    with torch.no_grad(), forward._precision():
        wanted = forward._logits(forwards._probe_rows(loaded.base, first=11)).float()
    with torch.no_grad():
        forwards._try_layers(forward, wanted, compiles=True, trains=True)
    assert why in forward.why
    assert bool(forward.fast_layers) == (not why)
    assert any("forward" in vars(module) for module in loaded.base.modules()) == (not why)
    rows, _ = _rows([7, 12])
    forward.loss(rows, count=9).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in loaded.base.model.layers.parameters())


def test_reference_model_without_trainable_weights_keeps_fast_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = forwards._try_layers
    monkeypatch.setattr(
        forwards,
        "_try_layers",
        lambda forward, wanted, **_: tried(forward, wanted, compiles=True, trains=True),
    )
    loaded = _loaded("llama")
    loaded.base.requires_grad_(requires_grad=False).to(torch.bfloat16)
    bare = dataclasses.replace(loaded, trainable={})
    forward = choose_forward(bare, dtype="bfloat16", quick_adapter=False, gradient_checkpointing=False)
    assert forward.fast_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_encoder_whose_tokens_see_later_ones_is_refused(dtype: str) -> None:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(ModelError) as refused:
        choose_forward(_loaded_from(config), dtype=dtype, quick_adapter=False, gradient_checkpointing=False)
    assert "BertLMHeadModel reads text in both directions" in str(refused.value)
    assert "set is_decoder: true" in str(refused.value.problems[0].fix)


def test_rows_are_padded_for_a_model_that_makes_its_mask_itself() -> None:
    config = transformers.DogeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=5, hidden_dropout=0.0,
    )  # fmt: skip
    forward = _choose(_loaded_from(config))
    assert (forward.layout, forward.why) == ("padded", "its attention needs a mask that it makes itself")


def test_rows_are_padded_for_chunks_of_attention_in_the_mask_alone() -> None:
    assert _choose(_loaded("llama 4")).why == "its attention sees chunks of a row, by its mask alone"
