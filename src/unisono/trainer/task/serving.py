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

from unisono.base.errors import DataError, UnisonoError, UsageError
from unisono.base.events import Reporter
from unisono.guard.supervise.codec import decode_message
from unisono.trainer.data.template import ChatTemplate
from unisono.trainer.data.text_encoder import probe_tokenizer
from unisono.trainer.model.engine import Engine, GeneratedAnswer, KnownPrompts, TokenScore
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.packed_layers import packed_layers
from unisono.trainer.model.prompt_cache import PromptCache
from unisono.trainer.model.token_grammars import GrammarError, LLGrammar, TokenGrammars
from unisono.trainer.plan.talk_messages import (
    AdapterChanged,
    Answered,
    AnswerPiece,
    Ask,
    Begun,
    Drop,
    FailedAsk,
    LoadAdapter,
    Pieces,
    Ping,
    PromptRequest,
    Ready,
    RefusedAsk,
    ScoredToken,
    ServeInput,
    UnloadAdapter,
    encode_news,
)
from unisono.trainer.plan.task_requests import NamedAdapter, ServeRequest
from unisono.trainer.task.inference import (
    InferenceModel,
    StopStrings,
    TextStream,
    open_requested,
    put_on,
    trusts_code,
)
from unisono.trainer.task.prompts import (
    Prepared,
    PromptInputs,
    PromptProcess,
    PromptReader,
    PromptReaders,
    describe_failure,
)
from unisono.trainer.task.several_adapters import AdapterSwitch, find_adapters
from unisono.trainer.task.value_serving import serve_values

DeskMessage = ServeInput | Prepared | None
"""None: the end of stdin."""


def run(request: ServeRequest, report: Reporter) -> Mapping[str, object]:
    """Answers requests until stdin ends.

    It reads JSON lines from stdin, ServeInput. It sends `Ready`, and for each request `Begun` or
    `RefusedAsk`, then `Pieces`, and `Answered`, or in the place of any of these `FailedAsk`.
    """
    with contextlib.suppress(OSError, ValueError):  # without it only a verdict on a hang lacks the stack
        faulthandler.register(signal.SIGUSR2, file=2)
    opened = open_requested(
        request.model,
        report,
        answers=request.answers or request.is_shared,
        sees=None,
        adapters=request.adapters,
        takes_adapters=request.takes_adapters,
    )
    lines: queue.SimpleQueue[DeskMessage] = queue.SimpleQueue()
    if opened.target.embeds or opened.target.head is not None:
        threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
        return serve_values(opened, lines, report)
    served = _served_models(opened)
    prompts = PromptProcess(_readers(served), lines)
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    with contextlib.closing(prompts), opened.ready() as model, contextlib.ExitStack() as stack:
        desk = _Desk(
            served, model, prompts, report, rows=request.rows, prompt_cache=request.prompt_cache_bytes
        )
        first = desk.engines[""]
        stack.enter_context(first.ready())  # the others compute with the same model
        stack.enter_context(packed_layers(model))
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
    adapters = {one.name: _served(one.key, opened.with_adapter(one)) for one in opened.adapters}
    return {"": _served(None, opened), **adapters}


def _served(key: str | None, opened: InferenceModel) -> _ServedModel:
    template, note = (opened.template, "") if opened.template else _fallback(opened)
    stop_ids = opened.stops(template)
    vocabulary = int(opened.forward.loaded.base.get_input_embeddings().weight.shape[0])
    grammars = TokenGrammars(opened.tokenizer, stop_ids=stop_ids, vocabulary=vocabulary)
    return _ServedModel(key, opened, template, note, stop_ids, grammars, _TokenTexts(opened.tokenizer))


