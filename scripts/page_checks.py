"""What the documentation shows exists: commands with their options, config keys, pictures, the
English page behind each Chinese one and the Chinese page beside each English one.

Used by the build of the site (scripts/site_hooks.py) and by tests/docs.

python scripts/page_checks.py                    lists Chinese pages whose English page has changed, and English pages without one
python scripts/page_checks.py --stamp PAGE...    notes that these Chinese pages match their English pages as they are now
"""

import argparse
import functools
import hashlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.yaml_file import all_keys

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CHINESE = DOCS / "zh"
BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r'<(?:img|source|video)\b[^>]*?\b(?:src|srcset)="([^"]+)"')
_STAMP = re.compile(r"<!-- from (\S+) at (\w+) -->\n")
_SHELL = ("", "bash", "sh", "console")


def unknown_commands(text: str) -> Iterator[str]:
    """Each `unisono NAME`, or option of it, in a block or in the text of a page that
    docs/reference/commands.md does not have.
    """
    reference = commands_page()
    bodies = "\n".join(body for language, body in BLOCK.findall(text) if language in _SHELL)
    shown = re.findall(r"^ *(?:\$ )?(?:\.venv/bin/)?unisono (.+)$", bodies, re.MULTILINE)
    shown += re.findall(r"`unisono ([^`]+)`", text)
    for line in shown:
        line = line.partition(" -- ")[0]  # noqa: PLW2901 - what follows is another program's
        words = line.split()
        if words[0].startswith("-"):
            continue
        two = f"unisono {words[0]} {words[1]}" if len(words) > 1 else ""
        name = two if f"## {two}\n" in reference else f"unisono {words[0]}"
        if f"## {name}\n" not in reference:
            yield f"unisono {line}"
            continue
        section, common = (
            reference.partition(f"## {title}\n")[2].partition("\n## ")[0]
            for title in (name, "Options of all commands")
        )
        for option in re.findall(r"(?<!\S)--[a-z-]+", line):
            if option not in section and option not in common:
                yield f"{option} of {name}"


def unknown_keys(text: str) -> Iterator[str]:
    """Each `section.key` in backquotes or as an override that no config has."""
    keys = _keys()
    sections = {key.partition(".")[0] for key in keys if "." in key}
    text = re.sub(r"```text.*?```", "", text, flags=re.DOTALL)  # transcripts show mistakes, too
    for name in re.findall(r"(?<![\w/.])((?:[a-z_]+\.)+[a-z_]+)(?==|`|:)", text):
        is_ours = name.partition(".")[0] in sections and not name.startswith(
            "model.embed_tokens"
        )  # a tensor's name
        if (
            is_ours
            and not name.endswith((".py", ".yaml", ".json", ".jsonl", ".md", ".safetensors"))
            and name not in keys
        ):
            yield name
    for language, body in BLOCK.findall(text):
        if language in ("yaml", "yml"):
            yield from _unknown_in_example(textwrap.dedent(body))


def _unknown_in_example(body: str) -> Iterator[str]:
    """Each key of an example that no config has.

    An example is a config of unisono if it fills in one of its sections: files of other tools, and
    of Kubernetes, are in blocks of YAML, too.
    """
    try:
        config = yaml.safe_load(body)
    except yaml.YAMLError:
        return  # a part of a file, or several
    if not isinstance(config, dict) or "apiVersion" in config:
        return
    if any(name in _sections() and isinstance(value, dict) for name, value in config.items()):
        yield from _unknown(config, "")


def _unknown(table: dict[str, Any], prefix: str) -> Iterator[str]:
    """Each key of a section and of the sections in it that no config has."""
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key not in _keys() | _sections():
            yield key
        elif key in _sections():
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, dict):
                    yield from _unknown(inner, f"{key}.")


def missing_pictures(text: str, page: Path) -> Iterator[str]:
    """Each picture in HTML of a page that does not exist; MkDocs itself checks those in Markdown."""
    for name in _PICTURE.findall(BLOCK.sub("", text)):
        if ":" not in name and not (page.parent / name).exists():
            yield name


def without_twin() -> list[str]:
    """The English pages that have no Chinese one: all must have one, except decisions."""
    pages = [page.relative_to(DOCS) for page in sorted(DOCS.rglob("*.md"))]
    return [
        page.as_posix()
        for page in pages
        if page.parts[0] not in ("zh", "decisions") and not (CHINESE / page).exists()
    ]


@functools.cache
def _keys() -> frozenset[str]:
    """Of a config."""
    return frozenset(all_keys(RunConfig))


@functools.cache
def _sections() -> frozenset[str]:
    """Of a config: what keys are in."""
    return frozenset(key.rpartition(".")[0] for key in _keys() if "." in key)


@functools.cache
def commands_page() -> str:
    """The reference page of all commands."""
    return (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")


def english_page(chinese: Path) -> Path:
    """The page that a Chinese one is made from: the one with the same path below docs/, for
    README.zh.md the README.
    """
    return DOCS / chinese.relative_to(CHINESE) if chinese.is_relative_to(CHINESE) else ROOT / "README.md"


def chinese_pages() -> list[Path]:
    """All pages in Chinese that are translations of one.

    Pages made by scripts/make_reference.py are compared there, and the index lists what there is.
    """
    pages = [
        page
        for page in (*sorted(CHINESE.rglob("*.md")), ROOT / "README.zh.md")
        if page != CHINESE / "README.md"
    ]
    return [page for page in pages if page.exists() and "<!-- Made by" not in page.read_text("utf-8")[:200]]


def digest(page: Path) -> str:
    """The digest of a page that its translation notes."""
    return hashlib.sha256(page.read_bytes()).hexdigest()[:12]


def why_behind(chinese: Path) -> str:
    """What is wrong with a Chinese page's note of the English page; empty if they match."""
    english = english_page(chinese)
    name = english.relative_to(ROOT).as_posix()
    if not english.exists():
        return f"there is no {name}"
    found = _STAMP.match(chinese.read_text(encoding="utf-8"))
    if not found or found[1] != name:
        return f"its first line does not note {name}"
    return "" if found[2] == digest(english) else f"{name} has changed since {found[2]}"


def stamp(chinese: Path) -> None:
    """Notes the English page's digest in the first line of a Chinese page."""
    english = english_page(chinese)
    text = _STAMP.sub("", chinese.read_text(encoding="utf-8"), count=1)
    line = f"<!-- from {english.relative_to(ROOT).as_posix()} at {digest(english)} -->\n"
    chinese.write_text(line + text, encoding="utf-8")


def main() -> int:
    """Returns 1 if a Chinese page has fallen behind, or is missing."""
    parser = argparse.ArgumentParser(description="Compares Chinese pages with the English ones.")
    parser.add_argument("--stamp", nargs="+", type=Path, metavar="PAGE", help="pages that are up to date")
    pages = [page.resolve() for page in parser.parse_args().stamp or []]
    for page in pages:
        if page not in chinese_pages():
            parser.error(f"{page} is no translation of a page: name the Chinese one")
    for page in pages:
        stamp(page)
    for name in without_twin():
        print(f"docs/{name}: there is no docs/zh/{name}", file=sys.stderr)
    behind = {page: why for page in chinese_pages() if (why := why_behind(page))}
    for page, why in behind.items():
        print(f"{page.relative_to(ROOT)}: {why}", file=sys.stderr)
    return 1 if behind or without_twin() else 0


if __name__ == "__main__":
    sys.exit(main())
