"""Settles how the rows of a source are read: its format, and which columns of the file are the
question, the answer, and so on.

What the config says counts. Else the first row decides: by our own names of columns
(data.formats.COLUMNS), or by names that datasets usually have (USUAL_NAMES). Where two columns
could be the same part of a row, the source is refused: a wrong guess would train on what nobody
meant.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.base.errors import DataError
from unisono.base.text import nearest
from unisono.trainer.config.data_sections import COLUMN_NAMES, SourceSection
from unisono.trainer.config.heads import CLASSIFY, EMBED
from unisono.trainer.config.sections import GRPO, PAIRS, PREFERENCE, RATINGS
from unisono.trainer.data import BadRow, RawRow, Row
from unisono.trainer.data.formats import COLUMNS, FormatName, Renamed, column_of, detect, kind_of, shown
from unisono.trainer.data.labelled_rows import LABEL, label_column, text_column
from unisono.trainer.data.preference_rows import is_rated, sides_in, turns_of_transcript
from unisono.trainer.data.prompt_rows import prompt_column
from unisono.trainer.data.row_names import READABLE
from unisono.trainer.data.similar_rows import PARTS, USUAL, parts_in
from unisono.trainer.data.sources import RowSource, names_pictures

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "instruction": (
        *("question", "query", "problem", "prompt", "user", "human", "inputs"),
        *("问题", "提问", "指令"),
    ),
    "output": (
        *("answer", "response", "completion", "solution", "reply", "assistant", "gpt", "target", "targets"),
        *("回答", "答案", "回复", "输出"),
    ),
    "input": ("context", "输入"),
    "system": ("system_prompt",),
    "history": (),
    "messages": ("conversation", "dialog", "dialogue", "chat"),
    "text": (),
    "chosen": ("chosen_response",),
    "rejected": ("rejected_response",),
}
"""What datasets call our columns, besides our own names; in any case of letters."""

_FILE_NAMES = ("file_name", "file_names")
_INPUTS = ("input", "输入")  # without a question, this is the question
_SAME = {"instruction": "prompt", "output": "completion"}  # the names of prompt-completion rows
_MEANING = {
    "instruction": "question",
    "input": "text after the question",
    "output": "answer",
    "system": "system message",
    "history": "earlier turns",
    "messages": "conversation",
    "text": "text",
    "chosen": "chosen answer",
    "rejected": "rejected answer",
    "label": "rating",
}
_KIND_OF_ROW = {
    "instruction": "a question with an answer",
    "prompt": "a question with an answer",
    "messages": "a conversation",
    "text": "a text",
}
_KINDS: dict[str, tuple[type, ...]] = {
    "history": (list, str),
    "messages": (list,),
    "chosen": (str, list, dict),
    "rejected": (str, list, dict),
}
"""What the value of a part is; text if it is not here."""
_OF_NO_PART = ("id", "uuid", "index", "source", "category", "type", "url", "language", "split", "date")
PAIR, RATING = "a chosen and a rejected answer", "one answer with a label"
"""What preference rows have."""
ONLY_RATED = "set objective: kto, or write both answers in one row"
ONLY_PAIRS = "set objective: dpo, or write two rows, one for each answer, with label: true and label: false"
"""What to do about rows of the other kind."""
_SET = "set"
_SHOWN, _LONGEST = 12, 80  # columns in a message; characters of a usual name, with blanks around it
# YAML reads such words as text without quotes.
_PLAIN = re.compile(r"(?:[^\W\d]|\.{0,2}/|~/)(?:[\w ./-]*[\w/.-])?")
_NOT_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")

Columns = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """How a source is read.

    Attributes:
        section: of the source, with the columns that were inferred.
        name: its format.
        why: it is read so, for people; "" if no row can be read.
        unread_answers: columns that are not read, and have a usual name of an answer.
    """

    section: SourceSection
    name: FormatName
    why: str
    unread_answers: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The source and its format, for people; "" if no row can be read."""
        if not self.why:
            return ""
        set_by = "" if self.why == _SET else "auto: "
        counts = "; every token counts in the loss" if self.name == "text" else ""
        return f"{self.section.path}: {self.name} ({set_by}{self.why}){counts}"

    @property
    def answer(self) -> str | None:
        """Our name of the column with the answer; None in other formats."""
        return {"alpaca": "output", "alpaca-prompt": "output", "prompt-completion": "completion"}.get(
            self.name
        )


