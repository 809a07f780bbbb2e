"""What is asked: one prompt, or a file of them; and how it becomes tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.data.readers import RowFile, kind_of, read_rows
from unisono.data.rows import BadRow, RawRow, RowError
from unisono.data.template import ChatTemplate
from unisono.data.tokens import encode_texts
from unisono.errors import DataError, Problem, UsageError
from unisono.inputs import expand, fault_of
from unisono.task.opening import Opened

_SHOWN = 20  # problems of a file
_COLUMNS = ("messages", "prompt", "text")

Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """One thing that is asked.

    Attributes:
        where: for messages: `prompts.jsonl:3`, or empty for the command line.
        asked: a text, or the messages of a conversation.
    """

    where: str
    asked: str | Turns


def read_prompts(file: str) -> list[Prompt]:
    """The prompts of a file: txt, a prompt a line; jsonl, json, csv, parquet, arrow: `prompt` (or `text`), or `messages`.

    Raises:
        DataError: with every row that is no prompt.
    """
    path = expand(file)
    fault = fault_of(path, file)
    if fault is not None:
        raise DataError.of(fault.what, where="--file", why=fault.why, fix=fault.fix)
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for row in read_rows(RowFile(path, file, kind_of(file) or "txt")):
        found = _prompt_of(row)
        prompts.append(found) if isinstance(found, Prompt) else problems.append(found)
    if problems:
        raise DataError(*problems[:_SHOWN])
    if not prompts:
        raise DataError.of(
            f"there is no prompt in {file}",
            where=file,
            fix="write one a line, or a JSON object a line with `prompt`",
        )
    return prompts


def encode_prompts(
    opened: Opened, prompts: Sequence[Prompt], *, raw: bool, system: str | None, max_new_tokens: int
) -> tuple[list[list[int]], ChatTemplate | None]:
    """The tokens of each prompt, and the template that rendered them; None if they are continued as they are.

    Args:
        opened: whose template and tokenizer are taken.
        prompts: what is asked.
        raw: continue a text as it is, without a chat template.
        system: a system message before each.
        max_new_tokens: room that must be left for the answer.

    Raises:
        DataError: with every prompt that cannot be rendered or is too long.
    """
    talks = any(not isinstance(prompt.asked, str) for prompt in prompts) or system is not None
    if raw and talks:
        raise UsageError.of(
            "messages cannot be continued without a chat template", where="--raw", fix="leave --raw out, or give plain text"
        )  # fmt: skip
    template = None if raw else opened.template
    if template is None and talks:
        template = opened.chat_template()[0]
    texts: list[str] = []
    problems: list[Problem] = []
    for prompt in prompts:
        try:
            texts.append(render(prompt, template, system))
        except RowError as error:
            texts.append("")
            problems.append(Problem(f"a prompt cannot be rendered: {error.why}", prompt.where, "", error.fix))
    ids = [tokens_of(opened, text, whole=template is None) for text in texts]
    if not problems:
        problems = [
            p
            for p in map(lambda prompt, row: _misfit(opened, prompt, row, max_new_tokens), prompts, ids)
            if p
        ]
    if problems:
        raise DataError(*problems[:_SHOWN])
    return ids, template


def render(prompt: Prompt, template: ChatTemplate | None, system: str | None) -> str:
    """The text that the model goes on from.

    Raises:
        RowError: if the template refuses the messages.
    """
    if template is None:
        assert isinstance(prompt.asked, str)
        return prompt.asked
    turns: Turns = (
        [{"role": "user", "content": prompt.asked}] if isinstance(prompt.asked, str) else prompt.asked
    )
    before: Turns = [{"role": "system", "content": system}] if system is not None else []
    return template.render([*before, *turns], prompt=True)


def tokens_of(opened: Opened, text: str, *, whole: bool) -> list[int]:
    """The tokens of a text; one that is whole begins as the tokenizer begins texts, and does not end."""
    ids = list(encode_texts(opened.tokenizer, [text], special=whole)[0].ids)
    end = opened.tokenizer.eos_token_id
    while whole and len(ids) > 1 and ids[-1] == end:
        ids.pop()
    return ids


def _prompt_of(row: RawRow | BadRow) -> Prompt | Problem:
    if isinstance(row, BadRow):
        return Problem(row.why, row.where, "", row.fix)
    where = str(row.place)
    asked = next((row.value[name] for name in _COLUMNS if row.value.get(name) is not None), None)
    if isinstance(asked, str):
        return (
            Prompt(where, asked)
            if asked.strip()
            else Problem("the prompt is empty", where, "", "write one, or remove the row")
        )
    if isinstance(asked, list):
        return _conversation(where, asked)
    return Problem(
        "the row has no prompt", where, f"it has {', '.join(list(row.value)[:6]) or 'nothing'}",
        "name it `prompt` (text) or `messages` (a list of {role, content})",
    )  # fmt: skip


def _conversation(where: str, turns: list[Any]) -> Prompt | Problem:
    if not turns or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    ):
        return Problem(
            "`messages` is no list of {role, content}", where, "", "write [{role: user, content: …}]"
        )
    if turns[-1]["role"] == "assistant":
        return Problem(
            "the conversation ends with an answer", where, "nothing is asked", "remove the last message; `unisono eval` compares answers"
        )  # fmt: skip
    return Prompt(where, turns)


def _misfit(opened: Opened, prompt: Prompt, ids: list[int], max_new_tokens: int) -> Problem | None:
    if not ids:
        return Problem("a prompt has no tokens", prompt.where, "", "write a prompt")
    if len(ids) + max_new_tokens <= opened.context:
        return None
    if len(ids) >= opened.context:
        return Problem(
            f"a prompt of {len(ids)} tokens is too long",
            prompt.where,
            f"the model reads {opened.context} tokens",
            "shorten it",
        )
    return Problem(
        f"a prompt of {len(ids)} tokens leaves no room for an answer of {max_new_tokens}", prompt.where,
        f"the model reads {opened.context} tokens", f"set --max-tokens to {opened.context - len(ids)} or less, or shorten the prompt",
    )  # fmt: skip
