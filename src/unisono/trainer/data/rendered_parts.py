"""Whether a chat template renders every part of a conversation: messages, thoughts, tool calls and
tools.

A template is a program that branches on what it gets: it may know no role `developer`, drop the
thoughts of earlier answers, or the text beside a tool call. So each part is looked for in each
rendering:

1. Conversations with the same shape (roles, and which parts each message has) are usually rendered
   as the same literal texts with the parts between them. If a rendering is equal to that, every
   part is in it. This takes a microsecond.
2. Otherwise a mark that occurs nowhere else is added to each part, and the conversation is rendered
   again: parts whose mark is missing are lost. If none is, the literal texts are kept for the next
   rows of this shape.

Pure but for the rendering, which the caller passes.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unisono.base.text import one_line
from unisono.trainer.data import Conversation, Message, ToolCall
from unisono.trainer.data.formats import THOUGHT_KEYS

Kind = Literal["content", "thought", "call", "tools"]
Render = Callable[[list[Message], list[Any] | None], str | None]
"""Renders messages with tools; None if the template refuses them."""

THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)

_MOST_SHAPES, _MOST_LAYOUTS = 1024, 8
_QUOTED = 100
_LONG = 16  # characters; a longer text does not stand in a rendering by chance
_END_TAGS = re.compile(r"(?:\s|</[^<>\s]{1,64}>)*\Z")
_WRITTEN: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""How templates write a text: as it is, without surrounding whitespace, or within JSON."""


@dataclass(frozen=True, slots=True)
class RenderedPart:
    """A part of a conversation.

    Attributes:
        message: its index; -1 for the tools.
        role: of the message; "" for the tools.
        text: the part itself, or for calls and tools a name or a string in them.
    """

    message: int
    role: str
    kind: Kind
    text: str

    def __str__(self) -> str:
        """The part for people: "the thought of message 2 (assistant)"."""
        if self.kind == "tools":
            return f"a tool ({one_line(repr(self.text), limit=40)})"
        whose = f"message {self.message + 1} ({one_line(self.role, limit=20)})"
        if self.kind == "content":
            return whose
        what = (
            "the thought"
            if self.kind == "thought"
            else f"a tool call ({one_line(repr(self.text), limit=40)})"
        )
        return f"{what} of {whose}"

    @property
    def quoted(self) -> str:
        """The name of the part, with the beginning of its text."""
        return f"{self}: {one_line(self.text, limit=_QUOTED)}"


@dataclass(frozen=True, slots=True)
class _Layout:
    """A rendering as literal texts with parts between them.

    Attributes:
        literals: one more than slots.
        slots: for each, the part's index, and how it is written.
    """

    literals: tuple[str, ...]
    slots: tuple[tuple[int, int], ...]

    def fits(self, parts: Sequence[RenderedPart], text: str) -> bool:
        """Whether a rendering is exactly this with these parts."""
        pieces = [self.literals[0]]
        for (number, way), literal in zip(self.slots, self.literals[1:], strict=True):
            pieces += (_WRITTEN[way](parts[number].text), literal)
        return "".join(pieces) == text


class RenderedParts:
    """Finds the parts that one template does not render."""

    def __init__(self, render: Render) -> None:
        """Knows no shape yet."""
        self._render = render
        self._layouts: OrderedDict[object, list[_Layout]] = OrderedDict()
        self._ways: dict[tuple[str, Kind], int] = {}

    def lost(self, conversation: Conversation, text: str) -> list[RenderedPart]:
        """The parts of a conversation that are not in its rendering.

        Args:
            conversation: whose messages have string contents.
            text: its rendering.
        """
        parts, shape = _parts_of(conversation)
        known = self._layouts.get(shape)
        if known is not None and any(layout.fits(parts, text) for layout in known):
            return []
        marks = _Marks(free_suffix(text, "zq"))
        marked = self._render(*marks.conversation(conversation))
        if marked is None:  # the template refuses marks
            return [part for part in parts if part.text.strip() not in text]
        seen = {int(number) for number in marks.pattern.findall(marked)}
        lost = [part for number, part in enumerate(parts) if number not in seen]
        lost = [part for part in lost if not _stands_alone(part, parts, text)]
        if not lost:
            self._learn(shape, parts, text, self._layout_of(parts, marked, marks.pattern))
        return lost

    def _learn(self, shape: object, parts: list[RenderedPart], text: str, layout: _Layout | None) -> None:
        """Keeps the layout of a rendering, if it is known."""
        if layout is None or not layout.fits(parts, text):
            return
        known = self._layouts.setdefault(shape, [])
        known.insert(0, layout)
        del known[_MOST_LAYOUTS:]
        self._layouts.move_to_end(shape)
        if len(self._layouts) > _MOST_SHAPES:
            self._layouts.popitem(last=False)

    def _layout_of(self, parts: list[RenderedPart], marked: str, pattern: re.Pattern[str]) -> _Layout | None:
        """The layout of a marked rendering; None if a part stands there in an unknown way."""
        literals: list[str] = []
        slots: list[tuple[int, int]] = []
        first = 0
        for mark in pattern.finditer(marked):
            number = int(mark[1])
            written = self._way(parts[number], marked[first : mark.start()], marked[mark.end() :])
            if written is None:
                return None
            way, head, tail = written
            literals.append(marked[first : mark.start() - head])
            slots.append((number, way))
            first = mark.end() + tail
        return _Layout((*literals, marked[first:]), tuple(slots))

    def _way(self, part: RenderedPart, before: str, after: str) -> tuple[int, int, int] | None:
        """How a part is written around its mark, and its characters before and behind it; None if
        that is unknown.

        If several ways give the same, it is the one in which such parts were written before.
        """
        offset = _mark_offset(part.text)
        fitting = [
            (way, len(head), len(tail))
            for way, (head, tail) in enumerate(_written_halves(part.text[:offset], part.text[offset:]))
            if before.endswith(head) and after.startswith(tail)
        ]
        longest = [one for one in fitting if one[1:] == max(one[1:] for one in fitting)]
        if not longest:
            return None
        usual = self._ways.get((part.role, part.kind))
        if len({_WRITTEN[way](part.text) for way in range(len(_WRITTEN))}) > 1:
            self._ways[part.role, part.kind] = longest[0][0]
        return next((one for one in longest if one[0] == usual), longest[0])


