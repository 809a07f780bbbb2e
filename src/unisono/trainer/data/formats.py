"""Row formats: alpaca, sharegpt, messages, openai, prompt-completion, text.

Detects a source's format, and reads examples from its rows.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from unisono.base.text import nearest, one_line
from unisono.trainer.config.data_sections import TagsSection
from unisono.trainer.data import (
    Completion,
    Conversation,
    Example,
    Exchange,
    FunctionCall,
    Labelled,
    Message,
    OpenPrompt,
    Preference,
    RowError,
    Similar,
    Text,
    ThoughtKey,
    ToolCall,
)

FormatName = Literal[
    "alpaca",
    "alpaca-prompt",
    "sharegpt",
    "messages",
    "openai",
    "text",
    "prompt-completion",
    "preference",
    "prompt",
    "labelled",
    "similar",
]
Renamed = Mapping[str, str | None]
"""The file's column name for each standard name; None: the column is not read."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}

# Required and optional columns of each format, in the order in which `auto` tries them.
COLUMNS: dict[FormatName, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("system", "tools", "functions")),
    "sharegpt": (("conversations",), ("system", "tools")),
    "prompt-completion": (("prompt", "completion"), ("system", "tools", "functions")),
    "alpaca": (("instruction", "output"), ("input", "history", "system", "tools")),
    "text": (("text",), ()),
    "alpaca-prompt": (("instruction", "output"), ("input",)),  # never detected: alpaca has these columns
}

_PICTURE_COLUMNS = ("images", "image")

FLAGS = ("weight", "train", "loss", "trainable", "training")
"""Keys of a message that say whether, or with which weight, it counts in the loss; other programs
write each of them.
"""

THOUGHT_KEYS: tuple[ThoughtKey, ...] = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of a message that hold the thought of an answer."""


def column_of(standard: str, renamed: Renamed) -> str | None:
    """The file's column for one of our names; None if none is read.

    A column that has a name of ours and stands for another part is that part alone.
    """
    if standard in renamed:
        return renamed[standard]
    return None if standard in renamed.values() else standard


def detect(row: Mapping[str, object], renamed: Renamed) -> tuple[FormatName, str] | None:
    """The format of a source by its first row, and why; None if it matches no known format.

    Args:
        row: its columns and values.
        renamed: the file's column name for each standard name.
    """
    columns = list(row)
    for name, (needed, _) in COLUMNS.items():
        file_column = [theirs for column in needed if (theirs := column_of(column, renamed)) in columns]
        if len(file_column) < len(needed):
            continue
        taken, because = _by_its_turns(name, row[file_column[0]])
        others = [c for c in columns if c not in _file_columns(taken, renamed)]
        pictures = {column_of(column, renamed) for column in _PICTURE_COLUMNS}
        pictures |= {"objects"} if isinstance(row.get("objects"), dict) else set()
        others = [shown(c) for c in others if c not in pictures]  # they are read, or refused
        why = f"the first row has {' and '.join(file_column)}{because}"
        return taken, why + (f"; not read: {', '.join(others[:6])}" if others else "")
    return None


def shown(column: Any) -> str:
    """A column's name for messages."""
    return one_line(str(column), limit=40)


def _by_its_turns(name: FormatName, turns: Any) -> tuple[FormatName, str]:
    """Decides by the first turn: files use `messages` and `conversations` for either form of
    turns.
    """
    first = turns[0] if name in ("messages", "sharegpt") and isinstance(turns, list) and turns else None
    if not isinstance(first, dict):
        return name, ""
    if "role" in first:
        return "messages", " with role and content"
    return ("sharegpt", " with from and value") if "from" in first else (name, "")


def _file_columns(name: FormatName, renamed: Renamed) -> list[str | None]:
    needed, optional = COLUMNS[name]
    standard = (*needed, *optional, "messages", "conversations")
    return [column_of(column, renamed) for column in standard]


