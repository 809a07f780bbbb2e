"""OpenAI's protocol: what a request may have, the objects of an answer, and errors.

Without I/O.
"""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unisono.base.files import parse_json
from unisono.base.text import one_line
from unisono.front.serve.answer_reader import AnswerPart, AnswerReader, ThoughtText
from unisono.trainer.plan.talk_messages import (
    THOUGHT_MARKS,
    AnswerForm,
    PromptRequest,
    ScoredToken,
    Thought,
)
from unisono.trainer.plan.task_requests import SamplingParams
from unisono.trainer.plan.tool_calls import CALL_MARKS, CalledTool, ToolCallReader

_MOST_ANSWERS = 16
_MOST_BIASES = 1_024
_MOST_SETTINGS = 32
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


class StrictObject(BaseModel):
    """An object that refuses unknown keys; null stands for the default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# Numbers beyond these bounds overflow 64 bits, or float32 once logits are divided by them.
_Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
_TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Penalty = Annotated[float, Field(ge=0.01, le=100.0)]
_Stop = Annotated[str, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]
_CountOrNone = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Subtracted = Annotated[float, Field(ge=-2.0, le=2.0)]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
_Top = Annotated[int, Field(ge=0, le=20)]


class _StreamOptions(StrictObject):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Function(BaseModel):
    """A function that the model may call; other keys are for the template."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(StrictObject):
    type: Literal["function"]
    function: _Function

    def form(self, *, is_strict: bool) -> dict[str, Any]:
        """The function for a grammar: its arguments are free if neither it nor the request is
        strict.
        """
        function = self.function
        is_free = not is_strict and not function.strict
        return {"function": {"name": function.name, "parameters": None if is_free else function.parameters}}


class _NamedFunction(StrictObject):
    name: str


class _NamedTool(StrictObject):
    type: Literal["function"]
    function: _NamedFunction


class _Schema(StrictObject):
    name: str = "answer"
    description: str | None = None
    content: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class _ResponseFormat(StrictObject):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "_ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for type: json_schema only")
        return self

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """JSON schema of the answer's text; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.content
        return {"type": "object"} if self.type == "json_object" else None


class _Message(BaseModel):
    """A message of a conversation; other keys are for the template."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None


