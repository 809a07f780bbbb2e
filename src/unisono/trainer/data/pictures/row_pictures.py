"""Pictures in the rows of files: takes them out, and leaves PICTURE in the text in their places.

Read are, of other programs:

- LLaMA-Factory, ms-swift and LLaVA: `<image>` in texts, with the column `images` or `image`
- OpenAI: parts `image_url`, also data URLs; Anthropic: parts with a `source`
- Hugging Face and TRL: parts `{"type": "image"}`, with the columns `images` or `image`, or with the
  picture in the part; or no place at all, then all pictures are at the beginning of the first user
  message
- ms-swift: `<ref-object>` and `<bbox>` in texts, with the column `objects` (see boxes)
- Unsloth and Qwen: parts with `image`, `min_pixels`, `max_pixels`

- LLaMA-Factory, ms-swift and Qwen: `<video>` in texts, with the column `videos`, or parts `video`

A picture is a path, a data URL, the URL of a named host, or the bytes of an Arrow column.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from unisono.base.named_hosts import PORTS, FetchError, NamedHosts
from unisono.base.text import one_line, redact
from unisono.trainer.config.data_sections import DataSection
from unisono.trainer.data import (
    BOX,
    MEDIA_MARK,
    PICTURE,
    PICTURE_TAG,
    REF,
    VIDEO,
    VIDEO_TAG,
    Completion,
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
from unisono.trainer.data.pictures.boxes import TAGS, read_objects, texts_of
from unisono.trainer.data.pictures.videos import VideoReader

_TAG = re.compile(f"({PICTURE_TAG}|{VIDEO_TAG})")
_TURNS = ("history", "messages", "conversations", "instruction", "input", "prompt", "output", "completion")
"""Columns with text, in the order of a conversation."""
_SIDES = ("chosen", "rejected")
"""Columns with answers to the same prompt, which they may repeat with its pictures."""
_CONTENTS = ("content", "value")
_OF_VIDEOS = ("video", "video_url", "input_video")
_OF_SAMPLING = (
    "fps", "nframes", "min_frames", "max_frames", "total_pixels", "video_start", "video_end",
)  # fmt: skip
_OTHER_MEDIA = {
    "audio": "a recording",
    "input_audio": "a recording",
}
_SHOWN = 60


def row_hosts(data: DataSection) -> NamedHosts:
    """The hosts from which pictures of rows may be fetched."""
    return NamedHosts(frozenset(data.image_hosts), "data.image_hosts", redirects_between=True)


@dataclass(frozen=True, slots=True)
class PictureColumns:
    """Where a source's rows have text and pictures.

    Attributes:
        turns: columns with text, in the order of a conversation.
        pictures: columns with pictures.
        contents: keys of a message that hold its text.
        inserts: whether pictures without a place belong at the beginning of the first user message.
        folders: where relative paths begin: the first one that has the file.
        hosts: from which pictures may be fetched.
        objects: the column with boxes.
        videos: columns with videos.
        frames: samples their frames; None: videos are refused.
        sides: columns with text of which each continues `turns`.
    """

    turns: Sequence[str]
    pictures: Sequence[str]
    contents: Sequence[str]
    inserts: bool
    folders: Sequence[Path]
    hosts: NamedHosts
    objects: str | None = "objects"
    videos: Sequence[str] = ()
    frames: VideoReader | None = None
    sides: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        renamed: Mapping[str, str | None],
        *,
        content_tag: str | None,
        inserts: bool,
        folders: Sequence[Path],
        hosts: NamedHosts,
        frames: VideoReader | None,
    ) -> "PictureColumns":
        """Those of a source.

        Args:
            renamed: the file's column name for each standard name.
            content_tag: the key of a message's text, if the config has one.
            inserts: whether pictures may have no place.
            folders: where relative paths begin.
            hosts: from which pictures may be fetched.
            frames: samples those of videos.
        """

        def named(names: Sequence[str]) -> list[str]:
            columns = [renamed.get(name, name) for name in names]
            return list(dict.fromkeys(column for column in columns if column is not None))

        contents = (content_tag,) if content_tag is not None else _CONTENTS
        objects = renamed.get("objects", "objects")
        pictures, videos = named(("images", "image")), named(("videos", "video"))
        places = contents, inserts, folders, hosts
        return cls(named(_TURNS), pictures, *places, objects, videos, frames, named(_SIDES))


@dataclass(frozen=True, slots=True)
class RowPictures:
    """A row without its pictures.

    Attributes:
        value: its columns, with PICTURE in their texts.
        pictures: in the order of their places.
        inserted: whether they had no places.
        objects: of the places BOX and REF in its texts.
        rejected_objects: of those of the prompt and the rejected answer; None: the same.
        videos: how many it has.
    """

    value: Mapping[str, object]
    pictures: tuple[PictureSource, ...]
    inserted: bool = False
    objects: RowObjects | None = None
    rejected_objects: RowObjects | None = None
    videos: int = 0


def take_pictures(row: Mapping[str, object], columns: PictureColumns) -> RowPictures:
    """The row with PICTURE for each of its pictures.

    Raises:
        RowError: if places and pictures do not match, or a picture is none.
    """
    listed = [picture for name in columns.pictures for picture in _listed(row.get(name), name)]
    objects, of_rejected = (
        None if columns.objects is None else read_objects(row.get(name))
        for name in (columns.objects or "", "rejected_objects")
    )
    films = [video for name in columns.videos for video in _films(row.get(name), name)]
    reader = _RowReader(listed, films, columns, objects)
    media = (*columns.pictures, *columns.videos)
    value = {name: part for name, part in row.items() if name not in media}
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
    if objects is not None and any((objects.refs, objects.boxes)) and not (listed or reader.pictures):
        raise RowError("it has names or boxes in the column objects, and no picture", "add the picture")
    reader.check_films()
    unplaced = listed[reader.used :]
    if not unplaced:
        seen, videos = tuple(reader.pictures), reader.videos
        return RowPictures(value, seen, objects=objects, rejected_objects=of_rejected, videos=videos)
    if reader.pictures or not columns.inserts:
        count = f"{len(listed)} {'pictures' if len(listed) > 1 else 'picture'}"
        raise RowError(
            f"it has {count}, and {reader.used or 'no'} {'place' if reader.used == 1 else 'places'} for them",
            f"write {PICTURE_TAG} in the text where each picture belongs",
        )
    pictures = tuple(reader.picture_of(one) for one in unplaced)
    return RowPictures(value, pictures, inserted=True, objects=objects, rejected_objects=of_rejected)


def with_pictures(example: Example, row: RowPictures) -> Example:
    """The example of such a row with its pictures.

    Raises:
        RowError: if it has no messages, or its own text has the mark.
    """
    if isinstance(example, Preference):
        chosen, *others = [_conversation_with(answer, row) for answer in example.answers]
        objects, is_part = row.rejected_objects or row.objects, row.rejected_objects is None
        rejected = [_with_objects(one, objects, is_part=is_part) for one in others]
        return replace(example, answers=[_with_objects(chosen, row.objects), *rejected])
    if isinstance(example, OpenPrompt):
        prompt, count = example.prompt, len(row.pictures)
        if row.inserted:
            prompt = PICTURE * count + prompt if isinstance(prompt, str) else _with_first(prompt, count)
        _check_places([("user", prompt)] if isinstance(prompt, str) else _texts_of(prompt), row)
        return _with_objects(
            replace(example, prompt=prompt, pictures=row.pictures), row.objects, is_part=True
        )
    if isinstance(example, Exchange):
        if row.objects is not None and len(example.answers) > 1:
            raise RowError(
                "it has boxes, which pairs read with the model's own chat template only",
                "set data.template: null, or write the boxes as text",
            )
        if row.inserted:
            example = replace(example, prompt=_with_first_turn(example.prompt, len(row.pictures)))
        texts = [(turn.role, turn.content) for turn in (*example.prompt, *example.answers)]
        _check_places(texts, row)
        return _with_objects(replace(example, pictures=row.pictures), row.objects)
    return _with_objects(_conversation_with(example, row), row.objects)


_Boxed = TypeVar("_Boxed", Conversation, Exchange, OpenPrompt)


def _with_objects(example: _Boxed, objects: RowObjects | None, *, is_part: bool = False) -> _Boxed:
    """The example with what the places of names and boxes in its texts stand for; `is_part`: others
    may follow, of an answer that is not there.

    Raises:
        RowError: if the numbers differ.
    """
    if objects is None:
        return example
    text = "".join(texts_of(example))
    refs, boxes = text.count(REF), text.count(BOX)
    for tag, key, places, listed in (
        ("<ref-object>", "ref", refs, len(objects.refs)),
        ("<bbox>", "bbox", boxes, len(objects.boxes)),
    ):
        if places > listed or (places < listed and not is_part):
            raise RowError(
                f"it has {places} × {tag}, and objects has {listed} in {key}", "write one place for each"
            )
    return replace(example, objects=replace(objects, refs=objects.refs[:refs], boxes=objects.boxes[:boxes]))


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
    roles = [role for role, content in texts for _ in MEDIA_MARK.findall(content)]
    if len(roles) != len(row.pictures):
        raise RowError(
            f"of its {len(row.pictures)} pictures {len(roles)} have a place in messages that are read",
            f"write {PICTURE_TAG} in the text of messages",
        )
    if "assistant" in roles:
        raise RowError(
            "a picture is in an answer, but models write text", f"move {PICTURE_TAG} to a message of the user"
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
        videos: how many videos have a place so far.
    """

    def __init__(
        self,
        listed: Sequence[object],
        films: Sequence[object],
        columns: PictureColumns,
        objects: RowObjects | None,
    ) -> None:
        self.pictures: list[PictureSource] = []
        self.used = self.videos = self._used_films = 0
        self._films = films
        self._objects = objects
        self._listed = listed
        self._columns = columns

    def copy(self) -> "_RowReader":
        """One that continues after the same places."""
        copied = _RowReader(self._listed, self._films, self._columns, self._objects)
        copied.pictures, copied.used = list(self.pictures), self.used
        copied.videos, copied._used_films = self.videos, self._used_films
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

    def check_films(self) -> None:
        """Compares the places of videos with those of the columns.

        Raises:
            RowError: if they differ, or there are boxes, too: their numbers are those of pictures.
        """
        if self._used_films != len(self._films):
            places = f"{self._used_films or 'no'} {'place' if self._used_films == 1 else 'places'}"
            raise RowError(
                f"it has {len(self._films)} {'videos' if len(self._films) > 1 else 'video'}, and {places}"
                " for them",
                f"write {VIDEO_TAG} in the text where each video belongs",
            )
        if self.videos and self._objects is not None and self._objects.boxes:
            raise RowError("it has videos and boxes in the column objects", "write them in separate rows")

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
        text = self._plain(text)
        pieces = []
        for piece in _TAG.split(text):
            if piece == PICTURE_TAG and self._listed:  # else it is text
                self._take_listed()
                pieces.append(PICTURE)
            elif piece == VIDEO_TAG and self._films:
                pieces.append(self._take_film())
            else:
                pieces.append(piece)
        return "".join(pieces)

    def _plain(self, text: str) -> str:
        """The text with marks for names and boxes; it must have none before."""
        mark = next((mark for mark in (PICTURE, VIDEO, BOX, REF) if mark in text), None)
        if mark is not None:
            raise RowError(f"its text has the character U+{ord(mark):04X}", "remove it")
        for tag, mark in TAGS.items() if self._objects is not None else ():
            text = text.replace(tag, mark)
        return text

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
            return self._plain(kept["text"])
        if kind in _OF_VIDEOS:
            film = next((kept[key] for key in (*_OF_VIDEOS, "url", "path") if key in kept), None)
            unread = [key for key in _OF_SAMPLING if key in kept]
            if unread:
                raise RowError(
                    f"a video of a part has {' and '.join(unread)}, which is not read",
                    "set data.frames instead",
                )
            return self._take_film() if film is None else self._film(film, kept)
        if kind not in ("image", "image_url", "input_image"):
            other = _OTHER_MEDIA.get(kind, f"a part of the type {one_line(kind, limit=20)}")
            raise RowError(f"it has {other}, but only text and pictures can be trained on", "remove the row")
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

    def _take_film(self) -> str:
        if self._used_films >= len(self._films):
            number = len(self._films)
            raise RowError(
                f"it has {number or 'no'} {'video' if number == 1 else 'videos'}, and more places for them",
                f"add the videos to the column videos, or remove {VIDEO_TAG}",
            )
        self._used_films += 1
        return self._film(self._films[self._used_films - 1])

    def _film(self, value: object, keys: Mapping[str, object] | None = None) -> str:
        """The marks of a video, or of its frames. The keys of a part may bound their pixels."""
        value = value.get("url", value) if isinstance(value, dict) and "url" in value else value
        frames = [self.picture_of(one) for one in (value if isinstance(value, list) else [value])]
        name = frames[0].name if len(frames) == 1 else f"{frames[0].name} …" if frames else ""
        if not frames or any(frame.url is not None for frame in frames):
            raise RowError("a video has no frames, or is a URL", "write the path of a file or directory")
        if self._columns.frames is None:
            raise RowError(
                "it has a video, and only pictures are read here", "write frames of it as pictures"
            )
        taken = self._columns.frames.sources(frames, name, lambda frame: _bounded(frame, keys or {}))
        self.videos += 1
        self.pictures += taken
        return "".join(one.mark for one in taken)

    def _take_listed(self) -> None:
        if self.used >= len(self._listed):
            raise RowError(
                f"it has {len(self._listed) or 'no'} {'picture' if len(self._listed) == 1 else 'pictures'},"
                " and"
                " more places for them",
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
            return self._of_url(text)
        if "\0" in text or len(text) > 4096:
            return _decoded_text(text, "base64 in the row")
        return PictureSource(str(self._file(text)), None, text)

    def _of_url(self, text: str) -> PictureSource:
        name, hosts = one_line(redact(text), limit=_SHOWN), self._columns.hosts
        download = "download it, and write the path of the file"
        if not hosts.key:
            raise RowError(f"the picture {name} is a URL", download)
        try:
            parts = urlsplit(text)
            if parts.scheme.lower() not in PORTS:
                raise RowError(f"the picture {name} is a URL that is not http or https", download)
            hosts.admit(parts)
        except FetchError as error:
            fix = f"add its host to {hosts.key}, or {download}"
            raise RowError(f"the picture {name} cannot be fetched: {error}", fix) from error
        except ValueError as error:
            raise RowError(f"the picture {name} is not a valid URL: {error}", download) from error
        return PictureSource(None, None, name, url=text)

    def _file(self, named: str) -> Path:
        path = Path(named).expanduser()
        if path.is_absolute():
            return path
        places = [folder / path for folder in self._columns.folders]
        return next((place for place in places if place.exists()), places[0])


def _listed(value: object, column: str) -> list[object]:
    """The pictures of a column: a list, one, or none."""
    if value is None or value == "" or value == []:
        return []
    if isinstance(value, list):
        if any(one is None for one in value):
            raise RowError(f"a picture in the column {one_line(column, limit=40)} is null", "remove it")
        return value
    return [value]


def _films(value: object, column: str) -> list[object]:
    """The videos of a column: a list of them, one, or none. Each is a path, or a list of frames."""
    if isinstance(value, dict | bytes):
        return [value]
    return _listed(value, column)


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
    if any(row.get(name) for name in (*columns.pictures, *columns.videos)):
        return True
    return any(_has_parts(row.get(name), columns.contents) for name in (*columns.turns, *columns.sides))


def _has_parts(value: object, contents: Sequence[str]) -> bool:
    for message in _messages(value):
        for key in contents:
            content = message.get(key)
            if isinstance(content, list) and any(map(_is_medium, content)):
                return True
    return False


def has_objects(row: Mapping[str, object], columns: PictureColumns) -> bool:
    """Whether a row may have boxes."""
    return columns.objects is not None and isinstance(row.get(columns.objects), dict | str)


def _is_medium(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") not in ("text", "input_text")


def _messages(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _messages(one)
