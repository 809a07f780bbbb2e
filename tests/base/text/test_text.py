"""Text from elsewhere reaches a terminal without anything that would steer it.

Run: pytest tests/text
"""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.text import nearest, one_line, plain, shown_places

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


@pytest.mark.parametrize(
    ("places", "shown"),
    [
        (["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "a.jsonl:7"], "a.jsonl:1-3, 7"),
        (["a.jsonl:1", "b.jsonl:2", "a.jsonl:3"], "a.jsonl:1, b.jsonl:2, a.jsonl:3"),
        (["a.parquet#9", "a.parquet#10"], "a.parquet#9-10"),
        ([f"a:{2 * i}" for i in range(20)], "a:0, 2, 4, 6, 8, 10 and 14 more"),
        (["cat.png", "dog.png"], "cat.png, dog.png"),
        ([], ""),
    ],
)
def test_places_are_shown_as_ranges_and_the_file_once(places: list[str], shown: str) -> None:
    assert shown_places(places) == shown


@given(st.lists(st.integers(1, 60), max_size=80))
def test_no_place_is_lost(numbers: list[int]) -> None:
    shown = shown_places([f"f:{number}" for number in numbers])
    ranges, _, rest = shown.partition(" and ")
    count = int(rest.split()[0]) if rest else 0
    for part in filter(None, ranges.removeprefix("f:").split(", ")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    assert count == len(numbers)
