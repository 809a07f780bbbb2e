"""Chat templates of vision-language models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from unisono.trainer.data import MEDIA_MARK, PICTURE, VIDEO, Messages, RowError
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.template import ChatTemplate

_QUESTION, _ANSWER = "unisonoquestion", "unisonoanswer"


@dataclass(frozen=True)
class PictureTemplate(ChatTemplate):
    """A chat template that writes a placeholder for each PICTURE and VIDEO in the contents of
    messages.

    Most templates read contents as lists of parts, some as text, in which the marks are written
    then.

    Attributes:
        marks: what stands for PICTURE, and for VIDEO if videos are read.
    """

    marks: "Mapping[str, MediumMark]" = field(default_factory=dict)

    def as_read(self, messages: Messages) -> Messages:
        """The messages with their contents as the template reads them."""
        if self._reads_text and not any(
            MEDIA_MARK.search(str(message.get("content", ""))) for message in messages
        ):
            return messages
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, object]) -> Mapping[str, object]:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        reads_parts = self.reads_part(PICTURE)
        for medium, mark in self.marks.items():
            if not (reads_parts and self.reads_part(medium)):
                content = content.replace(medium, mark.text)
        return {**message, "content": parts_of(content) if reads_parts else content}

    def reads_part(self, medium: str) -> bool:
        """Whether it writes one placeholder for a part of the type image (PICTURE) or video
        (VIDEO), and the text beside it.
        """
        return self._part_read(medium)

    @cached_property
    def _part_read(self) -> Callable[[str], bool]:
        def is_read(medium: str) -> bool:
            text = self.tried(parts_of(f"{medium}{_QUESTION}"))
            return text is not None and text.count(self.marks[medium].placeholder) == 1 and _QUESTION in text

        return cache(is_read)

    @cached_property
    def _reads_text(self) -> bool:
        """Whether it writes a content of text as it does one of parts."""
        as_text = self.tried(_QUESTION)
        as_parts = self.tried(parts_of(_QUESTION)) if self.reads_part(PICTURE) else as_text
        return as_text is not None and as_text == as_parts

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
    """A content as a list of parts: text, and pictures and videos at their places."""
    types = {PICTURE: "image", VIDEO: "video"}
    parts = [
        {"type": types[piece]} if piece in types else {"type": "text", "text": piece}
        for piece in MEDIA_MARK.split(content)
        if piece
    ]
    return parts or [{"type": "text", "text": ""}]


@dataclass(frozen=True, slots=True)
class MediumMark:
    """What is written for a picture or a video.

    Attributes:
        placeholder: of the processor.
        text: the placeholder, with the tokens that the model's own template writes around it.
    """

    placeholder: str
    text: str

    def filled(self, expansion: str) -> str:
        """The text with an expansion in place of the placeholder. What an expansion has itself, for
        each part of a video (Qwen3-VL), is not written around it again, as in LLaMA-Factory;
        transformers does that since version 5 where a chat template has it.
        """
        around = [part for part in self.text.split(self.placeholder) if part]
        has_it = bool(around) and all(part in expansion for part in around)
        return expansion if has_it else self.text.replace(self.placeholder, expansion)


def with_placeholders(
    template: ChatTemplate | None,
    *,
    processor: PictureProcessor,
    tokenizer: Any,
    stops: Sequence[str] = (),
    uses_own: bool = True,
) -> PictureTemplate | None:
    """The template as one for pictures; None if there is none.

    Args:
        template: of the config or the tokenizer.
        processor: of the model.
        tokenizer: of transformers.
        stops: known stop tokens.
        uses_own: whether the processor's template goes before the tokenizer's.
    """
    marks = media_marks(processor)
    if uses_own and processor.template is not None and (template is None or template.text is None):
        is_same = processor.template == getattr(tokenizer, "chat_template", None)
        text = None if is_same else processor.template
        origin = "the tokenizer's own" if is_same else "the processor's own"
        return PictureTemplate(tokenizer, text, origin, tuple(stops), marks)
    if template is None:
        return None
    values = {name: getattr(template, name) for name in ("tokenizer", "text", "origin", "known_stops")}
    return PictureTemplate(**values, marks=marks)


def media_marks(processor: PictureProcessor) -> dict[str, MediumMark]:
    """What the model's own chat template writes for PICTURE, and for VIDEO if the processor reads
    videos, without spaces around it, e.g. `<|vision_start|><|image_pad|><|vision_end|>`. Where that
    cannot be seen it is the placeholder; of a video it is that of a picture with the other
    placeholder.
    """
    picture = processor.placeholder
    around = _around(PICTURE, picture, processor) or picture
    marks = {PICTURE: MediumMark(picture, around)}
    video = processor.video_placeholder
    if video:
        text = _around(VIDEO, video, processor) or around.replace(picture, video)
        marks[VIDEO] = MediumMark(video, text)
    return marks


def _around(medium: str, placeholder: str, processor: PictureProcessor) -> str:
    """What the model's own chat template writes for a medium; empty if that cannot be seen."""
    tokenizer = processor.processor.tokenizer
    text = processor.template
    text = text if text is not None else getattr(tokenizer, "chat_template", None)
    if not isinstance(text, str):
        return ""
    template = PictureTemplate(tokenizer, text, "the model's own")
    whole, bare = (template.tried(parts_of(one + _QUESTION)) for one in (medium, ""))
    if whole is None or bare is None or whole.count(placeholder) != 1 or _QUESTION not in bare:
        return ""
    before = bare[: bare.index(_QUESTION)]
    text = whole[len(before) : whole.index(_QUESTION)] if whole.startswith(before) else ""
    return text.strip() if placeholder in text else ""
