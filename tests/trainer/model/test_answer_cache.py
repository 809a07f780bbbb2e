"""Keys and values of running answers. Run: pytest tests/trainer/model/test_answer_cache.py"""

import torch

from unisono.trainer.model.answer_cache import AnswerLayer


def drawn(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, which may have other widths."""
    return torch.randn(rows, 2, tokens, 64), torch.randn(rows, 2, tokens, 48)


def test_what_a_layer_gives_is_all_that_it_was_given() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [drawn(4, tokens) for tokens in (2_500, 1, 1, 70, 1)]  # the first has more than 1 MB
        beside = drawn(2, 30)
        news = drawn(5, 1)
    layer, other = AnswerLayer(), AnswerLayer()
    for number, part in enumerate(parts, 1):
        for given, side in zip(layer.update(*part), (0, 1), strict=True):
            assert torch.equal(given, torch.cat([one[side] for one in parts[:number]], dim=2))
    other.update(*beside)
    expected = [torch.cat([one[side] for one in parts], dim=2)[[0, 1, 3], :, 10:] for side in (0, 1)]
    layer.select(torch.tensor([0, 1, 3]), 10)
    length = expected[0].shape[2]
    layer.join(other, length=length)
    gap = length - 30
    for given, kept, new, added in zip(layer.update(*news), expected, beside, news, strict=True):
        padded = torch.nn.functional.pad(new, (0, 0, gap, 0))
        assert torch.equal(given, torch.cat([torch.cat([kept, padded]), added], dim=2))


def test_a_token_is_added_without_a_copy_of_the_others() -> None:
    layer = AnswerLayer()
    layer.update(*drawn(4, 2_500))
    first, _ = layer.update(*drawn(4, 1))
    second, _ = layer.update(*drawn(4, 1))
    assert second.data_ptr() == first.data_ptr()
