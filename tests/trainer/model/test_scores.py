"""The value of a row of a reward model is that of transformers' own forward.

Run: pytest tests/trainer/model/test_scores.py
"""

import copy
import dataclasses

import pytest
import torch
import transformers

from unisono.trainer.model.forward import Forward, Rows, choose_forward
from unisono.trainer.model.load import LoadedModel

_PAD = 5
_SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "num_labels": 1,
}  # fmt: skip
_CONFIGS = {
    "llama": transformers.LlamaConfig(**_SMALL),
    "qwen3": transformers.Qwen3Config(**_SMALL, head_dim=8),
    "gemma2": transformers.Gemma2Config(**_SMALL, head_dim=8, sliding_window=5),
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, num_labels=1
    ),
    "a head that is more than a matrix": transformers.LlamaConfig(**_SMALL),
}  # fmt: skip
_EXPECTED = {
    "llama": ("flat", "chunked"),
    "qwen3": ("flat", "chunked"),
    "gemma2": ("padded", "chunked"),
    "gpt2": ("flat", "chunked"),
    "a head that is more than a matrix": ("padded", "model"),
}


def _loaded(kind: str) -> LoadedModel:
    torch.manual_seed(0)
    base = transformers.AutoModelForSequenceClassification.from_config(copy.deepcopy(_CONFIGS[kind]))
    base.config.pad_token_id = _PAD
    with torch.no_grad():  # first weights are small, and would hide a row that sees another
        for parameter in base.parameters():
            parameter.mul_(3.0)
    if kind == "a head that is more than a matrix":
        base.score.register_forward_hook(lambda _module, _inputs, output: output.tanh())
    return LoadedModel(base, base, None, dict(base.named_parameters()), 0)


def _rows(lengths: list[int]) -> tuple[Rows, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    alone = [torch.randint(6, 97, (length,), generator=generator) for length in lengths]
    alone[0][-2:] = _PAD  # transformers reads the value at the last token before these
    alone[-1][3] = _PAD
    ids = torch.cat(alone)
    positions = torch.cat([torch.arange(length) for length in lengths])
    none = torch.zeros(0, dtype=torch.long)
    return Rows(ids, positions, lengths, none, none), alone


def _choose(loaded: LoadedModel, *, dtype: str = "float32") -> Forward:
    return choose_forward(loaded, dtype=dtype, quick_adapter=False, gradient_checkpointing=False)


@pytest.mark.parametrize("kind", _EXPECTED)
def test_scores_and_their_gradients_are_those_of_each_row_alone(kind: str) -> None:
    loaded = _loaded(kind)
    plain = copy.deepcopy(loaded.base)
    forward = _choose(loaded)
    assert (forward.layout, forward.head) == _EXPECTED[kind], forward.why
    rows, alone = _rows([7, 2, 140, 31])
    found = forward.scores(rows)
    wanted = torch.stack([plain(input_ids=ids[None], use_cache=False).logits[0, 0] for ids in alone])
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)  # values of about 1, sums that partly cancel

    weights = torch.tensor([1.0, -2.0, 3.0, -1.0])
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for (name, mine), (_, theirs) in zip(
        loaded.base.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert (mine.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max() + 1e-9, name


def test_scores_of_packed_rows_are_those_of_a_padded_batch_of_transformers() -> None:
    loaded = _loaded("llama")
    plain = copy.deepcopy(loaded.base)
    rows, alone = _rows([7, 2, 140, 31])
    ids = torch.full((4, 140), _PAD)
    for row, tokens in zip(ids, alone, strict=True):
        row[: len(tokens)] = tokens
    wanted = plain(input_ids=ids, attention_mask=(ids != _PAD).long()).logits[:, 0]
    found = _choose(loaded).scores(rows)
    # Inside of a row the mask of such a batch hides padding tokens; the last row has one.
    assert torch.allclose(found[:3], wanted[:3], rtol=1e-5, atol=1e-5)


def test_a_row_does_not_change_the_score_of_another() -> None:
    forward = _choose(_loaded("llama"))
    rows, _ = _rows([7, 2, 140, 31])
    ids = rows.input_ids.clone()
    ids[:7] = 11
    before, after = forward.scores(rows), forward.scores(dataclasses.replace(rows, input_ids=ids))
    assert not torch.allclose(before[0], after[0], rtol=1e-3)
    assert torch.equal(before[1:], after[1:])


def test_in_bfloat16_the_head_is_computed_in_float32() -> None:
    forward = _choose(_loaded("llama"), dtype="bfloat16")
    assert (forward.layout, forward.head) == ("flat", "chunked"), forward.why
    rows, _ = _rows([7, 2, 140, 31])
    scores = forward.scores(rows)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())
