"""Turns files into token tables, and accounts for every row of every source.

Here are the rows between file and model, and the ledger (data.json). Only the standard library is
imported: `data.token_table` needs only numpy and pyarrow, so that a second start is fast.

For each source, and in total, rows = used + dropped + bad. Cut, split, not_rendered (rows of which
a part is in no token) and eval are parts of used.

A row of a file is counted once: with weight 2 it is used once, although it is trained on twice per
epoch; with weight 0.5 the unselected half is dropped, with the reason `weight`. `tokens` and
`loss_tokens` count what the model sees in one epoch of training and one evaluation, so they depend
on the weight. `tokens_cut` are tokens of used rows that the model never sees.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Required, Self, TypedDict, TypeVar

if TYPE_CHECKING:
    from unisono.trainer.plan.task_requests import LedgerCounts, RowNote

Item = TypeVar("Item")
ThoughtKey = Literal["reasoning_content", "reasoning", "thinking", "thought"]


class FunctionCall(TypedDict):
    """What a tool call calls."""

    name: str
    arguments: object


class ToolCall(TypedDict):
    """A tool call in OpenAI's format; a row's other keys of it stay."""

    type: str
    function: FunctionCall


class Message(TypedDict, total=False):
    """A message of a conversation in OpenAI's format; a row's other keys of it stay. An answer that
    does not count in the loss in full has a `weight`.
    """

    role: Required[str]
    content: Required[str]
    tool_calls: list[ToolCall]
    weight: float
    reasoning_content: str
    reasoning: str
    thinking: str
    thought: str


Messages = Sequence[Mapping[str, object]]  # for a template, with whatever keys they have


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a row. Lines and rows are counted from 1.

    Attributes:
        file: as spelled in the config.
        number: the line, or the row in files without lines.
        by_line: whether `number` is a line.
    """

    file: str
    number: int
    by_line: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.by_line else f"{self.file}#{self.number}"


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as read from its file: column names and values."""

    place: Place
    value: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        place: of the row.
        why: the reason, in one line.
        fix: what the user can do about it.
        column: of the character at which reading failed, from 1; 0 if unknown.
    """

    place: Place
    why: str
    fix: str = ""
    column: int = 0

    @property
    def where(self) -> str:
        """`file:line` or `file:line:column`."""
        return f"{self.place}:{self.column}" if self.column else str(self.place)


Row = RawRow | BadRow


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows.

    Attributes:
        path: on this machine.
        name: as spelled in the config, for messages and the ledger.
        kind: the suffix that selects the reader, without the dot.
    """

    path: Path
    name: str
    kind: str

    @property
    def by_line(self) -> bool:
        """Whether its rows are located by lines."""
        return self.kind in ("jsonl", "ndjson", "csv", "tsv", "txt")


class RowError(Exception):
    """The error of one row, raised where its place is not known."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix

    def at(self, location: Place) -> BadRow:
        """The error as a bad row with a place."""
        return BadRow(location, self.why, self.fix)


class EmptyAnswerError(RowError):
    """The error of a row whose answer is empty."""

    def with_unread(self, columns: Sequence[str], ours: str | None) -> "EmptyAnswerError":
        """The error that names columns which are not read, and could hold the answer; `ours` is our
        name of the answer's column.
        """
        also = " and ".join(columns)
        fix = (
            self.fix if ours is None else f"set the source's columns: {{{ours}: {columns[0]}}}, or {self.fix}"
        )
        return EmptyAnswerError(f"{self.why}; the answer may be in {also}, which is not read", fix)


PICTURE = "\ue010"
"""Stands in a message's content where a picture is: of the private use area, so that it is in no
text.
"""


PICTURE_TAG, VIDEO_TAG = "<image>", "<video>"
"""Stand in texts of rows where a picture or a video is."""
VIDEO = "\ue013"
"""Stands like PICTURE where a video is, for a model with tokens of its own for videos."""
MEDIA_MARK = re.compile(f"({PICTURE}|{VIDEO})")


@dataclass(frozen=True, slots=True)
class PictureSource:
    """A picture of a row.

    Attributes:
        file: its absolute path; None if the row has its bytes or its URL.
        data: its bytes, if the row has them.
        name: for messages: the path as written, or what the row has instead.
        most_pixels: of the row itself: pixels to which a larger picture is reduced; None: no limit.
        least_pixels: likewise, to which a smaller picture is enlarged.
        url: where it is fetched from, if the row has its URL.
        clip: if it is a video in the place VIDEO, its frames.
    """

    file: str | None
    data: bytes | None
    name: str
    most_pixels: int | None = None
    least_pixels: int | None = None
    url: str | None = None
    clip: "Clip | None" = None

    @property
    def decoded(self) -> tuple["PictureSource", ...]:
        """What is decoded of it: the frames of a video, else the picture."""
        return (self,) if self.clip is None else self.clip.frames

    @property
    def mark(self) -> str:
        """What stands in its place: PICTURE or VIDEO."""
        return PICTURE if self.clip is None else VIDEO


