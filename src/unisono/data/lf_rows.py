"""Reads rows as LLaMA-Factory does: calls and tools stay text, roles must alternate, and a row may have two answers."""

import json
from collections.abc import Mapping
from typing import Any

from unisono.data.rows import Exchange, RowError, Turn
from unisono.text import one_line

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "function",
    "observation": "observation",
    "tool": "observation",
    "function_response": "observation",
}
_TAGGED = ("user", "assistant", "observation", "function", "system")
_ASKS, _ANSWERS = ("user", "observation"), ("assistant", "function")
_JOINT = "\n</tool_response>\n<tool_response>\n"  # between the results of several calls, whatever the template


class _Row:
    """A row by standard column names; a name that is mapped to None is a column that does not exist."""

    def __init__(
        self,
        name: str,
        row: Mapping[str, Any],
        columns: Mapping[str, str | None],
        tags: Mapping[str, str | None],
    ) -> None:
        self.is_openai = name in ("messages", "prompt-completion")
        self._row = row
        self._columns = columns
        self._tags = tags

    def get(self, *names: str) -> Any:
        """The value of the first of these columns that has one, else None."""
        for name in names:
            column = self._columns.get(name, name)
            if column is not None and self._row.get(column) is not None:
                return self._row[column]
        return None

    def text(self, *names: str) -> str:
        value = self.get(*names)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise RowError(f"{names[0]} is not text", f"make {names[0]} a string")
        return value

    def tools(self) -> str:
        """Function schemas as JSON, or ""."""
        value = self.get("tools")
        if isinstance(value, list):
            return json.dumps(value, ensure_ascii=False) if value else ""
        return self.text("tools")

    def turn(self, message: Any, number: int) -> tuple[str, str]:
        """Role and text of a message."""
        if not isinstance(message, dict):
            raise RowError(f"turn {number} is not an object", "write {from: human, value: …}")
        role_key = self._tags.get("role") or ("from" if "from" in message else "role")
        content_key = self._tags.get("content") or ("value" if "value" in message else "content")
        role, content = self._role(message.get(role_key), number), message.get(content_key)
        calls = message.get("tool_calls") if self.is_openai else None
        if role == "assistant" and calls:
            return "function", _calls(calls, number)
        if not isinstance(content, str):
            raise RowError(f"turn {number} has no text under `{content_key}`", "write its text there")
        return role, content

    def _role(self, tag: Any, number: int) -> str:
        if self._tags:
            known = {self._tags[name]: name for name in reversed(_TAGGED) if self._tags.get(name)}
        else:
            known = _ROLES
        role = known.get(tag) if isinstance(tag, str) else None
        if role is None:
            raise RowError(
                f"turn {number} is from {one_line(repr(tag), limit=40)}",
                f"use one of {', '.join(map(str, known))}",
            )
        return role


def read_exchange(
    name: str,
    row: Mapping[str, Any],
    columns: Mapping[str, str | None],
    tags: Mapping[str, str | None] | None = None,
) -> Exchange:
    """The exchange of a row.

    Args:
        name: the source's format.
        row: columns and values.
        columns: the file's column for each standard name; None for one that does not exist.
        tags: the names of `role`, `content`, and of the roles, in a message; without them all usual names are known.

    Raises:
        RowError: if a value has the wrong type, roles do not alternate, or the row has a part too few.
    """
    read = _Row(name, row, columns, tags or {})
    if name == "text":
        return Exchange([Turn("user", _required(read.text("text"), "text"))], [])
    if name == "prompt-completion":
        return _prompt_completion(read)
    if name == "alpaca":
        return _with_answers(read, _alpaca_prompt(read), read.text("system"), read.get("output"))
    if name == "preference" and read.get("conversations", "messages") is None:
        answer = read.get("completion", "output")
        return _with_answers(read, _alpaca_prompt(read), read.text("system"), answer)
    return _conversation(read)


def _required(text: str, column: str) -> str:
    if not text.strip():
        raise RowError(f"the {column} is empty", "remove the row")
    return text


def _alpaca_prompt(row: _Row) -> list[Turn]:
    turns: list[Turn] = []
    history = row.get("history")
    for pair in _listed(history, "history") if history is not None else []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, str) for side in pair)):
            raise RowError("history is not a list of [question, answer]", "write [[question, answer], …]")
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    parts = (row.text("instruction", "prompt"), row.text("input"))
    return [*turns, Turn("user", "\n".join(part for part in parts if part))]