def _readers(served: Mapping[str, _ServedModel]) -> PromptReaders:
    return PromptReaders(
        {name: PromptReader(one.opened, one.template, one.grammars) for name, one in served.items()}
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
        engines: by the names of adapters; that of the model itself has an empty one.
    """

    def __init__(
        self,
        served: dict[str, _ServedModel],
        model: Any,
        prompts: PromptProcess,
        report: Reporter,
        *,
        rows: int,
        prompt_cache: int,
    ) -> None:
        self._served = served
        self._rows = rows
        self._prompts = prompts
        self._report = report
        self._opened = served[""].opened
        keys = [one.key for one in served.values() if one.key is not None]
        self._peft_model = model if keys else None
        self._switch = AdapterSwitch(model, keys)
        self._placed = len(keys)  # adapters so far
        self._known = PromptCache(prompt_cache) if prompt_cache else None
        self.engines = {name: self._engine(name, model, one) for name, one in served.items()}
        self._unread: set[int] = set()  # requests whose prompts are being read
        self._places: dict[int, _Place] = {}
        self.answered = 0

    def _engine(self, name: str, model: Any, served: _ServedModel) -> Engine:
        opened = served.opened
        engine = Engine(
            model,
            stop_ids=served.stop_ids,
            pad_id=opened.pad_id,
            rows=self._rows,
            together=not opened.forward.rows_apart,
            allow=served.grammars.allow,
            known=KnownPrompts(self._known, name) if self._known is not None else None,
        )
        engine.on_failure = self.fail
        return engine

    def take(self, lines: "queue.SimpleQueue[DeskMessage]") -> bool:
        """Takes all messages that have arrived, after waiting for one if there is nothing to do;
        False at their end.
        """
        while True:
            try:
                message = lines.get(block=all(engine.is_idle for engine in self.engines.values()))
            except queue.Empty:
                return True
            if message is None:
                return False
            match message:
                case Ping():
                    self._report.send({"kind": "pong"})
                case Drop():
                    self._drop(message.id)
                case Ask() if message.question.adapter not in self._served:
                    gone = RefusedAsk(message.id, "model", "the adapter is no longer loaded", "")
                    self._report.send(encode_news(gone))
                case Ask():
                    self._unread.add(message.id)
                    self._prompts.submit(message)
                case LoadAdapter() | UnloadAdapter():
                    self._change_adapters(message)
                case Prepared():
                    self._begin(message)

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Puts an adapter on the model, or takes one off."""
        try:
            if isinstance(message, LoadAdapter):
                self._load(message.adapter)
            else:
                self._unload(message.name)
        except UnisonoError as error:
            problem = error.problems[0]
            refused = RefusedAsk(message.id, "lora_path", problem.what, problem.why or problem.fix)
            self._report.send(encode_news(refused))
        except Exception as error:  # noqa: BLE001 - the edge of a request: others continue
            self._report.send(encode_news(describe_failure(message.id, error)))
        else:
            self._prompts.renew(_readers(self._served))
            self._report.send(encode_news(AdapterChanged(message.id)))

    def _load(self, adapter: NamedAdapter) -> None:
        (placed,) = find_adapters([adapter], self._opened.target, self._report, first=self._placed)
        if trusts_code(placed.target):
            raise UsageError.of(
                "the adapter's run has model.trust_remote_code, and code is trusted only at the start",
                where=adapter.target,
                fix="name it with --adapter",
            )
        served = _served(placed.key, self._opened.with_adapter(placed))
        probe_tokenizer(served.opened.tokenizer)
        self._peft_model = put_on(
            self._opened.forward.loaded.base, self._peft_model, placed, self._opened.device
        )
        self._placed += 1
        self._switch.add(self._peft_model, placed.key)
        self._served[adapter.name] = served
        self.engines[adapter.name] = self._engine(adapter.name, self._peft_model, served)

    def _unload(self, name: str) -> None:
        served = self._served.pop(name)
        del self.engines[name]
        if self._known is not None:
            self._known.forget(name)
        assert served.key is not None
        self._switch.remove(served.key)
        if len(self._served) == 1:
            self._peft_model = None  # peft loads none into a model whose last one has gone

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
            assert isinstance(ask.question, PromptRequest)
            assert isinstance(prompt, PromptInputs)
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
        self.engines[question.adapter].add(answer)
        self._report.send(encode_news(Begun(number, len(ids), prompt.thought)))

    def fail(self, answers: Sequence[GeneratedAnswer], error: Exception) -> None:
        """Ends answers that could not be computed; the others continue.

        Raises:
            Exception: the same, if the device computes nothing any more.
        """
        torch.zeros(1, device=self._opened.device).item()  # raises after an error that leaves a GPU unusable
        for number in [number for number, place in self._places.items() if place.answer in answers]:
            del self._places[number]
            if isinstance(error, GrammarError):
                refused = RefusedAsk(number, "response_format", str(error), "use a simpler schema")
                self._report.send(encode_news(refused))
            else:
                self._report.send(encode_news(describe_failure(number, error)))

    def step(self) -> None:
        """Computes one token of each answer, and sends what is new."""
        for name, engine in self.engines.items():
            if not engine.is_idle:
                self._switch.activate(self._served[name].key)
                with torch.inference_mode():  # an operation costs less than with no_grad
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
