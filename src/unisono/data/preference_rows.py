"""Reads preference rows: a prompt with a chosen and a rejected answer, or with one answer and a label.

The prompt is `prompt` (text, or messages), `instruction` with input, system and history, or `messages` or `conversations`; without any of
these, `chosen` and `rejected` are whole conversations with the same beginning. An answer is text, a message, or a list of messages. A rated
answer is `completion` or `output`, or the last message.
"""

from typing import Any

from unisono.config.schema import TagsSection
from unisono.data.formats import (
    Renamed,
    RowColumns,
    alpaca_prompt,
    kind_of,
    list_of,
    messages_of,
    refuse_surrogates,
    sharegpt_messages,
    system_of,
    tools_of,
)
from unisono.data.rows import Completion, Conversation, Message, Preference, RowError
from unisono.text import one_line

_TURNS = ("messages", "conversations")
BOOLEAN = "write true or false without quotes; CSV has texts only, so use JSONL or Parquet"
"""What to do about a label that is not a boolean."""
_SIDES = ("chosen", "rejected")


def sides_in(row: dict[str, Any], renamed: Renamed) -> list[str]:
    """Those of `chosen` and `rejected` that a row has."""
    return [side for side in _SIDES if (name := renamed.get(side, side)) is not None and name in row]


def is_rated(row: dict[str, Any], renamed: Renamed) -> bool:
    """Whether a row has a label."""
    name = renamed.get("label", "label")
    return name is not None and row.get(name) is not None


def read_preference(row: dict[str, Any], renamed: Renamed, tags: TagsSection | None = None) -> Preference:
    """The pair, or the rated answer, of a row.

    Args:
        row: columns and values.
        renamed: the file's column name for each standard name.
        tags: keys and roles of turns; None: the usual words.

    Raises:
        RowError: if a part is missing or has an invalid value.
    """
    try:
        columns = RowColumns(row, renamed, tags)
        example = _pair(columns) if columns.has("chosen") or columns.has("rejected") else _rated(columns)
        refuse_surrogates(example)
    except RecursionError:
        raise RowError("it is nested too deep", "flatten it") from None
    return example


def _pair(row: RowColumns) -> Preference:
    missing = [side for side in _SIDES if not row.has(side)]
    if missing:
        other = next(side for side in _SIDES if side not in missing)
        raise RowError(
            f"it has a {other} answer, but no {missing[0]} one",
            f"add {missing[0]}, remove the row, or use objective: kto, which rates answers one by one",
        )
    prompt = _prompt(row)
    if isinstance(prompt, str) and all(isinstance(row.get(side), str) for side in _SIDES):
        return Preference([_completion(row, prompt, row.text(side), side) for side in _SIDES])
    before = _as_messages(prompt, row)
    chosen, rejected = (_conversation(row, before, side) for side in _SIDES)
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise RowError(
            "chosen and rejected follow different prompts",
            "write the same messages before both answers, or put the prompt into a column of its own",
        )
    return Preference([chosen, rejected])


def _rated(row: RowColumns) -> Preference:
    if not row.has("label"):
        raise RowError(
            "it has neither chosen and rejected answers, nor a label",
            "name the file's columns, e.g. columns: {chosen: good, rejected: bad} or {label: is_good}",
        )
    label = row.get("label")
    if not isinstance(label, bool):
        raise RowError(f"label is {one_line(repr(label), limit=40)}, not a boolean", BOOLEAN)
    if not row.has("completion") and any(row.has(name) for name in _TURNS):
        conversation = Conversation(_ending_with_answer(_turns(row), "messages"), tools_of(row))
        return Preference([conversation], label)
    name = "completion" if row.has("completion") else "output"
    prompt, answer = _prompt(row), row.get(name)
    if isinstance(prompt, str) and isinstance(answer, str):
        return Preference([_completion(row, prompt, answer, name)], label)
    return Preference([_conversation(row, _as_messages(prompt, row), name)], label)


