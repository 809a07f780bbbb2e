"""Reads preference rows: a prompt with a chosen and a rejected answer, or with one answer and a
label; and rows as LLaMA-Factory reads them.

The prompt is `prompt` (text, or messages), `instruction` with input, system and history, or
`messages` or `conversations`; without any of these, `chosen` and `rejected` are whole conversations
with the same beginning: messages, or hh-rlhf's transcripts. An answer is text, a message, or a list
of messages. A rated answer is `completion` or `output`, or the last message. In LLaMA-Factory's
rows calls and tools stay text, roles must alternate, and a row may have two answers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.base.text import one_line
from unisono.trainer.config.data_sections import TagsSection
from unisono.trainer.data import (
    Completion,
    Conversation,
    EmptyAnswerError,
    Exchange,
    Message,
    Preference,
    RowError,
    Turn,
)
from unisono.trainer.data.formats import (
    Renamed,
    RowColumns,
    alpaca_prompt,
    column_of,
    completion_of,
    kind_of,
    list_of,
    messages_of,
    refuse_surrogates,
    sharegpt_messages,
    system_of,
    tools_of,
    weight_of,
    with_system,
)
from unisono.trainer.data.template import common_beginning
from unisono.trainer.data.thoughts import thought_of

_TURNS = ("messages", "conversations")
BOOLEAN = "write true or false without quotes; CSV has texts only, so use JSONL or Parquet"
"""What to do about a label that is not a boolean."""
_SIDES = ("chosen", "rejected")
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
_OLD_ROLES = {"function": "observation"}  # of OpenAI's messages before tool_calls
_TAGGED = ("user", "assistant", "observation", "function", "system")
_ASKS, _ANSWERS = ("user", "observation"), ("assistant", "function")
JOINT = "\n</tool_response>\n<tool_response>\n"  # between the results of several calls, whatever the template


def sides_in(row: Mapping[str, object], renamed: Renamed) -> list[str]:
    """Those of `chosen` and `rejected` that a row has."""
    return [side for side in _SIDES if column_of(side, renamed) in row]


def is_rated(row: Mapping[str, object], renamed: Renamed) -> bool:
    """Whether a row has a label."""
    name = column_of("label", renamed)
    return name is not None and row.get(name) is not None


def read_preference(
    row: Mapping[str, object], renamed: Renamed, tags: TagsSection | None = None, *, plain: bool = False
) -> Preference:
    """The pair, or the rated answer, of a row.

    Args:
        row: columns and values.
        renamed: the file's column name for each standard name.
        tags: keys and roles of turns; None: the usual words.
        plain: whether prompts and answers that are texts are not turns of the chat template. Texts
            without a prompt are then whole rows, whose prompt is their beginning, as in TRL.

    Raises:
        RowError: if a part is missing or has an invalid value.
    """
    try:
        columns = RowColumns(row, renamed, tags, plain=plain)
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
    if all(isinstance(row.get(side), str) for side in _SIDES):
        sides = [row.text(side) for side in _SIDES]
        if row.plain and prompt == []:
            prompt = shared_prompt(*sides)
            sides = [side[len(prompt) :] for side in sides]
        if isinstance(prompt, str):
            return Preference([_completion(row, prompt, *side) for side in zip(sides, _SIDES, strict=True)])
    before = _as_messages(prompt, row)
    return _with_one_prompt(*(_conversation(row, before, side) for side in _SIDES))


def shared_prompt(chosen: str, rejected: str) -> str:
    """The beginning of two texts that is their prompt, as `trl.extract_prompt` has it: without a
    space at its end, and neither text is a prompt alone.
    """
    end, shortest = common_beginning(chosen, rejected), min(len(chosen), len(rejected))
    if end == shortest:
        return chosen[: max(end - 1, 0)]
    return chosen[: end - 1] if chosen[:end].endswith(" ") else chosen[:end]


def _with_one_prompt(chosen: Conversation, rejected: Conversation) -> Preference:
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise RowError(
            "chosen and rejected follow different prompts",
            "write the same messages before both answers, or put the prompt into a separate column",
        )
    return Preference([chosen, rejected])


def _rated(row: RowColumns) -> Preference:
    if not row.has("label"):
        raise RowError(
            "it has neither chosen and rejected answers, nor a label",
            "set the source's columns: {chosen: NAME, rejected: NAME}, or columns: {label: NAME}",
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
    if not answer.strip():
        raise EmptyAnswerError(f"{name} is empty", "write an answer, or remove the row")
    return completion_of(row, prompt, answer)


def _prompt(row: RowColumns) -> str | list[Message]:
    """The text or the messages before the answers; no messages if the answers contain them."""
    if row.has("prompt"):
        prompt = row.get("prompt")
        if isinstance(prompt, str) and (row.plain or not prompt.lstrip().startswith("[{")):
            return prompt
        if isinstance(prompt, list | str):
            return with_system(_messages(list_of(prompt, "prompt"), "prompt", row.tags), row)
        raise RowError(f"prompt is {kind_of(prompt)}, neither text nor messages", "make it a string")
    if row.has("instruction"):
        return alpaca_prompt(row)
    return _turns(row) if any(row.has(name) for name in _TURNS) else []


def _turns(row: RowColumns) -> list[Message]:
    name = next(name for name in _TURNS if row.has(name))
    return with_system(_messages(list_of(row.get(name), name), name, row.tags), row)


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
        turns = None if prompt else turns_of_transcript(value)
        if not prompt and turns is None:
            raise _without_prompt(row)
        messages: list[Message] = turns or [{"role": "assistant", "content": value}]
    elif isinstance(value, dict | list | str):
        messages = _messages([value] if isinstance(value, dict) else list_of(value, name), name, row.tags)
    else:
        raise RowError(f"{name} is {kind_of(value)}, neither text nor messages", "make it a string")
    for repeated in (prompt, prompt[1:] if prompt and prompt[0]["role"] == "system" else []):
        if repeated and messages[: len(repeated)] == repeated:
            messages = messages[len(repeated) :]
    whole = [*prompt, *messages] if prompt else with_system(messages, row)
    return Conversation(_ending_with_answer(whole, name), tools_of(row))


def _without_prompt(row: RowColumns) -> RowError:
    """The error of a row whose answers are text, without a prompt."""
    texts = [row.get(side) for side in _SIDES if row.has(side)]
    is_pair = len(texts) > 1 and all(isinstance(text, str) for text in texts)
    shared = texts[0][: common_beginning(*texts)] if is_pair else ""
    if not shared.strip():
        return RowError(
            "it has no prompt",
            "add prompt, instruction or messages, or make both answers whole conversations",
        )
    beginning = one_line(repr(shared), limit=80)
    return RowError(
        "its answers are text, and no column has the prompt",
        f"write their shared beginning ({beginning}) into a column prompt, or write both as lists of"
        " messages; of texts only those with turns of Human: and Assistant: are read as such",
    )


_TURN = re.compile(r"(?:\A\s*|\r?\n\r?\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def turns_of_transcript(text: Any) -> list[Message] | None:
    """The messages of a transcript as in hh-rlhf: turns that begin with `Human:` and `Assistant:`;
    None for any other value.
    """
    if not isinstance(text, str):
        return None
    marks = list(_TURN.finditer(text))
    if len(marks) < 2 or text[: marks[0].start()].strip() or marks[0][1] != "Human":
        return None
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        {"role": _SPEAKERS[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]


def _ending_with_answer(messages: list[Message], name: str) -> list[Message]:
    last: Message = messages[-1] if messages else {"role": "nobody", "content": ""}
    if last["role"] != "assistant":
        raise RowError(
            f"{name} ends with a message of {one_line(str(last['role']), limit=20)}, not with an answer",
            "end it with a message of the assistant",
        )
    if len(messages) == 1:
        raise RowError("there is no message before the answer", "add a prompt")
    if not last.get("tool_calls") and not last["content"].strip():
        raise RowError(f"the answer in {name} is empty", "write an answer, or remove the row")
    return messages


def with_answer_of(
    row: Conversation | Completion, other: Conversation | Completion
) -> Conversation | Completion:
    """The prompt of a row with the answer of another row."""
    if isinstance(row, Completion) and isinstance(other, Completion):
        return replace(row, completion=other.completion)
    answer: Message = (
        {"role": "assistant", "content": other.completion}
        if isinstance(other, Completion)
        else other.messages[-1]
    )
    if isinstance(row, Completion):
        return Conversation([{"role": "user", "content": row.prompt}, answer])
    return Conversation([*row.messages[:-1], answer], row.tools, row.pictures)


class _PreferenceRow:
    """A row by standard column names; a name that is mapped to None is a column that does not
    exist.
    """

    def __init__(
        self,
        name: str,
        row: Mapping[str, object],
        columns: Mapping[str, str | None],
        tags: Mapping[str, str | None],
        thought: tuple[str, str] | None,
    ) -> None:
        self.not_rendered: list[str] = []
        self._thought = thought
        self.is_openai = name in ("messages", "prompt-completion", "openai")
        self.is_exact_openai = name == "openai"  # as datasets with `formatting: openai`, oddities included
        self._row = row
        self._columns = columns
        self._tags = tags

    def get(self, *names: str) -> Any:
        """The value of the first of these columns that is mapped, or that the file has; else
        None.
        """
        for name in names:
            column = column_of(name, self._columns)
            if column is not None and (name in self._columns or column in self._row):
                return self._row.get(column)
        return None

    def is_mapped(self, name: str) -> bool:
        return self._columns.get(name) is not None

    def has_prompt(self) -> bool:
        """Whether there is a prompt in a column of its own."""
        return any(self.get(name) is not None for name in ("prompt", "instruction", *_TURNS))

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
        if value is None and self.is_openai and not self.is_exact_openai:
            value = self.get("functions")
        if isinstance(value, list | dict):
            return json.dumps(value, ensure_ascii=False) if value or self.is_exact_openai else ""
        return self.text("tools")

    def messages(self) -> list[Any]:
        value = self.get("conversations", "messages")
        if value is None:
            raise RowError(
                "there is no column with the turns", "set the source's columns: {conversations: NAME}"
            )
        return list_of(value, "conversations")

    def turn(self, message: Any, number: int) -> tuple[str, str]:
        """Role and text of a message."""
        if not isinstance(message, dict):
            raise RowError(f"turn {number} is not an object", "write {from: human, value: …}")
        role_key = self._tags.get("role_tag") or ("from" if "from" in message else "role")
        content_key = self._tags.get("content_tag") or ("value" if "value" in message else "content")
        role, content = self._role(message.get(role_key), number), message.get(content_key)
        calls = self._calls(message)
        thought = self._thought_of(message, number) if role in _ANSWERS else ""
        if role in _ANSWERS and calls:
            if isinstance(content, str) and content.strip():
                self.not_rendered.append(f"the text beside the tool call of message {number} (assistant)")
            return "function", thought + _calls(calls, number)
        if not isinstance(content, str):
            raise RowError(f"turn {number} has no text under `{content_key}`", "write its text there")
        return role, thought + content

    def _thought_of(self, message: Mapping[str, object], number: int) -> str:
        """The thought that a message has under a key of its own, as the template writes thoughts.

        Raises:
            RowError: if the template has no thoughts.
        """
        thought = thought_of(message)
        if not thought:
            return ""
        if self._thought is None:
            raise RowError(
                f"the thought of message {number} (assistant) is not rendered by the template",
                "set data.template to a reasoning model's, e.g. lf:qwen3, or remove the thought from the row",
            )
        begin, end = self._thought
        return begin + thought + end

    def _calls(self, message: Mapping[str, object]) -> Any:
        """The tool calls of a message, also in OpenAI's old form; None if it has none."""
        if not self.is_openai:
            return None
        calls, old = message.get("tool_calls"), message.get("function_call")
        return calls or ([old] if old and not self.is_exact_openai else None)

    def _role(self, tag: Any, number: int) -> str:
        if self._tags:
            known = {word: role for role in reversed(_TAGGED) if (word := self._tags.get(f"{role}_tag"))}
        else:
            known = _ROLES | (_OLD_ROLES if self.is_openai else {})
        role = known.get(tag) if isinstance(tag, str) else None
        if role is None:
            raise RowError(
                f"turn {number} is from {one_line(repr(tag), limit=40)}",
                f"use one of {', '.join(map(str, known))}",
            )
        return role


