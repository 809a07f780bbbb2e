"""The page of the studio: one document, whose scripts ask for everything else."""

import functools
import json
from pathlib import Path

from unisono.front.board.page import as_data, document
from unisono.front.board.page import words as board_words

OWN_STATIC = Path(__file__).parent / "static"


@functools.cache
def words() -> dict[str, dict[str, str]]:
    """The words of the page with those of the board, by language and name."""
    own = json.loads((OWN_STATIC / "studio-words.json").read_text(encoding="utf-8"))
    return {language: {**board_words()[language], **own[language]} for language in own}


def studio_html(language: str) -> str:
    """The page in one of its languages."""
    styles = ("uPlot.min.css", "board.css", "studio.css")
    head = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in styles)
    end = as_data("words", words()) + '<script src="/static/uPlot.iife.min.js" defer></script>'
    end += '<script src="/static/studio.js" type="module"></script>'
    return document(language, head=head, end=end, title="unisono studio")
