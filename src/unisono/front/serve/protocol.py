"""OpenAI's protocol: what a request may have, the objects of an answer, tool calls in a text, and
errors.

Without I/O.
"""

import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unisono.base.files import parse_json
from unisono.base.text import one_line
from unisono.trainer.plan.talk_messages import PromptRequest
from unisono.trainer.plan.task_requests import SamplingParams

_MOST_PROMPTS = 16
_MOST_MESSAGES = 10_000
_MOST_TOOLS = 1_024
_MOST_STOP_CHARACTERS = 1_000  # each token is compared with the end of an answer that is as long
_USUAL_TOKENS = 16  # of a completion, as in OpenAI's API


class ApiError(Exception):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        param: the parameter at fault; None if it is none.
        code: a word for programs.
        retry_after_s: seconds after which it may be sent again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The object that clients of OpenAI's API expect."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# ---- requests


class _Strict(BaseModel):
    """An object that refuses unknown keys; null stands for the default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# Numbers beyond these bounds overflow 64 bits, or float32 once logits are divided by them.
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
_TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Penalty = Annotated[float, Field(ge=0.01, le=100.0)]
_Stop = Annotated[str, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Function(BaseModel):
    """A function that the model may call; other keys are for the template."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str


class _Tool(_Strict):
    type: Literal["function"]
    function: _Function


class _ResponseFormat(_Strict):
    type: Literal["text"]


class _Message(BaseModel):
    """A message of a conversation; other keys are for the template."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None


class _Request(_Strict, ABC):
    """What both kinds of requests have.

    Parameters without effect here are accepted with their default only.
    """

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: _Share | None = None
    top_k: _TopK | None = None
    repetition_penalty: _Penalty | None = None
    max_tokens: _Count | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    seed: _Seed | None = None
    user: str | None = None
    n: Literal[1] | None = None
    presence_penalty: Annotated[float, Field(ge=0.0, le=0.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0.0, le=0.0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    def sampling(self) -> SamplingParams:
        """How tokens are chosen; without a seed it differs each time."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            repetition_penalty=self.repetition_penalty or 1.0,
            seed=secrets.randbits(48) if self.seed is None else self.seed,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @abstractmethod
    def questions(self) -> list[PromptRequest]:
        """What the task is asked, for each prompt."""


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    max_completion_tokens: _Count | None = None
    tools: Annotated[list[_Tool], Field(max_length=_MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, object] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def questions(self) -> list[PromptRequest]:
        """One, with the messages."""
        if self.messages[-1].role == "assistant":
            raise ApiError(
                400, "the conversation ends with an answer; it must end with a question", param="messages"
            )
        tools = [tool.model_dump() for tool in self.tools or ()] if self.may_call else None
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        question = PromptRequest(
            messages=messages,
            tools=tools,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            sampling=self.sampling(),
            stop=self.stops,
            marks=CALL_MARKS if self.may_call else (),
        )
        return [question]

    def reader(self) -> "ToolCallReader | None":
        """For the answer; None if it cannot call tools."""
        if not self.may_call:
            return None
        names = {tool.function.name for tool in self.tools or ()}
        return ToolCallReader(names, most=1 if self.parallel_tool_calls is False else None)


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_PROMPTS)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=_MOST_PROMPTS)]
    )
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Literal[0] | None = None
    suffix: Literal[""] | None = None

    def questions(self) -> list[PromptRequest]:
        """One for each prompt."""
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        limit, sampling, stop = self.max_tokens or _USUAL_TOKENS, self.sampling(), self.stops
        return [
            PromptRequest(prompt=prompt, max_tokens=limit, sampling=sampling, stop=stop, place=index)
            for index, prompt in enumerate(prompts)
        ]


