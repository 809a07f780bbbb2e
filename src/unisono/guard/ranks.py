"""The ranks of somebody else's program on this node: found by what they leave at the border, or by their environment; seen to their end."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unisono.events import Message
from unisono.facts.exit_status import exit_status
from unisono.facts.memory_events import oom_kills
from unisono.facts.tree import processes_below, variables_of
from unisono.integrations import border
from unisono.launch.ranks import LAST_WORDS, RankEnd
from unisono.plan import DeviceChoice, RankPlace
from unisono.rundir import RunDir
from unisono.watch import BeatMemory

UNKNOWN_END = "how it ended is not known"
_SEARCH_EVERY_S = 0.5
_LOOK_EVERY_S = 0.1


class ProgramDir(RunDir):
    """A run's directory in which all that the program prints on a node is one log."""

    def log(self, host: str, rank: int) -> Path:
        """What the whole program printed on that node."""
        del rank
        return self.root / "logs" / f"{host}-program.log"


@dataclass
class Rank:
    """One rank.

    Attributes:
        registration: who it is.
        registered: whether it has said so itself; else its environment did, and only its end is seen.
        last: `result`, `refused` or `crashed`, once it is told.
        end: how it ended, once it has.
    """

    registration: border.Registration
    registered: bool
    pidfd: int
    memory: BeatMemory | None = None
    events: border.EventsOf | None = None
    last: Message | None = None
    phase: str = "start"
    step: int = 0
    end: RankEnd | None = None

    def close(self) -> None:
        """Gives its memory and its descriptor back."""
        if self.memory is not None:
            self.memory.close()
        os.close(self.pidfd)


