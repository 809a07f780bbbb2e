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
from unisono.trainer.model.token_grammars import GrammarError, LLGrammar, TokenGrammars
from unisono.trainer.plan.talk_messages import (
    Answered,
    AnswerPiece,
    Ask,
    Begun,
    Drop,
    FailedAsk,
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
    PromptReaders,
    describe_failure,
)
from unisono.trainer.task.several_adapters import AdapterSwitch

DeskMessage = ServeInput | Prepared | None
"""None: the end of stdin."""


def run(request: ServeRequest, report: Reporter) -> Mapping[str, object]:
    """Answers requests until stdin ends.

    It reads JSON lines from stdin, ServeInput. It sends `Ready`, and for each request `Begun` or
    `RefusedAsk`, then `Pieces`, and `Answered`, or in the place of any of these `FailedAsk`.
    """
    with contextlib.suppress(OSError, ValueError):  # without it only a verdict on a hang lacks the stack
        faulthandler.register(signal.SIGUSR2, file=2)
    opened = open_requested(request.model, report, sees=None, adapters=request.adapters)
    served = _served_models(opened)
    lines: queue.SimpleQueue[DeskMessage] = queue.SimpleQueue()
    readers = {name: PromptReader(one.opened, one.template, one.grammars) for name, one in served.items()}
    prompts = PromptProcess(PromptReaders(readers), lines)
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    with contextlib.closing(prompts), opened.ready() as model, contextlib.ExitStack() as stack:
        engines = {name: _engine(model, one, request.rows) for name, one in served.items()}
        for engine in engines.values():
            stack.enter_context(engine.ready())
        desk = _Desk(served, engines, prompts, report, AdapterSwitch(model, [a.key for a in opened.adapters]))
        for engine in engines.values():
            engine.on_failure = desk.fail
        first = engines[""]
        note = "; ".join(one.note for one in served.values() if one.note)
        description = opened.target.description
        if opened.adapters:
            description += f" with {len(opened.adapters)} adapters"
        ready = Ready(description, note, opened.context, first.in_parts, blind=opened.blind)
        report.send(encode_news(ready))
        while desk.take(lines):
            desk.step()
    return {"answers": desk.answered}


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


@dataclass(frozen=True)
class _ServedModel:
    """A model, or an adapter on it.

    Attributes:
        key: of the adapter; None: the model itself.
        template: for chats; None if there is none.
        note: a warning for the user; may be empty.
    """

    key: str | None
    opened: InferenceModel
    template: ChatTemplate | None
    note: str
    stop_ids: set[int]
    grammars: TokenGrammars
    texts: _TokenTexts


def _served_models(opened: InferenceModel) -> dict[str, _ServedModel]:
    """The model, under an empty name, and its adapters."""
    adapters = {adapter.name: (adapter.key, opened.with_adapter(adapter)) for adapter in opened.adapters}
    served = {}
    for name, (key, one) in {"": (None, opened), **adapters}.items():
        template, note = (one.template, "") if one.template else _fallback(one)
        stop_ids = one.stops(template)
        vocabulary = int(one.forward.loaded.base.get_input_embeddings().weight.shape[0])
        grammars = TokenGrammars(one.tokenizer, stop_ids=stop_ids, vocabulary=vocabulary)
        served[name] = _ServedModel(key, one, template, note, stop_ids, grammars, _TokenTexts(one.tokenizer))
    return served


def _engine(model: Any, served: _ServedModel, rows: int) -> Engine:
    opened = served.opened
    return Engine(
        model,
        stop_ids=served.stop_ids,
        pad_id=opened.pad_id,
        rows=rows,
        together=not opened.forward.rows_apart,
        allow=served.grammars.allow,
    )


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

    served: _ServedModel
    answer: GeneratedAnswer
    stream: TextStream
    stops: StopStrings | None
    limit: int
    echo: str | None = None  # the prompt, until it has been sent
    shown: int = 0  # tokens whose text has been sent
    scored: int = 0  # tokens whose scores have been sent


