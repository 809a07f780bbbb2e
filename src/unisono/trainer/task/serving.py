"""The task `serve`: answers of a model to requests that come and go, computed together."""

import contextlib
import faulthandler
import json
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.guard.supervise.codec import decode_message
from unisono.trainer.data.template import ChatTemplate
from unisono.trainer.model.engine import Engine, GeneratedAnswer, TokenScore
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.token_grammars import LLGrammar, TokenGrammars
from unisono.trainer.plan.talk_messages import (
    Answered,
    Ask,
    Begun,
    Drop,
    FailedAsk,
    Piece,
    Pieces,
    Ping,
    PromptRequest,
    Ready,
    RefusedAsk,
    ScoredToken,
    ServeInput,
    encode_news,
)
from unisono.trainer.plan.task_requests import ServeRequest
from unisono.trainer.task.inference import InferenceModel, StopStrings, TextStream, open_requested
from unisono.trainer.task.prompts import (
    Prepared,
    PromptInputs,
    PromptProcess,
    PromptReader,
    describe_failure,
)

DeskMessage = ServeInput | Prepared | None
"""None: the end of stdin."""


def run(request: ServeRequest, report: Reporter) -> Mapping[str, object]:
    """Answers requests until stdin ends.

    It reads JSON lines from stdin, ServeInput. It sends `Ready`, and for each request `Begun` or
    `RefusedAsk`, then `Pieces`, and `Answered`, or in the place of any of these `FailedAsk`.
    """
    with contextlib.suppress(OSError, ValueError):  # without it only a verdict on a hang lacks the stack
        faulthandler.register(signal.SIGUSR2, file=2)
    opened = open_requested(request.model, report, sees=None)
    template, note = (opened.template, "") if opened.template else _fallback(opened)
    lines: queue.SimpleQueue[DeskMessage] = queue.SimpleQueue()
    stop_ids = opened.stops(template)
    vocabulary = int(opened.forward.loaded.base.get_input_embeddings().weight.shape[0])
    grammars = TokenGrammars(opened.tokenizer, stop_ids=stop_ids, vocabulary=vocabulary)
    prompts = PromptProcess(PromptReader(opened, template, grammars), lines)
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    with contextlib.closing(prompts), opened.ready() as model:
        engine = Engine(
            model,
            stop_ids=stop_ids,
            pad_id=opened.pad_id,
            rows=request.rows,
            together=not opened.forward.rows_apart,
            allow=grammars.allow,
        )
        desk = _Desk(opened, engine, prompts, report)
        engine.on_failure = desk.fail
        with engine.ready():
            ready = Ready(
                opened.target.description, note, opened.context, engine.in_parts, blind=opened.blind
            )
            report.send(encode_news(ready))
            while desk.take(lines):
                desk.step()
    return {"answers": desk.answered}


def _read(lines: "queue.SimpleQueue[DeskMessage]") -> None:
    # Not sys.stdin, whose lock this thread would hold whenever a process is forked, which then
    # could not close it.
    with open(sys.stdin.fileno(), encoding="utf-8", closefd=False) as stream:
        for line in stream:
            message: ServeInput | None = decode_message(json.loads(line), ServeInput)
            if message is not None:
                lines.put(message)
    lines.put(None)


def _fallback(opened: InferenceModel) -> tuple[ChatTemplate | None, str]:
    try:
        return opened.chat_template()
    except DataError as error:  # then it continues texts, and refuses chats
        return None, error.problems[0].what


@dataclass
class _Place:
    """A request that is being answered."""

    answer: GeneratedAnswer
    stream: TextStream
    stops: StopStrings | None
    limit: int
    echo: str | None = None  # the prompt, until it has been sent
    shown: int = 0  # tokens whose text has been sent
    scored: int = 0  # tokens whose scores have been sent


