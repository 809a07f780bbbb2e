"""The prompts of a file, with their pictures."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.base.errors import DataError, Problem
from unisono.base.files import expand, fault_of
from unisono.base.named_hosts import NamedHosts
from unisono.trainer.data import PICTURE, BadRow, Message, PictureSource, RawRow, RowError, RowFile
from unisono.trainer.data.pictures.decoder import Broken, decode_all
from unisono.trainer.data.pictures.processor import need_pillow
from unisono.trainer.data.pictures.row_pictures import PictureColumns, take_pictures
from unisono.trainer.data.readers import kind_of, read_rows

SHOWN = 20
"""Problems of a file that are listed."""
NO_HOSTS = NamedHosts(frozenset(), "")
"""Nothing is fetched for prompts."""
_COLUMNS = ("messages", "prompt", "text")
_PICTURES = ("images", "image")


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        where: for messages: `prompts.jsonl:3`, or empty for the command line.
        content: a text, or the messages of a conversation.
        pictures: of its messages, in order.
    """

    where: str
    content: str | list[Message]
    pictures: tuple[PictureSource, ...] = ()


def read_prompts(file: str) -> list[Prompt]:
    """The prompts of a file: one per line in txt; `prompt` (or `text`) or `messages` in jsonl,
    json, csv, parquet, arrow, with pictures as rows for training have them.

    Raises:
        DataError: with every row that is not a prompt, or has a picture that cannot be used.
    """
    path = expand(file)
    fault = fault_of(path, file)
    if fault is not None:
        raise DataError.of(fault.what, where="--file", why=fault.why, fix=fault.fix)
    folders = [path.absolute().parent, Path.cwd()]
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for row in read_rows(RowFile(path, file, kind_of(file) or "txt")):
        parsed = _prompt_of(row, folders)
        prompts.append(parsed) if isinstance(parsed, Prompt) else problems.append(parsed)
    problems += _broken_pictures(prompts)
    if problems:
        raise DataError(*problems[:SHOWN])
    if not prompts:
        raise DataError.of(
            f"there is no prompt in {file}",
            where=file,
            fix="write one per line, or one JSON object per line with `prompt`",
        )
    return prompts


def _broken_pictures(prompts: Sequence[Prompt]) -> list[Problem]:
    """A problem for each picture that cannot be decoded."""
    shown = [(prompt.where, source) for prompt in prompts for source in prompt.pictures]
    if not shown:
        return []
    need_pillow("--file")
    decoded = decode_all([source for _, source in shown], processes=len(os.sched_getaffinity(0)))
    return [
        Problem(f"the picture {source.name} cannot be used", where, one.why, "use a different picture")
        for (where, source), one in zip(shown, decoded, strict=True)
        if isinstance(one, Broken)
    ]


def _prompt_of(row: RawRow | BadRow, folders: Sequence[Path]) -> Prompt | Problem:
    if isinstance(row, BadRow):
        return Problem(row.why, row.where, "", row.fix)
    where = str(row.place)
    column = next((name for name in _COLUMNS if row.value.get(name) is not None), None)
    if column is None:
        return Problem(
            "the row has no prompt",
            where,
            f"it has {', '.join(list(row.value)[:6]) or 'nothing'}",
            "add a column `prompt` (text) or `messages` (a list of {role, content})",
        )
    columns = PictureColumns(
        (column,),
        _PICTURES,
        ("content",),
        inserts=True,
        folders=folders,
        hosts=NO_HOSTS,
        videos=("videos", "video"),
    )
    try:
        taken = take_pictures(row.value, columns)
    except RowError as error:
        return Problem(f"the prompt cannot be used: {error.why}", where, "", error.fix)
    content, count = taken.value[column], len(taken.pictures) if taken.inserted else 0
    if isinstance(content, str):
        if not content.strip():
            return Problem("the prompt is empty", where, "", "write one, or remove the row")
        if not taken.pictures:
            return Prompt(where, content)
        return Prompt(where, [{"role": "user", "content": PICTURE * count + content}], taken.pictures)
    prompt = _conversation(where, content if isinstance(content, list) else [])
    if isinstance(prompt, Problem) or not taken.pictures:
        return prompt
    return _with_pictures(prompt, taken.pictures, count)


def _with_pictures(prompt: Prompt, pictures: tuple[PictureSource, ...], unplaced: int) -> Prompt | Problem:
    """A conversation with its pictures; those without a place stand before the first question."""
    assert not isinstance(prompt.content, str)
    turns = list(prompt.content)
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    marks = [turn["role"] for turn in turns if PICTURE in turn["content"]]
    if first is None or any(role != "user" for role in marks):
        fix = "write <image> in messages of the user"
        return Problem("a picture is not in a message of the user", prompt.where, "", fix)
    turns[first] = turns[first] | {"content": PICTURE * unplaced + turns[first]["content"]}
    return replace(prompt, content=turns, pictures=pictures)


def _conversation(where: str, turns: list[Any]) -> Prompt | Problem:
    if not turns or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    ):
        return Problem(
            "`messages` is not a list of {role, content}", where, "", "write [{role: user, content: …}]"
        )
    if turns[-1]["role"] == "assistant":
        return Problem(
            "the conversation ends with an answer",
            where,
            "there is no question to answer",
            "remove the last message; `unisono eval` compares answers with references",
        )
    return Prompt(where, turns)
