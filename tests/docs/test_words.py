"""Texts for users use the words of the field: the avoided ones are in words.toml.

Run: pytest tests/docs/test_words.py
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from unisono.base.causes import CATALOGUE
from unisono.base.causes.variables import VARIABLES
from unisono.base.causes.verdict import EXIT_CODES
from unisono.front.cli.app import build_app

ROOT = Path(__file__).parents[2]
WORDS = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))["word"]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src" / "unisono" / "front" / "cli" / "templates").rglob("*.yaml")),
    *sorted((ROOT / "examples").glob("*.yaml")),
]


def prose(page: Path) -> str:
    """A page without what programs print, code, links and names of tests; CONTRIBUTING.md also
    without its table of words.
    """
    text = page.read_text("utf-8")
    if page.suffix != ".md":
        return text
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "`", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"^\| avoid \|.*?\n\n", "", text, flags=re.MULTILINE | re.DOTALL)


def found(text: str) -> list[str]:
    """Each avoided word in a text, with its surroundings and what to write instead."""
    one_line = " ".join(text.split())
    return [
        f"…{one_line[max(0, match.start() - 30) : match.end() + 30]}… ({match.group()}: write {word['prefer']})"
        for word in WORDS
        for match in re.finditer(word["pattern"], one_line, re.IGNORECASE)
    ]


def helps(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """The help of a command and of those below it: its name and all texts."""
    texts = [
        command.help or "",
        command.epilog or "",
        *(getattr(p, "help", None) or "" for p in command.params),
    ]
    yield name, "\n".join(texts)
    for sub, inner in getattr(command, "commands", {}).items():
        yield from helps(f"{name} {sub}", inner)


HELPS = dict(helps("unisono", typer.main.get_command(build_app())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert found(prose(page)) == []


def messages(source: str) -> Iterator[str]:
    """The strings of several words in a module, without docstrings and regular expressions."""
    tree = ast.parse(source)
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            text = "…".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            text = node.value
        else:
            continue
        if len(text.split()) > 2 and not re.search(r"\\[dbwsS]|\(\?|\[\^", text):
            yield text


SOURCES = sorted((ROOT / "src" / "unisono").rglob("*.py"))


@pytest.mark.parametrize("room", sorted({path.parent for path in SOURCES}), ids=lambda room: room.name)
def test_messages_use_the_words_of_the_field(room: Path) -> None:
    assert {
        f"{path.name}: {hit}"
        for path in room.glob("*.py")
        for text in messages(path.read_text("utf-8"))
        for hit in found(text)
    } == set()


@pytest.mark.parametrize("name", HELPS)
def test_help_uses_the_words_of_the_field(name: str) -> None:
    assert found(HELPS[name]) == []


@pytest.mark.parametrize("cause", CATALOGUE.values(), ids=lambda cause: cause.id)
def test_causes_use_the_words_of_the_field(cause: Any) -> None:
    texts = [cause.title, cause.meaning, *cause.remedy, *(text for _, text in cause.neighbours)]
    assert [hit for text in texts for hit in found(text)] == []


def test_exit_codes_and_variables_use_the_words_of_the_field() -> None:
    texts = [*EXIT_CODES.values(), *(text for v in VARIABLES for text in (v.meaning, v.suspicious))]
    assert [hit for text in texts for hit in found(text)] == []


def test_the_table_in_contributing_lists_these_words() -> None:
    table = (
        (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("| avoid | prefer |")[2].partition("\n\n")[0]
    )
    rows = re.findall(r"^\| (?!-)(.+) \| (.+) \|$", table, re.MULTILINE)
    assert rows == [(word["avoid"], word["prefer"]) for word in WORDS]


@pytest.mark.parametrize(
    "text",
    [
        "the run goes on",
        "as it was told",
        "a.b is no host name",
        "fixes, as `x`",
        "resumes to the bit",
        "the loss is no number",
    ],
)
def test_avoided_words_are_found(text: str) -> None:
    assert found(text)


@pytest.mark.parametrize(
    "text",
    [
        "there is no checkpoint",
        "it is no longer used",
        "128 + N, as well as 3",
        "another checkpoint was written",
        "the same bits",
    ],
)
def test_good_sentences_are_left_alone(text: str) -> None:
    assert found(text) == []
