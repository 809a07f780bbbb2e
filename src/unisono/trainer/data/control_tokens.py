"""Control tokens of a tokenizer in the texts of rows: a user who writes `<|im_end|>` ends a turn,
unless the text is escaped.

To escape one, it is replaced by a mark before the template renders the row, and put back
afterwards; its characters are then encoded as text. Where a tokenizer has added tokens, it encodes
the text before and behind each of them separately, so this changes no other token.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from unisono.base.errors import DataError
from unisono.base.text import one_line
from unisono.trainer.data import Conversation, RowError
from unisono.trainer.data.formats import all_text
from unisono.trainer.data.rendered_parts import free_suffix

Span = tuple[int, int]
_OF_THOUGHTS = ("<think>", "</think>")  # rows write them on purpose


class Restored(NamedTuple):
    """A rendering with the escaped control tokens in their places.

    Attributes:
        spans: the given ones, in this text.
        escaped: begin and end of each control token that is text.
    """

    text: str
    spans: list[Span]
    escaped: list[Span]


ControlTokensMode = Literal["keep", "escape", "bad"]
"""A value of `data.control_tokens`."""


def refuse_slow(tokenizer: Any) -> None:
    """Refuses tokenizers that cannot read control tokens as text.

    Raises:
        DataError: for a tokenizer in Python.
    """
    if not tokenizer.is_fast:
        raise DataError.of(
            "control tokens cannot be escaped with this tokenizer",
            where="data.control_tokens",
            why="it has no tokenizer.json, and a tokenizer in Python reads them wherever they stand",
            fix="set it to keep or bad, or use a tokenizer with a tokenizer.json",
        )


def refuse_control_tokens(token: str | None) -> None:
    """Refuses a row for its control token.

    Raises:
        RowError: if there is one.
    """
    if token is not None:
        raise RowError(
            f"its text has the control token {one_line(token, limit=40)}",
            "remove it, or set data.control_tokens: escape, which reads it as text",
        )


class ControlTokens:
    """Finds the control tokens of a tokenizer in texts."""

    def __init__(self, tokenizer: Any) -> None:
        names = {str(token) for token in tokenizer.all_special_tokens}
        names |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest = sorted(names - {"", *_OF_THOUGHTS}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest))) if longest else None

    def first_in(self, texts: Sequence[str]) -> str | None:
        """The first control token in some texts; None if there is none."""
        if self._pattern is not None:
            for text in texts:
                match = self._pattern.search(text)
                if match is not None:
                    return match[0]
        return None

    def spans_in(self, text: str) -> list[Span]:
        """Begin and end of each control token in a text."""
        return [] if self._pattern is None else [match.span() for match in self._pattern.finditer(text)]

    def hidden(self, conversation: Conversation) -> "Hidden":
        """The conversation with a mark for each control token in its messages."""
        hidden = Hidden(all_text(conversation))
        assert self._pattern is not None
        pattern = self._pattern

        def hide(text: str) -> str:
            return pattern.sub(lambda match: hidden.mark(match[0]), text)

        messages = [
            message | _mapped({name: value for name, value in message.items() if name != "role"}, hide)
            for message in conversation.messages
        ]
        hidden.conversation = Conversation(messages, conversation.tools)
        return hidden


class Hidden:
    """A conversation with marks for its control tokens.

    Attributes:
        conversation: with the marks.
    """

    conversation: Conversation

    def __init__(self, text: str) -> None:
        """Makes marks that do not occur in the text of the conversation."""
        self._tokens: list[str] = []
        self._end = free_suffix(text, "zqk")

    def mark(self, token: str) -> str:
        """The mark of the next control token."""
        self._tokens.append(token)
        return f"zqk{len(self._tokens) - 1}{self._end}"

    def restored(self, text: str, spans: Sequence[Span]) -> Restored:
        """A rendering with the control tokens in their places again; `spans` are some in it."""
        pieces: list[str] = []
        escaped: list[Span] = []
        moved: list[tuple[int, int]] = [(0, 0)]  # from here on, so many characters more
        first = grown = 0
        for mark in re.finditer(rf"zqk(\d+){self._end}", text):
            token = self._tokens[int(mark[1])]
            pieces += (text[first : mark.start()], token)
            escaped.append((mark.start() + grown, mark.start() + grown + len(token)))
            grown += len(token) - len(mark[0])
            moved.append((mark.end(), grown))
            first = mark.end()
        pieces.append(text[first:])

        def offset(at: int) -> int:
            return at + max((one for one in moved if one[0] <= at), key=lambda one: one[0])[1]

        return Restored("".join(pieces), [(offset(first), offset(end)) for first, end in spans], escaped)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    if isinstance(value, dict):
        return {name: _mapped(inner, change) for name, inner in value.items()}
    return value
