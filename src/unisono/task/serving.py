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

from unisono.data import RowError
from unisono.data.formats import messages_of
from unisono.data.template import ChatTemplate
from unisono.errors import DataError, UnisonoError
from unisono.events import Message, Reporter
from unisono.model.engine import Answer, Engine
from unisono.model.generate import Sampling
from unisono.task.generation import tokens_of_text
from unisono.task.inference import InferenceModel, StopStrings, TextStream, open_requested, prompt_ids

_ROLES = {"developer": "system"}
"""Roles of OpenAI's protocol that no template knows, and what they mean."""
_PROBE = [{"role": "user", "content": "hello"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Answers requests until stdin ends.

    Request: target, step (or null), rows (answers computed together). It reads JSON lines from stdin:

        ask   id; messages (of a chat, with tools or null) or prompt (text or tokens); max_tokens (or null: what the context has room for),
              the attributes of Sampling, stop (list), place, marks (special tokens that are part of the answer's text)
        drop  id: nobody waits for this answer any more
        ping  answered by `pong` between two forwards: a sign of life

    It sends `ready` (facts: description, context, note, in_parts: whether long prompts are read in parts), and for each request `begun` (id, prompt_tokens) or `refused_ask` (id, problem,
    text, fix), then `pieces` (pieces: [id, text] of all requests that got one), and `answered` (id, tokens, ended: stop | length).
    """
    with contextlib.suppress(OSError, ValueError):  # without it only a verdict on a hang lacks the stack
        faulthandler.register(signal.SIGUSR2, file=2)
    opened = open_requested(request, report)
    template, note = (opened.template, "") if opened.template else _fallback(opened)
    lines: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="requests", daemon=True).start()
    with opened.ready() as model:
        engine = Engine(
            model,
            stop_ids=opened.stops(template),
            pad_id=opened.pad_id,
            rows=request["rows"],
            together=not opened.forward.rows_apart,
        )
        desk = _Desk(opened, template, engine, report)
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
    for line in sys.stdin:
        lines.put(json.loads(line))
    lines.put(None)


def _fallback(opened: InferenceModel) -> tuple[ChatTemplate | None, str]:
    try:
        return opened.chat_template()
    except DataError as error:  # then it continues texts, and refuses chats
        return None, error.problems[0].what


class _Refused(Exception):  # noqa: N818 - named for what happened
    """A request that cannot be answered.

    Attributes:
        problem: messages, tools or prompt: the part of the request; `length`: its number of tokens.
    """

    def __init__(self, problem: str, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.problem, self.text, self.fix = problem, text, fix


@dataclass
class _Place:
    """A request that is being answered."""

    answer: Answer
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
        self, opened: InferenceModel, template: ChatTemplate | None, engine: Engine, report: Reporter
    ) -> None:
        self._opened = opened
        self._template = template
        self._engine = engine
        self._report = report
        self._places: dict[int, _Place] = {}
        self._has_tools: bool | None = None
        self.answered = 0

    def take(self, lines: "queue.SimpleQueue[Message | None]") -> bool:
        """Takes all messages that have arrived, after waiting for one if there is nothing to do; False at their end."""
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
                place = self._places.pop(message["id"], None)
                if place is not None:
                    place.answer.ended = "dropped"
            else:
                self._ask(message)

    def _ask(self, ask: Message) -> None:
        try:
            ids = self._ids_of(ask)
            room = self._room_after(ids)
        except _Refused as refused:
            self._report.send(
                "refused_ask", id=ask["id"], problem=refused.problem, text=refused.text, fix=refused.fix
            )
            return
        limit = min(room, ask["max_tokens"] or room)
        answer = Answer(ids, limit, Sampling.of(ask), place=ask["place"])
        tokenizer, stops = self._opened.tokenizer, ask["stop"]
        stream = TextStream(tokenizer, stops, marks=ask.get("marks", ()))
        self._places[ask["id"]] = _Place(
            answer, stream, StopStrings(tokenizer, stops) if stops else None, limit
        )
        self._engine.add(answer)
        self._report.send("begun", id=ask["id"], prompt_tokens=len(ids))

    def _room_after(self, ids: Sequence[int]) -> int:
        """The tokens that an answer to a prompt can have.

        Raises:
            _Refused: if there is room for none.
        """
        room = self._opened.context - len(ids)
        if room < 1:
            what = f"the prompt has {len(ids)} tokens, and the model reads {self._opened.context}"
            raise _Refused("length", what, "shorten it")
        return room

    def _ids_of(self, ask: Message) -> Sequence[int]:
        """The tokens that the model continues.

        Raises:
            _Refused: if there are none.
        """
        prompt = ask.get("prompt")
        if ask.get("messages") is not None:
            return self._ids_of_chat(ask["messages"], ask.get("tools"))
        ids = tokens_of_text(self._opened, prompt) if isinstance(prompt, str) else list(prompt or ())
        vocabulary = self._opened.forward.loaded.base.get_input_embeddings().weight.shape[0]
        odd = next((i for i in ids if not 0 <= i < vocabulary), None)
        if odd is not None:
            raise _Refused(
                "prompt", f"the model has no token {odd}", f"it has those from 0 to {vocabulary - 1}"
            )
        if not ids:
            raise _Refused("prompt", "the prompt is empty", "write one")
        return ids

    def _ids_of_chat(self, messages: list[Any], tools: list[Any] | None) -> Sequence[int]:
        if self._template is None:
            raise _Refused(
                "messages",
                "the model has no chat template, and no token that could end an answer",
                "use /v1/completions",
            )
        if tools and not self._writes_tools():
            raise _Refused("tools", "the model's chat template does not write tools", "omit them")
        try:
            turns = [
                turn | {"role": _ROLES.get(turn["role"], turn["role"])}
                for turn in messages_of(messages, "messages")
            ]
            return prompt_ids(self._opened.tokenizer, self._template, turns, tools)
        except RowError as error:
            raise _Refused("messages", error.why, error.fix) from error
        except UnisonoError as error:
            raise _Refused("messages", error.problems[0].what, error.problems[0].fix) from error

    def _writes_tools(self) -> bool:
        """Whether the chat template writes the schemas of functions; found by trying."""
        if self._has_tools is None:
            assert self._template is not None
            try:
                text = self._template.render(_PROBE, [_PROBE_TOOL], prompt=True)
                self._has_tools = text != self._template.render(_PROBE, prompt=True)
            except (RowError, UnisonoError):
                self._has_tools = False
        return self._has_tools

    def step(self) -> None:
        """Computes one token of each answer, and sends what is new."""
        if not self._engine.is_idle:
            self._engine.step()
        pieces: list[tuple[int, str]] = []
        ended: list[int] = []
        for number, place in self._places.items():
            piece = self._new_text(place)
            if place.answer.ended is not None:
                piece += place.stream.close()
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
        return text
