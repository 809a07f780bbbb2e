"""The ranks of one node: what monitors need of them, their processes, messages, logs, and
guaranteed end.

The front is their only owner.
"""

import contextlib
import mmap
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

from unisono.base.messages import FinalMessage, Message, check_message
from unisono.guard.facts.limits import oom_kills
from unisono.guard.facts.processes import stuck_threads
from unisono.guard.facts.storage import Hung, unless_stuck
from unisono.guard.places.ranks import NodePlace, RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import ChildProcess, Programs, worker_command
from unisono.guard.supervise.rank_logs import FollowedLog, LogTimes, RateLimit
from unisono.guard.supervise.task_process import tail_of
from unisono.guard.watch.views import BeatMemory, WorkerProcess


class Job(Protocol):
    """The ranks and nodes of a job, e.g. a RunPlan."""

    @property
    def ranks(self) -> Sequence[RankPlace]:
        """All ranks, by rank."""
        ...

    @property
    def nodes(self) -> Sequence[NodePlace]:
        """All nodes that take part."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole job; 0 if unknown."""
        ...

    @property
    def own_code(self) -> Mapping[str, str] | None:
        """The user's own code that the ranks execute, as in RunPlan; None: the whole program is."""
        ...

    def on_node(self, node_rank: int) -> Sequence[RankPlace]:
        """The ranks of one node."""
        ...


class TrainingJob(Job, Protocol):
    """What supervising a training run needs to know of it."""

    @property
    def store_host(self) -> str:
        """The address of torch's store on rank 0."""
        ...

    @property
    def from_step(self) -> int:
        """The step of the checkpoint that it resumes from; 0 for a new run."""
        ...

    @property
    def from_checkpoint(self) -> str | None:
        """The path of that checkpoint."""
        ...

    @property
    def stall_after(self) -> str:
        """Time without progress until a rank counts as stalled, e.g. `auto` or `60 seconds`."""
        ...

    @property
    def grace(self) -> str:
        """The time for a graceful stop, e.g. `60 seconds`."""
        ...

    @property
    def keeps_steps(self) -> bool:
        """Whether ranks keep their newest steps in memory."""
        ...

    def node(self, node_rank: int) -> NodePlace:
        """One node by its number.

        Raises:
            KeyError: if it does not take part.
        """
        ...


class NodeRanks(Protocol):
    """The ranks of this node, as a monitor sees them, e.g. LocalRanks."""

    @property
    def places(self) -> Sequence[RankPlace]:
        """Their places."""
        ...

    @property
    def run(self) -> RunDir:
        """The directory of their logs."""
        ...

    @property
    def beats(self) -> Mapping[int, BeatMemory]:
        """Their heartbeats, by rank; without ranks that have none."""
        ...

    @property
    def all_ended(self) -> bool:
        """Whether every rank has ended."""
        ...

    def pid(self, rank: int) -> int | None:
        """The pid of a rank's process while it lives."""
        ...

    def workers(self, rank: int) -> Sequence[WorkerProcess]:
        """Processes that a rank has started, if they show their stacks; the caller closes their
        files.
        """
        ...

    def final_message(self, rank: int) -> FinalMessage | None:
        """The message `result`, `refused` or `crashed` of a rank, once it has arrived."""
        ...


class SharedMemory:
    """Memory of the front for each rank that keeps its steps, inherited by the rank.

    Use it as a context.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}
        for rank in ranks:
            # Without free file descriptors, or without this call, nothing is kept.
            with contextlib.suppress(OSError):
                self._fds[rank] = os.memfd_create(f"unisono-rank-{rank}", os.MFD_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Frees the memory. Results of `content` stay valid."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks that have memory."""
        return sorted(self._fds)

    def fd(self, rank: int) -> int | None:
        """The file descriptor for the rank's process; None if the rank keeps nothing."""
        return self._fds.get(rank)

    def content(self, rank: int) -> memoryview | None:
        """All of the rank's memory; None if nothing was written to it."""
        size = os.fstat(self._fds[rank]).st_size
        return memoryview(mmap.mmap(self._fds[rank], size, prot=mmap.PROT_READ)) if size else None


