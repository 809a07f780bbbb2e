"""Equal digests mean equal bits. Run: pytest tests/trainer/training/test_digests.py"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.training.join import by_layer, checksum, shapes_digest

_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])


@given(shape=st.lists(st.integers(0, 40), max_size=3), dtype=_DTYPES, seed=st.integers(0, 99), data=st.data())
def test_one_turned_bit_is_seen(shape: list[int], dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone())
    if tensor.numel():
        other = tensor.clone()
        flat = other.view(-1).view(torch.uint8)
        flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert checksum(other) != checksum(tensor)


@pytest.mark.parametrize("places", [(0, 1), (0, 1023), (5, 5 + 1024), (0, 5_000_000)])
def test_words_that_changed_places_are_seen(places: tuple[int, int]) -> None:
    tensor = torch.arange(5_000_001)
    other = tensor.clone()
    a, b = places
    other[a], other[b] = tensor[b], tensor[a]
    assert checksum(other) != checksum(tensor)


def test_the_layout_in_memory_does_not_matter() -> None:
    tensor = torch.randn(30, 20)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)


def test_names_shapes_and_dtypes_are_in_the_outline() -> None:
    a = {"w": torch.zeros(2, 3)}
    assert shapes_digest(a) == shapes_digest({"w": torch.ones(2, 3)})
    assert shapes_digest(a) != shapes_digest({"v": torch.zeros(2, 3)})
    assert shapes_digest(a) != shapes_digest({"w": torch.zeros(3, 2)})
    assert shapes_digest(a) != shapes_digest({"w": torch.zeros(2, 3, dtype=torch.bfloat16)})


def test_many_tensors_are_reported_by_layer() -> None:
    values = {
        f"model.layers.{layer}.part{part}.weight": layer * part for layer in range(60) for part in range(9)
    }
    digests = by_layer(values)
    assert len(digests) == 60
    changed = by_layer(values | {"model.layers.17.part3.weight": 10**6})
    assert [name for name in digests if digests[name] != changed[name]] == ["model.layers.17"]