def _as_messages(prompt: str | list[Message], row: RowColumns) -> list[Message]:
    return [*system_of(row), {"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _completion(row: RowColumns, prompt: str, answer: str, name: str) -> Conversation | Completion:
    """Text after text, unless there is more, which only a template can render."""
    if not answer.strip():
        raise RowError(f"{name} is empty", "write an answer, or remove the row")
    tools, system = tools_of(row), system_of(row)
    if tools is None and not system:
        return Completion(prompt, answer)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Conversation([*system, *turns], tools)


def _prompt(row: RowColumns) -> str | list[Message]:
    """The text or the messages before the answers; no messages if the answers contain them."""
    if row.has("prompt"):
        prompt = row.get("prompt")
        if isinstance(prompt, str) and not prompt.lstrip().startswith("[{"):
            return prompt
        if isinstance(prompt, list | str):
            return _with_system(_messages(list_of(prompt, "prompt"), "prompt", row.tags), row)
        raise RowError(f"prompt is {kind_of(prompt)}, neither text nor messages", "make it a string")
    if row.has("instruction"):
        return alpaca_prompt(row)
    return _turns(row) if any(row.has(name) for name in _TURNS) else []


def _turns(row: RowColumns) -> list[Message]:
    name = next(name for name in _TURNS if row.has(name))
    return _with_system(_messages(list_of(row.get(name), name), name, row.tags), row)


def _with_system(messages: list[Message], row: RowColumns) -> list[Message]:
    """The messages behind the one in the column `system`. One that leads the conversation takes its place."""
    return messages if messages[:1] and messages[0]["role"] == "system" else [*system_of(row), *messages]


def _messages(turns: list[Any], name: str, tags: TagsSection | None) -> list[Message]:
    """The messages of turns in OpenAI's form, or in ShareGPT's."""
    first = turns[0] if turns else None
    if tags is not None or (isinstance(first, dict) and "role" not in first and "from" in first):
        return sharegpt_messages(turns, tags)
    return messages_of(turns, name)


def _conversation(row: RowColumns, prompt: list[Message], name: str) -> Conversation:
    """The prompt and an answer, which may repeat the prompt."""
    value = row.get(name)
    if isinstance(value, str) and not value.lstrip().startswith("[{"):
        if not prompt:
            raise RowError(
                "it has no prompt",
                "add prompt, instruction or messages, or make both answers whole conversations",
            )
        messages: list[Message] = [{"role": "assistant", "content": value}]
    elif isinstance(value, dict | list | str):
        messages = _messages([value] if isinstance(value, dict) else list_of(value, name), name, row.tags)
    else:
        raise RowError(f"{name} is {kind_of(value)}, neither text nor messages", "make it a string")
    for repeated in (prompt, prompt[1:] if prompt and prompt[0]["role"] == "system" else []):
        if repeated and messages[: len(repeated)] == repeated:
            messages = messages[len(repeated) :]
    return Conversation(_ending_with_answer([*prompt, *messages], name), tools_of(row))


def _ending_with_answer(messages: list[Message], name: str) -> list[Message]:
    last = messages[-1] if messages else {"role": "nobody"}
    if last["role"] != "assistant":
        raise RowError(
            f"{name} ends with a message of {one_line(str(last['role']), limit=20)}, not with an answer",
            "end it with a message of the assistant",
        )
    if len(messages) == 1:
        raise RowError("there is no message before the answer", "add a prompt")
    if not last.get("tool_calls") and not str(last.get("content", "")).strip():
        raise RowError(f"the answer in {name} is empty", "write an answer, or remove the row")
    return messages


def with_answer_of(
    own: Conversation | Completion, other: Conversation | Completion
) -> Conversation | Completion:
    """The prompt of a row with the answer of another row."""
    if isinstance(own, Completion) and isinstance(other, Completion):
        return Completion(own.prompt, other.completion)
    answer = (
        {"role": "assistant", "content": other.completion}
        if isinstance(other, Completion)
        else other.messages[-1]
    )
    if isinstance(own, Completion):
        return Conversation([{"role": "user", "content": own.prompt}, answer])
    return Conversation([*own.messages[:-1], answer], own.tools)
