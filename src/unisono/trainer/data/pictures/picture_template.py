"""Chat templates of vision-language models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from unisono.trainer.data import PICTURE, Messages, RowError
from unisono.trainer.data.template import ChatTemplate

_QUESTION, _ANSWER = "unisonoquestion", "unisonoanswer"


@dataclass(frozen=True)
class PictureTemplate(ChatTemplate):
    """A chat template that writes a placeholder for each PICTURE in the contents of messages.

    Most templates read contents as lists of parts, some as text, in which the placeholder itself is
    written then.

    Attributes:
        placeholder: of the processor.
    """

    placeholder: str = ""

    def as_read(self, messages: Messages) -> Messages:
        """The messages with their contents as the template reads them."""
        if not any(PICTURE in str(message.get("content", "")) for message in messages) and self._reads_text:
            return messages
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, object]) -> Mapping[str, object]:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        if not self._reads_parts:
            return {**message, "content": content.replace(PICTURE, self.placeholder)}
        return {**message, "content": parts_of(content)}

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether it writes one placeholder for a part of the type image, and the text beside
        it.
        """
        text = self._tried(parts_of(f"{PICTURE}{_QUESTION}"))
        return text is not None and text.count(self.placeholder) == 1 and _QUESTION in text

    @cached_property
    def _reads_text(self) -> bool:
        """Whether it writes a content of text as it does one of parts."""
        as_text = self._tried(_QUESTION)
        return as_text is not None and (not self._reads_parts or as_text == self._tried(parts_of(_QUESTION)))

    def _tried(self, content: object) -> str | None:
        answer = parts_of(_ANSWER) if isinstance(content, list) else _ANSWER
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        try:
            text: str = self._bounded(
                lambda: self.tokenizer.apply_chat_template(messages, chat_template=self.text, tokenize=False)
            )
        except RowError:
            return None
        return text


def parts_of(content: str) -> list[dict[str, str]]:
    """A content as a list of parts: text, and pictures at their places."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(PICTURE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def with_placeholders(
    template: ChatTemplate | None,
    *,
    own: str | None,
    placeholder: str,
    tokenizer: Any,
    stops: Sequence[str] = (),
) -> PictureTemplate | None:
    """The template as one for pictures; None if there is none.

    Args:
        template: of the config or the tokenizer.
        own: the processor's, which goes before the tokenizer's.
        placeholder: of the processor.
        tokenizer: of transformers.
        stops: known stop tokens.
    """
    if own is not None and (template is None or template.text is None):
        text = None if own == getattr(tokenizer, "chat_template", None) else own
        origin = "the tokenizer's own" if text is None else "the processor's own"
        return PictureTemplate(tokenizer, text, origin, tuple(stops), placeholder)
    if template is None:
        return None
    values = {field.name: getattr(template, field.name) for field in fields(template)}
    return PictureTemplate(**values, placeholder=placeholder)