def to_example(
    name: FormatName,
    row: Mapping[str, object],
    renamed: Renamed,
    tags: TagsSection | None = None,
    *,
    plain: bool = False,
) -> Example:
    """The example of a row.

    Args:
        name: the source's format.
        row: columns and values.
        renamed: the file's column name for each standard name.
        tags: keys and roles of turns; None: the usual words.
        plain: whether prompts and answers that are texts are not turns of the chat template.

    Raises:
        RowError: if a column is missing or has an invalid value.
    """
    try:
        example = _READ[name](RowColumns(row, renamed, tags, plain=plain))
        refuse_surrogates(example)
    except RecursionError:
        raise RowError("it is nested too deep", "flatten it") from None
    return example


class RowColumns:
    """A row by standard column names; `renamed`, `tags` and `plain` as in `to_example`."""

    def __init__(
        self,
        row: Mapping[str, object],
        renamed: Renamed,
        tags: TagsSection | None,
        *,
        plain: bool = False,
    ) -> None:
        self.tags = tags
        self.plain = plain
        self._row = row
        self._renamed = renamed

    def has(self, standard: str) -> bool:
        """Whether the row has a value there that is not null."""
        file_column = column_of(standard, self._renamed)
        return file_column is not None and self._row.get(file_column) is not None

    def is_named(self, standard: str) -> bool:
        """Whether `columns` names a column of the file."""
        return self._renamed.get(standard) is not None

    def is_read(self, standard: str) -> bool:
        """Whether the column was not switched off."""
        return column_of(standard, self._renamed) is not None

    def get(self, standard: str) -> Any:
        """The value of the column.

        Raises:
            RowError: if there is no such column.
        """
        file_column = column_of(standard, self._renamed)
        if file_column is None:
            raise RowError(
                f"the column {standard} is not read (columns: {{{standard}: null}})",
                f"name the file's column for {standard}",
            )
        if file_column not in self._row:
            near = nearest(file_column, [str(name) for name in self._row])
            known = ", ".join(shown(name) for name in list(self._row)[:8]) or "none"
            fix = (
                f"set the source's columns: {{{standard}: {near}}}, or a different data.format"
                if near
                else (
                    "all rows of a source must have the same columns: set data.format or columns, or move"
                    " other rows to a separate source"
                )
            )
            raise RowError(f"there is no column {file_column!r}; there are {known}", fix)
        return self._row[file_column]

    def text(self, standard: str) -> str:
        """The text of the column.

        Raises:
            RowError: if it is missing, or not text.
        """
        value = self.get(standard)
        if not isinstance(value, str):
            column = column_of(standard, self._renamed) or standard
            name = column if column == standard else f"{shown(column)} (read as {standard})"
            raise RowError(f"{name} is {kind_of(value)}, not text", f"make {shown(column)} a string")
        return value

    def optional_text(self, standard: str) -> str:
        """The text of a column like `text`, or "" without a value."""
        return self.text(standard) if self.has(standard) else ""


def _read_text(row: RowColumns) -> Example:
    text = row.text("text")
    if row.is_named("input"):
        text = "\n".join(part for part in (text, row.optional_text("input")) if part)
    return Text(text)