class _Request(StrictObject, ABC):
    """What both kinds of requests have.

    Parameters without effect here are accepted with their default only, or are words for the
    operator of a server.
    """

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: _Share | None = None
    top_k: _TopK | None = None
    min_p: _Share | None = None
    repetition_penalty: _Penalty | None = None
    presence_penalty: _Subtracted | None = None
    frequency_penalty: _Subtracted | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=_MOST_BIASES)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    seed: _Seed | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] | None = None
    user: str | None = None

    def sampling(self) -> SamplingParams:
        """How tokens are chosen; without a seed it differs each time."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            seed=secrets.randbits(48) if self.seed is None else self.seed,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which an answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def tries(self) -> int:
        """Answers to each prompt of which the best `choices` are given."""
        return self.choices

    @property
    def shows_scores(self) -> bool:
        """Whether answers have the log-probabilities of their tokens."""
        return False

    @abstractmethod
    def questions(self) -> list[PromptRequest]:
        """What the task is asked, for each prompt and try."""

    def reader(self, thought: Thought) -> AnswerReader | None:
        """For an answer; None if it is text only."""
        del thought
        return None


class ChatRequest(_Request):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    tools: Annotated[list[_Tool], Field(max_length=_MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: _Top | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=_MOST_SETTINGS)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, object] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def shows_scores(self) -> bool:
        """Whether answers have the log-probabilities of their tokens."""
        return bool(self.logprobs)

    def questions(self) -> list[PromptRequest]:
        """One for each answer, with the messages."""
        self._refuse_contradictions()
        tools = [tool.model_dump() for tool in self.tools or ()] if self.may_call else None
        question = PromptRequest(
            messages=[message.model_dump(exclude_none=True) for message in self.messages],
            tools=tools,
            continues=bool(self.continue_final_message),
            template_settings=self.chat_template_kwargs or {},
            effort=self.reasoning_effort,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            sampling=self.sampling(),
            stop=self.stops,
            marks=(*THOUGHT_MARKS, *CALL_MARKS) if self.may_call else THOUGHT_MARKS,
            form=self._form(),
            top=(self.top_logprobs or 0) if self.logprobs else None,
        )
        return [replace(question, place=place) for place in range(self.choices)]

    def _refuse_contradictions(self) -> None:
        is_continued = self.continue_final_message
        if is_continued and self.add_generation_prompt:
            what = "add_generation_prompt and continue_final_message exclude each other"
            raise ApiError(400, what, param="add_generation_prompt", code="invalid_value")
        if self.add_generation_prompt is False and not is_continued:
            what = "without a generation prompt the model would continue a question; omit it"
            raise ApiError(400, what, param="add_generation_prompt", code="invalid_value")
        if (self.messages[-1].role == "assistant") != bool(is_continued):
            what = "the conversation ends with an answer; with continue_final_message it is continued"
            if is_continued:
                what = "the conversation does not end with an answer that could be continued"
            raise ApiError(400, what, param="messages", code="invalid_value")
        if self.top_logprobs and not self.logprobs:
            what = "top_logprobs needs logprobs: true"
            raise ApiError(400, what, param="top_logprobs", code="invalid_value")
        if not self.tools and (self.tool_choice == "required" or isinstance(self.tool_choice, _NamedTool)):
            raise ApiError(400, "there are no tools to choose", param="tool_choice", code="invalid_value")

    def _form(self) -> AnswerForm | None:
        """What the answer has to be, if its tokens are to be held to it."""
        schema = self.response_format.schema_of_text if self.response_format is not None else None
        tools = list(self.tools or ()) if self.may_call else []
        must_call = self.tool_choice == "required"
        if isinstance(self.tool_choice, _NamedTool):
            name, must_call = self.tool_choice.function.name, True
            tools = [tool for tool in tools if tool.function.name == name]
            if not tools:
                what = f"there is no tool {one_line(name, limit=100)}"
                raise ApiError(400, what, param="tool_choice", code="invalid_value")
        if schema is None and not must_call and not any(tool.function.strict for tool in tools):
            return None
        is_one = isinstance(self.tool_choice, _NamedTool) or self.parallel_tool_calls is False
        forms = tuple(tool.form(is_strict=must_call) for tool in tools)
        return AnswerForm(schema=schema, tools=forms, must_call=must_call, one_call=is_one)

    def reader(self, thought: Thought) -> AnswerReader:
        """For an answer."""
        calls = None
        if self.may_call:
            names = {tool.function.name for tool in self.tools or ()}
            calls = ToolCallReader(names, most=1 if self.parallel_tool_calls is False else None)
        return AnswerReader(thought, calls)


class CompletionRequest(_Request):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=_MOST_ANSWERS)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1, max_length=_MOST_ANSWERS)]
    )
    max_tokens: _CountOrNone | None = None
    best_of: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)] | None = None
    echo: bool | None = None
    logprobs: _Top | None = None
    suffix: str | None = None

    @property
    def tries(self) -> int:
        """Answers to each prompt of which the best `choices` are given."""
        return self.best_of or self.choices

    @property
    def shows_scores(self) -> bool:
        """Whether answers have the log-probabilities of their tokens."""
        return self.logprobs is not None

    def questions(self) -> list[PromptRequest]:
        """One for each prompt and try."""
        prompts: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        self._refuse_contradictions(len(prompts))
        is_ranked = self.tries > self.choices
        question = PromptRequest(
            max_tokens=_USUAL_TOKENS if self.max_tokens is None else self.max_tokens,
            sampling=self.sampling(),
            stop=self.stops,
            top=0 if self.logprobs is None and is_ranked else self.logprobs,
            echo=bool(self.echo),
        )
        pairs = ((prompt, number) for prompt in prompts for number in range(self.tries))
        return [replace(question, prompt=prompt, place=place) for place, (prompt, _) in enumerate(pairs)]

    def _refuse_contradictions(self, prompts: int) -> None:
        if self.suffix:
            what = "suffix is not supported: a model of chats and texts has no tokens for a gap in a text"
            raise ApiError(400, what, param="suffix", code="unsupported_parameter")
        if self.max_tokens == 0 and not self.echo:
            what = "max_tokens: 0 is for echo: true; without it the answer would be empty"
            raise ApiError(400, what, param="max_tokens", code="invalid_value")
        if self.tries < self.choices:
            what = f"best_of is {self.best_of}, but must be at least n ({self.choices})"
            raise ApiError(400, what, param="best_of", code="invalid_value")
        if self.tries > self.choices and self.stream:
            what = "best_of selects complete answers, and cannot be streamed"
            raise ApiError(400, what, param="best_of", code="invalid_value")
        if prompts * self.tries > _MOST_ANSWERS:
            what = f"{prompts} prompts × {self.tries} answers; a request may have {_MOST_ANSWERS} answers"
            raise ApiError(400, what, param="n" if self.best_of is None else "best_of", code="invalid_value")


def read_request(kind: type[StrictObject], data: bytes, *, models: Collection[str]) -> Any:
    """The request of a body.

    Args:
        kind: of the path.
        data: the body.
        models: that are served.

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
    request = as_request(kind, value)
    if "model" in kind.model_fields and request.model not in models:
        raise unknown_model(request.model, models)
    return request