def free_suffix(text: str, prefix: str) -> str:
    """A suffix with which marks, a prefix and a number before it, do not occur in a text."""
    suffix = "qz"
    while re.search(rf"{prefix}\d+{suffix}", text):
        suffix = "x" + suffix
    return suffix


def _written_halves(head: str, tail: str) -> list[tuple[str, str]]:
    """The two halves of a text in each of the ways."""
    _, _, json_of, ascii_json_of = _WRITTEN
    return [
        (head, tail),
        (head.lstrip(), tail.rstrip()),
        (json_of(head), json_of(tail)),
        (ascii_json_of(head), ascii_json_of(tail)),
    ]


def _mark_offset(text: str) -> int:
    """Where a text is marked: before whitespace and closing tags at its end, which templates look
    for; at the end, if it has nothing else.
    """
    end = _END_TAGS.search(text)
    assert end is not None
    return end.start() or len(text.rstrip())


def _stands_alone(part: RenderedPart, parts: Sequence[RenderedPart], text: str) -> bool:
    """Whether a text that is too long to stand there by chance is in the rendering as often as in
    the parts.

    A template may compare a content, which a mark changes.
    """
    content = part.text.strip()
    return len(content) >= _LONG and text.count(content) >= sum(other.text.count(content) for other in parts)


def _parts_of(conversation: Conversation) -> tuple[list[RenderedPart], object]:
    """The parts in the order of their marks, and the shape."""
    parts: list[RenderedPart] = []
    shape: list[object] = []
    for index, message in enumerate(conversation.messages):
        role, content = message["role"], message["content"]
        if len(message) == 2 and "<think>" not in content:
            if content.strip():
                parts.append(RenderedPart(index, role, "content", content))
                shape.append(role)
            else:
                shape.append((role, ""))
            continue
        of_message = [RenderedPart(index, role, kind, text) for kind, text in _Marks.texts(message)]
        parts += of_message
        shape.append((role, *(part.kind for part in of_message), *sorted(message)))
    if conversation.tools is not None:
        parts += [RenderedPart(-1, "", "tools", text) for text in _Marks.texts_of_tools(conversation.tools)]
        shape.append(json.dumps(conversation.tools, sort_keys=True, default=str))
    return parts, tuple(shape)


class _Marks:
    """Adds a mark with the number of its part at the end of each part; without marks it collects
    the parts, so that both have one order.
    """

    def __init__(self, suffix: str = "", collected: list[tuple[Kind, str]] | None = None) -> None:
        """Marks with a suffix; or, with `collected`, which gets the parts, none."""
        self.pattern = re.compile(rf"zq(\d+){suffix}")
        self._suffix = suffix
        self._collected = collected
        self._count = 0

    def conversation(self, conversation: Conversation) -> tuple[list[Message], list[Any] | None]:
        """The messages and the tools with marks."""
        messages = [self.message(message) for message in conversation.messages]
        return messages, None if conversation.tools is None else self.tools(conversation.tools)

    @classmethod
    def texts(cls, message: Message) -> list[tuple[Kind, str]]:
        """The parts of a message."""
        parts: list[tuple[Kind, str]] = []
        cls(collected=parts).message(message)
        return parts

    @classmethod
    def texts_of_tools(cls, tools: list[Any]) -> list[str]:
        """The parts of tools."""
        parts: list[tuple[Kind, str]] = []
        cls(collected=parts).tools(tools)
        return [text for _, text in parts]

    def message(self, message: Message) -> Message:
        """The message with marks."""
        marked = message.copy()
        for key in THOUGHT_KEYS:
            if isinstance(thought := message.get(key), str):
                marked[key] = self._text("thought", thought)
        marked["content"] = self._content(message["content"])
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return marked

    def tools(self, tools: list[Any]) -> list[Any]:
        """The tools with marks in names and descriptions of functions and of their parameters."""
        return [self._described(tool) for tool in tools]

    def _content(self, content: str) -> str:
        pieces = THINK.split(content)  # text, thought, text …
        for at, piece in enumerate(pieces):
            pieces[at] = self._text("thought" if at % 2 else "content", piece)
        return "".join(f"<think>{piece}</think>" if at % 2 else piece for at, piece in enumerate(pieces))

    def _call(self, call: ToolCall) -> ToolCall:
        function = call["function"]
        arguments = self._leaves("call", function.get("arguments"))
        name = self._text("call", function["name"])
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _leaves(self, kind: Kind, value: Any) -> Any:
        """A value with marks in its strings."""
        if isinstance(value, str):
            return self._text(kind, value)
        if isinstance(value, dict):
            return {name: self._leaves(kind, inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._leaves(kind, inner) for inner in value]
        return value

    def _described(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._described(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        return {
            name: self._text("tools", inner)
            if name in ("name", "description") and isinstance(inner, str)
            else self._described(inner)
            for name, inner in value.items()
        }

    def _text(self, kind: Kind, text: str) -> str:
        if not text.strip():
            return text
        number, self._count = self._count, self._count + 1
        if self._collected is not None:
            self._collected.append((kind, text))
            return text
        offset = _mark_offset(text)
        return f"{text[:offset]}zq{number}{self._suffix}{text[offset:]}"
