"""Rows of `objective: embed`: an anchor with a similar text, and perhaps with another one that is
not.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.trainer.data import RowError, Similar, Text
from unisono.trainer.data.formats import Renamed, RowColumns, column_of, refuse_surrogates

PARTS = ("anchor", "positive", "negative")
USUAL: dict[str, tuple[str, ...]] = {
    "anchor": ("query", "question", "sentence1", "text1"),
    "positive": ("answer", "document", "passage", "sentence2", "text2", "pos"),
    "negative": ("hard_negative", "neg"),
}
"""What datasets of sentence-transformers call these columns."""


def parts_in(row: Mapping[str, object], renamed: Renamed) -> list[str]:
    """Those of PARTS that a row has."""
    return [part for part in PARTS if row.get(column_of(part, renamed) or "") is not None]


def read_similar(row: Mapping[str, object], renamed: Renamed) -> Similar:
    """The texts of a row.

    Args:
        row: columns and values.
        renamed: the file's column name for each standard name.

    Raises:
        RowError: if one is missing, is not text, or is empty.
    """
    columns = RowColumns(row, renamed, None)
    parts = [*PARTS[:2], *(["negative"] if columns.has("negative") else [])]
    texts = tuple(columns.text(part) for part in parts)
    empty = next((part for part, text in zip(parts, texts, strict=True) if not text.strip()), None)
    if empty is not None:
        raise RowError(f"the {empty} is empty", "write a text, or remove the row")
    refuse_surrogates(Text("".join(texts)))
    return Similar(texts)


@dataclass
class Sides:
    """The number of texts of a row, which the first one decides.

    Attributes:
        number: 2 for pairs, 3 for triplets; 0 before the first row.
    """

    number: int = 0

    def check(self, row: Similar) -> None:
        """Refuses a row with another number of texts.

        Raises:
            RowError: then.
        """
        self.number = self.number or len(row.texts)
        if len(row.texts) < self.number:
            raise RowError("it has no negative, and the first row has one", "add one, or remove the row")
        if len(row.texts) > self.number:
            raise RowError(
                "it has a negative, and the first row has none",
                "remove it, add negatives to all rows, or set the source's columns: {negative: null}",
            )
