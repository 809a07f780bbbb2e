"""Every signature matches its own example and not its look-alike, in bounded time.

Run: pytest tests/base/causes/test_signatures.py
"""

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.base.causes import find_cause
from unisono.base.causes.entries import Signature
from unisono.base.causes.signatures import LINE_LIMIT, all_signatures, compiled, match_line

LONGEST_S = 0.5
"""For a line of 100 kB through all signatures, on a busy machine; the slowest that is known takes a
tenth of it.
"""
MOST_REPEATS = 1500

IDS = {signature.id for signature in all_signatures()}
every_signature = pytest.mark.parametrize("signature", all_signatures(), ids=lambda signature: signature.id)


def test_ids_and_orders_are_unique() -> None:
    assert len(IDS) == len(all_signatures())
    assert len({signature.order for signature in all_signatures()}) == len(all_signatures())


@every_signature
def test_an_example_has_its_own_signature_and_none_of_a_different_cause(signature: Signature) -> None:
    found = match_line(signature.example)
    assert signature in found
    others = {hit.id for hit in found if hit.cause is not None and hit.cause != signature.cause}
    assert others <= set(signature.beside), f"also {others}"


@every_signature
def test_a_look_alike_does_not_have_it(signature: Signature) -> None:
    assert signature not in match_line(signature.look_alike)


@every_signature
def test_an_entry_reports_everything(signature: Signature) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", signature.id)
    assert signature.source
    assert signature.cause is None or find_cause(signature.cause) is not None
    assert set(signature.beside) <= IDS
    assert any(hint in signature.example for hint in signature.hints)
    if signature.kind in ("finished",):
        assert signature.cause is None


@every_signature
def test_every_repetition_is_bounded_and_none_is_in_another(signature: Signature) -> None:
    """What makes a regular expression slow is a repetition in a repetition, or two without a bound
    side by side.
    """
    tree = re._parser.parse(signature.pattern)  # type: ignore[attr-defined]
    assert max(_depths(tree), default=0) <= 1
    assert max(_repeats(tree), default=0) <= MOST_REPEATS


def _depths(tree: Any, depth: int = 0) -> Any:
    for name, value in _nodes(tree):
        inside = depth + (name == "MAX_REPEAT" and value[1] > 1 and value[0] != value[1])
        yield inside
        for part in _parts(value):
            yield from _depths(part, inside)


def _repeats(tree: Any) -> Any:
    for name, value in _nodes(tree):
        if name == "MAX_REPEAT":
            yield int(value[1])
        for part in _parts(value):
            yield from _repeats(part)


def _nodes(tree: Any) -> Any:
    return ((str(name), value) for name, value in tree)


def _parts(value: Any) -> Any:
    """The expressions inside one."""
    kind = type(re._parser.parse("a"))  # type: ignore[attr-defined]
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, kind):
            yield one
        elif isinstance(one, tuple | list):
            stack.extend(one)


_HINTS = [hint for signature in all_signatures() for hint in signature.hints]
_PIECES = st.one_of(
    st.sampled_from([*_HINTS, *(s.example for s in all_signatures())]), st.text(max_size=8), st.sampled_from([" ", "1", "a", "(", ":", "'", "\x1b[0m"])
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(st.lists(_PIECES, min_size=1, max_size=6), st.integers(0, LINE_LIMIT))
def test_no_line_of_100_kb_takes_long(pieces: list[str], shift: int) -> None:
    """Pieces of what is looked for, again and again: what would make a search go back and forth."""
    text = "".join(pieces)
    line = ("x" * shift + text * (100_000 // max(1, len(text)) + 1))[:100_000]
    began = time.process_time()
    match_line(line)
    assert time.process_time() - began < LONGEST_S


@every_signature
def test_its_own_words_over_and_over_take_no_time(signature: Signature) -> None:
    for piece in (*signature.hints, signature.example, signature.example[: len(signature.example) // 2]):
        began = time.process_time()
        compiled(signature.pattern).search((piece * LINE_LIMIT)[:LINE_LIMIT])
        assert time.process_time() - began < 0.1


def test_words_in_the_colours_of_a_terminal_are_found() -> None:
    (hit,) = match_line("\x1b[31mCUDA out\x1b[0m of memory. Tried to allocate 4.64 GiB")
    assert hit.id == "cuda_out_of_memory"
