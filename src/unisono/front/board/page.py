"""The page: for the server, which adds nothing to it, and as one file with everything in it.

The words are in words.json, in English and Chinese.

`unisono board --out` makes the file without the packages of the server, which board.server imports.
"""

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.base._version import __version__
from unisono.front.board.follow import FollowedRun, find_runs
from unisono.front.board.regions import REGIONS, harmless, pictures_in, read_picture, show_region

STATIC = Path(__file__).parent / "static"
NO_ICON = '<link rel="icon" href="data:,">'
"""Keeps a browser from asking for /favicon.ico."""
_STYLES = ("uPlot.min.css", "board.css")
_SCRIPTS = ("uPlot.iife.min.js", "board.js")

_POINTS_OF_ALL = 40_000
"""Over all runs and about twelve curves of each, at most so many points: a few megabytes."""


@functools.cache
def words() -> dict[str, dict[str, str]]:
    """The words of the page, by language and name."""
    by_language: dict[str, dict[str, str]] = json.loads((STATIC / "words.json").read_text(encoding="utf-8"))
    return by_language


def page_html(language: str, *, home: str = "") -> str:
    """The page of the server: it loads its parts, and asks for the data.

    Args:
        home: the path of the page that leads here; empty: there is none.
    """
    links = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in _STYLES)
    scripts = "".join(f'<script src="/static/{name}" defer></script>' for name in _SCRIPTS)
    data = as_data("words", words()) + (as_data("home", home) if home else "")
    return document(language, head=links, end=data + scripts)


def file_html(data: Mapping[str, object]) -> str:
    """The page with its data in one file, which needs no server and asks for nothing.

    Args:
        data: `{"runs": [{"name", "path", "regions": {name: value}}], …}`, with text that is
            harmless already.
    """
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in _STYLES]
    scripts = [(STATIC / name).read_text(encoding="utf-8") for name in _SCRIPTS]
    for text in (*styles, *scripts):
        assert "</style" not in text, "it would end the element"
        assert "</script" not in text, "it would end the element"
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash_of, scripts))}; style-src"
        f" {' '.join(map(_hash_of, styles))}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">' + "".join(
        f"<style>{text}</style>" for text in styles
    )
    end = (
        as_data("words", words())
        + as_data("data", data)
        + "".join(f"<script>{text}</script>" for text in scripts)
    )
    return document("en", head=head, end=end)


def runs_file(paths: list[Path], *, key: bytes) -> tuple[list[dict[str, str]], str]:
    """The names and paths of the runs, and the text of the file."""
    named = find_runs(paths)
    points = max(200, min(2_000, _POINTS_OF_ALL // max(1, len(named))))
    runs: list[Mapping[str, object]] = []
    for name, root in named:
        run = FollowedRun(name, root)
        run.look()
        query = {"points": str(points), "spread": "1"}
        regions = {region: show_region(run, region, query, key=key) for region in REGIONS}
        regions["samples"]["inline"] = _inline_pictures(run)
        runs.append({"name": harmless(name), "path": harmless(str(root)), "regions": regions})
    return [{"name": name, "path": str(root)} for name, root in named], file_html({"schema": 1, "runs": runs})


def _inline_pictures(run: FollowedRun) -> dict[str, str]:
    """The pictures of a run's samples as data URLs, by name."""
    names = {name for message in run.samples for name in pictures_in(message)}
    read = {name: read_picture(run, name) for name in sorted(names)}
    return {
        name: f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
        for name, data in read.items()
        if data is not None
    }


def document(language: str, *, head: str, end: str, title: str = "unisono board") -> str:
    """A page with an empty element that its script fills."""
    word = words()[language]
    return (
        f'<!doctype html><html lang="{"zh-CN" if language == "zh" else "en"}"><head><meta'
        ' charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1"><meta'
        ' name="color-scheme" content="light dark"><meta name="generator" content="unisono'
        f' {html.escape(__version__)}">{NO_ICON}<title>{title}'
        f"</title>{head}</head><body><noscript>{html.escape(word['needs_script'])}</noscript><div"
        f' id="page"></div>{end}</body></html>'
    )


def _hash_of(text: str) -> str:
    """The source expression of a policy for an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def as_data(name: str, value: Any) -> str:
    """A JSON value as an element that is not run; no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'
