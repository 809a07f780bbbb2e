"""OpenAI's protocol: what a request may have, the objects of an answer, and errors.

Without I/O.
"""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from unisono.base.files import parse_json
from unisono.base.text import one_line
from unisono.trainer.plan.talk_messages import PromptRequest
from unisono.trainer.plan.task_requests import SamplingParams
from unisono.trainer.plan.tool_calls import CALL_MARKS, CalledTool, ToolCallReader

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