def _with_answers(row: _Row, prompt: list[Turn], system: str, answer: Any) -> Exchange:
    """Adds a pair of answers, or one with a label, or one."""
    label, chosen, rejected = row.get("label"), row.get("chosen"), row.get("rejected")
    answers: list[Turn] = []
    if isinstance(label, bool):
        if not isinstance(answer, str):
            raise RowError("the row has a label, but no answer", "write the answer as a string")
        return Exchange(prompt, [Turn("assistant", answer)], system, row.tools(), label)
    if chosen is not None or rejected is not None:
        answers = [_answer(row, chosen, "chosen"), _answer(row, rejected, "rejected")]
    elif isinstance(answer, str):
        answers = [Turn("assistant", answer)]
    return Exchange(prompt, answers, system, row.tools())


def _answer(row: _Row, value: Any, column: str) -> Turn:
    if isinstance(value, str):
        return Turn("assistant", value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise RowError(f"{column} is neither text nor a message", f"make {column} a string, or a message")
    role, content = row.turn(value, 1)
    if role not in _ANSWERS:
        raise RowError(f"{column} is a turn of the {role}, not an answer", "write an answer of the assistant")
    return Turn(role, content)  # type: ignore[arg-type]  # one of _ANSWERS


def _prompt_completion(row: _Row) -> Exchange:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Exchange([Turn("user", prompt)], [Turn("assistant", completion)], "", row.tools())
    if isinstance(prompt, list) and isinstance(completion, list):
        return _exchange(row, [*prompt, *completion], has_answer=True)
    raise RowError(
        "prompt and completion are neither two strings nor two lists of messages", "make both strings"
    )


def _conversation(row: _Row) -> Exchange:
    found = row.get("conversations", "messages")
    if found is None:
        raise RowError("there is no column with the turns", "set columns: {conversations: NAME}")
    messages = _listed(found, "conversations")
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None and rejected is None:
        return _exchange(row, messages, has_answer=True)
    exchange = _exchange(row, messages, has_answer=False)
    answers = [_answer(row, chosen, "chosen"), _answer(row, rejected, "rejected")]
    return Exchange(exchange.prompt, answers, exchange.system, exchange.tools)


def _exchange(row: _Row, messages: list[Any], *, has_answer: bool) -> Exchange:
    """The turns of a conversation in order; a leading system message replaces the column `system`."""
    found = [row.turn(message, number) for number, message in enumerate(messages, 1)]
    system = row.text("system")
    first = 1
    if found and found[0][0] == "system":
        system, found, first = found[0][1], found[1:], 2
    turns: list[Turn] = []
    for number, (role, content) in enumerate(found, first):
        if row.is_openai and role == "observation" and turns and turns[-1].role == "observation":
            turns[-1] = Turn("observation", turns[-1].content + _JOINT + content)
            continue
        expected = _ANSWERS if len(turns) % 2 else _ASKS
        if role not in expected:
            raise RowError(
                f"turn {number} is of the {role}, where a turn of the {' or '.join(expected)} must be",
                "questions and answers must alternate, beginning with a question",
            )
        turns.append(Turn(role, content))  # type: ignore[arg-type]  # one of `expected`
    if len(turns) % 2 == has_answer:
        raise RowError(
            f"the conversation has {len(turns)} turns and ends with {'a question' if has_answer else 'an answer'}",
            "end it with an answer" if has_answer else "leave the answer to chosen and rejected",
        )
    if not turns:
        raise RowError("the conversation is empty", "remove the row, or add a question and an answer")
    label = row.get("label")
    answers = [turns.pop()] if has_answer else []
    return Exchange(turns, answers, system, row.tools(), label if isinstance(label, bool) else None)


def _listed(value: Any, column: str) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # in CSV a list must be JSON
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(f"{column} is a string, but not a JSON list", "write a list") from None
    if not isinstance(value, list):
        raise RowError(f"{column} is not a list", "write a list")
    return value


def _calls(calls: Any, number: int) -> str:
    functions = [call.get("function", call) if isinstance(call, dict) else None for call in _listed(calls, "tool_calls")]
    if not all(isinstance(function, dict) for function in functions):
        raise RowError(f"a tool call of turn {number} is not an object", "write {function: {name: …, arguments: …}}")
    return json.dumps(functions, ensure_ascii=False)