@dataclass
class ProgramRanks:
    """The ranks of this node, of the newest start of their launcher. What launch.signs looks at.

    Attributes:
        folder: of the border.
        run: the run's directory.
        node_rank: of this node.
        host: its name.
        root: the process below which they are.
        newest: which start of the launcher's these are, from 0.
    """

    folder: Path
    run: RunDir
    node_rank: int
    host: str
    root: int
    newest: int = 0
    _ranks: dict[int, Rank] = field(default_factory=dict)
    _searched: float = 0.0
    _looked: float = 0.0
    _kills_before: int = field(default_factory=lambda: oom_kills() or 0)

    @property
    def places(self) -> list[RankPlace]:
        """Of all that are known."""
        return [self._place(self._ranks[number]) for number in sorted(self._ranks)]

    @property
    def world_size(self) -> int:
        """As the ranks say; 0 while there are none."""
        return max((rank.registration.world_size for rank in self._ranks.values()), default=0)

    @property
    def beats(self) -> dict[int, BeatMemory]:
        """Of those that leave signs of life."""
        return {n: rank.memory for n, rank in self._ranks.items() if rank.memory is not None}

    @property
    def all_ended(self) -> bool:
        """Whether none is left; False while none is known."""
        return bool(self._ranks) and all(rank.end is not None for rank in self._ranks.values())

    @property
    def unseen(self) -> list[int]:
        """Ranks of which only the end is seen."""
        return sorted(number for number, rank in self._ranks.items() if not rank.registered)

    def pid(self, rank: int) -> int | None:
        """Of a rank's process while it lives."""
        known = self._ranks.get(rank)
        return known.registration.pid if known is not None and known.end is None else None

    def last_word(self, rank: int) -> Message | None:
        """What a rank said last of itself, if that was its last word."""
        known = self._ranks.get(rank)
        return known.last if known is not None else None

    def fds(self) -> list[int]:
        """Readable when a rank has ended."""
        return [rank.pidfd for rank in self._ranks.values() if rank.end is None]

    def close(self) -> None:
        """Gives memory and descriptors back; the ranks are not touched."""
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()

    def news(self, *, at_once: bool = False) -> list[Message]:
        """What is new: `registered` (who is there now), `rank_said`, `rank_ended`; as they go to the head."""
        now = time.monotonic()
        ended = self._take_ends()
        if not (at_once or ended) and now - self._looked < _LOOK_EVERY_S:
            return ended
        self._looked = now
        found = self._find(now)
        said = [message for number in sorted(self._ranks) for message in self._hear(number)]
        news: list[Message] = []
        if found:
            places = [place.model_dump(mode="json") for place in self.places]
            news.append(
                {"kind": "registered", "places": places, "world_size": self.world_size, "attempt": self.newest, "unseen": self.unseen}
            )  # fmt: skip
        return [*news, *said, *ended]

    # --- who is there

    def _find(self, now: float) -> bool:
        """Takes in who is new; whether anybody is, or has said more of itself."""
        changed = False
        for one in border.registrations(self.folder):
            changed |= self._take(one, registered=True)
        if now - self._searched >= _SEARCH_EVERY_S:
            self._searched = now
            for one in self._by_environment():
                changed |= self._take(one, registered=False)
        return changed

    def _take(self, one: border.Registration, *, registered: bool) -> bool:
        known = self._ranks.get(one.rank)
        if one.attempt < self.newest:
            return False
        if known is not None and known.registration.attempt == one.attempt:
            return self._again(known, one, registered=registered)
        rank = self._open_process(one)
        if rank is None:
            return False
        if one.attempt > self.newest:  # the launcher has started them anew
            self.close()
            self.newest = one.attempt
        self._ranks[one.rank] = rank
        if registered:
            self._open(rank)
        return True

    def _again(self, known: Rank, one: border.Registration, *, registered: bool) -> bool:
        """One that is known says more of itself. Of two processes that say they are the same rank the first counts."""
        if known.registration.pid != one.pid or not registered or known.end is not None:
            return False
        is_new = not known.registered or known.registration.uuid != one.uuid
        known.registration = one
        if not known.registered:
            self._open(known)
        return is_new

    @staticmethod
    def _open_process(one: border.Registration) -> Rank | None:
        """None where it is gone already."""
        try:
            pidfd = os.pidfd_open(one.pid)
        except OSError:
            return None
        if border.start_of(one.pid) == one.started:
            return Rank(one, registered=False, pidfd=pidfd)
        os.close(pidfd)
        return None

    def _open(self, rank: Rank) -> None:
        rank.registered = True
        rank.events = border.EventsOf(self.folder, rank.registration.pid)
        with contextlib.suppress(OSError):
            rank.memory = border.memory_of(self.folder, rank.registration.pid)

    def _by_environment(self) -> Iterator[border.Registration]:
        """Processes of the program that a launcher has given a rank. What a rank starts itself has the same one: the parent counts."""
        said: dict[int, tuple[int, int]] = {}
        for pid, parent in processes_below(self.root):
            variables = variables_of(
                pid, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
            )
            try:
                rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
                local = int(variables["LOCAL_RANK"])
            except (KeyError, ValueError):
                continue
            said[pid] = (rank, world)
            started = border.start_of(pid)
            if said.get(parent) == (rank, world) or not 0 <= rank < world or started is None:
                continue
            yield border.Registration(
                pid, started, rank, local, world, int(variables.get("LOCAL_WORLD_SIZE") or 1), self.host,
                attempt=int(variables.get("TORCHELASTIC_RESTART_COUNT") or 0), sees=(),
            )  # fmt: skip

    def _place(self, rank: Rank) -> RankPlace:
        one = rank.registration
        uuid = one.uuid or None
        device = DeviceChoice(
            kind="cuda" if uuid else "cpu", uuid=uuid, name=uuid or "unknown", memory_bytes=0, bfloat16=False
        )
        return RankPlace(
            rank=one.rank, node_rank=self.node_rank, local_rank=one.local_rank, host=self.host, device=device
        )

    # --- what they say, and how they end

    def _hear(self, number: int) -> list[Message]:
        rank = self._ranks[number]
        said = rank.events.new() if rank.events is not None else []
        for message in said:
            if message["kind"] in LAST_WORDS:
                rank.last = message
            elif message["kind"] == "phase":
                rank.phase = str(message.get("phase"))
        return [{"kind": "rank_said", "rank": number, "message": message} for message in said]

    def _take_ends(self) -> list[Message]:
        alive = {rank.pidfd: number for number, rank in self._ranks.items() if rank.end is None}
        news: list[Message] = []
        for pidfd in select.select(list(alive), [], [], 0)[0] if alive else []:
            number = alive[pidfd]
            news += self._hear(number)
            rank = self._ranks[number]
            rank.end = self._end_of(number, rank)
            news.append({"kind": "rank_ended", "end": rank.end.to_json(), "attempt": self.newest})
        return news

    def _end_of(self, number: int, rank: Rank) -> RankEnd:
        code = exit_status(rank.pidfd, rank.registration.pid)
        beat = rank.memory.read() if rank.memory is not None else None
        last = rank.last
        if last is None and code == 0:
            last = {"kind": "result"}
        earlier = any(other.end is not None for other in self._ranks.values())
        by_launcher = code == -signal.SIGTERM and earlier and last is None
        why = "its launcher ended it" if by_launcher else ""
        return RankEnd(
            rank=number, returncode=code if code is not None else 0, last=last, phase=beat.phase if beat else rank.phase,
            step=beat.step if beat else rank.step, oom_killed=(oom_kills() or 0) > self._kills_before,
            ended_by_us=why or (UNKNOWN_END if code is None and last is None else ""),
        )  # fmt: skip
