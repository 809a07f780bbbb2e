"""Logs with very many tracebacks are read in time that grows with their length only.

Run: pytest tests/guard/diagnosis/test_large_logs.py
"""

import io
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.causes.signatures import all_signatures, match_hints, match_line
from unisono.guard.diagnosis.lines import OFTEN_STRONG, Hints
from unisono.guard.diagnosis.reading import diagnose_logs
from unisono.guard.diagnosis.scan import _HINTS, Scanned, scan

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/u/train.py", line {number}, in main
    loss = model(batch{number})
  File "/home/u/model.py", line {number}, in forward
    return rows["labels{number}"]
ValueError: bad value {number}
"""


def traceback(number: int) -> str:
    return TRACEBACK.format(number=number)


def of_rank(number: int) -> str:
    return "".join(f"[rank{number}]: {line}\n" for line in traceback(number).splitlines())


def chained(number: int) -> str:
    return f"\nDuring handling of the above exception, another exception occurred:\n\n{traceback(number)}"


def reported(number: int) -> str:
    return f"Exception ignored in: <function Loader.__del__ at 0x{number:x}>\n{traceback(number)}"


def seconds(make: Callable[[int], str], count: int) -> float:
    """CPU seconds of reading and judging so many."""
    log = "".join(map(make, range(count))).encode()
    began = time.process_time()
    diagnose_logs([scan("a.log", io.BytesIO(log))])
    return time.process_time() - began


@pytest.mark.parametrize("make", [traceback, of_rank, chained, reported])
def test_four_times_as_many_tracebacks_take_about_four_times_as_long(make: Callable[[int], str]) -> None:
    seconds(make, 10)  # what is compiled on first use
    few, many = seconds(make, 1500), seconds(make, 6000)
    assert many < 8 * few, "a search through all earlier ones for each makes it sixteen times"


def read(text: str) -> Scanned:
    return scan("a.log", io.BytesIO(text.encode()))


def test_of_too_many_tracebacks_the_first_and_the_last_are_kept() -> None:
    count = OFTEN_STRONG + 8000
    found = read("".join(map(traceback, range(count)))).tracebacks
    numbers = [trace.user_line for trace in found]
    assert numbers[:OFTEN_STRONG] == list(range(OFTEN_STRONG))
    assert numbers[-15:] == list(range(count - 15, count))
    assert len(found) < OFTEN_STRONG + 500
    assert all(len(trace.functions) == 2 and not trace.earlier for trace in found)


def test_none_of_too_many_reported_exceptions_is_the_end_of_the_program() -> None:
    text = "".join(map(reported, range(OFTEN_STRONG + 8000))) + "step 1\n" * 200
    scanned = read(text)
    assert all(trace.ignored for trace in scanned.tracebacks)
    ended = read(f"{text}{traceback(7_000_000)}")
    assert [trace.user_line for trace in ended.tracebacks if not trace.ignored] == [7_000_000]


@given(
    words=st.frozensets(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=8),
    text=st.text("abcdé\ud800", max_size=30),
)
def test_the_strings_of_a_text_are_those_that_a_search_for_each_finds(
    words: frozenset[str], text: str
) -> None:
    assert set(Hints(words).held(text)) == {word for word in words if word in text}


@pytest.mark.parametrize("signature", all_signatures(), ids=lambda one: one.id)
def test_a_line_whose_hints_are_known_has_the_signatures_of_the_line(signature: object) -> None:
    for line in (signature.example, signature.look_alike):  # type: ignore[attr-defined]
        assert list(match_hints(line, _HINTS.held(line))) == match_line(line)