class _TokenTexts:
    """The texts of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        # Some tokenizers write no space at the beginning of a text.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._skipped = len(self._decode(self._before))

    def of(self, token: int) -> str:
        """The text of a token; special ones, too, have one."""
        text = self._texts.get(token)
        if text is None:
            text = self._decode([*self._before, token])[self._skipped :]
            self._texts[token] = text
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class _Desk:
    """The requests, and the engine that answers them.

    Attributes:
        answered: number of complete answers.
    """

    def __init__(
        self, opened: InferenceModel, engine: Engine, prompts: PromptProcess, report: Reporter
    ) -> None:
        self._opened = opened
        self._engine = engine
        self._prompts = prompts
        self._report = report
        self._texts = _TokenTexts(opened.tokenizer)
        self._unread: set[int] = set()  # requests whose prompts are being read
        self._places: dict[int, _Place] = {}
        self.answered = 0

    def take(self, lines: "queue.SimpleQueue[DeskMessage]") -> bool:
        """Takes all messages that have arrived, after waiting for one if there is nothing to do;
        False at their end.
        """
        while True:
            try:
                message = lines.get(block=self._engine.is_idle)
            except queue.Empty:
                return True
            if message is None:
                return False
            match message:
                case Ping():
                    self._report.send({"kind": "pong"})
                case Drop():
                    self._drop(message.id)
                case Ask():
                    self._unread.add(message.id)
                    self._prompts.submit(message)
                case Prepared():
                    self._begin(message)

    def _drop(self, number: int) -> None:
        self._unread.discard(number)
        place = self._places.pop(number, None)
        if place is not None:
            place.answer.ended = "dropped"

    def _begin(self, prepared: Prepared) -> None:
        """Begins an answer whose prompt has been read."""
        ask, prompt = prepared.ask, prepared.prompt
        if ask.id not in self._unread:
            return
        self._unread.remove(ask.id)
        if isinstance(prompt, RefusedAsk | FailedAsk):
            self._report.send(encode_news(prompt))
        else:
            self._add(ask.id, ask.question, prompt, prepared.grammar)

    def _add(
        self, number: int, question: PromptRequest, prompt: PromptInputs, grammar: LLGrammar | None
    ) -> None:
        ids = prompt.ids
        room = self._opened.context - len(ids)
        limit = room if question.max_tokens is None else min(room, question.max_tokens)
        answer = GeneratedAnswer(
            ids,
            limit,
            question.sampling,
            place=question.place,
            pictures=self._pictures(prompt),
            grammar=grammar,
            top=question.top,
            prompt_scores=[] if question.echo and question.top is not None else None,
        )
        tokenizer, stops = self._opened.tokenizer, question.stop
        place = _Place(
            answer,
            TextStream(tokenizer, stops, marks=question.marks),
            StopStrings(tokenizer, stops) if stops else None,
            limit,
        )
        if question.echo:
            place.echo = question.prompt if isinstance(question.prompt, str) else tokenizer.decode(ids)
        self._places[number] = place
        self._engine.add(answer)
        self._report.send(encode_news(Begun(number, len(ids), prompt.thought)))

    def _pictures(self, prompt: PromptInputs) -> PictureInputs | None:
        if not prompt.pictures:
            return None
        assert self._opened.processor is not None
        tensors = {
            name: torch.from_numpy(values).to(self._opened.device) for name, values in prompt.pictures.items()
        }
        return PictureInputs(tensors, self._opened.processor.image_ids)

    def fail(self, answers: Sequence[GeneratedAnswer], error: Exception) -> None:
        """Ends answers that could not be computed; the others continue.

        Raises:
            Exception: the same, if the device computes nothing any more.
        """
        torch.zeros(1, device=self._opened.device).item()  # raises after an error that leaves a GPU unusable
        for number in [number for number, place in self._places.items() if place.answer in answers]:
            del self._places[number]
            self._report.send(encode_news(describe_failure(number, error)))

    def step(self) -> None:
        """Computes one token of each answer, and sends what is new."""
        if not self._engine.is_idle:
            self._engine.step()
        pieces: list[Piece] = []
        ended: list[tuple[int, str]] = []
        for number, place in list(self._places.items()):
            try:
                new = self._new_pieces(number, place)
            except Exception as error:  # noqa: BLE001 - the edge of a request: it fails alone
                place.answer.ended = "failed"
                self.fail([place.answer], error)
                continue
            if place.answer.ended is not None:
                ended.append((number, place.answer.ended))
            pieces += new
        if pieces:
            self._report.send(encode_news(Pieces(tuple(pieces))))
        for number, why in ended:
            place = self._places.pop(number)
            self.answered += 1
            self._report.send(encode_news(Answered(number, len(place.answer.tokens), why)))

    def _new_pieces(self, number: int, place: _Place) -> list[Piece]:
        """The prompt, once it has been read and if it is wanted, and what is new of the answer."""
        answer, pieces = place.answer, []
        has_moved = answer.ended is not None or len(answer.tokens) > place.shown
        if place.echo is not None and has_moved:
            pieces.append(Piece(number, place.echo, self._scored_prompt(answer)))
            place.echo = None
        text = self._new_text(place)
        scores = answer.scores[place.scored :]
        place.scored += len(scores)
        if text or scores:
            tokens = tuple(self._scored(answer, score) for score in scores)
            pieces.append(Piece(number, text, tokens))
        return pieces

    def _scored_prompt(self, answer: GeneratedAnswer) -> tuple[ScoredToken, ...]:
        if answer.prompt_scores is None:
            return ()
        first = ScoredToken(self._texts.of(answer.prompt[0]), None)
        return (first, *(self._scored(answer, score) for score in answer.prompt_scores))

    def _scored(self, answer: GeneratedAnswer, score: TokenScore) -> ScoredToken:
        top = tuple((self._texts.of(token), value) for token, value in score.top)
        is_stop = answer.stop_token is not None and score is answer.scores[-1]
        return ScoredToken(self._texts.of(score.token), score.log_prob, top, is_stop)

    def _new_text(self, place: _Place) -> str:
        answer, text = place.answer, ""
        for token in answer.tokens[place.shown :]:
            text += place.stream.push(token)
            place.shown += 1
            if place.stops is not None and place.stops(0, answer.tokens):
                answer.ended = "stop"
        return text if answer.ended is None else text + place.stream.close()
