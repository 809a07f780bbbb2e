"""Chat templates of vision-language models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unisono.trainer.data import PICTURE, Messages, RowError
from unisono.trainer.data.template import ChatTemplate

_QUESTION, _ANSWER = "unisonoquestion", "unisonoanswer"


@dataclass(frozen=True)
class PictureTemplate(ChatTemplate):
    """A chat template that writes a placeholder for each PICTURE in the contents of messages.

    Most templates read contents as lists of parts, some as text, in which the mark is written then.

    Attributes:
        placeholder: of the processor.
        mark: what stands for a picture: the placeholder, with the tokens that the model's own
            template writes around it.
    """

    placeholder: str = ""
    mark: str = ""

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
            return {**message, "content": content.replace(PICTURE, self.mark or self.placeholder)}
        return {**message, "content": parts_of(content)}

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether it writes one placeholder for a part of the type image, and the text beside
        it.
        """
        text = self.tried(parts_of(f"{PICTURE}{_QUESTION}"))
        return text is not None and text.count(self.placeholder) == 1 and _QUESTION in text

    @cached_property
    def _reads_text(self) -> bool:
        """Whether it writes a content of text as it does one of parts."""
        as_text = self.tried(_QUESTION)
        return as_text is not None and (not self._reads_parts or as_text == self.tried(parts_of(_QUESTION)))

    def tried(self, content: object) -> str | None:
        """Its text for a question with a content and a short answer; None if it refuses it."""
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
    of_processor: str | None,
    placeholder: str,
    tokenizer: Any,
    stops: Sequence[str] = (),
) -> PictureTemplate | None:
    """The template as one for pictures; None if there is none.

    Args:
        template: of the config or the tokenizer.
        of_processor: the processor's, which goes before the tokenizer's.
        placeholder: of the processor.
        tokenizer: of transformers.
        stops: known stop tokens.
    """
    if of_processor is not None and (template is None or template.text is None):
        text = None if of_processor == getattr(tokenizer, "chat_template", None) else of_processor
        origin = "the tokenizer's own" if text is None else "the processor's own"
        return PictureTemplate(tokenizer, text, origin, tuple(stops), placeholder)
    if template is None:
        return None
    values = {name: getattr(template, name) for name in ("tokenizer", "text", "origin", "known_stops")}
    mark = picture_mark(of_processor, placeholder=placeholder, tokenizer=tokenizer)
    return PictureTemplate(**values, placeholder=placeholder, mark=mark)


def picture_mark(of_processor: str | None, *, placeholder: str, tokenizer: Any) -> str:
    """What the model's own chat template writes for a picture, without spaces around it, e.g.
    `<|vision_start|><|image_pad|><|vision_end|>`; the placeholder if that cannot be seen.

    Args:
        of_processor: the processor's template; None: the tokenizer's.
        placeholder: of the processor.
        tokenizer: of transformers.
    """
    text = of_processor if of_processor is not None else getattr(tokenizer, "chat_template", None)
    if not isinstance(text, str):
        return placeholder
    template = PictureTemplate(tokenizer, text, "the model's own", placeholder=placeholder)
    whole, bare = (template.tried(parts_of(one + _QUESTION)) for one in (PICTURE, ""))
    if whole is None or bare is None or whole.count(placeholder) != 1 or _QUESTION not in bare:
        return placeholder
    before = bare[: bare.index(_QUESTION)]
    text = whole[len(before) : whole.index(_QUESTION)] if whole.startswith(before) else ""
    return text.strip() if placeholder in text else placeholder
