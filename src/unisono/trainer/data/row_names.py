"""Checks the names in the rows of a source: its columns, the keys of its messages, and columns of
pictures, which text models do not read.

A name that nothing reads is one error for its source, since it is one mistake: the rows would be
trained without what it holds.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.base.errors import Problem
from unisono.base.text import nearest
from unisono.trainer.config.data_sections import SourceSection, TagsSection
from unisono.trainer.data import Place, RawRow, RowError
from unisono.trainer.data.formats import COLUMNS, FLAGS, THOUGHT_KEYS, FormatName, shown

MEDIA = {
    "images": "a picture",
    "image": "a picture",
    "videos": "a video",
    "video": "a video",
    "audios": "a recording",
    "audio": "a recording",
}
"""Columns of what text models do not read, and what a row with a value there has."""

_TURNS = ("messages", "conversations", "prompt", "completion", "output", "chosen", "rejected")
"""Columns that may hold messages."""
_CARRIED = ("name", "id", "tool_call_id", "refusal")  # what exports of other programs always have
_OF_MESSAGES = frozenset(("role", "content", "tool_calls", "function_call", *THOUGHT_KEYS, *_CARRIED))
_OF_SHAREGPT = frozenset(("from", "value", *THOUGHT_KEYS, *_CARRIED))
_KNOWN = {True: _OF_SHAREGPT, False: _OF_MESSAGES}
"""Keys of a message that has `from` and no role, and of other messages, besides the flags."""
_FLAGS = frozenset(FLAGS)
_SHOWN = 12  # names in a message

READABLE: Mapping[FormatName, frozenset[str]] = {
    **{name: frozenset((*needed, *optional)) for name, (needed, optional) in COLUMNS.items()},
    "messages": frozenset((*COLUMNS["messages"][1], "messages", "conversations")),
    "sharegpt": frozenset((*COLUMNS["sharegpt"][1], "messages", "conversations")),
    "openai": frozenset(("messages", "conversations", "system", "tools")),
    "text": frozenset(("text", "input")),
    "alpaca": frozenset((*COLUMNS["alpaca"][0], *COLUMNS["alpaca"][1], "prompt")),
    "prompt": frozenset(
        (*_TURNS, "instruction", "input", "history", "system", "tools", "functions", "output")
    ),
    "preference": frozenset(
        (*_TURNS, "instruction", "input", "history", "system", "tools", "functions", "label")
    ),
    "similar": frozenset(("anchor", "positive", "negative")),
    "labelled": frozenset(
        ("text", "messages", "conversations", "system", "tools", "functions", "label", "labels")
    ),
}
"""The columns that each format can read."""


@dataclass(slots=True)
class _NameUse:
    """Where a name was seen first, and in how many messages."""

    first: Place
    count: int = 0


class RowNames:
    """The names in the rows of one source; fed row by row.

    Attributes:
        has_flags: whether a message says whether it counts in the loss.
    """

    def __init__(
        self,
        section: SourceSection,
        name: FormatName,
        *,
        key: str,
        ignore: Sequence[str],
        template: Callable[[], str],
        refuses_pictures: str = "this model reads text only",
    ) -> None:
        """Starts with no row.

        Args:
            section: of the source.
            name: its format.
            key: of its section in the config, for messages.
            ignore: keys of messages that are not read.
            template: gives the text of the chat template: a key that it reads is known.
            refuses_pictures: why pictures and videos are refused; "": only recordings are.
        """
        self.has_flags = False
        self._section = section
        self._key = key
        self._name: FormatName = name
        self._template = template
        self._ignore = frozenset(ignore)
        self._unread: dict[str, _NameUse] = {}
        self._instead: dict[str, str] = {}  # an unread key, and the key that its message lacks
        self._columns: Counter[str] = Counter()
        self._absent = {theirs for theirs in section.columns.values() if theirs is not None}
        self._rows = 0
        turns = (section.columns.get(turn, turn) for turn in _TURNS if turn in READABLE[name])
        self._turns = [column for column in turns if column is not None]
        refused = {kind for kind, what in MEDIA.items() if refuses_pictures or what == "a recording"}
        media = {section.columns.get(kind, kind): kind for kind in MEDIA if kind in refused}
        self._refuses = refuses_pictures or "only text, pictures and frames of videos can be trained on"
        self._media = {column: kind for column, kind in media.items() if column is not None}
        self._known = _KNOWN if section.tags is None else dict.fromkeys(_KNOWN, _of_tags(section.tags))
        self._read_by_template: dict[str, bool] = {}

    def checked(self, row: RawRow) -> Mapping[str, object]:
        """The columns and values of a row, without the keys of messages that are ignored.

        Raises:
            RowError: if it has a picture, a video or a recording.
        """
        self._rows += 1
        if self._absent:
            self._columns.update(map(str, row.value))
            self._absent.difference_update(row.value)
        if not self._media.keys().isdisjoint(row.value):
            self._refuse_media(row.value)
        value = self._without_ignored(row.value) if self._ignore else row.value
        for message in self._messages(value):
            is_sharegpt = "from" in message and "role" not in message
            if not message.keys() <= self._known[is_sharegpt]:
                self._note(message, row.place, is_sharegpt=is_sharegpt)
        return value

    def problems(self, *, all_rows: bool) -> list[Problem]:
        """What is wrong with the names of columns and keys; `all_rows`: whether no row of the
        source was left out.
        """
        problems = [*self._unread_columns(), *(self._absent_columns() if all_rows else ())]
        if self._unread:
            problems.append(self._unread_keys())
        return problems

    def _messages(self, row: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
        """The messages of a row, in all its columns; those that are JSON in a text are not looked
        at.
        """
        for column in self._turns:
            value = row.get(column)
            if isinstance(value, dict):
                yield value
            elif isinstance(value, list):
                yield from (message for message in value if isinstance(message, dict))

    def _refuse_media(self, row: Mapping[str, object]) -> None:
        for column, kind in self._media.items():
            value = row.get(column)
            if value and (not isinstance(value, list) or any(value)):
                raise RowError(
                    f"it has {MEDIA[kind]} in the column {shown(column)}, and {self._refuses}",
                    f"remove the row; or set the source's columns: {{{kind}: null}} to train on its text alone",
                )

    def _without_ignored(self, row: Mapping[str, object]) -> Mapping[str, object]:
        kept = dict(row)
        for column in self._turns:
            value = row.get(column)
            if isinstance(value, dict):
                kept[column] = self._without(value)
            elif isinstance(value, list):
                kept[column] = [self._without(one) if isinstance(one, dict) else one for one in value]
        return kept

    def _without(self, message: Mapping[str, object]) -> Mapping[str, object]:
        return {name: value for name, value in message.items() if name not in self._ignore}

    def _note(self, message: Mapping[str, object], location: Place, *, is_sharegpt: bool) -> None:
        """Notes the keys that nothing reads, and flags. One without a value says nothing."""
        goes_to_template = not is_sharegpt and self._section.tags is None
        for name, value in message.items():
            if name in self._known[is_sharegpt] or value in (None, "", [], {}):
                continue
            if name in _FLAGS:
                self.has_flags = True
            elif not (goes_to_template and self._is_read_by_template(name)):
                self._unread.setdefault(name, _NameUse(location)).count += 1
                lacks = "value" if is_sharegpt else "content"
                if self._section.tags is None and isinstance(value, str | list) and lacks not in message:
                    self._instead[name] = lacks

    def _is_read_by_template(self, name: str) -> bool:
        if name not in self._read_by_template:
            word = re.escape(name)
            reads = re.search(rf"\.{word}\b|['\"]{word}['\"]", self._template())
            self._read_by_template[name] = reads is not None
        return self._read_by_template[name]

    def _unread_keys(self) -> Problem:
        names = list(self._unread)[:_SHOWN]
        first = self._unread[names[0]]
        known = sorted(_FLAGS.union(*self._known.values()))
        close = [(name, near) for name in names if (near := self._instead.get(name) or nearest(name, known))]
        counts = ", ".join(f"`{shown(name)}` × {self._unread[name].count}" for name in names)
        more = f", and {len(self._unread) - _SHOWN} more" if len(self._unread) > _SHOWN else ""
        guesses = ", ".join(f"`{near}` instead of `{shown(name)}`" for name, near in close)
        ignored = f"data.ignore: [{', '.join(shown(name) for name in self._unread)}]"
        fix = f"if they have no meaning for the training, set {ignored}"
        return Problem(
            f"messages of {self._section.path} have keys that are not read",
            str(first.first),
            f"{counts}{more}",
            f"did you mean {guesses}? Else {fix}" if close else fix,
        )

    def _unread_columns(self) -> Iterator[Problem]:
        """Columns that the config names, and that the format has no use for."""
        readable = READABLE[self._name]
        for ours, theirs in self._section.columns.items():
            if theirs is None or ours in readable or ours in MEDIA or ours == "objects":
                continue
            near = nearest(ours, sorted(readable))
            yield Problem(
                f"rows of the format {self._name} have no {ours}, so columns: {{{ours}: {theirs}}} has no effect",
                f"{self._key}.columns",
                f"they have {', '.join(sorted(readable))}",
                f"did you mean `{near}`?" if near else "remove it, or set the source's format",
            )

    def _absent_columns(self) -> Iterator[Problem]:
        """Columns that the config names, and that no row has."""
        for ours, theirs in self._section.columns.items():
            if theirs is None or theirs not in self._absent or not self._rows or ours in _needed(self._name):
                continue
            names = list(self._columns)
            near = nearest(theirs, names)
            known = ", ".join(shown(name) for name in names[:_SHOWN])
            yield Problem(
                f"no row of {self._section.path} has the column {theirs!r}, named in columns: {{{ours}: {theirs}}}",
                f"{self._key}.columns",
                f"its columns are {known}",
                f"did you mean `{near}`?" if near else f"correct or remove {ours}",
            )


def _needed(name: FormatName) -> Sequence[str]:
    """Columns without which a row is bad: their error is that of the row."""
    return COLUMNS[name][0] if name in COLUMNS else ()


def _of_tags(tags: TagsSection) -> frozenset[str]:
    return frozenset((tags.role_tag, tags.content_tag, "tool_calls", *THOUGHT_KEYS, *_CARRIED))
