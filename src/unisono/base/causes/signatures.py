"""Known log lines and what they indicate, for the logs of running ranks and for `unisono
diagnose`.

They judge nothing: the caller weighs the matches of all logs. The catalogue is read at the first
line.
"""

import functools
import re
from collections.abc import Iterable

from unisono.base.causes.entries import Signature, all_entries, read_other_lines
from unisono.base.text import plain


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The compiled pattern, on first use: most runs never need most of them."""
    return re.compile(pattern)


LINE_LIMIT = 2048
"""Only this many characters of a line are searched: the message is at the beginning, and a line may
be a megabyte of numbers.
"""


@functools.cache
def all_signatures() -> tuple[Signature, ...]:
    """All signatures, in their order of precedence."""
    of_causes = (signature for entry in all_entries() for signature in entry.signatures)
    return tuple(sorted((*of_causes, *read_other_lines()), key=lambda one: (one.order, one.id)))


@functools.cache
def _by_id() -> dict[str, Signature]:
    return {signature.id: signature for signature in all_signatures()}


@functools.cache
def _by_hint() -> dict[str, list[int]]:
    """The numbers of the signatures with a hint.

    Flat, since most lines have no hint, and this search is all that they cost.
    """
    numbers: dict[str, list[int]] = {}
    for number, signature in enumerate(all_signatures()):
        for hint in signature.hints:
            numbers.setdefault(hint, []).append(number)
    return numbers


def find_signature(signature_id: str) -> Signature | None:
    """The entry with this id, or None."""
    return _by_id().get(signature_id)


def match_line(line: str) -> list[Signature]:
    """The signatures that match a line, in their order of precedence.

    Terminal escape sequences are ignored.
    """
    head = line[:LINE_LIMIT]
    if "\x1b" in head:
        head = plain(head)
    return [*_matching(head)]


@functools.lru_cache(maxsize=256)  # several ranks print the same
def _matching(line: str) -> tuple[Signature, ...]:
    return match_hints(line, [hint for hint in _by_hint() if hint in line])


def match_hints(line: str, hints: Iterable[str]) -> tuple[Signature, ...]:
    """The signatures that match a line, where it is known which hints the line holds; others do not
    count.
    """
    signatures, by_hint = all_signatures(), _by_hint()
    numbers = {number for hint in hints for number in by_hint.get(hint, ())}
    return tuple(
        signatures[number] for number in sorted(numbers) if compiled(signatures[number].pattern).search(line)
    )
