"""OpenAI's protocol: what a request may have, the objects of an answer, tool calls in a text, and errors. Without I/O."""

import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unisono.text import one_line

_MOST_PROMPTS = 16
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

    def body(self) -> dict[str, Any]:
        """The object that clients of OpenAI's API expect."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


# ---- requests


class _Strict(BaseModel):
    """An object that refuses unknown keys; null stands for the default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


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


Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Count = Annotated[int, Field(ge=1)]


class _Request(_Strict, ABC):
    """What both kinds of requests have. Parameters without effect here are accepted with their default only."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    max_tokens: _Count | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: int | None = None
    user: str | None = None
    n: Literal[1] | None = None
    presence_penalty: Annotated[float, Field(ge=0.0, le=0.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0.0, le=0.0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    def sampling(self) -> dict[str, Any]:
        """How tokens are chosen: the attributes of `model.generate.Sampling`, and stop. Without a seed it differs each time."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or 0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "seed": secrets.randbits(48) if self.seed is None else self.seed,
            "stop": stop or [],
        }

    @abstractmethod
    def asks(self) -> list[dict[str, Any]]:
        """The requests to the task, one for each prompt."""


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: _Count | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def asks(self) -> list[dict[str, Any]]:
        """As in `_Request`."""
        if self.messages[-1].role == "assistant":
            raise ApiError(
                400, "the conversation ends with an answer; it must end with a question", param="messages"
            )
        tools = [tool.model_dump() for tool in self.tools or ()] if self.may_call else None
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        limit = self.max_completion_tokens or self.max_tokens
        return [self.sampling() | {"messages": messages, "tools": tools, "max_tokens": limit, "place": 0}]


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

    def asks(self) -> list[dict[str, Any]]:
        """As in `_Request`."""
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        limit = self.max_tokens or _USUAL_TOKENS
        settings = self.sampling() | {"max_tokens": limit}
        return [settings | {"prompt": prompt, "place": place} for place, prompt in enumerate(prompts)]


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
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
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


def _refusal(error: ValidationError, value: dict[str, Any]) -> ApiError:
    """The first thing that is wrong with a request."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    place = ".".join(str(part) for part in first["loc"] if not _is_type_name(part))
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return ApiError(400, f"the parameter {name} is not known here", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{place} is missing", param=name, code="missing_required_parameter")
    given = one_line(json.dumps(value.get(name)), limit=80)
    message = f"{place} is not valid: {first['msg']}; {name} is {given}"
    return ApiError(400, message, param=name, code="invalid_value")


def _is_type_name(part: int | str) -> bool:
    """Whether a part of a pydantic location is the name of a branch of a union, e.g. `list[int]`."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "constrained-str"))


# ---- answers


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

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        frame = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return frame | {"choices": choices}

    def whole(self, texts: list[str], ended: list[str], usage: Usage, *, may_call: bool) -> dict[str, Any]:
        """The answer in one object.

        Args:
            texts: of each prompt's answer.
            ended: stop or length, for each.
            usage: of all.
            may_call: whether a text can be a call of tools.
        """
        choices = []
        for index, (text, why) in enumerate(zip(texts, ended, strict=True)):
            if not self.is_chat:
                choices.append(_choice(index, why) | {"text": text})
                continue
            content, calls = find_tool_calls(text) if may_call else (text, [])
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if calls:
                message["tool_calls"] = calls
            choices.append(_choice(index, "tool_calls" if calls else why) | {"message": message})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._frame(kind, choices) | {"usage": usage.to_json()}

    def first(self, index: int) -> dict[str, Any]:
        """The chunk that begins an answer of a chat."""
        return self._chunk(index, None, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """A chunk with text."""
        return self._chunk(index, None, {"content": text})

    def calls(self, index: int, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The chunk with all calls of tools."""
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        return self._chunk(index, None, {"tool_calls": numbered})

    def last(self, index: int, ended: str) -> dict[str, Any]:
        """The chunk that ends an answer: stop, length or tool_calls."""
        return self._chunk(index, ended, {})

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk after the last, for a client that asked for it."""
        return self._frame(self._kind, []) | {"usage": usage.to_json()}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, index: int, ended: str | None, delta: dict[str, Any]) -> dict[str, Any]:
        content = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        return self._frame(self._kind, [_choice(index, ended) | content])


def _choice(index: int, ended: str | None) -> dict[str, Any]:
    return {"index": index, "finish_reason": ended, "logprobs": None}


# ---- tool calls

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
_ACTION = re.compile(r"Action:\s*([^\n]+)\nAction Input:\s*(.*?)(?=\nAction:|$)", re.DOTALL)


def find_tool_calls(text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """The text of an answer without its calls, and the calls; (text, []) if it has none.

    Calls are read in the forms that chat templates teach: JSON in <tool_call>, lines with Action and Action Input, and an answer that is
    nothing but JSON with a name and arguments (or parameters).
    """
    tagged = [_call(match[1]) for match in _TAGGED.finditer(text)]
    if tagged and all(tagged):
        return _TAGGED.sub("", text).strip() or None, [call for call in tagged if call]
    actions = [
        _written(match[1].strip(), _parsed(match[2].strip()) or match[2].strip())
        for match in _ACTION.finditer(text)
    ]
    if actions:
        return _ACTION.sub("", text).strip() or None, actions
    value = _parsed(text.strip())
    found = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
    if found and all(found):
        return None, [call for call in found if call]
    return text, []


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(text: str) -> dict[str, Any] | None:
    return _call_of(_parsed(text))


def _call_of(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return _written(value["name"], arguments) if isinstance(arguments, dict | str) else None


def _written(name: str, arguments: Any) -> dict[str, Any]:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }
