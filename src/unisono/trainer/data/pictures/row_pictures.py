"""Pictures in the rows of files: takes them out, and leaves PICTURE in the text in their places.

Read are, of other programs:

- LLaMA-Factory, ms-swift and LLaVA: `<image>` in texts, with the column `images` or `image`
- OpenAI: parts `image_url`, also data URLs; Anthropic: parts with a `source`
- Hugging Face and TRL: parts `{"type": "image"}`, with the columns `images` or `image`, or with the
  picture in the part; or no place at all, then all pictures are at the beginning of the first user
  message
- Unsloth and Qwen: parts with `image`, `min_pixels`, `max_pixels`

A picture is a path, a data URL, or the bytes of an Arrow column.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from unisono.base.text import one_line
from unisono.trainer.data import (
    PICTURE,
    PICTURE_TAG,
    Completion,
    Conversation,
    Example,
    Exchange,
    Message,
    OpenPrompt,
    PictureSource,
    Preference,
    RowError,
    Turn,
)

_TURNS = ("history", "messages", "conversations", "instruction", "input", "prompt", "output", "completion")
"""Columns with text, in the order of a conversation."""
_SIDES = ("chosen", "rejected")
"""Columns with answers to the same prompt, which they may repeat with its pictures."""
_CONTENTS = ("content", "value")
_OTHER_MEDIA = {
    "video": "a video",
    "video_url": "a video",
    "audio": "a recording",
    "input_audio": "a recording",
}
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class PictureColumns:
    """Where a source's rows have text and pictures.

    Attributes:
        turns: columns with text, in the order of a conversation.
        pictures: columns with pictures.
        contents: keys of a message that hold its text.
        inserts: whether pictures without a place belong at the beginning of the first user message.
        folders: where relative paths begin: the first one that has the file.
        sides: columns with text of which each continues `turns`.
    """

    turns: Sequence[str]
    pictures: Sequence[str]
    contents: Sequence[str]
    inserts: bool
    folders: Sequence[Path]
    sides: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        renamed: Mapping[str, str | None],
        *,
        content_tag: str | None,
        inserts: bool,
        folders: Sequence[Path],
    ) -> "PictureColumns":
        """Those of a source.

        Args:
            renamed: the file's column name for each standard name.
            content_tag: the key of a message's text, if the config has one.
            inserts: whether pictures may have no place.
            folders: where relative paths begin.
        """

        def named(names: Sequence[str]) -> list[str]:
            columns = [renamed.get(name, name) for name in names]
            return list(dict.fromkeys(column for column in columns if column is not None))

        contents = (content_tag,) if content_tag is not None else _CONTENTS
        pictures = named(("images", "image"))
        return cls(named(_TURNS), pictures, contents, inserts, folders, named(_SIDES))


@dataclass(frozen=True, slots=True)
class RowPictures:
    """A row without its pictures.

    Attributes:
        value: its columns, with PICTURE in their texts.
        pictures: in the order of their places.
        inserted: whether they had no places.
    """

    value: Mapping[str, object]
    pictures: tuple[PictureSource, ...]
    inserted: bool = False


def take_pictures(row: Mapping[str, object], columns: PictureColumns) -> RowPictures:
    """The row with PICTURE for each of its pictures.

    Raises:
        RowError: if places and pictures do not match, or a picture is none.
    """
    listed = [picture for name in columns.pictures for picture in _listed(row.get(name), name)]
    reader = _RowReader(listed, columns)
    value = {name: part for name, part in row.items() if name not in columns.pictures}
    for name in columns.turns:
        if name in value:
            value[name] = reader.turns(value[name])
    sides = {name: reader.copy() for name in columns.sides if name in value}
    for name, of_side in sides.items():
        value[name] = of_side.turns(value[name])
    if sides:
        reader, *others = sides.values()
        if any(other.pictures != reader.pictures for other in others):
            raise RowError(
                "chosen and rejected have different pictures", "write the same messages before both answers"
            )
    unplaced = listed[reader.used :]
    if not unplaced:
        return RowPictures(value, tuple(reader.pictures))
    if reader.pictures or not columns.inserts:
        count = f"{len(listed)} picture{'s' * (len(listed) > 1)}"
        raise RowError(
            f"it has {count}, and {reader.used or 'no'} place{'s' * (reader.used != 1)} for them",
            f"write {PICTURE_TAG} in the text where each picture belongs",
        )
    return RowPictures(value, tuple(reader.picture_of(one) for one in unplaced), inserted=True)


def with_pictures(example: Example, row: RowPictures) -> Example:
    """The example of such a row with its pictures.

    Raises:
        RowError: if it has no messages, or its own text has the mark.
    """
    if isinstance(example, Preference):
        return replace(example, answers=[_conversation_with(answer, row) for answer in example.answers])
    if isinstance(example, OpenPrompt):
        prompt, count = example.prompt, len(row.pictures)
        if row.inserted:
            prompt = PICTURE * count + prompt if isinstance(prompt, str) else _with_first(prompt, count)
        _check_places([("user", prompt)] if isinstance(prompt, str) else _texts_of(prompt), row)
        return replace(example, prompt=prompt, pictures=row.pictures)
    if isinstance(example, Exchange):
        if row.inserted:
            example = replace(example, prompt=_with_first_turn(example.prompt, len(row.pictures)))
        texts = [(turn.role, turn.content) for turn in (*example.prompt, *example.answers)]
        _check_places(texts, row)
        return replace(example, pictures=row.pictures)
    return _conversation_with(example, row)


def _conversation_with(example: Example, row: RowPictures) -> Conversation:
    """The messages of an example with the pictures of its row.

    Raises:
        RowError: if it has none, or its own text has the mark.
    """
    if isinstance(example, Completion):
        turns: list[Message] = [
            {"role": "user", "content": example.prompt},
            {"role": "assistant", "content": example.completion},
        ]
        example = Conversation(turns)
    if not isinstance(example, Conversation):
        raise RowError(
            "it has pictures, and rows of this format have no messages for them",
            "write messages, or remove the pictures",
        )
    if row.inserted:
        example = replace(example, messages=_with_first(example.messages, len(row.pictures)))
    _check_places(_texts_of(example.messages), row)
    return replace(example, pictures=row.pictures)


def _texts_of(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Roles and contents."""
    return [(message["role"], message["content"]) for message in messages]