def with_file_names(source: RowSource, first: Row) -> SourceSection:
    """The section of a source, with its column of pictures if its rows name some in a metadata
    file: `file_name`, or `file_names` for several.
    """
    section = source.section
    if isinstance(first, BadRow) or "images" in section.columns or not names_pictures(source):
        return section
    column = next((name for name in _FILE_NAMES if name in first.value), None)
    return section if column is None else _with_columns(section, {"images": column})


def settle_format(section: SourceSection, first: Row, *, objective: str, key: str) -> SourceFormat:
    """The format of a source, as configured or as its first row shows.

    Args:
        section: of the source.
        first: its first readable row; a bad row if none can be read.
        objective: of the run.
        key: of the source's section in the config.

    Raises:
        DataError: if the row matches no known format, or several, or is not for the objective.
    """
    settled = _settle(section, first, objective=objective, key=key)
    read = {column_of(name, settled.section.columns) for name in READABLE[settled.name]}
    columns = first.value if isinstance(first, RawRow) else ()
    unread = (name for name in columns if name not in read and _folded(name) in USUAL_NAMES["output"])
    return replace(settled, unread_answers=tuple(map(shown, unread)))


def _settle(section: SourceSection, first: Row, *, objective: str, key: str) -> SourceFormat:
    configured = section.format
    if objective == GRPO:
        return _settle_prompt(section, first, key)
    if objective == CLASSIFY:
        return _settle_labelled(section, first, key)
    if objective == EMBED:
        return _settle_similar(section, first, key)
    if configured != "auto":
        if (objective in PREFERENCE) != (configured == "preference"):
            raise _other_rows(section, objective, first, key, f"data.format is {configured}")
        return SourceFormat(section, configured, _SET)
    if isinstance(first, BadRow):
        return SourceFormat(section, "text", "")  # no row can be read, so the format does not matter
    if objective in PREFERENCE:
        return _settle_preference(section, first, objective, key)
    if len(sides_in(first.value, section.columns)) == 2:
        raise _other_rows(section, objective, first, key, f"the row has {PAIR}")
    inferred = _Inference(section, first, key).answers(objective)
    section = _with_columns(section, inferred)
    detected = detect(first.value, section.columns)
    if detected is None:
        raise _unknown(section, first, key)
    return SourceFormat(section, detected[0], f"{detected[1]}{_read_as(inferred)}")


def _settle_prompt(section: SourceSection, first: Row, key: str) -> SourceFormat:
    """The format of prompts, whose answers the model samples."""
    if section.format != "auto":
        raise DataError.of(
            f"objective {GRPO} reads prompts from any row, and data.format is {section.format}",
            where=key,
            fix="remove data.format; set the source's columns: {prompt: NAME} if no column has a usual name",
        )
    if isinstance(first, BadRow):
        return SourceFormat(section, "prompt", "")
    name = prompt_column(first.value, section.columns)
    if name is None:
        raise DataError.of(
            f"{section.path} has no column with a prompt",
            where=key,
            why=f"its columns are {_names(first.value)}",
            fix="set the source's columns: {prompt: NAME}",
        )
    return SourceFormat(section, "prompt", f"the first row has {column_of(name, section.columns)}")


_USUAL_TEXTS = ("sentence", "content", "review", "文本", "句子", "内容")
_USUAL_LABELS = ("class", "category", "标签", "类别")