def read_exchange(
    name: str,
    row: Mapping[str, object],
    columns: Mapping[str, str | None],
    tags: Mapping[str, str | None] | None = None,
    *,
    thought: tuple[str, str] | None = None,
) -> Exchange:
    """The exchange of a row.

    Args:
        name: the source's format.
        row: columns and values.
        columns: the file's column for each standard name; None for one that does not exist.
        tags: the words of a source for the keys and roles of a turn (role_tag, content_tag,
            user_tag, …); without them all usual words are known.
        thought: begin and end of a thought in the template; None: it has no thoughts.

    Raises:
        RowError: if a value has the wrong type, roles do not alternate, or the row has a part too
            few.
    """
    read = _PreferenceRow(name, row, columns, tags or {}, thought)
    exchange = _read_exchange(name, read)
    return replace(exchange, not_rendered=tuple(read.not_rendered)) if read.not_rendered else exchange


def _read_exchange(name: str, read: _PreferenceRow) -> Exchange:
    if name == "text":
        parts = [read.text("text"), read.text("input") if read.is_mapped("input") else ""]
        return Exchange([Turn("user", "\n".join(part for part in parts if part))], [])
    if name == "prompt-completion":
        return _prompt_completion(read)
    if name == "alpaca":
        answer = read.get("output")
        answers = [Turn("assistant", answer)] if isinstance(answer, str) else []
        return Exchange(_alpaca_prompt(read), answers, read.text("system"), read.tools())
    if name == "preference":
        return _preference(read)
    exchange = _exchange(read, read.messages(), has_answer=True)
    return replace(exchange, system=_openai_system(exchange)) if name == "openai" else exchange