def _read_completion(row: RowColumns) -> Example:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return completion_of(row, prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = messages_of([*prompt, *completion], "prompt and completion")
        return Conversation(with_system(messages, row), tools_of(row))
    raise RowError(
        f"prompt is {kind_of(prompt)} and completion is {kind_of(completion)}",
        "make both strings, or both lists of messages",
    )


def completion_of(row: RowColumns, prompt: str, answer: str) -> Conversation | Completion:
    """Text after text, unless the row has more, which only a template can render.

    Raises:
        RowError: if it has, and its texts are no turns of a template.
    """
    tools, system = tools_of(row), system_of(row)
    if tools is None and not system:
        return Completion(prompt, answer, row.plain)
    refuse_rendered(row)
    turns: list[Message] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Conversation([*system, *turns], tools)


def refuse_rendered(row: RowColumns) -> None:
    """Refuses a system message or tools beside texts that no template renders.

    Raises:
        RowError: if `data.plain_texts` is set.
    """
    if row.plain:
        raise RowError(
            "its prompt is a text, and its system message or tools need the chat template",
            "write the prompt as messages, or set the source's columns: {system: null, tools: null}",
        )


def _read_messages(row: RowColumns) -> Example:
    messages = messages_of(row.get("messages" if row.has("messages") else _either(row)), "messages")
    return Conversation(with_system(messages, row), tools_of(row))


def _either(row: RowColumns) -> str:
    return "conversations" if row.has("conversations") else "messages"


def _read_alpaca(row: RowColumns) -> Example:
    answer: Message = {"role": "assistant", "content": row.text("output")}
    return Conversation([*alpaca_prompt(row), answer], tools_of(row))


_ALPACA = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_REQUEST = ". Write a response that appropriately completes the request."


def _read_alpaca_prompt(row: RowColumns) -> Example:
    """Text after text, in the prompt of Stanford's Alpaca, which axolotl's `type: alpaca` has."""
    instruction, context = _instruction(row), row.optional_text("input")
    opening = f"{_ALPACA}{_WITH_INPUT if context else ''}{_REQUEST}"
    parts = [opening, f"### Instruction:\n{instruction}"]
    parts += [f"### Input:\n{context}"] if context else []
    return Completion("\n\n".join([*parts, "### Response:\n"]), row.text("output"), plain=True)


def alpaca_prompt(row: RowColumns) -> list[Message]:
    """The messages before the answer: system, history, and instruction with input.

    Raises:
        RowError: if a column has an invalid value.
    """
    messages = system_of(row)
    history = row.get("history") if row.has("history") else []
    for pair in list_of(history, "history"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(side, str) for side in pair)):
            raise RowError("history is not a list of [question, answer]", "write [[question, answer], …]")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(part for part in (_instruction(row), row.optional_text("input")) if part)
    return [*messages, {"role": "user", "content": question}]


def _instruction(row: RowColumns) -> str:
    """The text of the column.

    It may be switched off, or empty: the question is then in `input` alone.
    """
    if not row.is_read("instruction") or row.get("instruction") is None:
        return ""
    return row.text("instruction")


def system_of(row: RowColumns) -> list[Message]:
    """The system message of the column `system`, if there is one."""
    system = row.optional_text("system")
    return [{"role": "system", "content": system}] if system else []


def _read_sharegpt(row: RowColumns) -> Example:
    turns = list_of(row.get("conversations" if not row.has("messages") else "messages"), "conversations")
    messages = sharegpt_messages(turns, row.tags)
    return Conversation(_checked(with_system(messages, row), "conversations"), tools_of(row))


def sharegpt_messages(turns: list[Any], tags: TagsSection | None) -> list[Message]:
    """The messages of ShareGPT's turns.

    Raises:
        RowError: if a turn has no text, or an unknown role.
    """
    words = _words_of(tags)
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        role, text = _role_and_text(turn, number, words)
        if role == "function_call":
            calls = _calls_of_text(text, number)
            message: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        else:
            message = {"role": role, "content": text}
        if message["role"] == "assistant":
            for key in THOUGHT_KEYS:
                if turn.get(key):
                    message[key] = turn[key]
        messages.append(_flagged(message, turn, number))
    return messages


@dataclass(frozen=True, slots=True)
class _TurnKeys:
    """The keys of a turn, and the role that each word stands for."""

    role: str
    text: str
    roles: dict[str, str]


_USUAL_WORDS = _TurnKeys("from", "value", _ROLES)


def _words_of(tags: TagsSection | None) -> _TurnKeys:
    if tags is None:
        return _USUAL_WORDS
    pairs = (
        (tags.user_tag, "user"),
        (tags.assistant_tag, "assistant"),
        (tags.observation_tag, "tool"),
        (tags.function_tag, "function_call"),
        (tags.system_tag, "system"),
    )
    return _TurnKeys(
        tags.role_tag, tags.content_tag, {word: role for word, role in pairs if word is not None}
    )


