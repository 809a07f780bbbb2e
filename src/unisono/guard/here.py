"""This node's part of a guarded program: the program, its ranks, and what its processes bring to agreements. Messages in, messages out.

The head treats its own node as it treats the others: what is new here are the messages that a node sends, and what it wants done are those
that it sends to nodes.
"""

import contextlib
import json
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from unisono.events import Message
from unisono.guard.program import Program
from unisono.guard.ranks import ProgramRanks
from unisono.guard.signals import Signals
from unisono.integrations import border
from unisono.rundir import RunDir

PASSED_EVERYWHERE = (signal.SIGINT, signal.SIGTERM)
"""What stops a program on one node stops it on all; SIGUSR1 means what the program makes of it, there alone."""


@dataclass
class Here:
    """What runs on this node.

    Attributes:
        program: the program; None where only its launchers are agreed upon, by hand.
        ranks: of this node.
        folder: of the border.
        run: the run's directory; None: nothing is kept.
        signals: that the front has got.
    """

    program: Program | None
    ranks: ProgramRanks
    folder: Path
    run: RunDir | None
    signals: Signals
    _told: bool = False
    _is_orphaned: bool = False
    _brought: dict[str, border.Brought] = field(default_factory=dict)
    _events: dict[int, IO[str]] = field(default_factory=dict)

    def news(self, timeout_s: float, *, also: Sequence[int] = ()) -> list[Message]:
        """What is new here, after waiting for the first of it, or for one of `also` to become readable."""
        own = [self.program.fileno()] if self.program is not None and self.program.returncode is None else []
        select.select([*own, *self.ranks.fds(), self.signals.fileno(), *also], [], [], timeout_s)
        messages = self._passed_on()
        messages += self._orphaned()
        messages += self.ranks.news()
        for message in messages:
            if message["kind"] == "rank_said":
                self._keep(int(message["rank"]), message["message"])
        messages += [self._as_message(one) for one in self._new_facts()]
        if self.program is not None and not self._told and self.program.poll(0) is not None:
            messages += self.ranks.news(at_once=True)
            messages.append(
                {
                    "kind": "program_ended",
                    "returncode": self.program.returncode,
                    "left": self.program.left,
                    "oom_killed": self.ranks.oom_killed,
                    "keeper_lost": self.program.is_keeper_lost,
                }
            )
            self._told = True
        return messages

    def obey(self, message: Message) -> None:
        """Does what the head wants done here."""
        match message["kind"]:
            case "answer":
                brought = self._brought.pop(str(message["key"]), None)
                if brought is not None:
                    border.answer_facts(self.folder, brought, border.Answer(**message["answer"]))
            case "stop" if self.program is not None:
                self.program.signal(signal.Signals[str(message["signal"])])
            case "end" if self.program is not None:
                self.program.end()
            case _:
                pass

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended, and that has been told."""
        return self._told or self.program is None

    def close(self) -> None:
        """Ends what is left, and closes files."""
        if self.program is not None:
            self.program.close()
        self.ranks.close()
        for file in self._events.values():
            with contextlib.suppress(OSError):
                file.close()

    def _orphaned(self) -> list[Message]:
        """The ends of ranks that came before the program's own. Those that come after it say nothing: the keeper ends what is left."""
        if self.program is None or self._is_orphaned:
            return []
        self.program.poll(0)
        if self.program.gone is None and not self.program.is_keeper_lost:
            return []
        messages = self.ranks.news(at_once=True)
        self._is_orphaned = self.ranks.is_orphaned = True
        self.program.note_seen()
        return messages

    def _passed_on(self) -> list[Message]:
        """Signals of the front go to the program as they come."""
        messages: list[Message] = []
        for number in self.signals.take():
            if self.program is not None:
                self.program.signal(number)
            messages.append({"kind": "asked", "signal": number.name})
        return messages

    def _new_facts(self) -> list[border.Brought]:
        found = []
        for one in border.brought_facts(self.folder):
            name = f"{one.pid}-{one.name}"
            if self._brought.get(name) != one:
                self._brought[name] = one
                found.append(one)
        return found

    @staticmethod
    def _as_message(one: border.Brought) -> Message:
        return {
            "kind": "brought",
            "key": f"{one.pid}-{one.name}",
            **{k: v for k, v in asdict(one).items() if k != "pid"},
        }

    def _keep(self, rank: int, message: Message) -> None:
        """A line in the rank's file of events. A disk that is full costs only that."""
        if self.run is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if rank not in self._events:
                path = self.run.events(rank)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._events[rank] = path.open("a", encoding="utf-8")
            self._events[rank].write(json.dumps({"time": time.time(), **message}, ensure_ascii=False) + "\n")
            self._events[rank].flush()
