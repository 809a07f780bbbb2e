"""Names that others gave never become paths outside a directory.

Run: pytest tests/base/files/test_path_below.py
"""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.files import path_below

PARTS = st.sampled_from(
    [
        "..",
        ".",
        "",
        "a",
        "etc",
        "b c",
        "模型",
        "~",
        "C:",
        "x\0",
        "\x1b[31m",
        "\x9b",
        "a\\b",
        "\ud800",
        "-rf",
        "é" * 200,
    ]
)
NAMES = st.one_of(
    st.lists(PARTS, max_size=40).map("/".join),
    st.text(max_size=40),
    st.lists(st.text(max_size=5)).map("/".join),
)


@given(NAMES, st.integers(1, 40))
def test_a_name_is_refused_or_leads_to_a_file_below_the_directory(name: str, parts: int) -> None:
    root = Path("/srv/cache")
    try:
        path = path_below(root, name, parts=parts)
    except ValueError as error:
        shown = str(error)
        assert shown.isprintable()
        assert len(shown) < 600
        return
    assert os.path.normpath(path) == str(path) == f"/srv/cache/{name}"
    assert root in path.parents
    assert len(path.parts) - len(root.parts) <= parts
    assert all(len(os.fsencode(part)) <= 255 for part in path.parts)
    assert not set(name) & {"\\", "\0", "\n", "\x1b", "\x7f", "\x9b"}


@given(st.lists(st.from_regex(r"[\w -]{1,60}", fullmatch=True), min_size=1, max_size=5))
def test_the_names_of_ordinary_files_are_taken(words: list[str]) -> None:
    assert path_below(Path("x"), "/".join(words)) == Path("x", *words)


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/x", "", ".", "a//b", "a/", "C:x", "a\\..\\x", "a\0", "n" * 256, "n/" * 900 + "n", None, 7, b"x"]
)  # fmt: skip
def test_what_is_not_a_plain_relative_path_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"^the name "):
        path_below(Path("x"), name)


def test_a_name_of_one_part_stays_in_the_directory_itself() -> None:
    assert path_below(Path("x"), ".hidden", parts=1) == Path("x/.hidden")
    with pytest.raises(ValueError, match="is in another directory"):
        path_below(Path("x"), "a/b", parts=1)