def _role_and_text(turn: Any, number: int, words: _TurnKeys) -> tuple[str, str]:
    if not isinstance(turn, dict) or not isinstance(turn.get(words.text), str):
        raise RowError(
            f"turn {number} has no text under `{shown(words.text)}`{_keys_of(turn)}",
            "write {from: human, value: …}, or set the source's format: sharegpt, and its tags: {role_tag: …,"
            " content_tag: …}",
        )
    word = turn.get(words.role)
    role = words.roles.get(word) if isinstance(word, str) else None
    if role is None:
        raise RowError(
            f"turn {number} is from {one_line(repr(word), limit=40)}",
            f"{shown(words.role)} is one of {', '.join(words.roles)}",
        )
    return role, turn[words.text]


def with_system(messages: list[Message], row: RowColumns) -> list[Message]:
    """The messages behind the one in the column `system`.

    Raises:
        RowError: if a different one leads the conversation.
    """
    column = system_of(row)
    if not messages or messages[0]["role"] != "system":
        return [*column, *messages]
    if column and column[0]["content"] != messages[0]["content"]:
        raise RowError(
            "it has two system messages: the column system, and a different first message",
            "remove one of them; or set the source's columns: {system: null} to use the first message",
        )
    return messages


def _flagged(message: Message, source: Mapping[str, object], number: int) -> Message:
    """The message of a source, with `weight` if it is an answer that does not count in full."""
    weight = weight_of(source, number, is_answer=message["role"] == "assistant")
    return message if weight == 1 else message | {"weight": weight}


def weight_of(message: Mapping[str, object], number: int, *, is_answer: bool) -> float:
    """The weight of a message in the loss by its flags, from 0 to 1; 1 without flags.

    Args:
        message: as in the file.
        number: of the message, for errors.
        is_answer: whether it is of the assistant; others never count.

    Raises:
        RowError: if a flag is neither true, false nor a number from 0 to 1, flags contradict each
            other, or a message that is no answer should count.
    """
    flags: dict[str, float] = {}
    for name in FLAGS:
        if (value := message.get(name)) is None:
            continue
        if isinstance(value, bool | int | float) and 0 <= value <= 1:
            flags[name] = value
            continue
        raise RowError(
            f"{name} of message {number} is {one_line(repr(value), limit=40)}, neither false or true, nor a"
            " number from 0 to 1",
            "write the weight of the message in the loss",
        )
    if len(set(map(float, flags.values()))) > 1:
        names = ", ".join(f"{name}: {value}" for name, value in flags.items())
        raise RowError(f"message {number} contradicts itself: {names}", "remove one of them")
    name, weight = next(iter(flags.items()), ("weight", 1))
    if flags and weight and not is_answer:
        raise RowError(
            f"message {number} has {name}: {str(weight).lower()}, and is not an answer",
            f"only messages of the assistant count in the loss: remove it, or set data.ignore: [{name}]",
        )
    return float(weight)


_OPENAI_TAGS = TagsSection(
    role_tag="role",
    content_tag="content",
    user_tag="user",
    assistant_tag="assistant",
    observation_tag="tool",
    function_tag="function",
    system_tag="system",
)
_BETWEEN_ANSWERS = "\n</tool_response>\n<tool_response>\n"
_NO_THINKING = "detailed thinking off"


def _read_openai(row: RowColumns) -> Example:
    """OpenAI messages as LLaMA-Factory 0.9.5 reads them.

    Answers of tools that follow each other are joined to one, those at the end are dropped, a turn
    with tool calls loses its text, and the system message asks for no thinking. `messages` changes
    nothing of this.
    """
    words = _words_of(row.tags or _OPENAI_TAGS)
    turns: list[Message] = []
    answers: list[str] = []
    for number, turn in enumerate(list_of(row.get("messages"), "messages"), 1):
        message = _openai_turn(turn, number, words)
        if message["role"] == "tool":
            answers.append(message["content"])
            continue
        if answers:
            turns.append({"role": "tool", "content": _BETWEEN_ANSWERS.join(answers)})
            answers = []
        turns.append(_flagged(message, turn, number))
    leading = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
    _refuse_disorder(turns)
    has_tools = row.has("tools") and row.get("tools") != ""
    system = _without_thinking(
        row.optional_text("system") if leading is None else leading, has_tools=has_tools
    )
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return Conversation([*before, *turns], tools_of(row))