def _check_places(texts: Sequence[tuple[str, str]], row: RowPictures) -> None:
    """Refuses places for pictures that are not read, or are in an answer; `texts` are roles and
    contents.

    Raises:
        RowError: then.
    """
    roles = [role for role, content in texts for _ in range(content.count(PICTURE))]
    if len(roles) != len(row.pictures):
        raise RowError(
            f"of its {len(row.pictures)} pictures {len(roles)} have a place in messages that are read",
            f"write {PICTURE_TAG} in the text of messages",
        )
    if "assistant" in roles:
        raise RowError(
            "a picture is in an answer, and models write text", f"move {PICTURE_TAG} to a message of the user"
        )


def _with_first(messages: Sequence[Message], count: int) -> list[Message]:
    """The messages with places at the beginning of the first one of the user."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise RowError(
            "it has pictures, and no message of the user", f"write {PICTURE_TAG} where they belong"
        )
    marked: Message = messages[first] | {"content": PICTURE * count + messages[first]["content"]}
    return [*messages[:first], marked, *messages[first + 1 :]]


def _with_first_turn(turns: Sequence[Turn], count: int) -> list[Turn]:
    """The turns with places at the beginning of the first question."""
    first, *others = turns
    return [replace(first, content=PICTURE * count + first.content), *others]


class _RowReader:
    """Puts marks into the text of one row, and pictures in their order.

    Attributes:
        pictures: those with a place so far.
        used: how many of them are of a column.
    """

    def __init__(self, listed: Sequence[object], columns: PictureColumns) -> None:
        self.pictures: list[PictureSource] = []
        self.used = 0
        self._listed = listed
        self._columns = columns

    def copy(self) -> "_RowReader":
        """One that continues after the same places."""
        copied = _RowReader(self._listed, self._columns)
        copied.pictures, copied.used = list(self.pictures), self.used
        return copied

    def turns(self, value: object) -> object:
        """The text, message, or list of messages with marks."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return self._message(value)
        if isinstance(value, list):
            return [self.turns(one) for one in value]
        return value

    def _message(self, message: Mapping[str, object]) -> Mapping[str, object]:
        marked = dict(message)
        for key in self._columns.contents:
            content = message.get(key)
            if isinstance(content, str):
                marked[key] = self._text(content)
            elif isinstance(content, list) and content:
                marked[key] = "".join(self._part(part) for part in content)
        return marked

    def _text(self, text: str) -> str:
        if PICTURE in text:
            raise RowError(f"its text has the character U+{ord(PICTURE):04X}", "remove it")
        if not self._listed:  # then it is text
            return text
        pieces = text.split(PICTURE_TAG)
        for _ in pieces[1:]:
            self._take_listed()
        return PICTURE.join(pieces)

    def _part(self, part: object) -> str:
        if isinstance(part, str):
            return part
        if not isinstance(part, dict):
            raise RowError(
                f"a part of a message is {one_line(repr(part), limit=_SHOWN)}", "write {type: text, text: …}"
            )
        kept = {key: value for key, value in part.items() if value is not None}  # Arrow fills them in
        kind = str(kept.get("type", "text" if "text" in kept else "image" if "image" in kept else None))
        if kind in ("text", "input_text") and isinstance(kept.get("text"), str):
            if PICTURE in kept["text"]:
                raise RowError(f"its text has the character U+{ord(PICTURE):04X}", "remove it")
            return str(kept["text"])
        if kind not in ("image", "image_url", "input_image"):
            other = _OTHER_MEDIA.get(kind, f"a part of the type {one_line(kind, limit=20)}")
            raise RowError(f"it has {other}, and text and pictures can be trained on", "remove the row")
        source = next(
            (kept[key] for key in ("image", "image_url", "url", "path", "source", "base64") if key in kept),
            None,
        )
        if source is None:
            self._take_listed()
        else:
            picture = self.picture_of(
                {"base64": source} if "base64" in kept and source is kept["base64"] else source
            )
            self.pictures.append(_bounded(picture, kept))
        return PICTURE

    def _take_listed(self) -> None:
        if self.used >= len(self._listed):
            raise RowError(
                f"it has {len(self._listed) or 'no'} picture{'s' * (len(self._listed) != 1)}, and more places"
                " for them",
                f"add the pictures to the column images, or remove {PICTURE_TAG}",
            )
        self.pictures.append(self.picture_of(self._listed[self.used]))
        self.used += 1

    def picture_of(self, value: object) -> PictureSource:
        """The picture that a value of a row names or holds.

        Raises:
            RowError: if it does not.
        """
        if isinstance(value, dict):
            return self._of_object(value)
        if isinstance(value, bytes):
            return PictureSource(None, value, "bytes in the row")
        if isinstance(value, str) and value.strip():
            return self._of_text(value)
        raise RowError(
            f"a picture is {one_line(repr(value), limit=_SHOWN)}", "write the path of a file, or a data URL"
        )

    def _of_object(self, value: Mapping[str, object]) -> PictureSource:
        """A picture of an Arrow column, or of a part."""
        data = value.get("bytes")
        if isinstance(data, bytes):
            return PictureSource(
                None, data, one_line(str(value.get("path") or "bytes in the row"), limit=_SHOWN)
            )
        if isinstance(value.get("base64"), str):
            return _decoded_text(str(value["base64"]), "base64 in the row")
        if value.get("type") == "base64" and isinstance(value.get("data"), str):
            return _decoded_text(str(value["data"]), "base64 in the row")
        named = next(
            (value[key] for key in ("path", "url", "file_name", "image") if isinstance(value.get(key), str)),
            None,
        )
        if named is None:
            raise RowError(
                f"a picture has neither bytes nor a path: its keys are {', '.join(map(str, list(value)[:6]))}",
                "write the path of a file, or a data URL",
            )
        return _bounded(self._of_text(str(named)), value)

    def _of_text(self, text: str) -> PictureSource:
        if text.startswith("data:"):
            head, _, body = text.partition(",")
            if not head.endswith(";base64"):
                raise RowError("a data URL of a picture is not base64", "write data:image/png;base64,…")
            return _decoded_text(body, f"{one_line(head, limit=40)},…")
        scheme = urlsplit(text).scheme if "://" in text else ""
        if scheme == "file":
            text = unquote(urlsplit(text).path)
        elif scheme:
            raise RowError(
                f"the picture {one_line(text, limit=_SHOWN)} is a URL",
                "download it, and write the path of the file",
            )
        if "\0" in text or len(text) > 4096:
            return _decoded_text(text, "base64 in the row")
        return PictureSource(str(self._file(text)), None, text)

    def _file(self, named: str) -> Path:
        path = Path(named).expanduser()
        if path.is_absolute():
            return path
        places = [folder / path for folder in self._columns.folders]
        return next((place for place in places if place.is_file()), places[0])


