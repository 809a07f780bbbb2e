"""Rows of `objective: classify`: a text or a conversation with a label, or with a list of labels;
and the labels of a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.base.errors import DataError
from unisono.base.text import nearest, one_line
from unisono.trainer.config.data_sections import TagsSection
from unisono.trainer.config.heads import ClassifySection, label_text
from unisono.trainer.data import Conversation, Labelled, RowError, Text
from unisono.trainer.data.formats import (
    FormatName,
    Renamed,
    RowColumns,
    column_of,
    kind_of,
    list_of,
    refuse_surrogates,
    shown,
    to_example,
)

LABEL, LABELS = "label", "labels"
_TEXTS = ("text", "messages", "conversations")
_SHOWN = 8


def text_column(row: Mapping[str, object], renamed: Renamed) -> str | None:
    """Our name of the column that is classified; None if there is none."""
    return next((name for name in _TEXTS if row.get(column_of(name, renamed) or "") is not None), None)


def label_column(row: Mapping[str, object], renamed: Renamed) -> str | None:
    """Our name of the column with the label, or with several; None if there is none."""
    names = (LABELS, LABEL)
    return next((name for name in names if row.get(column_of(name, renamed) or "") is not None), None)


def read_labelled(row: Mapping[str, object], renamed: Renamed, tags: TagsSection | None) -> Labelled:
    """The text, or the conversation, of a row with its labels.

    Args:
        row: columns and values.
        renamed: the file's column name for each standard name.
        tags: keys and roles of turns; None: the usual words.

    Raises:
        RowError: if there is no text or no label, or a value is invalid.
    """
    columns = RowColumns(row, renamed, tags)
    name = text_column(row, renamed)
    if name is None:
        columns.get("text")  # names the columns that there are
        raise RowError("text is null", "write a text, or remove the row")
    is_sharegpt = name != "text" and _is_sharegpt(columns.get(name))
    kind: FormatName = "sharegpt" if is_sharegpt else "text" if name == "text" else "messages"
    example = to_example(kind, row, renamed, tags)
    assert isinstance(example, Text | Conversation)
    has_list = columns.has(LABELS)
    if has_list and columns.has(LABEL):
        raise RowError(
            "it has both label and labels", "remove one of them, or set the source's columns: {label: null}"
        )
    labels = _labels(columns.get(LABELS)) if has_list else (_label(columns.get(LABEL), LABEL),)
    refuse_surrogates(Text("".join(labels)))
    return Labelled(example, labels, has_list)


def _is_sharegpt(turns: object) -> bool:
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def _labels(value: object) -> tuple[str, ...]:
    names = [_label(one, LABELS) for one in list_of(value, LABELS)]
    return tuple(dict.fromkeys(names))


def _label(value: object, name: str) -> str:
    text = label_text(value)
    if text is None:
        raise RowError(f"{name} has {kind_of(value)}", "write a label as text or as a whole number")
    if not text.strip():
        raise RowError(f"{name} is empty", "write a label, or remove the row")
    return text


@dataclass(frozen=True, slots=True)
class TableLabels:
    """The labels of a table's rows.

    Attributes:
        names: of all labels, in the order of the model's outputs.
        multi_label: whether a row has any number of them.
        sets: for each combination that rows have, the numbers of its labels.
    """

    names: tuple[str, ...]
    multi_label: bool
    sets: tuple[tuple[int, ...], ...]


@dataclass
class LabelSets:
    """Collects the labels of rows, those for training first.

    Attributes:
        section: of the config.
        multi_label: whether a row has any number of labels; None until the first row decides.
    """

    section: ClassifySection
    multi_label: bool | None = None
    _names: dict[str, None] = field(default_factory=dict)
    _sets: dict[tuple[str, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._names.update(dict.fromkeys(self.section.labels or ()))
        if self.section.multi_label != "auto":
            self.multi_label = self.section.multi_label

    def check(self, row: Labelled, *, is_training: bool) -> None:
        """Refuses a row whose labels the model will not have.

        Raises:
            RowError: then, or if the row has several labels, and rows have one each.
        """
        if self.multi_label is None:
            self.multi_label = row.is_list
        if not self.multi_label and row.is_list:
            raise RowError(
                "it has a list of labels, and rows have one label each",
                "write label instead, or set classify.multi_label: true",
            )
        if is_training and self.section.labels is None:
            return
        unknown = next((name for name in row.labels if name not in self._names), None)
        if unknown is not None:
            raise self._unknown(unknown)

    def _unknown(self, name: str) -> RowError:
        known = list(self._names) if self.section.labels is not None else _sorted(self._names)
        some = ", ".join(map(shown, known[:_SHOWN])) + (", …" if len(known) > _SHOWN else "")
        near = nearest(name, known)
        guess = f"did you mean {near!r}? Else " if near else ""
        return RowError(
            f"its label {one_line(repr(name), limit=60)} is not a label of the training: {some}",
            f"{guess}correct it, remove the row, or add the label to the training",
        )

    def number(self, labels: Sequence[str]) -> int:
        """The number of the combination of labels of a usable row, which it keeps."""
        self._names.update(dict.fromkeys(labels))
        return self._sets.setdefault(tuple(sorted(labels)), len(self._sets))

    def finish(self) -> TableLabels:
        """The labels of the table; the combinations by the numbers that rows got.

        Raises:
            DataError: if there is only one label, so that there is nothing to learn.
        """
        names = list(self._names) if self.section.labels is not None else _sorted(self._names)
        if len(names) < 2 and not self.multi_label:
            raise DataError.of(
                f"all rows have the label {shown(names[0])}" if names else "no row has a label",
                where="data.train",
                why="a classifier has two labels at least",
                fix="add rows with other labels, or name all labels in classify.labels",
            )
        numbers = {name: number for number, name in enumerate(names)}
        sets = tuple(tuple(sorted(numbers[name] for name in one)) for one in self._sets)
        return TableLabels(tuple(names), bool(self.multi_label), sets)


def _sorted(names: Mapping[str, None]) -> list[str]:
    """Names in order; whole numbers by value."""
    if all(name.lstrip("-").isdecimal() for name in names):
        return sorted(names, key=int)
    return sorted(names)
