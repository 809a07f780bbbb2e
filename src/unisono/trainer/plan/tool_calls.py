"""The calls of tools that a model writes in its answers. Pure."""

import json
import re
import secrets
from collections.abc import Collection
from typing import Any, NotRequired, TypedDict


class CalledFunction(TypedDict):
    """The function of a call; chunks after the first lack its name."""

    name: NotRequired[str]
    arguments: str


class CalledTool(TypedDict):
    """A call of a tool; chunks have its index, and after the first only the arguments."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[str]
    function: CalledFunction


_LISTS = ("[TOOL_CALLS]", "<|tool_call|>")
CALL_MARKS = ("<tool_call>", "</tool_call>", *_LISTS, "[CALL_ID]", "[ARGS]", "<|python_tag|>")
"""What models write around calls. Some tokenizers have them as special tokens, which texts usually
lack.
"""
_STARTS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|tool_call\|>|<\|python_tag\|>|(?:^|(?<=\n))Action:")
_MARKS = ("<tool_call>", *_LISTS, "<|python_tag|>", "\nAction:")
_END = "</tool_call>"
_BARE = re.compile(r"[\[{]")
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_FIRST_KEY = re.compile(r'\[?\s*\{\s*"([^"]*)"')
_NOT_AN_OBJECT = re.compile(r'\[\s*[^\s{]|\[?\s*\{\s*[^\s"]')
_ACTION = re.compile(r"Action:[ \t]*([^\n]{1,200})\n+Action Input:\s*")
_NAMED = re.compile(r"\s*([\w.-]{1,200})\s*(?:\[CALL_ID\]\s*(\w{1,64})\s*)?(?:\[ARGS\])?\s*(?=\{)")
_NEXT = re.compile(r"\s*;\s*(?=\{)")
_JSON = json.JSONDecoder()


class ToolCallReader:
    """Separates an answer, as it comes, into texts and calls of tools. Pure.

    It reads the forms that chat templates teach: JSON in <tool_call> (Qwen, Hermes), an answer that
    begins with JSON, or <|python_tag|> and JSON (Llama 3), [TOOL_CALLS] with a list, or with a name
    and [ARGS] (Mistral), <|tool_call|> with a list (Granite), and lines with Action and Action
    Input (ReAct). A call is given once its JSON is complete; what only looks like a call is text.
    """

    def __init__(self, names: Collection[str], *, most: int | None = None) -> None:
        """A reader of one answer.

        Args:
            names: of the tools; JSON without a mark is a call only with one of them.
            most: calls that are given; None: all.
        """
        self._names = names
        self._most = most
        self._held = ""
        self._space = ""  # that is text only if more text follows
        self._has_text = False
        self._is_after_call = False
        self.calls = 0

    def push(self, text: str) -> list[str | CalledTool]:
        """The texts and calls that are certain with this piece of the answer."""
        self._held += text
        return self._read(is_over=False)

    def close(self) -> list[str | CalledTool]:
        """The rest, after the last piece."""
        pieces = self._read(is_over=True)
        if self._space and not self.calls:
            pieces.append(self._space)
        return pieces

    def _read(self, *, is_over: bool) -> list[str | CalledTool]:
        pieces: list[str | CalledTool] = []
        while self._held:
            if self._is_after_call and not is_over and self._held.strip() in ("", ";"):
                break
            start = self._start()
            if start is None:
                self._say(pieces, len(self._held) - (0 if is_over else self._beginning_of_a_mark()))
                break
            self._say(pieces, start)
            length, calls = self._calls_at_beginning(is_over=is_over)
            if length == 0 and not is_over:
                break  # it is not complete
            if calls:
                self._give(pieces, calls, length)
            else:
                self._say(pieces, length or len(self._held))
        return pieces

    def _start(self) -> int | None:
        """Where a call may begin in what is held."""
        if self._is_after_call and _NEXT.match(self._held):
            return 0
        if not self._has_text and not self.calls:
            spaces = len(self._held) - len(self._held.lstrip())
            if _BARE.match(self._held, spaces):
                return spaces
        match = _STARTS.search(self._held)
        return match.start() if match else None

    def _beginning_of_a_mark(self) -> int:
        """The length of the end of what is held that may become a mark."""
        is_first = not self._has_text and "Action:".startswith(self._held)
        return len(self._held) if is_first else max(_overlap(self._held, mark) for mark in _MARKS)

    def _say(self, pieces: list[str | CalledTool], count: int) -> None:
        """Gives so many characters as text, without spaces around calls."""
        text, self._held = self._space + self._held[:count], self._held[count:]
        if self._is_after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            pieces.append("\n" + kept if self._is_after_call and self._has_text else kept)
            self._has_text, self._is_after_call = True, False

    def _give(self, pieces: list[str | CalledTool], calls: list[CalledTool], length: int) -> None:
        self._held, self._space, self._is_after_call = self._held[length:], "", True
        for call in calls:
            if self._most is None or self.calls < self._most:
                pieces.append(call)
                self.calls += 1

    def _calls_at_beginning(self, *, is_over: bool) -> tuple[int, list[CalledTool]]:
        """The length of what begins with a mark or JSON, and its calls, none if it is text; 0: it
        is not complete.
        """
        held = self._held
        if held.startswith("<tool_call>"):
            return _tagged(held, is_over=is_over)
        for mark_of_list in _LISTS:
            if held.startswith(mark_of_list):
                return _listed(held, len(mark_of_list))
        if held.startswith("Action:"):
            return _action(held)
        mark = len("<|python_tag|>") if held.startswith("<|python_tag|>") else 0
        following = _NEXT.match(held) if self._is_after_call else None
        if not mark and following is None:
            if "[TOOL_CALLS]".startswith(held):
                return 0, []
            if _is_foreign(held):
                return 1, []
        value, end = _json_at(held, following.end() if following else mark)
        calls = _calls_of(value, needs_arguments=True)
        if not mark and any(call["function"].get("name") not in self._names for call in calls):
            return end, []
        return end, calls


def _is_foreign(text: str) -> bool:
    """Whether JSON that has begun cannot be a call."""
    key = _FIRST_KEY.match(text)
    return key[1] not in _KEYS if key else bool(_NOT_AN_OBJECT.match(text))


def _tagged(text: str, *, is_over: bool) -> tuple[int, list[CalledTool]]:
    value, end = _json_at(text, len("<tool_call>"))
    after = text[end:].lstrip()
    if end and after.startswith(_END):
        return len(text) - len(after) + len(_END), _calls_of(value)
    if end and _END.startswith(after):
        return (len(text), _calls_of(value)) if is_over else (0, [])
    close = text.find(_END)
    is_in_text = not is_over and _is_cut(text[len("<tool_call>") :])
    return (0, []) if close < 0 or is_in_text else (close + len(_END), [])


def _listed(text: str, start: int) -> tuple[int, list[CalledTool]]:
    match = _NAMED.match(text, start)
    if match is None:
        value, end = _json_at(text, start)
        return end, _calls_of(value)
    value, end = _json_at(text, match.end())
    return end, _calls_of({"name": match[1], "arguments": value, "id": match[2]}) if end else []


def _action(text: str) -> tuple[int, list[CalledTool]]:
    match = _ACTION.match(text)
    if match is None:
        second = text.partition("\n")[2].lstrip("\n")
        is_complete = second and not _begins_alike(second, "Action Input:")
        return (len("Action:") if is_complete else 0), []
    value, end = _json_at(text, match.end())
    if not end:
        is_text = match.end() < len(text) and text[match.end()] != "{"
        return (match.end() if is_text else 0), []
    return end, _calls_of({"name": match[1].strip(), "arguments": value})


def _begins_alike(text: str, other: str) -> bool:
    return text.startswith(other) or other.startswith(text)


def _is_cut(text: str) -> bool:
    """Whether JSON may continue: it is valid up to its end."""
    text = text.strip()
    try:
        _JSON.raw_decode(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text) or error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def _json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON object or list at a place, and its end; (None, 0) if there is none, or it is not
    complete.
    """
    start += len(text[start:]) - len(text[start:].lstrip())
    if not _BARE.match(text, start):
        return None, 0
    try:
        return _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0


def _calls_of(value: Any, *, needs_arguments: bool = False) -> list[CalledTool]:
    """The calls of a JSON object or list; none if one of them is not a call."""
    values = value if isinstance(value, list) else [value]
    calls = [_call_of(one, needs_arguments=needs_arguments) for one in values]
    return [call for call in calls if call is not None] if all(calls) else []


def _call_of(value: Any, *, needs_arguments: bool) -> CalledTool | None:
    if not isinstance(value, dict):
        return None
    function = value["function"] if isinstance(value.get("function"), dict) else value
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None and not needs_arguments:
        arguments = {}
    if isinstance(arguments, str):
        arguments, _ = _json_at(arguments, 0)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    given = value.get("id")
    return {
        # Templates of Mistral take no other ids back than nine letters and digits.
        "id": given
        if isinstance(given, str) and re.fullmatch(r"\w{1,64}", given)
        else secrets.token_hex(5)[:9],
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
