"""Rows of `objective: grpo`: a prompt that the model answers, and columns for the rewards."""

import json
from collections.abc import Mapping

from unisono.base.text import nearest
from unisono.trainer.config.data_sections import TagsSection
from unisono.trainer.data import Message, OpenPrompt, RowError
from unisono.trainer.data.formats import (
    Renamed,
    RowColumns,
    alpaca_prompt,
    column_of,
    kind_of,
    messages_of,
    refuse_rendered,
    refuse_surrogates,
    sharegpt_messages,
    shown,
    system_of,
    tools_of,
    with_system,
)

ANSWER = "answer"
"""The column with which built-in rewards compare; the answer of a row that has one."""
_PROMPTS = (
    "prompt",
    "messages",
    "conversations",
    "instruction",
    "question",
    "query",
    "problem",
    "问题",
    "提问",
)
_ALSO_READ = ("system", "tools", "functions", "input", "history")
_ANSWERS = {"prompt": "completion", "instruction": "output"}


def prompt_column(row: Mapping[str, object], renamed: Renamed) -> str | None:
    """Our name of the column that is the prompt of a row; None if there is none."""
    return next((name for name in _PROMPTS if row.get(column_of(name, renamed) or "") is not None), None)


def prompt_turns(row: Mapping[str, object], renamed: Renamed) -> list[str]:
    """The file's columns that are the prompt of a row, in the order of a conversation."""
    name = prompt_column(row, renamed)
    names = ("history", name, "input") if name == "instruction" else (name,)
    columns = (column_of(one, renamed) for one in names if one is not None)
    return [column for column in columns if column is not None]


def read_open_prompt(
    row: Mapping[str, object], renamed: Renamed, tags: TagsSection | None, *, plain: bool = False
) -> OpenPrompt:
    """The question of a row: its prompt without an answer, and all columns that are not the prompt.

    Args:
        row: columns and values.
        renamed: the file's column name for each standard name.
        tags: keys and roles of turns; None: the usual words.
        plain: whether a prompt that is a text is not a turn of the chat template.

    Raises:
        RowError: if there is no prompt, or a value is invalid.
    """
    name = prompt_column(row, renamed)
    if name is None:
        near = nearest("prompt", [str(column) for column in row])
        names = ", ".join(shown(column) for column in list(row)[:8]) or "none"
        raise RowError(
            f"there is no prompt; the columns are {names}",
            f"set the source's columns: {{prompt: {near or 'NAME'}}}",
        )
    columns = RowColumns(row, renamed, tags, plain=plain)
    prompt, answer = _prompt(columns, name)
    tools = tools_of(columns)
    if tools and isinstance(prompt, str):
        refuse_rendered(columns)
        prompt = [{"role": "user", "content": prompt}]
    used = {column_of(one, renamed) for one in (name, *_ALSO_READ)}
    others = {str(column): value for column, value in row.items() if column not in used}
    if answer is not None:
        others.setdefault(ANSWER, answer)
    question = OpenPrompt(prompt, _json_of(others), tools)
    refuse_surrogates(question)
    return question


def _prompt(row: RowColumns, name: str) -> tuple[str | list[Message], str | None]:
    """The prompt, and the reference answer of a row that has one."""
    if name == "instruction":
        return alpaca_prompt(row), _reference(row, name)
    value = row.get(name)
    if isinstance(value, str):
        if not value.strip():
            raise RowError("the prompt is empty", "write one, or remove the row")
        system = system_of(row)
        if system:
            refuse_rendered(row)
        return [*system, {"role": "user", "content": value}] if system else value, _reference(row, name)
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind_of(value)}", "make it a string, or a list of messages")
    is_sharegpt = bool(value) and isinstance(value[0], dict) and "from" in value[0]
    messages = sharegpt_messages(value, row.tags) if is_sharegpt else messages_of(value, name)
    messages, answer = with_system(messages, row), _reference(row, name)
    if messages and messages[-1]["role"] == "assistant":
        answer = messages[-1]["content"] if answer is None else answer
        messages = messages[:-1]
    if not any(message["role"] == "user" for message in messages):
        raise RowError("no message is a question", "begin with a message of the user")
    return messages, answer


def _reference(row: RowColumns, name: str) -> str | None:
    column = _ANSWERS.get(name)
    return (
        row.text(column)
        if column is not None and row.has(column) and isinstance(row.get(column), str)
        else None
    )


def _json_of(columns: Mapping[str, object]) -> str:
    """The columns as JSON, which reaches the processes of rewards.

    Raises:
        RowError: if a value has no JSON.
    """
    try:
        return json.dumps(columns, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(
            f"a column cannot be given to a reward: {error}", "write it as text, number, list or mapping"
        ) from None