def _settle_labelled(section: SourceSection, first: Row, key: str) -> SourceFormat:
    """The format of texts with labels."""
    if isinstance(first, BadRow):
        return SourceFormat(section, "labelled", "")
    inferred: Columns = {}
    row = first.value
    if "text" not in section.columns and text_column(row, section.columns) is None:
        inferred |= _usual(row, "text", _USUAL_TEXTS)
    if label_column(row, section.columns) is None and not {LABEL, "labels"} & section.columns.keys():
        inferred |= _usual(row, LABEL, _USUAL_LABELS)
    section = _with_columns(section, inferred)
    text, label = text_column(row, section.columns), label_column(row, section.columns)
    if text is None or label is None:
        missing = "text" if text is None else "label"
        raise DataError.of(
            f"{section.path} has no column with a {missing}",
            where=str(first.place),
            why=f"its columns are {_names(row)}",
            fix=f"set the source's columns: {{{missing}: NAME}}",
        )
    names = [column_of(name, section.columns) for name in (text, label)]
    return SourceFormat(
        section, "labelled", f"the first row has {names[0]} and {names[1]}{_read_as(inferred)}"
    )


def _settle_similar(section: SourceSection, first: Row, key: str) -> SourceFormat:
    """The format of similar texts."""
    if isinstance(first, BadRow):
        return SourceFormat(section, "similar", "")
    inferred: Columns = {}
    for part in PARTS:
        if part not in section.columns and part not in first.value:
            inferred |= _usual(first.value, part, USUAL[part])
    section = _with_columns(section, inferred)
    parts = parts_in(first.value, section.columns)
    missing = next((part for part in PARTS[:2] if part not in parts), None)
    if missing is not None:
        raise DataError.of(
            f"{section.path} has no column with the {missing}",
            where=str(first.place),
            why=f"its columns are {_names(first.value)}",
            fix=f"set the source's columns: {{{missing}: NAME}}",
        )
    names = " and ".join(str(column_of(part, section.columns)) for part in parts)
    return SourceFormat(section, "similar", f"the first row has {names}{_read_as(inferred)}")


def _usual(row: Mapping[str, object], part: str, names: Sequence[str]) -> Columns:
    """The column of a part if exactly one has a usual name of it."""
    fitting = [name for name, value in row.items() if _folded(name) in names and value is not None]
    return {part: fitting[0]} if len(fitting) == 1 else {}


def _settle_preference(section: SourceSection, first: RawRow, objective: str, key: str) -> SourceFormat:
    inference = _Inference(section, first, key)
    inferred = inference.pair() if objective in PAIRS else inference.rating()
    section = _with_columns(section, inferred)
    sides, rated = sides_in(first.value, section.columns), is_rated(first.value, section.columns)
    if not (sides if objective in PAIRS else rated):
        has = f"the row has {PAIR}" if sides else f"the row has {RATING}" if rated else None
        raise _other_rows(section, objective, first, key, has or f"its columns are {_names(first.value)}")
    talks = (
        ", transcripts of Human: and Assistant: turns"
        if _are_transcripts(first.value, section.columns)
        else ""
    )
    why = f"the first row has {' and '.join(sides) or 'label'}{talks}{_read_as(inferred)}"
    return SourceFormat(section, "preference", why)


def _are_transcripts(row: Mapping[str, object], renamed: Renamed) -> bool:
    """Whether a pair has its prompt in two transcripts."""
    prompts = ("prompt", "instruction", "messages", "conversations")
    if any(row.get(column_of(name, renamed) or "") is not None for name in prompts):
        return False
    sides = (row.get(column_of(side, renamed) or "") for side in ("chosen", "rejected"))
    return all(turns_of_transcript(side) is not None for side in sides)


def _with_columns(section: SourceSection, inferred: Columns) -> SourceSection:
    return section.model_copy(update={"columns": {**section.columns, **inferred}}) if inferred else section


