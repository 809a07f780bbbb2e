"""Rows with labels, and similar texts, for tests of the objectives classify and embed."""

import json
import random
from pathlib import Path
from typing import Any

_WORDS = {
    "garden": ["rose", "tree", "grass", "spade"],
    "kitchen": ["pan", "kettle", "spoon", "cook"],
    "street": ["car", "bus", "bike", "walk"],
}
LABELS = list(_WORDS)


def labelled_rows(number: int, *, several: bool = False, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a few words; each label has its own words, and most rows a word of another."""
    draw = random.Random(seed)
    rows = []
    for _ in range(number):
        labels = draw.sample(LABELS, draw.choice((0, 1, 1, 2)) if several else 1)
        words = [word for label in labels for word in draw.sample(_WORDS[label], draw.randint(1, 3))]
        text = " ".join(["the", *words, draw.choice(_WORDS[draw.choice(LABELS)])])
        rows.append(
            {"text": text, "labels": sorted(labels)} if several else {"text": text, "label": labels[0]}
        )
    return rows


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """The file, with the rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def similar_rows(number: int, *, texts: int = 3, seed: int = 0) -> list[dict[str, str]]:
    """Rows whose positives have the words of their anchors in another order."""
    draw, words = random.Random(seed), [word for own in _WORDS.values() for word in own]
    rows = []
    for _ in range(number):
        one, other, third = draw.sample(words, 3)
        row = {"anchor": f"the {one} and the {other}", "positive": f"{other} {one}", "negative": f"a {third}"}
        rows.append(dict(list(row.items())[:texts]))
    return rows
