"""The task `chat`: a conversation over stdin and the report pipe.

Request: target, step (or null), system (or null), max_tokens, temperature, top_p, seed.
It hears JSON lines on stdin: {"kind": "say", "text"}, {"kind": "clear"}; the end of stdin ends it, SIGINT ends the answer that is
being given. It sends `ready` (facts: description, note), then for each `say`: `token` (text) as they come and `answer` (text, tokens,
ended: stop | length | interrupted), or `refused_turn` (text, fix) if the turn cannot be answered. Result: turns.
"""

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from unisono.data.rows import RowError
from unisono.data.template import ChatTemplate
from unisono.events import Reporter
from unisono.model.generate import generate
from unisono.task.decoding import TextStream, decode
from unisono.task.opening import Opened, open_for_inference
from unisono.task.prompts import tokens_of


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Talks until stdin ends; gives the number of turns."""
    opened = open_for_inference(request["target"], step=request.get("step"), report=report)
    template, note = opened.chat_template()
    interrupt = _Interrupt()
    signal.signal(signal.SIGINT, interrupt)
    conversation = Conversation(opened, template, request, report, interrupt)
    report.send("ready", facts={"description": opened.target.description, "note": note})
    for line in sys.stdin:
        message = json.loads(line)
        if message["kind"] == "clear":
            conversation.clear()
        else:
            conversation.say(message["text"])
    return {"turns": conversation.turns}


class _Interrupt:
    """Whether Ctrl-C was pressed since the turn began."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, *_: object) -> None:
        self.asked = True


class Conversation:
    """What has been said, and how the model goes on.

    Attributes:
        turns: answers given so far.
    """

    def __init__(
        self,
        opened: Opened,
        template: ChatTemplate,
        request: dict[str, Any],
        report: Reporter,
        interrupt: _Interrupt,
    ) -> None:
        self._opened = opened
        self._template = template
        self._request = request
        self._report = report
        self._interrupt = interrupt
        self.turns = 0
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system message."""
        system = self._request.get("system")
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Answers; a turn that cannot be answered is forgotten."""
        self._messages.append({"role": "user", "content": text})
        self._interrupt.asked = False
        try:
            ids = tokens_of(self._opened, self._template.render(self._messages, prompt=True), whole=False)
        except RowError as error:
            self._refuse(error.why, error.fix)
            return
        room = self._opened.context - len(ids)
        if room < 1:
            self._refuse(
                f"the conversation is longer than the {self._opened.context} tokens that the model reads",
                "/clear begins anew",
            )
            return
        answer, shown = self._answer(ids, limit=min(room, self._request["max_tokens"]))
        self._messages.append({"role": "assistant", "content": shown})
        self.turns += 1
        ended = (
            "interrupted"
            if self._interrupt.asked
            else "length"
            if len(answer) >= min(room, self._request["max_tokens"])
            else "stop"
        )
        self._report.send("answer", text=shown, tokens=len(answer), ended=ended)

    def _answer(self, ids: Sequence[int], *, limit: int) -> tuple[list[int], str]:
        stream = TextStream(self._opened.tokenizer)

        def send(token: int) -> None:
            piece = stream.push(token)
            if piece:
                self._report.send("token", text=piece)

        with self._opened.ready() as model:
            (answer,) = generate(
                model, [ids], max_new_tokens=limit, stop_ids=self._opened.stops(self._template), pad_id=self._opened.pad_id,
                temperature=self._request["temperature"], top_p=self._request["top_p"], seed=self._request["seed"] + self.turns,
                on_token=send, is_done=lambda *_: self._interrupt.asked,
            )  # fmt: skip
        rest = stream.close()
        if rest:
            self._report.send("token", text=rest)
        return answer, decode(self._opened.tokenizer, answer)

    def _refuse(self, why: str, fix: str) -> None:
        self._messages.pop()
        self._report.send("refused_turn", text=why, fix=fix)