def read_request(kind: type[_Request], data: bytes, *, model: str) -> Any:
    """The request of a body.

    Args:
        kind: ChatRequest or CompletionRequest.
        data: the body.
        model: the only one that is served.

    Raises:
        ApiError: if it is not JSON, a parameter is not valid, or it is for a different model.
    """
    try:
        value = parse_json(data.decode())
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # refuses NaN and unpaired surrogates
    except ValueError as error:
        why = one_line(str(error), limit=100)
        raise ApiError(400, f"the body is not valid JSON: {why}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, value) from None
    if request.model != model:
        raise unknown_model(request.model, model)
    return request


def unknown_model(name: str, model: str) -> ApiError:
    """The error for a model that is not served."""
    return ApiError(
        404,
        f"there is no model {one_line(name, limit=100)!r} here; this server has {model!r}",
        param="model",
        code="model_not_found",
    )


def _refusal(error: ValidationError, value: Mapping[str, object]) -> ApiError:
    """The first thing that is wrong with a request."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    field = ".".join(str(part) for part in first["loc"] if not _is_type_name(part))
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return ApiError(400, f"the parameter {name} is not known here", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{field} is missing", param=name, code="missing_required_parameter")
    given = one_line(json.dumps(value.get(name)), limit=80)
    message = f"{field} is not valid: {first['msg']}; {name} is {given}"
    return ApiError(400, message, param=name, code="invalid_value")


def _is_type_name(part: int | str) -> bool:
    """Whether a part of a pydantic location is the name of a branch of a union, e.g.
    `list[int]`.
    """
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "constrained-str"))


# ---- answers


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


@dataclass
class Usage:
    """The tokens of a request."""

    prompt: int = 0
    answer: int = 0

    def to_json(self) -> dict[str, int]:
        """The object `usage`."""
        total = self.prompt + self.answer
        return {"prompt_tokens": self.prompt, "completion_tokens": self.answer, "total_tokens": total}


@dataclass
class Objects:
    """Makes the JSON objects of one answer.

    Attributes:
        model: its name.
        is_chat: of /v1/chat/completions, else of /v1/completions.
    """

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def _frame(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(
        self, texts: list[str], ended: list[str], usage: Usage, *, reader: "ToolCallReader | None"
    ) -> dict[str, object]:
        """The answer in one object.

        Args:
            texts: of each prompt's answer.
            ended: stop or length, for each.
            usage: of all.
            reader: of the only text, if it can call tools.
        """
        choices: list[dict[str, object]] = []
        for index, (text, why) in enumerate(zip(texts, ended, strict=True)):
            if not self.is_chat:
                choices.append({**_choice(index, why), "text": text})
                continue
            pieces = [text] if reader is None else [*reader.push(text), *reader.close()]
            calls = [part for part in pieces if not isinstance(part, str)]
            content = "".join(part for part in pieces if isinstance(part, str))
            message: dict[str, object] = {"role": "assistant", "content": content or (None if calls else "")}
            if calls:
                message["tool_calls"] = calls
            choices.append({**_choice(index, self.ended(why, reader)), "message": message})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._frame(kind, choices), "usage": usage.to_json()}

    def first(self, index: int) -> dict[str, object]:
        """The chunk that begins an answer of a chat."""
        return self._chunk(index, None, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> dict[str, object]:
        """A chunk with text."""
        return self._chunk(index, None, {"content": text})

    def call(self, index: int, number: int, call: CalledTool) -> list[dict[str, object]]:
        """The chunks with a call of a tool, the number'th of the answer: its name, then its
        arguments.
        """
        named: CalledTool = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
        arguments: CalledTool = {"index": number, "function": {"arguments": call["function"]["arguments"]}}
        return [self._chunk(index, None, {"tool_calls": [part]}) for part in (named, arguments)]

    def ended(self, why: str, reader: "ToolCallReader | None") -> str:
        """The reason for the end of an answer, for the client: stop, length or tool_calls."""
        return "tool_calls" if why == "stop" and reader is not None and reader.calls else why

    def last(self, index: int, ended: str) -> dict[str, object]:
        """The chunk that ends an answer: stop, length or tool_calls."""
        return self._chunk(index, ended, {})

    def usage(self, usage: Usage) -> dict[str, object]:
        """The chunk after the last, for a client that asked for it."""
        return {**self._frame(self._kind, []), "usage": usage.to_json()}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, index: int, ended: str | None, delta: dict[str, object]) -> dict[str, object]:
        choice = _choice(index, ended)
        if self.is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return self._frame(self._kind, [choice])


def _choice(index: int, ended: str | None) -> dict[str, object]:
    return {"index": index, "finish_reason": ended, "logprobs": None}


# ---- tool calls

CALL_MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")
"""What models write around calls. Some tokenizers have them as special tokens, which texts usually
lack.
"""
_STARTS = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|(?:^|(?<=\n))Action:")
_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "\nAction:")
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
    and [ARGS] (Mistral), and lines with Action and Action Input (ReAct). A call is given once its
    JSON is complete; what only looks like a call is text.
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
        if held.startswith("[TOOL_CALLS]"):
            return _listed(held)
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


def _listed(text: str) -> tuple[int, list[CalledTool]]:
    start = len("[TOOL_CALLS]")
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