def _openai_turn(turn: Any, number: int, words: _TurnKeys) -> Message:
    calls = turn.get("tool_calls") if isinstance(turn, dict) else None
    if isinstance(turn, dict) and turn.get(words.text) is None and calls:
        turn = {**turn, words.text: ""}
    role, text = _role_and_text(turn, number, words)
    if role not in ("assistant", "function_call"):
        return {"role": role, "content": text}
    if calls:
        functions = [
            call.get("function") if isinstance(call, dict) else None for call in list_of(calls, "tool_calls")
        ]
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
            raise RowError(
                f"a tool call of turn {number} has no function name",
                "write {function: {name: …, arguments: …}}",
            )
        known = set(words.roles.values())
        # LLaMA-Factory has no role for it.
        if "function_call" not in known and not {"tool", "system"} <= known:
            raise RowError(
                f"turn {number} has tool calls, and there is no function_tag", "set tags.function_tag"
            )
        calls = [{"type": "function", "function": function} for function in functions]
    elif role == "function_call":
        calls = _calls_of_text(text, number)
    else:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _refuse_disorder(turns: list[Message]) -> None:
    """Turns of the user or a tool, and of the assistant, take turns; the last one is the
    assistant's.
    """
    for number, turn in enumerate(turns, 1):
        if turn["role"] not in (("user", "tool") if number % 2 else ("assistant",)):
            raise RowError(
                f"turn {number} is from {turn['role']}, out of turn", "user and assistant take turns"
            )
    if not turns or len(turns) % 2:
        raise RowError(f"it has {len(turns)} turns, and no answer at the end", "end it with an answer")


def _without_thinking(system: str, *, has_tools: bool) -> str:
    if has_tools:
        return f"{system}\n" if system else ""
    if not system:
        return _NO_THINKING
    knows = "detailed thinking on" in system or _NO_THINKING in system
    return system if knows else f"{system}\n{_NO_THINKING}"


def _calls_of_text(text: str, number: int) -> list[ToolCall]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(
            f"the function call of turn {number} is not a JSON object with a name",
            'write {"name": …, "arguments": {…}}',
        )
    return [
        {"type": "function", "function": _function(call["name"], call.get("arguments", {}))} for call in calls
    ]