@dataclass(frozen=True, slots=True)
class Clip:
    """The frames of a video that are used.

    Attributes:
        frames: pictures, in order.
        times: of each, in seconds after the first frame of the video.
        seconds: of the video.
    """

    frames: tuple[PictureSource, ...]
    times: tuple[float, ...]
    seconds: float


BOX, REF = "\ue011", "\ue012"
"""Stand in a message's content for a box, and for the name of an object, of `RowObjects`."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box or a point in a picture of a row.

    Attributes:
        numbers: x and y of a point, or of two corners.
        picture: its number in the row, from 0.
    """

    numbers: tuple[float, ...]
    picture: int


@dataclass(frozen=True, slots=True)
class RowObjects:
    """What BOX and REF stand for in the contents of a row's messages, in order.

    Attributes:
        refs: names.
        boxes: of which the coordinates are pixels of the picture's file.
        is_share: whether they are shares of its sides instead, from 0 to 1.
    """

    refs: tuple[str, ...]
    boxes: tuple[Box, ...]
    is_share: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template.

    Attributes:
        messages: in order; PICTURE stands for a picture in their contents.
        tools: function schemas.
        pictures: those of all messages, in order.
        objects: of the places BOX and REF in their contents.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    pictures: tuple[PictureSource, ...] = ()
    objects: RowObjects | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its answer as plain strings; `plain`: the chat template is not for them."""

    prompt: str
    completion: str
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn as text.

    Attributes:
        role: who speaks.
        content: of a function turn JSON: a call {name, arguments}, or a list of calls.
        weight: of this answer in the loss, from 0 to 1.
    """

    role: Literal["user", "assistant", "function", "observation"]
    content: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """A conversation up to a question, and its answers.

    Attributes:
        prompt: questions and answers in turn, beginning and ending with a question (or an
            observation).
        answers: one; none if there is only text; of a preference pair two, the chosen one and the
            rejected one.
        system: the system message, or "".
        tools: function schemas as JSON, or "".
        desirable: whether the answer is a good one; None if the row does not say.
        not_rendered: parts of the row that are in none of these, in words.
        pictures: of the places PICTURE in its turns, in order.
        objects: of the places BOX and REF.
    """

    prompt: list[Turn]
    answers: list[Turn]
    system: str = ""
    tools: str = ""
    desirable: bool | None = None
    not_rendered: tuple[str, ...] = ()
    pictures: tuple[PictureSource, ...] = ()
    objects: RowObjects | None = None


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt with its answers.

    Attributes:
        answers: the prompt with each answer: the chosen one and the rejected one, or one with a
            label.
        desirable: whether the answer is a good one; None for a pair.
    """

    answers: list["Conversation | Completion"]
    desirable: bool | None = None


@dataclass(frozen=True, slots=True)
class OpenPrompt:
    """A prompt that the model answers itself.

    Attributes:
        prompt: text, or messages that end before the answer; PICTURE stands for a picture.
        columns: the other columns of the row, as JSON.
        tools: function schemas.
        pictures: those of the prompt, in order.
        objects: of the places BOX and REF in the prompt.
    """

    prompt: str | list[Message]
    columns: str
    tools: list[Any] | None = None
    pictures: tuple[PictureSource, ...] = ()
    objects: RowObjects | None = None

    @property
    def record(self) -> str:
        """What rewards get of it, as JSON: prompt and columns; of pictures PICTURE_TAG in the
        prompt, and a column `images` with their files, or what the row has instead; of videos
        likewise VIDEO_TAG and `videos`.
        """
        prompt, columns = json.dumps(self.prompt, ensure_ascii=False), self.columns
        if self.pictures:
            names: dict[str, list[str]] = {"images": [], "videos": []}
            for one in self.pictures:
                names["images" if one.clip is None else "videos"].append(one.file or one.name)
            prompt = prompt.replace(PICTURE, PICTURE_TAG).replace(VIDEO, VIDEO_TAG)
            listed = {column: values for column, values in names.items() if values}
            columns = json.dumps(json.loads(columns) | listed, ensure_ascii=False)
        return f'{{"prompt": {prompt}, "columns": {columns}}}'


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or a conversation, with its labels.

    Attributes:
        example: what is classified.
        labels: one; any number of a row that has a list of them.
        is_list: whether the row has a list.
    """

    example: "Text | Conversation"
    labels: tuple[str, ...]
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Similar:
    """A text with one that is similar, and perhaps one that is not.

    Attributes:
        texts: the anchor, the positive, and the negative of a triplet.
    """

    texts: tuple[str, ...]


Example = Conversation | Completion | Text | Exchange | Preference | OpenPrompt | Labelled | Similar


_COUNTS = (
    "rows", "used", "cut", "split", "not_rendered", "bad", "eval", "tokens", "tokens_cut", "loss_tokens",
)  # fmt: skip


_OF_PICTURES = ("used", "resized", "missing", "broken", "tokens")