def as_request(kind: type[StrictObject], value: Mapping[str, object]) -> Any:
    """The request of an object.

    Raises:
        ApiError: if a parameter is not valid.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, value) from None


def unknown_model(name: str, models: Collection[str]) -> ApiError:
    """The error for a model that is not served."""
    return ApiError(
        404,
        f"there is no model {one_line(name, limit=100)!r} here; this server has {', '.join(map(repr, models))}",
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
class ChosenAnswer:
    """An answer as the task has given it.

    Attributes:
        text: with the prompt, if it is echoed.
        tokens: of the text, if it gets log-probabilities.
        ended: stop or length.
        thought: whether it may begin with a thought.
    """

    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    ended: str = ""
    thought: Thought = "none"

    @property
    def mean_log_prob(self) -> float:
        """Of its tokens."""
        values = [token.log_prob for token in self.tokens if token.log_prob is not None]
        return sum(values) / len(values) if values else 0.0


@dataclass
class Objects:
    """Makes the JSON objects of one answer.

    Attributes:
        model: its name.
        is_chat: of /v1/chat/completions, else of /v1/completions.
        shows_scores: whether it has log-probabilities.
    """

    model: str
    is_chat: bool
    shows_scores: bool = False
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
        self, answers: list[ChosenAnswer], usage: Usage, *, reader: Callable[[Thought], AnswerReader | None]
    ) -> dict[str, object]:
        """The answer in one object.

        Args:
            answers: one for each choice.
            usage: of all.
            reader: of each in a chat.
        """
        choices: list[dict[str, object]] = []
        for index, answer in enumerate(answers):
            scores = self._scores(answer.tokens)
            of_chat = reader(answer.thought) if self.is_chat else None
            if of_chat is None:
                choices.append({**_choice(index, answer.ended, scores), "text": answer.text})
                continue
            message = _message([*of_chat.push(answer.text), *of_chat.close()])
            choices.append({**_choice(index, self.ended(answer.ended, of_chat), scores), "message": message})
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._frame(kind, choices), "usage": usage.to_json()}

    def first(self, index: int) -> dict[str, object]:
        """The chunk that begins an answer of a chat."""
        return self._chunk(index, None, {"role": "assistant", "content": ""})

    def piece(
        self, index: int, text: str, tokens: Sequence[ScoredToken] = (), *, offset: int = 0
    ) -> dict[str, object]:
        """A chunk with text, and the tokens that have come since the last; in a completion `offset`
        is the place of the first in the answer.
        """
        return self._chunk(index, None, {"content": text}, self._scores(tokens, offset))

    def thought(self, index: int, text: str, tokens: Sequence[ScoredToken] = ()) -> dict[str, object]:
        """A chunk with a piece of a thought."""
        return self._chunk(index, None, {"reasoning_content": text}, self._scores(tokens))

    def call(self, index: int, number: int, call: CalledTool) -> list[dict[str, object]]:
        """The chunks with a call of a tool, the number'th of the answer: its name, then its
        arguments.
        """
        named: CalledTool = {**call, "index": number, "function": {**call["function"], "arguments": ""}}
        arguments: CalledTool = {"index": number, "function": {"arguments": call["function"]["arguments"]}}
        return [self._chunk(index, None, {"tool_calls": [part]}) for part in (named, arguments)]

    def ended(self, why: str, reader: AnswerReader | None) -> str:
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

    def _chunk(
        self, index: int, ended: str | None, delta: dict[str, object], scores: object = None
    ) -> dict[str, object]:
        choice = _choice(index, ended, scores)
        if self.is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return self._frame(self._kind, [choice])

    def _scores(self, tokens: Sequence[ScoredToken], offset: int = 0) -> dict[str, object] | None:
        """The object `logprobs`."""
        if not self.shows_scores:
            return None
        if self.is_chat:
            shown = [_chat_score(token) for token in tokens if not token.is_stop]
            return {"content": shown, "refusal": None}
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token.text))
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets[:-1],
        }


def _message(parts: Sequence[AnswerPart]) -> dict[str, object]:
    """The message of an answer of a chat."""
    thought = "".join(part.text for part in parts if isinstance(part, ThoughtText))
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, dict)]
    message: dict[str, object] = {"role": "assistant", "content": content or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _chat_score(token: ScoredToken) -> dict[str, object]:
    top = [_likely(text, value) for text, value in token.top]
    assert token.log_prob is not None, "a chat has no prompt that is echoed"
    return {**_likely(token.text, token.log_prob), "top_logprobs": top}


def _likely(text: str, log_prob: float) -> dict[str, object]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}


def _top(token: ScoredToken) -> dict[str, float] | None:
    """The most likely texts in the place of a token, and its own; None where nothing precedes it.

    Of tokens with the same text, e.g. that of a part of a character, it has the most likely one.
    """
    if token.log_prob is None:
        return None
    likely = dict(reversed(token.top))
    return {**likely, token.text: max(token.log_prob, likely.get(token.text, token.log_prob))}


def _choice(index: int, ended: str | None, scores: object = None) -> dict[str, object]:
    return {"index": index, "finish_reason": ended, "logprobs": scores}
