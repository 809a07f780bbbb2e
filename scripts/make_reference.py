"""Writes docs/reference/ and docs/zh/reference/ from the code: the schema, the catalogue, the
commands, the exit codes, the names of files.

    python scripts/make_reference.py            writes the pages
    python scripts/make_reference.py --check    exit 1 if one of them is not up to date

The pages are kept in the repository, so that they can be read there; a test runs --check.
"""

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

from cause_pages import Chinese, cause_pages
from commands_page import commands_page
from page_parts import Translate, table
from translated_pages import translated_pages
from unisono.base.causes.verdict import EXIT_CODES
from unisono.guard.rundir import RunDir

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
CHINESE = "../zh/reference"
MADE = "<!-- Made by scripts/make_reference.py. Change the code, then run it. -->"


def main() -> int:
    """Writes the pages, or with --check compares them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare")
    only_compares = parser.parse_args().check
    pages = make_pages()
    if not only_compares:
        write(pages)
        return 0
    old = stale(pages)
    for path in old:
        print(f"{path} is not up to date: run python scripts/make_reference.py", file=sys.stderr)
    return 1 if old else 0


def stale(pages: dict[str, str]) -> list[Path]:
    """The pages whose files are missing or have other texts."""
    paths = {FOLDER / name: text for name, text in pages.items()}
    return [
        path for path, text in paths.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def write(pages: dict[str, str]) -> None:
    """Writes the pages."""
    for name, text in pages.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def make_pages() -> dict[str, str]:
    """Every page by its file name."""
    bodies = {
        "exit-codes.md": exit_codes_page(),
        "files.md": files_page(),
        **pages_in("en", str),
        **{f"{CHINESE}/{name}": lines for name, lines in pages_in("zh", Chinese()).items()},
    }
    return {name: "\n".join([MADE, "", *lines]).rstrip("\n") + "\n" for name, lines in bodies.items()}


def pages_in(language: str, t: Translate) -> dict[str, list[str]]:
    """The pages that are there in both languages."""
    return {
        "commands.md": commands_page(language),
        **translated_pages(t, language),
        **cause_pages(t, language),
    }


def exit_codes_page() -> list[str]:
    """What each exit code means."""
    rows = [[str(code), meaning] for code, meaning in EXIT_CODES.items()]
    return ["# Exit codes", "", "The exit codes of all commands.", "", *table(["code", "meaning"], rows)]


def files_page() -> list[str]:
    """What is in a run's directory."""
    run = RunDir(Path("OUT"))
    rows = []
    for name, member in vars(RunDir).items():
        if isinstance(member, property):
            rows.append([f"`{getattr(run, name).relative_to('OUT')}`", doc_paragraph(member)])
    rows.append([f"`{run.events(0).relative_to('OUT')}`", doc_paragraph(RunDir.events)])
    rows.append([f"`{run.timeline(0).relative_to('OUT')}`", doc_paragraph(RunDir.timeline)])
    rows.append([f"`{run.log('HOST', 0).relative_to('OUT')}`", doc_paragraph(RunDir.log)])
    rows.append([f"`{run.checkpoint(100).relative_to('OUT')}/`", doc_paragraph(RunDir.checkpoint)])
    return [
        "# Files of a run", "",
        "All files of a run are below its `output_dir`. JSON files have `\"schema\": 1`, and are written atomically.", "",
        *table(["name", "contents"], rows),
    ]  # fmt: skip


def doc_paragraph(thing: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    sys.exit(main())
