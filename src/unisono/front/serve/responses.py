"""OpenAI's protocol of responses, in the part that has no state: a request as one of chats, and the
objects and events of an answer.

Without I/O.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from unisono.front.serve.answer_reader import AnswerReader, ThoughtText
from unisono.front.serve.protocol import ApiError, ChatRequest, StrictObject, Usage, as_request
from unisono.trainer.plan.talk_messages import Answered, AnswerPiece

_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")


class _TextForm(StrictObject):
    format: dict[str, Any] | None = None


class _Reasoning(StrictObject):
    effort: str | None = None
    summary: Literal["auto"] | None = None


class ResponseRequest(StrictObject):
    """`POST /v1/responses`."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: _TextForm | None = None
    reasoning: _Reasoning | None = None
    store: Literal[False] | None = None
    metadata: dict[str, object] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    background: Literal[False] | None = None

    def chat(self) -> ChatRequest:
        """The same request of a chat.

        Raises:
            ApiError: if a part is not known, or needs responses that are stored.
        """
        values: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_output_tokens,
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _form(self.text.format if self.text else None),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        request: ChatRequest = as_request(ChatRequest, {k: v for k, v in values.items() if v is not None})
        return request

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            kind = item.get("type", "message")
            if kind == "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments")}
                made = {"id": item.get("call_id"), "type": "function", "function": call}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(made)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
            elif kind == "function_call_output":
                content = _content(item.get("output"))
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            elif kind == "message" and item.get("role") in _ROLES:
                messages.append({"role": item["role"], "content": _content(item.get("content"))})
            elif kind != "reasoning":  # thoughts of earlier answers are not shown to models again
                raise _unknown("input", f"items of the type {kind!r}")
        return messages


def _content(content: Any) -> Any:
    """The content of a message as one of a chat."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            url = {"url": part["image_url"], "detail": part.get("detail", "auto")}
            parts.append({"type": "image_url", "image_url": url})
        else:
            raise _unknown("input", f"parts of the type {kind!r}")
    if all(part["type"] == "text" for part in parts):
        return "".join(str(part["text"]) for part in parts)
    return parts


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _unknown("tools", f"tools of the type {tool.get('type')!r}")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping):
        return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return choice


def _form(form: Any) -> Any:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        return form
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in form.items() if key != "type"},
    }


def _unknown(param: str, what: str) -> ApiError:
    return ApiError(400, f"{what} are not known here", param=param, code="invalid_value")


@dataclass
class ResponseObjects:
    """Makes the objects and events of one response, as its answer comes.

    Attributes:
        request: of the client.
        reader: of the answer.
        prompt_tokens: of its prompt.
    """

    request: ResponseRequest
    reader: AnswerReader
    prompt_tokens: int
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Any] | None = None  # the item that may grow: a thought or a message
    _number: int = 0
    _why: str = ""
    _usage: Usage = field(default_factory=Usage)

    def begin(self) -> Iterator[dict[str, object]]:
        """The first events."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def take(self, news: AnswerPiece | Answered) -> Iterator[dict[str, object]]:
        """The events of what is new."""
        if isinstance(news, AnswerPiece):
            yield from self._parts(self.reader.push(news.text))
            return
        yield from self._parts(self.reader.close())
        if not self._output:
            yield from self._grow("message", "")
        yield from self._close()
        self._why = news.ended
        self._usage = Usage(self.prompt_tokens, news.tokens)
        status = "incomplete" if news.ended == "length" else "completed"
        yield self._event(f"response.{status}", response=self.whole())

    def whole(self) -> dict[str, object]:
        """The response, once its answer is complete."""
        return self._response("incomplete" if self._why == "length" else "completed")

    def _response(self, status: str) -> dict[str, object]:
        request = self.request
        is_over = status != "in_progress"
        usage = {
            "input_tokens": self._usage.prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self._usage.answer,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._usage.prompt + self._usage.answer,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": (request.text.format if request.text else None) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": usage if is_over else None,
        }

    def _parts(self, parts: Iterator[Any]) -> Iterator[dict[str, object]]:
        for part in parts:
            if isinstance(part, str):
                yield from self._grow("message", part)
            elif isinstance(part, ThoughtText):
                yield from self._grow("reasoning", part.text)
            else:
                yield from self._close()
                yield from self._call(part)

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, object]]:
        """The events of text for a message or a thought, which begins if it has not."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin_item(kind)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        if text:
            name = "output_text" if kind == "message" else "reasoning_text"
            yield self._event(f"response.{name}.delta", **self._place(), delta=text, **_scores(kind))

    def _begin_item(self, kind: str) -> Iterator[dict[str, object]]:
        item: dict[str, Any]
        part: dict[str, Any]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": _id("msg"), "type": kind, "status": "in_progress", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _id("rs"), "type": kind, "status": "in_progress", "summary": []}
        yield self._added({**item, "content": []})
        self._open = {**item, "content": [part]}
        self._output.append(self._open)
        yield self._event("response.content_part.added", **self._place(), part=dict(part))

    def _close(self) -> Iterator[dict[str, object]]:
        """The events that end the item that grows."""
        item, place = self._open, self._place() if self._open else {}
        if item is None:
            return
        (part,) = item["content"]
        item["status"] = "completed"
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        yield self._event(f"response.{name}.done", **place, text=part["text"], **_scores(item["type"]))
        yield self._event("response.content_part.done", **place, part=dict(part))
        yield self._done(item)
        self._open = None

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, object]]:
        """The events of a call of a tool."""
        function = call["function"]
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": "",
        }
        yield self._added(item)
        whole = {**item, "status": "completed", "arguments": function["arguments"]}
        self._output.append(whole)
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        arguments = function["arguments"]
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        done = {"name": function["name"], "arguments": arguments}
        yield self._event("response.function_call_arguments.done", **place, **done)
        yield self._done(whole)

    def _added(self, item: Mapping[str, Any]) -> dict[str, object]:
        return self._event("response.output_item.added", output_index=len(self._output), item=dict(item))

    def _done(self, item: Mapping[str, Any]) -> dict[str, object]:
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=dict(item))

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _event(self, kind: str, **values: Any) -> dict[str, object]:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **values}


def _scores(kind: str) -> dict[str, list[object]]:
    """What events of a message have beside their text."""
    return {"logprobs": []} if kind == "message" else {}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