def _openai_system(exchange: Exchange) -> str:
    """The system message of a dataset with `formatting: openai`, to which LLaMA-Factory adds a
    phrase of some models.
    """
    system, off = exchange.system, "detailed thinking off"
    if exchange.tools:
        return system + "\n" if system else ""
    if not system:
        return off
    return system if off in system or "detailed thinking on" in system else f"{system}\n{off}"


def _alpaca_prompt(row: _PreferenceRow) -> list[Turn]:
    turns: list[Turn] = []
    history = row.get("history")
    for pair in list_of(history, "history") if history is not None else []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, str) for side in pair)):
            raise RowError("history is not a list of [question, answer]", "write [[question, answer], …]")
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    parts = (row.text("instruction", "prompt"), row.text("input"))
    return [*turns, Turn("user", "\n".join(part for part in parts if part))]


def _preference(row: _PreferenceRow) -> Exchange:
    """A pair of answers, or one with a label; the prompt is a conversation, or text."""
    label, chosen, rejected = row.get("label"), row.get("chosen"), row.get("rejected")
    turns = None if row.has_prompt() else _transcript_before(chosen, rejected)
    if turns is not None:
        prompt, chosen, rejected = turns
        exchange = _exchange(row, prompt, has_answer=False)
        return replace(exchange, answers=[_answer(row, chosen, "chosen"), _answer(row, rejected, "rejected")])
    talks = row.get("conversations", "messages") is not None
    is_pair = chosen is not None or rejected is not None
    if not is_pair and label is not None and not isinstance(label, bool):
        raise RowError(f"label is {one_line(repr(label), limit=40)}, not a boolean", BOOLEAN)
    missing = [name for name, value in (("chosen", chosen), ("rejected", rejected)) if value is None]
    if is_pair and missing:
        raise RowError(f"the row has no {missing[0]} answer", f"add {missing[0]}, or remove the row")
    if not is_pair and label is None:
        raise RowError(
            "the row has neither chosen and rejected answers, nor a label that is true or false",
            "set the source's columns: {chosen: NAME, rejected: NAME}, or columns: {label: NAME}",
        )
    if talks:
        exchange = _exchange(row, row.messages(), has_answer=not is_pair)
    else:
        exchange = Exchange(_alpaca_prompt(row), [], row.text("system"), row.tools())
    if is_pair:
        answers = [_answer(row, chosen, "chosen"), _answer(row, rejected, "rejected")]
        return replace(exchange, answers=answers)
    if not talks:
        answer = _answer(row, row.get("output", "completion"), "output")
        exchange = replace(exchange, answers=[answer])
    return replace(exchange, desirable=label)


