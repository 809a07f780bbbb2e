"""Rewards of answers about pictures."""

from typing import Any


def first_byte(completions: list[str], **_columns: Any) -> list[float]:
    """Of the number of the first character: answers have different rewards."""
    return [ord(text[0]) % 7 / 7 if text else 0.0 for text in completions]


def by_picture(completion_ids: list[list[int]], color: list[str], **_columns: Any) -> list[float]:
    """1 for an even token about a red thing, and for an odd one about another."""
    return [
        float((ids[0] % 2 == 0) == (name == "red")) for ids, name in zip(completion_ids, color, strict=True)
    ]
