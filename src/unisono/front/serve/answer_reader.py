"""Separates an answer, as it comes, into thoughts, texts and calls of tools. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.trainer.plan.talk_messages import THOUGHT_MARKS, Thought
from unisono.trainer.plan.tool_calls import CalledTool, ToolCallReader

_OPENING, _CLOSING = THOUGHT_MARKS


@dataclass(frozen=True, slots=True)
class ThoughtText:
    """A piece of what a model thinks before its answer."""

    text: str


AnswerPart = ThoughtText | str | CalledTool


class AnswerReader:
    """Reads one answer."""

    def __init__(self, thought: Thought, calls: ToolCallReader | None) -> None:
        """A reader of one answer.

        Args:
            thought: whether it may begin with a thought.
            calls: separates texts and calls; None: it has no calls.
        """
        self._thought = thought
        self._calls = calls
        self._held = ""
        self._has_begun = False  # the thought has text
        self._is_after_thought = False  # spaces before the text do not count

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return 0 if self._calls is None else self._calls.calls

    def push(self, text: str) -> Iterator[AnswerPart]:
        """What is certain with this piece of the answer."""
        rest = text
        if self._thought == "possible":
            self._held, rest = self._held + rest, ""
            begun = self._held.lstrip()
            if begun.startswith(_OPENING):
                self._thought, rest, self._held = "open", begun.removeprefix(_OPENING), ""
            elif not _OPENING.startswith(begun):
                self._thought, rest, self._held = "none", self._held, ""
        if self._thought == "open":
            self._held, rest = self._held + rest, ""
            thought, mark, after = self._held.partition(_CLOSING)
            if mark:
                self._held = ""
                yield from self._think(thought.rstrip())
                self._thought, self._is_after_thought, rest = "none", True, after
            else:
                kept = _certain(self._held)
                yield from self._think(self._held[:kept])
                self._held = self._held[kept:]
        yield from self._say(rest)

    def close(self) -> Iterator[AnswerPart]:
        """The rest, after the last piece."""
        held, self._held = self._held, ""
        if self._thought == "open":
            yield from self._think(held.rstrip())
        else:
            yield from self._say(held)
        if self._calls is not None:
            yield from self._calls.close()

    def _think(self, text: str) -> Iterator[AnswerPart]:
        text = text if self._has_begun else text.lstrip()
        if text:
            self._has_begun = True
            yield ThoughtText(text)

    def _say(self, text: str) -> Iterator[AnswerPart]:
        if self._is_after_thought:
            text = text.lstrip()
            self._is_after_thought = not text
        if not text:
            return
        if self._calls is None:
            yield text
        else:
            yield from self._calls.push(text)


def _certain(text: str) -> int:
    """The length of a thought without spaces at its end and what may begin the mark behind it."""
    length = len(text)
    overlap = next((n for n in range(len(_CLOSING) - 1, 0, -1) if text.endswith(_CLOSING[:n])), 0)
    return len(text[: length - overlap].rstrip())