def _read_as(inferred: Columns) -> str:
    pairs = [f"{shown(theirs)} is read as {ours}" for ours, theirs in inferred.items() if theirs is not None]
    return f"; {', '.join(pairs)}" if pairs else ""


class _Inference:
    """Finds the columns of parts by usual names; what it gives are those that the config does not
    name, and that have no name of ours.
    """

    def __init__(self, section: SourceSection, row: RawRow, key: str) -> None:
        self._section = section
        self._row = row
        self._key = key

    def answers(self, objective: str) -> Columns:
        """The columns of a question with an answer, of a conversation, or of a text; empty if our
        own names are enough, or nothing fits.

        Raises:
            DataError: if there are several ways to read the row.
        """
        detected, named = detect(self._row.value, self._section.columns), self._section.columns
        if detected is not None and (detected[0] != "text" or "text" in named or objective == "pretrain"):
            return {}
        ways = (self._question_and_answer(), self._single("messages"), self._single("text"))
        candidates = [way for way in ways if way is not None]
        if len(candidates) > 1:
            kinds = [_KIND_OF_ROW[next(iter(way))] for way in candidates]
            raise self._ambiguous(f"it has {kinds[0]} and {kinds[1]}", candidates)
        return self._new(candidates[0]) if candidates else {}

    def pair(self) -> Columns:
        """The columns of a chosen and a rejected answer.

        Raises:
            DataError: if two columns could be the same part.
        """
        rejected = self._one("rejected")
        chosen = self._one("chosen") or (self._one("output") if rejected else None)
        if chosen is None or rejected is None:
            return {}
        is_text = isinstance(self._row.value[chosen], str)  # else they may be whole conversations
        sides: Columns = {"chosen": chosen, "rejected": rejected}
        return self._new(sides | self._before() if is_text else sides)

    def rating(self) -> Columns:
        """The columns of an answer with a label.

        Raises:
            DataError: if two columns could be the same part.
        """
        if not is_rated(self._row.value, self._section.columns) or self._has("messages", "conversations"):
            return {}
        answer = None if self._has("completion", "output") else self._one("output")
        return self._new({"output": answer} | self._before())

    def _question_and_answer(self) -> Columns | None:
        if not self._all("output") or not (self._all("instruction") or self._all("input")):
            return None
        answer, prompt = self._one("output"), self._asked()
        question = prompt.pop("instruction")
        if question is None:
            return None
        is_prompt = any(name in self._section.columns for name in _SAME.values())
        names = [_SAME[part] if is_prompt else part for part in _SAME]
        return dict(zip(names, (question, answer), strict=True)) | prompt

    def _single(self, part: str) -> Columns | None:
        name = self._one(part)
        return None if name is None else {part: name}

    def _before(self) -> Columns:
        """The columns before the answers of a preference row, as far as they have no name of
        ours.
        """
        if self._has("prompt", "instruction", "messages", "conversations"):
            return {"system": self._one("system")}
        return self._asked()

    def _asked(self) -> Columns:
        """The columns of a question, and of what belongs to it; `instruction` is None if there is
        none.
        """
        question, inputs = self._one("instruction"), self._all("input")
        if question is None:
            question = next((name for name in inputs if _folded(name) in _INPUTS), None)
            inputs = [name for name in inputs if name != question]
        if len(inputs) > 1:
            raise self._several("input", inputs)
        parts: Columns = {part: self._one(part) for part in ("system", "history")}
        return {"instruction": question, "input": inputs[0] if inputs else None} | parts

    def _has(self, *parts: str) -> bool:
        """Whether the row has a value in one of these columns of ours."""
        names = (column_of(part, self._section.columns) for part in parts)
        return any(name is not None and self._row.value.get(name) is not None for name in names)

    def _one(self, part: str) -> str | None:
        """The column of a part, if there is one.

        Raises:
            DataError: if several could be it.
        """
        names = self._all(part)
        if len(names) > 1:
            raise self._several(part, names)
        return names[0] if names else None

    def _all(self, part: str) -> list[str]:
        """The columns that could be a part by name and value; that of the config, if it names
        one.
        """
        columns, row = self._section.columns, self._row.value
        for ours in (part, _SAME.get(part, part)):
            if ours in columns:
                named = columns[ours]
                return [named] if named is not None and named in row else []
        names = {part, *USUAL_NAMES[part]} - columns.keys()
        taken, kinds = set(columns.values()), _KINDS.get(part, (str,))
        return [
            name
            for name, value in row.items()
            if name not in taken and _folded(name) in names and isinstance(value, kinds)
        ]

    def _new(self, columns: Columns) -> Columns:
        return {
            ours: theirs
            for ours, theirs in columns.items()
            if theirs is not None and ours != theirs and ours not in self._section.columns
        }

    def _several(self, part: str, names: list[str]) -> DataError:
        why = f"{shown(names[0])} or {shown(names[1])} could be the {_MEANING[part]}"
        return self._ambiguous(why, [{part: name} for name in names])

    def _ambiguous(self, why: str, ways: list[Columns]) -> DataError:
        first, *others = (
            self._section.columns | {o: t for o, t in way.items() if t is not None} for way in ways
        )
        others_written = " or ".join(map(written_columns, others))
        return DataError.of(
            f"the columns of {self._section.path} can be read in several ways",
            where=str(self._row.place),
            why=why,
            fix=f"say which: {written_source(self._section, self._key, first)}, or with {others_written}",
        )


