"""The search of the documentation site finds the page that answers a question or explains a line of a
log: with the theme's script and the site's index.

Run: pytest tests/docs/test_search.py
"""

import tomllib
from pathlib import Path

import pytest

from bench.docs_search import ask, kept_lines
from site_hooks import WORDS
from tests.needs import need

QUESTIONS = tomllib.loads((Path(__file__).parent / "search_questions.toml").read_text("utf-8"))
ENOUGH = 0.9


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("kind", ["topics", "lines"])
def test_the_right_page_is_the_first_result(site: Path, language: str, kind: str) -> None:
    """A question counts where one of its pages exists in this language."""
    need("node")
    folder = site / "zh" if language == "zh" else site
    questions = {
        words: right
        for words, pages in QUESTIONS["lines" if kind == "lines" else language].items()
        if (right := [page for page in pages if (folder / f"{page}.html").exists()])
    }
    found = ask(folder, [{"line": words} for words in questions], whole=True)
    missed = {
        words: pages
        for (words, right), pages in zip(questions.items(), found, strict=True)
        if not pages or pages[0] not in right
    }
    assert len(questions) >= 20
    assert len(missed) <= (1 - ENOUGH) * len(questions), missed


def test_every_page_with_words_for_the_search_exists() -> None:
    docs = Path(__file__).parents[2] / "docs"
    named = {*tomllib.loads(WORDS.read_text("utf-8"))}
    named |= {f"{page}.md" for table in QUESTIONS.values() for pages in table.values() for page in pages}
    assert {page for page in named if not (docs / page).exists()} == set()


@pytest.mark.slow
def test_pasted_log_line_finds_its_cause_among_the_first_three_results(site: Path) -> None:
    """The site's own search, with the theme's script and the site's index.

    Figures for more lines: bench/docs_search.py.
    """
    need("node")
    rows = list(kept_lines())
    found = dict(zip((row["line"] for row in rows), ask(site, rows), strict=True))
    missed = {
        row["line"]: found[row["line"]] for row in rows if not set(row["causes"]) & set(found[row["line"]])
    }
    assert len(rows) > 60
    assert len(missed) <= 0.05 * len(rows), missed
