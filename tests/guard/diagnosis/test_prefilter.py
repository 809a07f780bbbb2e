"""The one look at most bytes of a log. Run: pytest tests/guard/diagnosis/test_prefilter.py"""

import builtins
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.diagnosis import lines
from unisono.guard.diagnosis.lines import EDGE_KEPT, OFTEN, OFTEN_STRONG, Prefilter

STRONG, WEAK = ("CUDA out of memory", "Error: ", "Traceback (most"), ("it/s]", "step", "steps/s")


@pytest.fixture(params=["re2", "re"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both: google-re2, and Python's own where that is missing."""
    real = builtins.__import__

    def without_re2(name: str, *rest: Any, **more: Any) -> Any:
        if name == "re2":
            raise ImportError(name)
        return real(name, *rest, **more)

    if request.param == "re":
        monkeypatch.setattr(builtins, "__import__", without_re2)
    lines._finder.cache_clear()
    yield request.param
    lines._finder.cache_clear()


def places(data: bytes) -> list[int]:
    pattern = b"|".join(re.escape(word.encode()) for word in sorted((*STRONG, *WEAK), key=len, reverse=True))
    return [found.start() for found in re.finditer(pattern, data)]


@given(
    st.lists(
        st.one_of(st.binary(max_size=12), st.sampled_from([word.encode() for word in (*STRONG, *WEAK)])),
        max_size=30,
    )
)
def test_in_a_short_log_every_place_is_found_whatever_bytes_are_around_it(parts: list[bytes]) -> None:
    data = b"".join(parts)
    assert Prefilter(STRONG, WEAK).hits(data) == places(data)


def test_both_engines_find_the_same(engine: str) -> None:
    data = "Error: ½ CUDA out of memory\x00\xff it/s] steps/s".encode() + b"\xff\xfe Error: "
    assert Prefilter(STRONG, WEAK).hits(data) == places(data)


def test_a_failure_is_found_among_any_number_of_bars(engine: str) -> None:
    filter_ = Prefilter(STRONG, WEAK)
    bars = b" 1/9 [00:01<00:02, 1.0it/s]\n" * 20_000
    first = filter_.hits(bars)
    assert OFTEN <= len(first) < 3 * OFTEN
    second = filter_.hits(bars + b"Error: here\n" + bars)
    assert len(bars) in second
    assert len(second) < 2 * OFTEN


def test_the_last_bar_of_a_chunk_is_found_however_many_there_were(engine: str) -> None:
    filter_ = Prefilter(STRONG, WEAK)
    bars = b" 1/9 [00:01<00:02, 1.0it/s]\n" * 20_000
    for _ in range(3):
        assert filter_.hits(bars)[-1] == bars.rindex(b"it/s]")


def test_first_and_last_of_very_many_errors_in_each_chunk_are_found() -> None:
    filter_ = Prefilter(STRONG, WEAK)
    errors = b"Error: again\n" * (OFTEN_STRONG + 1)
    filter_.hits(errors)
    found = filter_.hits(errors)
    assert len(found) == 2 * EDGE_KEPT
    assert (found[0], found[-1]) == (0, errors.rindex(b"Error: "))


def test_what_is_seen_often_in_one_log_counts_in_the_next() -> None:
    bars = b"it/s]\n" * (2 * OFTEN)
    Prefilter(STRONG, WEAK).hits(bars)
    assert len(Prefilter(STRONG, WEAK).hits(bars[: 6 * (OFTEN - 1)])) == OFTEN - 1
