"""Boxes in the text of rows, as ms-swift writes them: `<ref-object>` and `<bbox>` in messages, and
a column `objects` with what they stand for. Each family has a form of its own.

- `ref`: names, one for each `<ref-object>`
- `bbox`: points [x, y] or boxes [x1, y1, x2, y2], one for each `<bbox>`
- `bbox_type`: real, pixels of the picture as it is in the file; or norm1, shares from 0 to 1
- `image_id`: the picture of each box, from 0; without it the first one

Forms are those of ms-swift 4 (swift/template/base.py, templates/qwen.py, templates/internvl.py).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from unisono.base.text import one_line
from unisono.trainer.data import (
    BOX,
    REF,
    Box,
    Conversation,
    Example,
    Exchange,
    Message,
    OpenPrompt,
    PictureSource,
    Preference,
    RowError,
    RowObjects,
    Turn,
)
from unisono.trainer.data.pictures.processor import named_class
from unisono.trainer.data.pictures.store import PictureStore

TAGS = {"<ref-object>": REF, "<bbox>": BOX}
"""What ms-swift writes in texts, and what stands there until the pictures are decoded."""
BoxForm = Literal["tokens", "list"]
_SHOWN = 60
_OUTSIDE = 1.0  # pixels beyond the picture: of a box that was rounded


def read_objects(value: object) -> RowObjects | None:
    """What a row's column `objects` holds; None if it is none of ms-swift.

    Raises:
        RowError: if a part of it is not valid.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, dict) or not ("ref" in value or "bbox" in value):
        return None
    refs, boxes = _listed(value, "ref"), _listed(value, "bbox")
    kind = value.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise RowError(f"bbox_type in objects is {one_line(repr(kind), limit=_SHOWN)}", "write real or norm1")
    pictures = _listed(value, "image_id") or [0] * len(boxes)
    if len(pictures) != len(boxes):
        raise RowError(
            f"objects has {len(boxes)} in bbox and {len(pictures)} in image_id", "write one for each box"
        )
    if not all(isinstance(ref, str) for ref in refs):
        raise RowError("ref in objects has a value that is not text", "write names")
    return RowObjects(
        tuple(map(str, refs)),
        tuple(_box(box, picture) for box, picture in zip(boxes, pictures, strict=True)),
        is_share=kind == "norm1",
    )


def _listed(objects: Mapping[str, Any], key: str) -> list[Any]:
    value = objects.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError(f"{key} in objects is {one_line(repr(value), limit=_SHOWN)}", "write a list")
    return value