def picture_counts(pictures: Mapping[str, int]) -> dict[str, int]:
    """The counts of pictures: used in an epoch, resized ones of these, missing, broken, and the
    tokens of those used.
    """
    return {name: pictures.get(name, 0) for name in _OF_PICTURES}


@dataclass
class SourceCounts:
    """The counts of one source's rows."""

    path: str
    weight: float = 1.0
    rows: int = 0
    used: int = 0
    cut: int = 0
    split: int = 0
    not_rendered: int = 0
    bad: int = 0
    eval: int = 0
    tokens: int = 0
    tokens_cut: int = 0
    loss_tokens: int = 0
    pictures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, object]:
        """The source's entry in data.json."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        dropped = dict(sorted(self.dropped.items()))
        pictures = {"pictures": picture_counts(self.pictures)} if self.pictures else {}
        return {"path": self.path, "weight": self.weight, **counts, **pictures, "dropped": dropped}


class Ledger:
    """The counts, and a list of all rows that were dropped or changed; the list is in a file, not
    in memory.
    """

    def __init__(self, notes: Path) -> None:
        """Starts a ledger whose list of rows is kept in the file `notes` until `write`."""
        self.sources: list[SourceCounts] = []
        self.first_bad = ""
        self._path = notes
        self._notes: IO[str] = notes.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._notes.close()

    def note(self, location: Place, what: str, why: str, *, parts: Sequence[str] = ()) -> None:
        """Records what happened to a row: bad, dropped, cut, split or not rendered; `parts` of it
        are in no token.
        """
        if what == "bad" and not self.first_bad:
            self.first_bad = f"{location}: {why}"
        entry = {"file": location.file, "line": location.number, "what": what, "why": why}
        entry |= {"parts": list(parts)} if parts else {}
        self._notes.write(json.dumps(entry, ensure_ascii=True) + "\n")

    @property
    def dropped(self) -> dict[str, int]:
        """The dropped rows of all sources, by reason."""
        return dict(sorted(sum((source.dropped for source in self.sources), Counter()).items()))

    def total(self) -> dict[str, int | dict[str, int]]:
        """The sums over all sources."""
        sums = {name: sum(getattr(source, name) for source in self.sources) for name in _COUNTS}
        pictures = sum((source.pictures for source in self.sources), Counter[str]())
        counted = {"pictures": picture_counts(pictures)} if pictures else {}
        return {**sums, **counted, "dropped": self.dropped}

    def write(self, path: Path) -> None:
        """Writes data.json to a new file: one line each for `sources` and `total`, then one for
        each row.
        """
        self._notes.flush()
        with path.open("w", encoding="utf-8") as out, self._path.open(encoding="utf-8") as notes:
            out.write(
                f'{{"schema": 1,\n"sources": {json.dumps([source.to_json() for source in self.sources])},\n'
            )
            out.write(f'"total": {json.dumps(self.total())},\n"rows": [\n')
            for number, line in enumerate(notes):
                out.write((",\n" if number else "") + line.rstrip("\n"))
            out.write("\n]}\n")


def read_counts(path: Path) -> "LedgerCounts":
    """`sources` and `total` of a ledger written by Ledger.write, without reading its rows, which
    may be millions.
    """
    with path.open(encoding="utf-8") as stream:
        head = "".join(islice(stream, 3))
    counts: LedgerCounts = json.loads(head.rstrip().removesuffix(",") + "}")
    return counts


def first_notes(path: Path, *, limit: int) -> "list[RowNote]":
    """The first dropped or changed rows of such a ledger."""
    with path.open(encoding="utf-8") as stream:
        lines = (line.strip().removesuffix(",") for line in islice(stream, 4, 4 + limit))
        return [json.loads(line) for line in lines if line.startswith("{")]


def unrendered_parts(path: Path, rows: Iterable[str]) -> dict[str, list[str]]:
    """For some rows, as `file:line` or `file#row`, the parts that are in no token, in words;
    without rows that have none.
    """
    shown = set(rows)
    parts: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as stream:
        for line in islice(stream, 4, None):
            if '"what": "not rendered"' not in line:
                continue
            note = json.loads(line.strip().removesuffix(","))
            for row in (f"{note['file']}:{note['line']}", f"{note['file']}#{note['line']}"):
                if row in shown:
                    parts[row] = note["parts"]
    return parts


def flat_total(total: Mapping[str, int | dict[str, int]]) -> dict[str, int]:
    """The total with `dropped` as a single number, and of pictures those used, for the plan."""
    flat = {name: sum(value.values()) if isinstance(value, dict) else value for name, value in total.items()}
    pictures = total.get("pictures")
    return flat | ({"pictures": pictures["used"]} if isinstance(pictures, dict) else {})


def grouped(items: Iterable[tuple[Item, int]], *, most: int) -> Iterator[list[Item]]:
    """Items with their sizes, in order, in groups of up to `most` in sum, and at least one item."""
    group: list[Item] = []
    total = 0
    for item, size in items:
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
