"""What the site adds to MkDocs: places for generated pages, links that leave the pages, a switch of
language that stays on the page, words for the search, and errors for commands, keys and pictures
that do not exist.

Used by mkdocs.yml and mkdocs.zh.yml (`make docs`).
"""

import html
import json
import logging
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from cause_pages import KINDS, Chinese, fragments
from page_checks import (
    BLOCK,
    CHINESE,
    DOCS,
    ROOT,
    missing_pictures,
    unknown_commands,
    unknown_keys,
    without_twin,
)

WORDS = ROOT / "scripts" / "search_words.toml"
QUERY = ROOT / "docs-theme" / "search-query.js"
log = logging.getLogger("mkdocs.hooks.site")  # a warning fails the build, since it is strict
_LINK = re.compile(r'!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?(?: "([^"]*)")?\)')
_LIST = re.compile(r"^((?!(?:[-*]|\d+\.) |[|>#\s]).+)\n(?=(?:-|1\.) )", re.MULTILINE)
"""A paragraph that a list follows without an empty line."""
_GENERATED = {"decisions/README.md": "decisions", "reference/causes.md": "reference/causes"}
"""Pages that are followed in the navigation by all others of a folder."""
WEIGHTS = {
    "decisions/": 0.3, "README": 0.5, "explanation/architecture": 0.5, "reference/tried": 0.5, "reference/variables": 0.6,
    "reference/llamafactory": 0.6, "reference/sd-scripts": 0.6, "how-to/from-": 0.6, "how-to/run/": 0.7, "reference/glossary": 0.8,
}  # fmt: skip
"""How much pages count in the search, others 1: these name everything without being about it. What
pages of causes count depends on the query: docs-theme/search-query.js.
"""
SECTIONS = {
    "Home": "首页", "Tutorials": "教程", "Guides": "指南", "Train": "训练", "Resume and keep": "断点续训与检查点", "Use the result": "使用结果", "Many machines": "多机多卡",
    "Check": "检查与诊断", "Watch an existing script": "监控现有脚本", "Come from another tool": "从其他工具迁移",
    "Causes": "故障原因", "Reference": "参考", "Concepts": "原理", "Decisions": "设计决策",
}  # fmt: skip
"""The navigation's sections in Chinese."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills in the navigation: folders of generated pages; in Chinese, only pages that there
    are.
    """
    folder = Path(config.docs_dir)
    if folder == DOCS:
        for name in without_twin():
            log.warning("%s has no Chinese page: docs/zh/%s", name, name)
    config.nav = _places(config.nav or [], folder, chinese=folder != DOCS)
    return config


def _places(entries: list[Any], folder: Path, *, chinese: bool) -> list[Any]:
    """The navigation as MkDocs takes it."""
    places: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if isinstance(inner, str):
                places.append({SECTIONS[title] if chinese else title: inner})
            elif found := _places(inner, folder, chinese=chinese):
                places.append({SECTIONS[title] if chinese else title: found})
            continue
        if (folder / entry).exists() or not chinese:
            places.append(entry)
        if entry in _GENERATED:
            places += _causes(chinese=chinese) if "causes" in entry else _others(folder, entry)
    return places


def _others(folder: Path, entry: str) -> list[Any]:
    """All other pages of the folder of a generated page."""
    pages = sorted((folder / _GENERATED[entry]).glob("*.md"))
    return [name for page in pages if (name := page.relative_to(folder).as_posix()) != entry]


def _causes(*, chinese: bool) -> list[Any]:
    """The pages of causes, by kind."""
    translate = Chinese() if chinese else str
    return [
        {translate(kind): [{cause: f"reference/causes/{cause}.md"} for cause in causes]}
        for kind, causes in KINDS.items()
    ]


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Checks a page, and rewrites its links to what is not part of this site."""
    where = page.file.src_uri
    weights = [weight for folder, weight in WEIGHTS.items() if where.startswith(folder)]
    page.meta.setdefault("search", {}).setdefault("boost", weights[0] if weights else 1)
    page.meta["twins"] = _twins(where, chinese=Path(config.docs_dir) != DOCS)
    if where == "README.md":
        page.meta["hide"] = ["navigation", "toc"]
    for name in unknown_commands(markdown):
        log.warning("%s shows a command that does not exist: %s", where, name)
    for name in unknown_keys(markdown):
        log.warning("%s shows a config key that does not exist: %s", where, name)
    source = Path(page.file.abs_src_path or "")
    for name in missing_pictures(markdown, source):
        log.warning("%s shows a picture that does not exist: %s", where, name)
    markdown = re.sub(r"\A<!--.*?-->\s*", "", markdown)  # MkDocs would not see the title behind it
    parts, end = [], 0
    for block in BLOCK.finditer(markdown):
        shown = drawn_rooms(block[2]) if block[1] == "mermaid" else block[0]
        parts += [_relink(markdown[end : block.start()], source, Path(config.docs_dir)), shown]
        end = block.end()
    return "".join([*parts, _relink(markdown[end:], source, Path(config.docs_dir))])


def _twins(where: str, *, chinese: bool) -> dict[str, str]:
    """The addresses of a page in both languages, as seen from it; the home of the language that does
    not have it.
    """
    here, folders = (CHINESE if chinese else DOCS) / where, {"en": DOCS, "zh": CHINESE}
    pages = {
        language: folder / (where if (folder / where).exists() else "README.md")
        for language, folder in folders.items()
    }
    return {language: _address(page, here) for language, page in pages.items()}


def _address(page: Path, source: Path) -> str:
    """How a page of the site links to another, perhaps of the other language.

    docs/zh/x.md becomes zh/x.html, docs/x.md becomes x.html: the paths between them are those between
    the files.
    """
    address = Path(os.path.relpath(page, source.parent)).with_suffix(".html")
    return (address.with_name("index.html") if page.stem in ("README", "index") else address).as_posix()


def _relink(text: str, source: Path, folder: Path) -> str:
    """Links to pages in the other language as addresses; links to the repository's other files as
    their names; lists begin a paragraph, as on GitHub.
    """

    def replace(link: re.Match[str]) -> str:
        words, target, anchor, title = link.groups(default="")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = (source.parent / target).resolve()
        other_language = folder == DOCS and path.is_relative_to(DOCS / "zh")
        if path.is_relative_to(folder) and not other_language:
            return link[0]
        if not path.exists():
            log.warning("%s links to %s, which does not exist", source, target)
        if path.is_relative_to(DOCS) and path.suffix == ".md":
            return f'<a href="{_address(path, source)}{anchor}">{words}</a>'
        if link[0].startswith("!"):
            return f'<img alt="{html.escape(words)}" src="{os.path.relpath(path, source.parent)}">'
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("tests/"):
            return f'<abbr title="{name}{"::" if title else ""}{title}">{words}</abbr>'
        return words if name in words else f"{words} (`{name}`)"

    return _LIST.sub(r"\1\n\n", _LINK.sub(replace, text))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Names the dialog of the search, as screen readers need; the theme does not."""
    unnamed = 'data-md-component="search" role="dialog"'
    if output.count(unnamed) != 1:
        log.warning("%s has no dialog of the search: has the theme changed?", page.file.src_uri)
    name = "搜索" if config.theme["language"] == "zh" else "Search"
    return output.replace(unnamed, f'{unnamed} aria-label="{name}"')