def _listed(value: object, column: str) -> list[object]:
    """The pictures of a column: a list, one, or none."""
    if value is None or value == "" or value == []:
        return []
    if isinstance(value, list):
        if any(one is None for one in value):
            raise RowError(f"a picture in the column {one_line(column, limit=40)} is null", "remove it")
        return value
    return [value]


def _decoded_text(text: str, name: str) -> PictureSource:
    try:
        return PictureSource(None, base64.b64decode(text, validate=True), name)
    except (binascii.Error, ValueError):
        raise RowError("a picture is not valid base64", "encode its bytes again") from None


def _bounded(picture: PictureSource, keys: Mapping[str, object]) -> PictureSource:
    """The picture with the bounds of pixels that a part has."""
    bounds: dict[str, int | None] = {}
    for key, field in (("max_pixels", "most_pixels"), ("min_pixels", "least_pixels")):
        value = keys.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RowError(
                f"{key} of a picture is {one_line(repr(value), limit=40)}", "write a number of pixels"
            )
        bounds[field] = value
    return replace(picture, **bounds)  # type: ignore[arg-type]  # both fields are numbers


def has_picture(row: Mapping[str, object], columns: PictureColumns) -> bool:
    """Whether a row may have one: a value in a column of pictures, or a part of a message."""
    if any(row.get(name) for name in columns.pictures):
        return True
    return any(_has_parts(row.get(name), columns.contents) for name in (*columns.turns, *columns.sides))


def _has_parts(value: object, contents: Sequence[str]) -> bool:
    for message in _messages(value):
        for key in contents:
            content = message.get(key)
            if isinstance(content, list) and any(map(_is_medium, content)):
                return True
    return False


def _is_medium(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") not in ("text", "input_text")


def _messages(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _messages(one)
