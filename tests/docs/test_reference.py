"""The reference pages are those that the code makes now.

Run: pytest tests/docs
"""

import ast
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from make_catalogue import COMPLETE, SOURCE, Text, Texts, catalogue_texts, mistakes
from tests import front_server
from unisono.base.locale import read_entries
from unisono.guard.supervise.child_process import child_environment
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import all_keys

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["make_reference.py", "draw_rooms.py", "make_catalogue.py"])
def test_the_pages_made_from_the_code_are_up_to_date(script: str) -> None:
    """If this fails: python scripts/SCRIPT.

    For make_catalogue.py then translate what must be complete: `--check` lists it.
    """
    # Forked, as programs are: one of them imports torch.
    command = [sys.executable, "-m", "tests.guard.integrations.launched_programs", str(ROOT / "scripts" / script), "--check"]  # fmt: skip
    with front_server.start_rank(
        command, cwd=ROOT, env=child_environment(threads=1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        _, complaints = process.communicate()
    assert process.returncode == 0, complaints


def test_a_text_needs_a_translation_only_where_chinese_is_complete() -> None:
    entries = read_entries()
    texts = catalogue_texts()
    assert mistakes(texts, entries) == []
    for text, about in (
        *islice(((text, about) for text, about in texts.items() if about.is_complete), 0, None, 500),
        *islice(((text, about) for text, about in texts.items() if not about.is_complete), 0, None, 500),
    ):
        others = {english: chinese for english, chinese in entries.items() if english != text}
        expected = [f"no translation: {text} ({about.origin})"] if about.is_complete else []
        assert mistakes(texts, others) == expected


def test_a_changed_text_or_other_values_of_any_text_are_refused() -> None:
    texts = {"{n} rows of {path}": Text("trainer/data/sources.py", is_complete=False)}
    assert mistakes(texts, {"{n} rows of {path}": "{path} 的 {n} 行"}) == []
    assert mistakes(texts, {"{n} rows of {path}": "{n} 行"}) == [
        "other values in the translation: {n} rows of {path}"
    ]
    assert mistakes(texts, {"{n} rows": "{n} 行"}) == ["no such text: {n} rows"]


@pytest.mark.parametrize(
    ("code", "is_complete"),
    [
        ('raise DataError("the file has no rows")', False),
        ('verdict = Verdict(summary=f"rank {rank} has died", fix=("start it again",))', True),
        ('Evidence(where, f"it waits in {function}")', True),
        ('report.phase("merge", "merging the adapter")', True),
        ('typer.Option("--out", help="Write one file.")', True),
        ('verdict = judge(Verdict(summary=text)), "written to the log"', False),
    ],
)
def test_verdicts_progress_and_help_are_complete_in_any_file(code: str, *, is_complete: bool) -> None:
    texts = Texts(least_words=2, is_complete=False)
    texts.visit(ast.parse(code))
    assert set(texts.templates.values()) == {is_complete}


def test_every_file_in_the_list_of_what_is_complete_exists() -> None:
    assert all((SOURCE / name).exists() for names in COMPLETE.values() for name in names)


def test_every_key_is_in_it_with_a_meaning() -> None:
    page = (ROOT / "docs" / "reference" / "config.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `")}
    for key in all_keys(RunConfig):
        assert not rows[f"`{key}`"].rstrip().endswith("|  |"), f"{key} has no description in the schema"