def on_post_build(*, config: MkDocsConfig) -> None:
    """Puts the preparation of queries before the theme's search worker, and words that pages do not
    show into the index.
    """
    place = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(place.read_text("utf-8"))
    _add_words(index["docs"], chinese=Path(config.docs_dir) != DOCS)
    place.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")), "utf-8")
    (worker,) = (Path(config.site_dir) / "assets" / "javascripts" / "workers").glob("search.*.js")
    worker.write_text(QUERY.read_text("utf-8") + worker.read_text("utf-8"), encoding="utf-8")


def _add_words(entries: list[dict[str, Any]], *, chinese: bool) -> None:
    """Adds to the entries of pages what people search for (scripts/search_words.toml), and to those of
    causes the other parts of their log lines.
    """
    words = tomllib.loads(WORDS.read_text("utf-8"))
    for entry in entries:
        page = entry["location"].removesuffix(".html") + ".md"
        if page in words:
            entry["tags"] = [text for language, text in words[page].items() if chinese or language == "en"]
        if page.startswith("reference/causes/") and "#" not in page:
            entry["text"] += f" <p>{html.escape(' '.join(fragments(Path(page).stem)))}</p>"


_ROW = 6


def drawn_rooms(text: str) -> str:
    """A flowchart of mermaid as a picture: rows of boxes for each subgraph, and an arrow for each
    line with `-->`.

    The theme would load mermaid's library from the network.
    """
    wings = re.findall(r"subgraph (\w+)\n(.*?)\n  end", text, re.DOTALL)
    rooms = [(wing, re.findall(r'^ {4}([\w.]+)\["', body, re.MULTILINE)) for wing, body in wings]
    rows = [(wing, row[start : start + _ROW]) for wing, row in rooms for start in range(0, len(row), _ROW)]
    arrows = re.findall(r"^ *([\w.]+) --> ([\w.]+)$", text, re.MULTILINE)
    width, height, gap = 118, 26, 46
    places = {}
    for number, (_, row) in enumerate(rows):
        for index, name in enumerate(row):
            places[name] = (520 + (index - (len(row) - 1) / 2) * (width + 30), 20 + number * (height + gap))
    lines = [
        f'<path d="M{x0:.0f} {y0 + height} C{x0:.0f} {y0 + height + gap / 2:.0f} {x1:.0f} {y1 - gap / 2:.0f}'
        f' {x1:.0f} {y1 - 4}" marker-end="url(#tip)"/>'
        for (x0, y0), (x1, y1) in ((places[one], places[other]) for one, other in arrows)
    ]
    boxes = [
        f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width}" height="{height}" rx="4"/><text x="{x:.0f}"'
        f' y="{y + 17}">{name.rpartition(".")[2]}</text>'
        for name, (x, y) in places.items()
    ]
    first = {wing: 20 + number * (height + gap) for number, (wing, _) in reversed([*enumerate(rows)])}
    labels = [f'<text x="36" y="{y + 17}" font-weight="bold">{wing}</text>' for wing, y in first.items()]
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"'
        ' orient="auto"><path d="M0 0L8 4L0 8z"/></marker>'
    )
    words = "; ".join(f"{one} imports {other}" for one, other in arrows)
    size = f"0 0 960 {20 + len(rows) * (height + gap)}"
    return (
        f'<svg class="rooms" viewBox="{size}" role="img"'
        f' aria-label="{words}"><defs>{tip}</defs>{"".join(lines)}{"".join(boxes)}{"".join(labels)}</svg>'
    )
