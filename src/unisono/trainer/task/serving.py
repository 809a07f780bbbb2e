"""The task `serve`: answers of a model to requests that come and go, computed together."""

import contextlib
import faulthandler
import json
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.base.errors import DataError
from unisono.base.events import Message, Reporter
from unisono.trainer.data.template import ChatTemplate
from unisono.trainer.model.engine import Engine, GeneratedAnswer
from unisono.trainer.model.generate import SamplingParams
from unisono.trainer.task.inference import InferenceModel, StopStrings, TextStream, open_requested
from unisono.trainer.task.prompts import PromptProcess, PromptReader, describe_failure


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Answers requests until stdin ends.

    Request: target, step (or null), rows (answers computed together). It reads JSON lines from
    stdin:

        ask   id; messages (of a chat, with tools or null) or prompt (text or tokens);
              max_tokens (or null: what the context has room for), the attributes of
              SamplingParams, stop (list), place, marks (special tokens that are part of the
              answer's text)
        drop  id: nobody waits for this answer any more
        ping  answered by `pong` between two forwards: a sign of life

    It sends `ready` (facts: description, context, note, in_parts: whether long prompts are read in
    parts), and for each request `begun` (id, prompt_tokens) or `refused_ask` (id, problem, text,
    fix), then `pieces` (pieces: [id, text] of all requests that got one), and `answered` (id,
    tokens, ended: stop | length), or in the place of any of these `failed_ask` (id, text, where):
    an exception ends the request that it came from, and no other.
    """
    with contextlib.suppress(OSError, ValueError):  # without it only a verdict on a hang lacks the stack
        faulthandler.register(signal.SIGUSR2, file=2)
    opened = open_requested(request, report)
    template, note = (opened.template, "") if opened.template else _fallback(opened)
    lines: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    prompts = PromptProcess(PromptReader(opened, template), lines)
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    with contextlib.closing(prompts), opened.ready() as model:
        engine = Engine(
            model,
            stop_ids=opened.stops(template),
            pad_id=opened.pad_id,
            rows=request["rows"],
            together=not opened.forward.rows_apart,
        )
        desk = _Desk(opened, engine, prompts, report)
        engine.on_failure = desk.fail
        with engine.ready():
            facts = {
                "description": opened.target.description,
                "context": opened.context,
                "note": note,
                "in_parts": engine.in_parts,
            }
            report.send("ready", facts=facts)
            while desk.take(lines):
                desk.step()
    return {"answers": desk.answered}


def _read(lines: "queue.SimpleQueue[Message | None]") -> None:
    # Not sys.stdin, whose lock this thread would hold whenever a process is forked, which then
    # could not close it.
    with open(sys.stdin.fileno(), encoding="utf-8", closefd=False) as stream:
        for line in stream:
            lines.put(json.loads(line))
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
    shown: int = field(default=0)  # tokens whose text has been sent


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
        self._unread: set[int] = set()  # requests whose prompts are being read
        self._places: dict[int, _Place] = {}
        self.answered = 0

    def take(self, lines: "queue.SimpleQueue[Message | None]") -> bool:
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
            if message["kind"] == "ping":
                self._report.send("pong")
            elif message["kind"] == "drop":
                self._drop(message["id"])
            elif message["kind"] == "ask":
                self._unread.add(message["id"])
                self._prompts.submit(message)
            else:
                self._begin(message)

    def _drop(self, number: int) -> None:
        self._unread.discard(number)
        place = self._places.pop(number, None)
        if place is not None:
            place.answer.ended = "dropped"

    def _begin(self, prepared: Message) -> None:
        """Begins an answer whose prompt has been read."""
        ask = prepared["ask"]
        if ask["id"] not in self._unread:
            return
        self._unread.remove(ask["id"])
        if "refused" in prepared:
            problem, text, fix = prepared["refused"]
            self._report.send("refused_ask", id=ask["id"], problem=problem, text=text, fix=fix)
        elif "failed" in prepared:
            self._fail(ask["id"], *prepared["failed"])
        else:
            self._add(ask, prepared["ids"])

    def _add(self, ask: Message, ids: Sequence[int]) -> None:
        room = self._opened.context - len(ids)
        limit = min(room, ask["max_tokens"] or room)
        answer = GeneratedAnswer(ids, limit, SamplingParams.of(ask), place=ask["place"])
        tokenizer, stops = self._opened.tokenizer, ask["stop"]
        stream = TextStream(tokenizer, stops, marks=ask.get("marks", ()))
        self._places[ask["id"]] = _Place(
            answer, stream, StopStrings(tokenizer, stops) if stops else None, limit
        )
        self._engine.add(answer)
        self._report.send("begun", id=ask["id"], prompt_tokens=len(ids))

    def fail(self, answers: Sequence[GeneratedAnswer], error: Exception) -> None:
        """Ends answers that could not be computed; the others continue.

        Raises:
            Exception: the same, if the device computes nothing any more.
        """
        torch.zeros(1, device=self._opened.device).item()  # raises after an error that leaves a GPU unusable
        for number in [number for number, place in self._places.items() if place.answer in answers]:
            del self._places[number]
            self._fail(number, *describe_failure(error))

    def _fail(self, number: int, text: str, where: str) -> None:
        self._report.send("failed_ask", id=number, text=text, where=where)

    def step(self) -> None:
        """Computes one token of each answer, and sends what is new."""
        if not self._engine.is_idle:
            self._engine.step()
        pieces: list[tuple[int, str]] = []
        ended: list[int] = []
        for number, place in list(self._places.items()):
            try:
                piece = self._new_text(place)
            except Exception as error:  # noqa: BLE001 - the edge of a request: it fails alone
                place.answer.ended = "failed"
                self.fail([place.answer], error)
                continue
            if place.answer.ended is not None:
                ended.append(number)
            if piece:
                pieces.append((number, piece))
        if pieces:
            self._report.send("pieces", pieces=pieces)
        for number in ended:
            place = self._places.pop(number)
            self.answered += 1
            self._report.send(
                "answered", id=number, tokens=len(place.answer.tokens), ended=place.answer.ended
            )

    def _new_text(self, place: _Place) -> str:
        answer, text = place.answer, ""
        for token in answer.tokens[place.shown :]:
            text += place.stream.push(token)
            place.shown += 1
            if place.stops is not None and place.stops(0, answer.tokens):
                answer.ended = "stop"
        return text if answer.ended is None else text + place.stream.close()