_LEAVES_WITHIN_S = 5.0  # after a final message other than a result


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A rank sent a message."""

    rank: int
    message: Message


@dataclass(frozen=True)
class RankEnd:
    """How a rank's process ended.

    Attributes:
        returncode: of the process; negative: a signal.
        last: its final message: `result`, `refused` or `crashed`; None if it ended without one.
        phase: the last phase it reported.
        step: the last step it finished.
        oom_killed: whether the kernel counted an OOM kill in this cgroup meanwhile.
        end_reason: why its front ended it; empty if the front did not.
    """

    rank: int
    returncode: int
    last: FinalMessage | None
    phase: str
    step: int
    tail: str = ""
    oom_killed: bool = False
    end_reason: str = ""

    def to_json(self) -> dict[str, object]:
        """A message for the head."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads the output of to_json.

        Raises:
            KeyError, TypeError, ValueError: if the value is not such an object.
        """
        last = cast("FinalMessage", check_message(value["last"])) if value["last"] is not None else None
        return cls(
            rank=int(value["rank"]),
            returncode=int(value["returncode"]),
            last=last,
            phase=str(value["phase"]),
            step=int(value["step"]),
            tail=str(value["tail"]),
            oom_killed=bool(value["oom_killed"]),
            end_reason=str(value["end_reason"]),
        )


RankUpdate = RankMessage | RankEnd


@dataclass
class _Rank:
    place: RankPlace
    child: ChildProcess
    log: IO[bytes]
    times: LogTimes
    followed: FollowedLog
    phase: str = "start"
    step: int = 0
    last: FinalMessage | None = None
    end_reason: str = ""
    end_reported: bool = False
    last_at: float = 0.0

    def note(self, message: Message) -> None:
        match message["kind"]:
            case "phase":
                self.phase = str(message.get("phase"))
            case "step":
                self.phase, self.step = "train", int(message["step"])
            case "result" | "refused" | "crashed":
                self.last = message
            case _:
                pass


@dataclass
class LocalRanks:
    """Starts the ranks of this node and leaves none behind: use it as a context.

    Attributes:
        places: the ranks, by local rank.
        run: the run's directory; logs and events go there.
        environments: of each rank, in the order of `places`.
        has_input: whether they wait for messages on stdin, as several ranks do before their first
            collective.
        shared_memory: in which some ranks keep their newest step; it outlives them.
        beats: the heartbeats of each rank, which also outlive it.
    """

    places: Sequence[RankPlace]
    run: RunDir
    plan_file: Path
    programs: Programs
    environments: Sequence[dict[str, str]]
    from_step: int = 0
    has_input: bool = False
    shared_memory: SharedMemory | None = None
    beats: dict[int, BeatMemory] = field(default_factory=dict, init=False)
    _ranks: dict[int, _Rank] = field(default_factory=dict, init=False)
    _kills_before: int = field(default=0, init=False)
    _rate: RateLimit = field(default_factory=RateLimit, init=False)

    def __enter__(self) -> Self:
        self._kills_before = oom_kills() or 0
        try:
            for place, environment in zip(self.places, self.environments, strict=True):
                self.beats[place.rank] = BeatMemory(place.rank)
                self._ranks[place.rank] = self._start(place, environment)
        except BaseException:  # one rank could not be started: end those that were
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks.values():
            rank.child.end(patience_s=0)
            rank.times.close()
            rank.log.close()
        for memory in self.beats.values():
            memory.close()
        self.beats.clear()

    def pid(self, rank: int) -> int | None:
        """The pid of the rank's process while it lives."""
        member = self._ranks.get(rank)
        return member.child.pid if member is not None and member.child.returncode is None else None

    def workers(self, rank: int) -> Sequence[WorkerProcess]:
        """None: our ranks load their data in threads."""
        return ()

    def final_message(self, rank: int) -> FinalMessage | None:
        """The message `result`, `refused` or `crashed` of a rank, once it has arrived."""
        member = self._ranks.get(rank)
        return member.last if member is not None else None

    def finished_steps(self) -> list[int]:
        """The last finished step of each rank whose heartbeat can be read now."""
        read = [memory.read() for memory in self.beats.values()]
        return [max(0, beat.step - 1) for beat in read if beat is not None]

    @property
    def all_ended(self) -> bool:
        """Whether every rank has ended, and `poll` has reported its end."""
        return all(rank.end_reported for rank in self._ranks.values())

    def poll(self, timeout_s: float, *, also: Sequence[int] = ()) -> list[RankUpdate]:
        """New messages and ends of ranks, after waiting at most `timeout_s` for the first.

        Args:
            timeout_s: seconds.
            also: file descriptors that end the wait when they become readable.
        """
        waiting = [rank.child.fileno for rank in self._ranks.values() if rank.child.fileno is not None]
        quick = any(not rank.end_reported and rank.child.fileno is None for rank in self._ranks.values())
        select.select([*waiting, *also], [], [], 0.01 if quick else timeout_s)
        updates: list[RankUpdate] = []
        for number, rank in self._ranks.items():
            if rank.end_reported:
                continue
            for message in rank.child.read(0):
                rank.note(message)
                updates.append(RankMessage(number, message))
            updates += [
                RankMessage(number, warning)
                for warning in (*rank.times.note(), *rank.followed.take_matches())
            ]
            self._end_if_overdue(rank)
            if rank.child.ended:
                rank.end_reported = True
                updates += [RankMessage(number, match) for match in _last_log_matches(rank)]
                if rank.child.is_beyond_reach:
                    updates.append(RankMessage(number, _beyond_reach(rank)))
                updates.append(self._end_of(rank))
        return updates

    def send(self, message: Mapping[str, object], *, rank: int | None = None) -> None:
        """Sends a message to one rank, or to all."""
        for number, member in self._ranks.items():
            if rank in (None, number) and not member.child.ended:
                member.child.send(message)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that lives."""
        for rank in self._ranks.values():
            rank.child.signal(number)

    def end(self, why: str) -> None:
        """Ends every rank that lives, with its descendants, at once."""
        alive = [rank for rank in self._ranks.values() if not rank.end_reported]
        for rank in alive:
            rank.end_reason = rank.end_reason or why
            rank.child.kill()  # all at first, so that none sees a peer's end
        for rank in alive:
            rank.child.end(patience_s=0)

    def _end_if_overdue(self, rank: _Rank) -> None:
        """Ends a rank that has refused or crashed and does not exit: a thread of it may wait for
        storage.
        """
        if rank.last is None or rank.last["kind"] == "result" or rank.child.ended:
            return
        rank.last_at = rank.last_at or time.monotonic()
        if time.monotonic() - rank.last_at > _LEAVES_WITHIN_S:
            rank.child.end(patience_s=0)

    def _start(self, place: RankPlace, environment: dict[str, str]) -> _Rank:
        path = self.run.log(place.host, place.rank)
        log = open_log(path)
        kept = self.shared_memory.fd(place.rank) if self.shared_memory is not None else None
        try:
            child = ChildProcess(
                lambda fd: worker_command(
                    self.programs,
                    plan=self.plan_file,
                    events=self.run.events(place.rank),
                    report_fd=fd,
                    snapshot_fd=kept,
                    beat_fds=self.beats[place.rank].fds,
                ),
                environment=environment,
                output=log,
                has_input=self.has_input,
                inherits=(*(() if kept is None else (kept,)), *self.beats[place.rank].fds),
                fork_server=self.programs.fork_server,
                waits=True,
            )
        except BaseException:  # raised again
            log.close()
            raise
        followed = FollowedLog(log, place.rank, self._rate)
        return _Rank(
            place, child, log, LogTimes(log, path, grew=followed.grew), followed, step=self.from_step
        )

    def _end_of(self, rank: _Rank) -> RankEnd:
        return RankEnd(
            rank=rank.place.rank,
            returncode=rank.child.returncode or 0,
            last=rank.last,
            phase=rank.phase,
            step=rank.step,
            tail=_tail_of(rank.log),
            oom_killed=(oom_kills() or 0) > self._kills_before,
            end_reason=rank.end_reason,
        )


def _beyond_reach(rank: _Rank) -> Message:
    """The warning about a process that SIGKILL does not end."""
    threads = (
        "; ".join(map(str, stuck_threads(rank.child.pid))) or "the kernel does not show what it waits for"
    )
    text = f"process {rank.child.pid} of {rank.place.label} was killed and has not ended: {threads}"
    fix = "it ends as soon as its storage answers; nothing waits for it"
    return {"kind": "warning", "time": time.time(), "code": "rank_beyond_reach", "text": text, "fix": fix}


def _last_log_matches(rank: _Rank) -> list[Message]:
    """Matches at the end of the log, which often show the cause."""
    # Reading the end of the log, which is next, reports it.
    with contextlib.suppress(Hung, OSError):
        unless_stuck(lambda: rank.followed.grew(os.fstat(rank.log.fileno()).st_size))
    return rank.followed.take_matches()


def _tail_of(log: IO[bytes]) -> str:
    try:
        return unless_stuck(lambda: tail_of(log))
    except Hung as hung:
        return f"the end of the log cannot be read: {hung}"


def open_log(path: Path) -> IO[bytes]:
    """The rank's log, for appending; readable only by its owner, since ranks may print secrets."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return os.fdopen(fd, "ab", buffering=0)