def _folded(name: str) -> str:
    return name.strip().casefold() if len(name) <= _LONGEST else ""


def _names(row: Mapping[str, object]) -> str:
    return ", ".join(shown(name) for name in list(row)[:_SHOWN]) or "none"


def _unknown(section: SourceSection, first: RawRow, key: str) -> DataError:
    """The refusal of a row that has no known format, with a mapping of its own columns."""
    known = "; ".join(f"{name}: {', '.join(needed)}" for name, (needed, _) in COLUMNS.items())
    absent = [name for name in section.columns.values() if name is not None and name not in first.value]
    without = f", without {', '.join(absent)} (set in `columns`)" if absent else ""
    guess, wrong = propose(first.value), _not_text(first.value)
    empty = [name for name in _asked_or_answered(first.value) if first.value[name] is None]
    whole = propose({**first.value, **dict.fromkeys(empty, "")}) if empty else {}
    if "output" in whole:
        mapping = written_source(section, key, whole)
        fix = (
            f"{shown(empty[0])} is empty in this row: write a text, or remove the row, or set {mapping} and"
            " data.on_bad_row: skip"
        )
    elif wrong:
        fix = f"{shown(wrong[0])} is {kind_of(first.value[wrong[0]])}, not text: write it as text"
    elif guess:
        fix = _fix_of_guess(guess, written_source(section, key, guess))
    else:
        fix = "write its rows in one of these formats"
    return DataError.of(
        f"cannot infer the format of {section.path} from its columns",
        where=str(first.place),
        why=f"its columns are {_names(first.value)}{without}; known formats are {known}",
        fix=fix,
    )


def _fix_of_guess(guess: Columns, mapping: str) -> str:
    if "output" in guess:
        return (
            f"if the question is in {shown(guess['instruction'])} and the answer in {shown(guess['output'])},"
            f" set {mapping}"
        )
    if "messages" in guess:
        return f"if {shown(guess['messages'])} is a conversation, set {mapping}"
    return f"if {shown(guess['text'])} is the text, set {mapping}"


def _not_text(row: Mapping[str, object]) -> list[str]:
    """The columns of a question or an answer, by their names, whose values are neither text nor
    null.
    """
    return [name for name in _asked_or_answered(row) if not isinstance(row[name], str | None)]


