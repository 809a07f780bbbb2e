"""Text from elsewhere reaches a terminal without anything that would steer it.

Run: pytest tests/text
"""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.text import nearest, one_line, plain

nasty = st.text(
    alphabet=st.one_of(st.characters(), st.sampled_from("\x1b[]31m;\x07\\\r\n\t\u202e\u200b\x9b\ud800"))
)


@given(nasty)
def test_nothing_that_steers_a_terminal_is_left(text: str) -> None:
    shown = plain(text)
    assert {unicodedata.category(character) for character in shown if character not in "\n\t"} & {
        "Cc",
        "Cs",
    } == set()
    assert not any(
        "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069" for character in shown
    )
    shown.encode("utf-8")


@given(nasty)
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert plain(plain(text)) == plain(text)


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert plain(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"), ("\x1b]0;title\x07x", "x"), ("a\rb", "ab"), ("a\x08b", "ab"), ("\x1b]8;;http://x\x1b\\link", "link"),
        ("tab\tand\nline", "tab\tand\nline"), ("\u202etxt.exe", "txt.exe"), ("\x9b31mx", "31mx"),
    ],
)  # fmt: skip
def test_sequences_go_as_a_whole(text: str, shown: str) -> None:
    assert plain(text) == shown


@given(nasty, st.integers(1, 40))
def test_one_line_is_one_line_and_not_longer_than_asked(text: str, limit: int) -> None:
    line = one_line(text, limit=limit)
    assert len(line) <= limit
    assert len(line.splitlines()) <= 1


def test_a_cut_is_marked() -> None:
    assert one_line("some  long\ntext", limit=8) == "some…"
    assert one_line("averylongword and more", limit=8) == "averylo…"


def test_the_nearest_word_is_near_or_none() -> None:
    assert nearest("lorra", ["lora", "dora"]) == "lora"
    assert nearest("xyz", ["lora", "dora"]) is None