def messages_of(value: Any, column: str) -> list[Message]:
    """The messages of a list, in the form that templates expect.

    Raises:
        RowError: if one has no role, or content that is not text.
    """
    messages = []
    for number, message in enumerate(list_of(value, column), 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(
                f"message {number} has no role{_keys_of(message)}", "write {role: user, content: …}"
            )
        messages.append(_message(message, number))
    return _checked(messages, column)


def _keys_of(message: Any) -> str:
    """The keys of a message that lacks one, for the error."""
    if not isinstance(message, dict):
        return f": it is {kind_of(message)}"
    return f"; its keys are {', '.join(shown(name) for name in list(message)[:6]) or 'none'}"


def _message(message: Any, number: int) -> Message:
    """The message with its content as one string, arguments of calls as objects, and without null
    keys.

    Templates expect this form; it is passed to `tokenizer.apply_chat_template`. A call in OpenAI's
    old form becomes one in the new form.
    """
    kept: Any = {name: value for name, value in message.items() if value is not None and name not in FLAGS}
    if kept["role"] == "function":
        kept["role"] = "tool"
    old_call = kept.pop("function_call", None)
    if old_call and kept.get("tool_calls"):
        raise RowError(f"message {number} has tool_calls and function_call", "remove one of them")
    if old_call:
        kept["tool_calls"] = [old_call]
    content = kept.get("content", "")
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        raise RowError(f"the content of message {number} is {kind_of(content)}, not text", "make it a string")
    kept["content"] = content
    calls = kept.get("tool_calls")
    if calls is not None:
        calls = list_of(calls, f"tool_calls of message {number}")
        kept["tool_calls"] = [_call(call, number) for call in calls]
        if not calls:
            del kept["tool_calls"]
    return _flagged(kept, message, number)


def _part(part: Any, number: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise RowError(f"message {number} has a part that is not text", "remove it: only text can be trained on")


def _call(call: Any, number: int) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(
            f"a tool call of message {number} has no function name",
            "write {function: {name: …, arguments: …}}",
        )
    outer = {name: value for name, value in call.items() if value is not None and call is not function}
    read = _function(function["name"], function.get("arguments", {}))
    whole: Any = {"type": "function", **outer, "function": read}
    return whole


def _function(name: str, arguments: object) -> FunctionCall:
    """OpenAI writes arguments as a string of JSON; templates expect the object."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"name": name, "arguments": arguments}


def tools_of(row: RowColumns) -> list[Any] | None:
    """The function schemas of a row, also in OpenAI's old column `functions`; None if it has none.

    Raises:
        RowError: if they are not a list of objects.
    """
    column = "tools" if row.has("tools") else "functions"
    if not row.has(column):
        return None
    tools = row.get(column)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except (ValueError, RecursionError):
            raise RowError(f"{column} is not valid JSON", "write a list of function schemas") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{column} is not a list of function schemas", "write a list of function schemas")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


def _checked(messages: list[Message], column: str) -> list[Message]:
    if not messages:
        raise RowError(f"{column} is empty", "remove the row, or add a question and an answer")
    return messages


def list_of(value: Any, name: str) -> list[Any]:
    """A list, also as the JSON text that CSV files have.

    Raises:
        RowError: if it is neither; `name` is that of the column.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):  # in CSV a list must be JSON
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(f"{name} is a string, but not a JSON list", "write a list") from None
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind_of(value)}, not a list", "write a list")
    return value


def kind_of(value: Any) -> str:
    """The kind of a JSON value, for messages."""
    if value is None:
        return "empty"
    names: dict[type, str] = {list: "a list", str: "text", dict: "an object", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def refuse_surrogates(example: Example) -> None:
    """Refuses unpaired surrogates, which JSON allows: the tokenizer would fail on them with an
    error of its own.
    """
    if holds_surrogate(all_text(example)):
        raise RowError("it has an unpaired surrogate, which is not valid text", "write the full character")


def holds_surrogate(text: str) -> bool:
    """Whether a text has an unpaired surrogate."""
    return not text.isascii() and _SURROGATE.search(text) is not None


def all_text(example: Example) -> str:
    """All strings of an example, joined."""
    if isinstance(example, Text):
        return example.text
    if isinstance(example, Labelled):
        return all_text(example.example)
    if isinstance(example, Similar):
        return "\0".join(example.texts)
    if isinstance(example, Preference):
        return "\0".join(all_text(answer) for answer in example.answers)
    if isinstance(example, Exchange):
        turns = (turn.content for turn in (*example.prompt, *example.answers))
        return "\0".join((example.system, example.tools, *turns))
    if isinstance(example, Completion):
        return example.prompt + "\0" + example.completion
    if isinstance(example, OpenPrompt):
        return all_strings(example.prompt, example.columns, example.tools)
    return all_strings(example.messages, example.tools)


def all_strings(*values: object) -> str:
    """All strings in JSON values, joined."""
    strings: list[str] = []
    for value in values:
        _collect(value, strings)
    return "\0".join(strings)


def _collect(value: object, strings: list[str]) -> None:
    if isinstance(value, str):
        strings.append(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            strings.append(str(name))
            _collect(inner, strings)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, strings)


_READ: dict[FormatName, Callable[[RowColumns], Example]] = {
    "messages": _read_messages,
    "openai": _read_openai,
    "sharegpt": _read_sharegpt,
    "prompt-completion": _read_completion,
    "alpaca": _read_alpaca,
    "alpaca-prompt": _read_alpaca_prompt,
    "text": _read_text,
}