def _asked_or_answered(row: Mapping[str, object]) -> list[str]:
    names = {"instruction", "output", *USUAL_NAMES["instruction"], *USUAL_NAMES["output"]}
    return [name for name in row if _folded(name) in names]


def propose(row: Mapping[str, object], parts: tuple[str, ...] = ("instruction", "output")) -> Columns:
    """A mapping of the row's own columns to the wanted parts: those with the nearest names, else in
    the order of the file; empty without.

    For a question with an answer it may be a conversation, or a text, instead.
    """
    names = [name for name in row if shown(name) == name]  # those that a config can name
    lists = [name for name in names if _holds_objects(row[name])]
    texts = [name for name in names if isinstance(row[name], str)]
    texts = [name for name in texts if _folded(name) not in _OF_NO_PART] or texts
    if parts == ("instruction", "output") and (lists or len(texts) == 1):
        return {"messages": lists[0]} if lists else {"text": texts[0]}
    mapping: Columns = {}
    for part in parts:
        near = [name for word in (part, *USUAL_NAMES[part]) if (name := nearest(word, texts)) is not None]
        if near and near[0] not in mapping.values():
            mapping[part] = near[0]
    unused = [name for name in texts if name not in mapping.values()]
    for part in parts:
        if part not in mapping and unused:
            mapping[part] = unused.pop(0)
    return {part: mapping[part] for part in parts} if len(mapping) == len(parts) else {}


def _holds_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def written_source(section: SourceSection, key: str, columns: Renamed) -> str:
    """The entry of a source in the config, with its columns, ready to paste."""
    root = ".".join(key.split(".")[:2])
    return f"{root}: [{{path: {_written(section.path)}, {written_columns(columns)}}}]"


def written_columns(columns: Renamed) -> str:
    """A mapping of columns as it is written in a config."""
    pairs = (f"{ours}: {_written(theirs)}" for ours, theirs in columns.items())
    return f"columns: {{{', '.join(pairs)}}}"


def _written(name: str | None) -> str:
    if name is None:
        return "null"
    is_plain = _PLAIN.fullmatch(name) is not None and name.lower() not in _NOT_TEXT
    return name if is_plain else json.dumps(name, ensure_ascii=False)


def _other_rows(section: SourceSection, objective: str, first: Row, key: str, why: str) -> DataError:
    """The refusal of rows that are not for the objective."""
    path, location = section.path, str(first.place)
    if objective not in PREFERENCE:
        return DataError.of(
            f"objective {objective} trains on one answer for each row, and {path} has preference rows",
            where=location,
            why=why,
            fix=(
                f"set objective: {', '.join(PAIRS)} or {RATINGS[0]}; or set data.format to the format of the"
                " other columns, e.g. messages"
            ),
        )
    is_pair = objective in PAIRS
    needed, other = ("pairs of answers", ONLY_RATED) if is_pair else ("answers with a label", ONLY_PAIRS)
    mapping = written_source(section, key, _proposed_preference(first, is_pair=is_pair))
    return DataError.of(
        f"objective {objective} needs {needed}, and {path} has none",
        where=location,
        why=why,
        fix=(
            other
            if why.startswith("the row has")
            else f"name its columns, e.g. {mapping}; or set objective: sft"
        ),
    )


def _proposed_preference(first: Row, *, is_pair: bool) -> Columns:
    """A mapping of the row's own columns to those of a pair, or of an answer with a label."""
    row = first.value if isinstance(first, RawRow) else {}
    if is_pair:
        mapping = propose(row, ("instruction", "chosen", "rejected")) or {
            "chosen": "NAME",
            "rejected": "NAME",
        }
    else:
        label = next((n for n, value in row.items() if isinstance(value, bool) and shown(n) == n), "NAME")
        mapping = propose(row) | {"label": label}
    return {ours: theirs for ours, theirs in mapping.items() if theirs not in COLUMN_NAMES}