def _transcript_before(chosen: Any, rejected: Any) -> tuple[list[Message], Message, Message] | None:
    """The shared messages of two transcripts, and the last one of each; None if they are none.

    Raises:
        RowError: if they have different messages before the last one.
    """
    sides = turns_of_transcript(chosen), turns_of_transcript(rejected)
    if sides[0] is None or sides[1] is None:
        return None
    _with_one_prompt(
        *(
            Conversation(_ending_with_answer(turns, name))
            for turns, name in zip(sides, _SIDES, strict=True)
            if turns
        )
    )
    return sides[0][:-1], sides[0][-1], sides[1][-1]


def _answer(row: _PreferenceRow, value: Any, column: str) -> Turn:
    if isinstance(value, str):
        return Turn("assistant", value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict):
        raise RowError(f"{column} is neither text nor a message", f"make {column} a string, or a message")
    role, content = row.turn(value, 1)
    if role not in _ANSWERS:
        raise RowError(f"{column} is a turn of the {role}, not an answer", "write an answer of the assistant")
    if weight_of(value, 1, is_answer=True) != 1:
        raise RowError(f"{column} has a weight in the loss, and preferences have none", "remove it")
    return Turn(role, content)  # type: ignore[arg-type]  # one of _ANSWERS


def _prompt_completion(row: _PreferenceRow) -> Exchange:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        answers = [Turn("assistant", completion)]
        return Exchange([Turn("user", prompt)], answers, row.text("system"), row.tools())
    if isinstance(prompt, list) and isinstance(completion, list):
        return _exchange(row, [*prompt, *completion], has_answer=True)
    raise RowError(
        "prompt and completion are neither two strings nor two lists of messages", "make both strings"
    )