class _Desk:
    """The requests, and the engines that answer them, one for each adapter.

    Attributes:
        answered: number of complete answers.
    """

    def __init__(
        self,
        served: Mapping[str, _ServedModel],
        engines: Mapping[str, Engine],
        prompts: PromptProcess,
        report: Reporter,
        switch: AdapterSwitch,
    ) -> None:
        self._served = served
        self._engines = engines
        self._prompts = prompts
        self._report = report
        self._switch = switch
        self._device = served[""].opened.device
        self._unread: set[int] = set()  # requests whose prompts are being read
        self._places: dict[int, _Place] = {}
        self.answered = 0

    def take(self, lines: "queue.SimpleQueue[DeskMessage]") -> bool:
        """Takes all messages that have arrived, after waiting for one if there is nothing to do;
        False at their end.
        """
        while True:
            try:
                message = lines.get(block=all(engine.is_idle for engine in self._engines.values()))
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
        ids, served = prompt.ids, self._served[question.adapter]
        opened, tokenizer, stops = served.opened, served.opened.tokenizer, question.stop
        room = opened.context - len(ids)
        limit = room if question.max_tokens is None else min(room, question.max_tokens)
        answer = GeneratedAnswer(
            ids,
            limit,
            question.sampling,
            place=question.place,
            pictures=_pictures(opened, prompt),
            grammar=grammar,
            top=question.top,
            prompt_scores=[] if question.echo and question.top is not None else None,
        )
        place = _Place(
            served,
            answer,
            TextStream(tokenizer, stops, marks=question.marks),
            StopStrings(tokenizer, stops) if stops else None,
            limit,
        )
        if question.echo:
            place.echo = question.prompt if isinstance(question.prompt, str) else tokenizer.decode(ids)
        self._places[number] = place
        self._engines[question.adapter].add(answer)
        self._report.send(encode_news(Begun(number, len(ids), prompt.thought)))

    def fail(self, answers: Sequence[GeneratedAnswer], error: Exception) -> None:
        """Ends answers that could not be computed; the others continue.

        Raises:
            Exception: the same, if the device computes nothing any more.
        """
        torch.zeros(1, device=self._device).item()  # raises after an error that leaves a GPU unusable
        for number in [number for number, place in self._places.items() if place.answer in answers]:
            del self._places[number]
            if isinstance(error, GrammarError):
                refused = RefusedAsk(number, "response_format", str(error), "use a simpler schema")
                self._report.send(encode_news(refused))
            else:
                self._report.send(encode_news(describe_failure(number, error)))

    def step(self) -> None:
        """Computes one token of each answer, and sends what is new."""
        for name, engine in self._engines.items():
            if not engine.is_idle:
                self._switch.activate(self._served[name].key)
                engine.step()
        pieces: list[AnswerPiece] = []
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

    def _new_pieces(self, number: int, place: _Place) -> list[AnswerPiece]:
        """The prompt, once it has been read and if it is wanted, and what is new of the answer."""
        answer, pieces = place.answer, []
        has_moved = answer.ended is not None or len(answer.tokens) > place.shown
        if place.echo is not None and has_moved:
            pieces.append(AnswerPiece(number, place.echo, _scored_prompt(place)))
            place.echo = None
        text = self._new_text(place)
        scores = answer.scores[place.scored :]
        place.scored += len(scores)
        if text or scores:
            tokens = tuple(_scored(place, score) for score in scores)
            pieces.append(AnswerPiece(number, text, tokens))
        return pieces

    def _new_text(self, place: _Place) -> str:
        answer, text = place.answer, ""
        for token in answer.tokens[place.shown :]:
            text += place.stream.push(token)
            place.shown += 1
            if place.stops is not None and place.stops(0, answer.tokens):
                answer.ended = "stop"
        return text if answer.ended is None else text + place.stream.close()


def _pictures(opened: InferenceModel, prompt: PromptInputs) -> PictureInputs | None:
    if not prompt.pictures:
        return None
    assert opened.processor is not None
    tensors = {name: torch.from_numpy(values).to(opened.device) for name, values in prompt.pictures.items()}
    return PictureInputs(tensors, opened.processor.image_ids)


def _scored_prompt(place: _Place) -> tuple[ScoredToken, ...]:
    answer = place.answer
    if answer.prompt_scores is None:
        return ()
    first = ScoredToken(place.served.texts.of(answer.prompt[0]), None)
    return (first, *(_scored(place, score) for score in answer.prompt_scores))


def _scored(place: _Place, score: TokenScore) -> ScoredToken:
    texts, answer = place.served.texts, place.answer
    top = tuple((texts.of(token), value) for token, value in score.top)
    is_stop = answer.stop_token is not None and bool(answer.scores) and score is answer.scores[-1]
    return ScoredToken(texts.of(score.token), score.log_prob, top, is_stop)
