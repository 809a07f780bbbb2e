"""The answer to a request, from the pieces that the model writes: whole, or as server-sent
events.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from unisono.front.serve.answer_reader import AnswerReader, ThoughtText
from unisono.front.serve.model_process import PendingAsk
from unisono.front.serve.protocol import (
    ApiError,
    ChatRequest,
    ChosenAnswer,
    CompletionRequest,
    Objects,
    Usage,
)
from unisono.front.serve.responses import ResponseObjects, ResponseRequest
from unisono.trainer.plan.talk_messages import Answered, AnswerPiece, ScoredToken, Thought


class EventStream(StreamingResponse):
    """Server-sent events.

    `on_end` is called in any case: an iterator that was never begun would not run its own
    `finally`.
    """

    def __init__(self, events: AsyncIterator[str], *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


@dataclass
class ChoicesAnswer:
    """The answer to one HTTP request, of one or several choices."""

    asks: list[PendingAsk]
    objects: Objects
    request: ChatRequest | CompletionRequest
    usage: Usage = field(default_factory=Usage)
    thoughts: list[Thought] = field(default_factory=list)

    async def begin(self) -> bool:
        """Waits until all prompts are being answered.

        Raises:
            ApiError: if one is refused.
        """
        for number, ask in enumerate(self.asks):
            begun = await ask.begin()
            self.thoughts.append(begun.thought)
            if number % self.request.tries == 0:
                self.usage.prompt += begun.prompt_tokens
        return True

    async def whole(self) -> dict[str, object]:
        """The answer in one object."""
        answers = []
        for ask, thought in zip(self.asks, self.thoughts, strict=True):
            answer = ChosenAnswer(thought=thought)
            async for piece in ask.pieces():
                if isinstance(piece, AnswerPiece):
                    answer.text += piece.text
                    answer.tokens += piece.tokens
                else:
                    self.usage.answer += piece.tokens
                    answer.ended = piece.ended
            answers.append(answer)
        return self.objects.whole(self._best(answers), self.usage, reader=self.request.reader)

    def _best(self, answers: list[ChosenAnswer]) -> list[ChosenAnswer]:
        """The best answers to each prompt, of all tries."""
        tries, choices = self.request.tries, self.request.choices
        if tries == choices:
            return answers
        groups = [answers[start : start + tries] for start in range(0, len(answers), tries)]
        return [
            answer
            for group in groups
            for answer in sorted(group, key=lambda one: -one.mean_log_prob)[:choices]
        ]

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events; an error ends them."""
        streams = [
            _ChoiceStream(index, self.objects, self.request.reader(thought))
            for index, thought in enumerate(self.thoughts)
        ]
        try:
            async for index, news in _merged(self.asks):
                if isinstance(news, Answered):
                    self.usage.answer += news.tokens
                for value in streams[index].chunks(news):
                    yield _event(value)
        except ApiError as error:
            yield _event(error.body())
            return
        if self.request.stream_options and self.request.stream_options.include_usage:
            yield _event(self.objects.usage(self.usage))
        yield "data: [DONE]\n\n"


@dataclass
class ResponsesAnswer:
    """The answer to one request of /v1/responses."""

    ask: PendingAsk
    request: ResponseRequest
    chat: ChatRequest
    _objects: ResponseObjects | None = None

    async def begin(self) -> bool:
        """Waits until the prompt is being answered.

        Raises:
            ApiError: if it is refused.
        """
        begun = await self.ask.begin()
        reader = self.chat.reader(begun.thought)
        self._objects = ResponseObjects(self.request, reader, begun.prompt_tokens)
        return True

    async def whole(self) -> dict[str, object]:
        """The answer in one object."""
        assert self._objects is not None
        async for piece in self.ask.pieces():
            for _ in self._objects.take(piece):
                pass
        return self._objects.whole()

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events; an error ends them."""
        assert self._objects is not None
        for value in self._objects.begin():
            yield _named_event(value)
        try:
            async for piece in self.ask.pieces():
                for value in self._objects.take(piece):
                    yield _named_event(value)
        except ApiError as error:
            value = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
            yield _named_event(value)


@dataclass
class _ChoiceStream:
    """The chunks of one choice."""

    index: int
    objects: Objects
    reader: AnswerReader | None
    _has_begun: bool = False
    _tokens: list[ScoredToken] = field(default_factory=list)  # that no chunk has had
    _offset: int = 0

    def chunks(self, news: AnswerPiece | Answered) -> Iterator[dict[str, object]]:
        """The chunks of what is new."""
        if not self._has_begun and self.objects.is_chat:
            yield self.objects.first(self.index)
        self._has_begun = True
        if isinstance(news, AnswerPiece):
            self._tokens += news.tokens
            yield from self._parts(news.text, is_last=False)
            return
        yield from self._parts("", is_last=True)
        if self._tokens:
            yield self._text("")
        yield self.objects.last(self.index, self.objects.ended(news.ended, self.reader))

    def _parts(self, text: str, *, is_last: bool) -> Iterator[dict[str, object]]:
        """The chunks of a piece of the answer."""
        if self.reader is None:
            if text:
                yield self._text(text)
            return
        number = self.reader.calls
        parts = [*self.reader.push(text), *(self.reader.close() if is_last else ())]
        for part in parts:
            if isinstance(part, str):
                yield self._text(part)
            elif isinstance(part, ThoughtText):
                yield self.objects.thought(self.index, part.text, self._taken())
            else:
                yield from self.objects.call(self.index, number, part)
                number += 1

    def _text(self, text: str) -> dict[str, object]:
        offset, tokens = self._offset, self._taken()
        return self.objects.piece(self.index, text, tokens, offset=offset)

    def _taken(self) -> list[ScoredToken]:
        """The tokens for the next chunk."""
        tokens, self._tokens = self._tokens, []
        self._offset += sum(len(token.text) for token in tokens)
        return tokens


async def _merged(asks: Sequence[PendingAsk]) -> AsyncIterator[tuple[int, AnswerPiece | Answered]]:
    """The pieces of several prompts as they come, with the prompt's index.

    Raises:
        ApiError: if one will have no answer.
    """
    if len(asks) == 1:
        async for piece in asks[0].pieces():
            yield 0, piece
        return
    messages: asyncio.Queue[tuple[int, AnswerPiece | Answered | ApiError]] = asyncio.Queue()

    async def pass_on(index: int) -> None:
        try:
            async for piece in asks[index].pieces():
                messages.put_nowait((index, piece))
        except ApiError as error:
            messages.put_nowait((index, error))

    readers = [asyncio.create_task(pass_on(index)) for index in range(len(asks))]
    try:
        left = len(asks)
        while left:
            index, news = await messages.get()
            if isinstance(news, ApiError):
                raise news
            left -= isinstance(news, Answered)
            yield index, news
    finally:
        for reader in readers:
            reader.cancel()


def _event(value: dict[str, object]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _named_event(value: dict[str, object]) -> str:
    return f"event: {value['type']}\n{_event(value)}"