def _exchange(row: _PreferenceRow, messages: list[Any], *, has_answer: bool) -> Exchange:
    """The turns of a conversation in order; a leading system message replaces the column
    `system`.
    """
    parsed = [_turn(row, message, number) for number, message in enumerate(messages, 1)]
    system = row.text("system")
    first = 1
    if parsed and parsed[0][0] == "system":
        system, parsed, first = parsed[0][1], parsed[1:], 2
    while row.is_exact_openai and parsed and parsed[-1][0] == "observation":
        parsed.pop()
    turns: list[Turn] = []
    for number, (role, content, weight) in enumerate(parsed, first):
        if row.is_openai and role == "observation" and turns and turns[-1].role == "observation":
            turns[-1] = Turn("observation", turns[-1].content + JOINT + content)
            continue
        expected = _ANSWERS if len(turns) % 2 else _ASKS
        if role not in expected:
            raise RowError(
                f"turn {number} is of the {role}, where a turn of the {' or '.join(expected)} must be",
                "questions and answers must alternate, beginning with a question",
            )
        turns.append(Turn(role, content, weight))  # type: ignore[arg-type]  # one of `expected`
    if len(turns) % 2 == has_answer:
        raise RowError(
            f"the conversation has {len(turns)} turns and ends with"
            f" {'a question' if has_answer else 'an answer'}",
            "end it with an answer" if has_answer else "leave the answer to chosen and rejected",
        )
    if not turns:
        raise RowError("the conversation is empty", "remove the row, or add a question and an answer")
    answers = [turns.pop()] if has_answer else []
    return Exchange(turns, answers, system, row.tools())


def _turn(row: _PreferenceRow, message: Any, number: int) -> tuple[str, str, float]:
    """Role and text of a message, and its weight in the loss if it is an answer."""
    role, content = row.turn(message, number)
    return role, content, weight_of(message, number, is_answer=role in _ANSWERS)


def _calls(calls: Any, number: int) -> str:
    functions = [
        call.get("function", call) if isinstance(call, dict) else None
        for call in list_of(calls, "tool_calls")
    ]
    if not all(isinstance(function, dict) for function in functions):
        raise RowError(
            f"a tool call of turn {number} is not an object", "write {function: {name: …, arguments: …}}"
        )
    return json.dumps(functions, ensure_ascii=False)