def _box(box: object, picture: object) -> Box:
    numbers = box if isinstance(box, list) and len(box) in (2, 4) else []
    if not numbers or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        raise RowError(
            f"a box in objects is {one_line(repr(box), limit=_SHOWN)}", "write [x1, y1, x2, y2] or [x, y]"
        )
    if not isinstance(picture, int) or picture < 0:
        raise RowError(
            f"image_id in objects is {one_line(repr(picture), limit=_SHOWN)}",
            "write the number of a picture of the row, from 0",
        )
    return Box(tuple(map(float, numbers)), picture)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a family writes boxes.

    Attributes:
        ref: a name, with its tokens.
        box: coordinates, with its tokens.
        tokens: that the tokenizer must have.
        in_pixels: whether coordinates are pixels of the picture as the model gets it; else
            thousandths of its sides.
    """

    ref: str
    box: Callable[[Sequence[int]], str]
    tokens: tuple[str, ...]
    in_pixels: bool = False


def _points(box: Sequence[int]) -> str:
    return ",".join(f"({x},{y})" for x, y in zip(box[::2], box[1::2], strict=True))


_QWEN = _Form(
    "<|object_ref_start|>{}<|object_ref_end|>",
    lambda box: f"<|box_start|>{_points(box)}<|box_end|>",
    ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
)
FORMS = {
    "Qwen2VLProcessor": _QWEN,
    "Qwen2_5_VLProcessor": replace(_QWEN, in_pixels=True),
    "Qwen3VLProcessor": _QWEN,
    "InternVLProcessor": _Form(
        "<ref>{}</ref>",
        lambda box: f"<box>[{list(box)}]</box>",
        ("<ref>", "</ref>", "<box>", "</box>"),
    ),
}
"""By the class of the processor."""


def with_boxes(example: Example, store: PictureStore, form: BoxForm) -> Example:
    """The example with its names and boxes as the model's family writes them.

    Args:
        example: its pictures are decoded.
        store: that has them.
        form: with the tokens of the family, or as a list `[x1, y1, x2, y2]` and the bare name.

    Raises:
        RowError: if a box is not in its picture, or the family has no form of boxes that is known.
    """
    if isinstance(example, Preference):
        answers = [with_boxes(answer, store, form) for answer in example.answers]
        return replace(example, answers=answers)  # type: ignore[arg-type]  # conversations, as before
    if not isinstance(example, Conversation | Exchange | OpenPrompt) or example.objects is None:
        return example
    objects, known = example.objects, _form_of(store, form)
    refs = iter(known.ref.format(ref) for ref in objects.refs)
    boxes = (_scaled(box, objects, example.pictures, store, known) for box in objects.boxes)
    texts = iter([known.box(box) for box in boxes])
    marks = {REF: refs, BOX: texts}
    if isinstance(example, Conversation):
        return replace(example, messages=_filled_messages(example.messages, marks), objects=None)
    if isinstance(example, OpenPrompt):
        prompt = example.prompt
        filled = _filled(prompt, marks) if isinstance(prompt, str) else _filled_messages(prompt, marks)
        return replace(example, prompt=filled, objects=None)
    return replace(
        example,
        prompt=[_filled_turn(turn, marks) for turn in example.prompt],
        answers=[_filled_turn(turn, marks) for turn in example.answers],
        objects=None,
    )


def texts_of(example: Conversation | Exchange | OpenPrompt) -> list[str]:
    """The texts of an example that may have names and boxes, in order."""
    if isinstance(example, Exchange):
        return [turn.content for turn in (*example.prompt, *example.answers)]
    messages = example.messages if isinstance(example, Conversation) else example.prompt
    return [messages] if isinstance(messages, str) else [str(message["content"]) for message in messages]


def boxed(example: Example) -> list[Conversation | Exchange | OpenPrompt]:
    """The parts of an example that have names or boxes."""
    parts = example.answers if isinstance(example, Preference) else [example]
    return [
        part
        for part in parts
        if isinstance(part, Conversation | Exchange | OpenPrompt) and part.objects is not None
    ]


def _filled_messages(messages: Sequence[Message], marks: Mapping[str, Iterator[str]]) -> list[Message]:
    return [{**message, "content": _filled(str(message["content"]), marks)} for message in messages]


def _filled_turn(turn: Turn, marks: Mapping[str, Iterator[str]]) -> Turn:
    return replace(turn, content=_filled(turn.content, marks))


def _filled(text: str, marks: Mapping[str, Iterator[str]]) -> str:
    for mark, values in marks.items():
        first, *others = text.split(mark)
        text = first + "".join(next(values) + part for part in others)
    return text


def _form_of(store: PictureStore, form: BoxForm) -> _Form:
    """The form of the model's family.

    Raises:
        RowError: if none is known, or its tokenizer lacks the tokens.
    """
    processor = store.processor.processor
    names = [kind.__name__ for kind in type(processor).__mro__]
    known = next((FORMS[name] for name in names if name in FORMS), None)
    if known is None:
        raise RowError(
            f"it has boxes in the column objects, and how the models of {named_class(processor)} write boxes"
            " is not known",
            "write the coordinates in the text, and set the source's columns: {objects: null}",
        )
    if form == "list":
        return replace(known, ref="{}", box=lambda box: str(list(box)), tokens=())
    absent = next((token for token in known.tokens if token not in processor.tokenizer.get_vocab()), None)
    if absent is not None:
        raise RowError(
            f"it has boxes in the column objects, and the tokenizer has no token {absent}",
            "set data.boxes: list, or add the token to the tokenizer",
        )
    return known


def _scaled(
    box: Box, objects: RowObjects, pictures: Sequence[PictureSource], store: PictureStore, form: _Form
) -> list[int]:
    """The coordinates as the family counts them."""
    if box.picture >= len(pictures):
        raise RowError(
            f"image_id in objects is {box.picture}, and the row has {len(pictures)} pictures",
            "count the pictures of the row from 0",
        )
    source = pictures[box.picture]
    width, height = store.size(source)
    own = (1.0, 1.0) if objects.is_share else (float(width), float(height))
    slack = 0.0 if objects.is_share else _OUTSIDE
    outside = any(not -slack <= at <= own[i % 2] + slack for i, at in enumerate(box.numbers))
    if outside:
        shown = ", ".join(f"{at:g}" for at in box.numbers)
        limits = "shares from 0 to 1" if objects.is_share else f"a picture of {width} × {height} pixels"
        raise RowError(
            f"the box [{shown}] in objects is outside of {source.name}: it is in {limits}",
            "correct the box, or bbox_type (real: pixels; norm1: shares)",
        )
    target = store.seen_size(source) if form.in_pixels else (1000, 1000)
    return [round(min(max(at / own[i % 2], 0.0), 1.0) * target[i % 2]) for i, at in enumerate(box.numbers)]
