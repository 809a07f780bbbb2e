"""The pictures of prompts: decoded within the bounds of rows, and made into what the model gets."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.base.errors import DataError, UsageError
from unisono.base.files import expand, fault_of
from unisono.trainer.config.sections import PixelsSection
from unisono.trainer.data import PICTURE, PictureSource, RowError
from unisono.trainer.data.pictures.decoder import Broken, decode_all
from unisono.trainer.data.pictures.decoding import BadPictureError, decoding, read_picture_file, upright_rgb
from unisono.trainer.data.pictures.processor import PictureProcessor, fitted_size, need_pillow
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.plan.talk_messages import PICTURE_TAG, with_places


@dataclass(frozen=True)
class SeenPicture:
    """A picture as a model gets it.

    Attributes:
        name: for messages.
        image: of Pillow, upright, in RGB, within the bounds of the run.
        processor: of the model.
        tensors: as of `PictureProcessor.inputs`, by whether the prompt has several pictures.
    """

    name: str
    image: Any
    processor: PictureProcessor
    tensors: dict[bool, dict[str, torch.Tensor]]

    @classmethod
    def of(cls, source: PictureSource, processor: PictureProcessor, pixels: PixelsSection) -> "SeenPicture":
        """The picture of a source.

        Raises:
            BadPictureError: if it cannot be decoded.
            RowError: if the processor refuses it.
        """
        image = read_picture(source, pixels)
        return cls(source.name, image, processor, {False: dict(processor.inputs(image))})

    def seen(self, *, several: bool) -> dict[str, torch.Tensor]:
        """Its tensors in a prompt with one or several pictures."""
        several = several and self.processor.reads_rows
        if several not in self.tensors:
            self.tensors[several] = dict(self.processor.inputs(self.image, several=several))
        return self.tensors[several]


def expansions_of(pictures: Sequence[SeenPicture]) -> list[str]:
    """The text that takes the place of each picture of a prompt."""
    several = len(pictures) > 1
    return [one.processor.expansion(one.image.size, several=several) for one in pictures]


def sources_of(names: Sequence[str], *, where: str) -> tuple[PictureSource, ...]:
    """The pictures of files, each decoded once in a process with a limit of time and memory.

    Args:
        names: paths.
        where: for messages.

    Raises:
        DataError: if there is no such file.
        UsageError: if one cannot be used, or Pillow is missing.
    """
    if names:
        need_pillow(where)
    for name in names:
        fault = fault_of(expand(name), name)
        if fault is not None:
            raise DataError.of(fault.what, where=where, why=fault.why, fix=fault.fix)
    sources = tuple(PictureSource(str(expand(name).absolute()), None, name) for name in names)
    for source, decoded in zip(sources, decode_all(sources, processes=1), strict=True):
        if isinstance(decoded, Broken):
            raise unusable(source, decoded.why, where=where)
    return sources


def unusable(source: PictureSource, why: str, *, where: str) -> UsageError:
    """The error for a picture that cannot be used."""
    return UsageError.of(
        f"the picture {source.name} cannot be used", where=where, why=why, fix="use another picture"
    )


def read_picture(source: PictureSource, pixels: PixelsSection) -> Any:
    """The picture of Pillow, upright, in RGB, within the bounds of the training.

    Raises:
        BadPictureError: if it cannot be decoded.
    """
    data = source.data if source.data is not None else read_picture_file(Path(str(source.file)))
    with decoding(data) as image:
        upright = upright_rgb(image)
    size = fitted_size(upright.size, source, pixels)
    return upright if upright.size == size else upright.resize(size)


def see_file(
    source: PictureSource, processor: PictureProcessor, pixels: PixelsSection, *, where: str
) -> SeenPicture:
    """The picture of a file that could be decoded.

    Raises:
        UsageError: if it cannot be used any more, or the processor refuses it.
    """
    try:
        return SeenPicture.of(source, processor, pixels)
    except BadPictureError as error:
        raise unusable(source, str(error), where=where) from error
    except RowError as error:
        raise unusable(source, error.why, where=where) from error


def marked(text: str, count: int) -> str:
    """A message with PICTURE for each of its pictures: in the places of <image>, else before it."""
    return with_places(text, count).replace(PICTURE_TAG, PICTURE) if count else text


def with_expansions(text: str, expansions: Sequence[str], processor: PictureProcessor) -> str:
    """A rendered prompt with the tokens of its pictures instead of their placeholders.

    Raises:
        RowError: if the template did not write one placeholder for each, or the text itself has a
            token of pictures.
    """
    pieces = text.split(processor.placeholder)
    if len(pieces) - 1 != len(expansions):
        raise RowError(
            f"it has {len(pieces) - 1} × {processor.placeholder} for {len(expansions)} pictures",
            "write <image> where each picture belongs, and pass as many pictures",
        )
    for token in _tokens(processor):
        if any(token in piece for piece in pieces):
            raise RowError(f"its text has {token}, which stands for a part of a picture", "remove it")
    return pieces[0] + "".join(made + piece for made, piece in zip(expansions, pieces[1:], strict=True))


def inputs_of(
    pictures: Sequence[SeenPicture], processor: PictureProcessor, device: torch.device
) -> PictureInputs | None:
    """The pictures of a prompt for a forward; None if it has none."""
    tensors = [one.seen(several=len(pictures) > 1) for one in pictures]
    return PictureInputs.of(tensors, processor.image_ids, device)


def take_sent(
    messages: Sequence[Mapping[str, Any]], processor: PictureProcessor
) -> tuple[list[Mapping[str, Any]], list[PictureSource]]:
    """Messages of OpenAI's protocol with PICTURE for each part `image_url`, and the pictures.

    Raises:
        RowError: if one is not a data URL, is not in a message of the user, or a text has what
            stands for a picture.
    """
    pictures: list[PictureSource] = []
    taken: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [_taken_part(part, message["role"], pictures, processor) for part in content]
        elif isinstance(content, str):
            _refuse_marks(content, processor)
        taken.append({**message, "content": content})
    return taken, pictures


def _taken_part(part: Any, role: str, pictures: list[PictureSource], processor: PictureProcessor) -> Any:
    if not isinstance(part, dict) or part.get("type") != "image_url":
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            _refuse_marks(part["text"], processor)
        return part
    if role != "user":
        raise RowError(f"a message of the role {role} has a picture", "send it in a message of the user")
    pictures.append(_of_data_url(part.get("image_url"), f"picture {len(pictures) + 1}"))
    return {"type": "text", "text": PICTURE}


def _of_data_url(value: Any, name: str) -> PictureSource:
    url = value.get("url") if isinstance(value, dict) else None
    if not isinstance(url, str):
        raise RowError(f"{name} has no URL", 'write {"type": "image_url", "image_url": {"url": "data:…"}}')
    if value.get("detail") not in (None, "auto", "high"):
        raise RowError(
            f"the detail of {name} is neither auto nor high", "omit it, and send a smaller picture"
        )
    head, comma, body = url.partition(",")
    if not (head.lower().startswith("data:") and head.lower().endswith(";base64") and comma):
        raise RowError(f"{name} is not a data URL in base64", "write data:image/png;base64,…")
    try:
        return PictureSource(None, base64.b64decode(body, validate=True), name)
    except (binascii.Error, ValueError):
        raise RowError(f"{name} is not valid base64", "encode its bytes again") from None


def _refuse_marks(text: str, processor: PictureProcessor) -> None:
    if PICTURE in text:
        raise RowError(f"a text has the character U+{ord(PICTURE):04X}", "remove it")
    token = next((token for token in (processor.placeholder, *_tokens(processor)) if token in text), None)
    if token is not None:
        raise RowError(f"a text has {token}, which stands for a picture", "remove it")


def _tokens(processor: PictureProcessor) -> list[str]:
    """The tokens of which each stands for a feature of a picture."""
    tokens: list[str] = processor.processor.tokenizer.convert_ids_to_tokens(list(processor.image_ids))
    return tokens
