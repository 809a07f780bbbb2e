"""The ranks of a guarded program on this node: found by their registration in the border or by
their environment, and watched to their end.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unisono.base.messages import FinalMessage, is_final
from unisono.guard.facts.limits import oom_kills
from unisono.guard.facts.processes import exit_status, processes_below, variables_of
from unisono.guard.integrations import border
from unisono.guard.integrations.border import Registration, start_of
from unisono.guard.integrations.worker_stacks import workers_below
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.supervise.node_messages import (
    LauncherUnwatched,
    NodeNews,
    RankEnded,
    RankSaid,
    RanksRegistered,
)
from unisono.guard.watch.views import BeatMemory, WorkerProcess

_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)


@dataclass(frozen=True, slots=True)
class FoundRank:
    """A process that is a rank by its environment."""

    registration: Registration
    launcher: int


@dataclass(frozen=True)
class Search:
    """A snapshot of the descendants of a process.

    Attributes:
        parents: of each.
        said: which rank of how many a process is, by its environment. What a rank starts itself has
            the same one.
        found: the ranks: of processes that say the same the first ancestor.
    """

    parents: Mapping[int, int]
    claims: Mapping[int, tuple[int, int]]
    found: tuple[FoundRank, ...]

    def is_below(self, pid: int, other: int) -> bool:
        """Whether a process is a descendant of `other`."""
        while pid in self.parents:
            pid = self.parents[pid]
            if pid == other:
                return True
        return False

    def launcher_of(self, pid: int) -> int | None:
        """The process that started a rank, possibly through a shell; None if the rank is gone."""
        parent = self.parents.get(pid)
        while parent is not None and parent in self.claims and self.claims[parent] == self.claims.get(pid):
            parent = self.parents.get(parent)
        return parent


def search(root: int, host: str) -> Search:
    """Finds the ranks among all descendants of a process."""
    parents: dict[int, int] = {}
    claims: dict[int, tuple[int, int]] = {}
    ranks: list[FoundRank] = []
    for pid, parent in processes_below(root):
        parents[pid] = parent
        variables = variables_of(pid, _VARIABLES)
        try:
            rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
            local_rank = int(variables["LOCAL_RANK"])
            local_world_size = int(variables.get("LOCAL_WORLD_SIZE") or 1)
            attempt = int(variables.get("TORCHELASTIC_RESTART_COUNT") or 0)
            restarts = int(variables.get("TORCHELASTIC_MAX_RESTARTS") or 0)
        except (KeyError, ValueError):
            continue
        claims[pid] = (rank, world_size)
        started = start_of(pid)
        if claims.get(parent) == (rank, world_size) or not 0 <= rank < world_size or started is None:
            continue
        registration = Registration(
            pid,
            started,
            rank,
            local_rank,
            world_size,
            local_world_size,
            host,
            attempt=attempt,
            sees=(),
            restarts=restarts,
        )
        ranks.append(FoundRank(registration, parent))
    return Search(parents, claims, tuple(ranks))


UNKNOWN_END = "how it ended is not known"
_SEARCH_EVERY_S = 0.5
_LOOK_EVERY_S = 0.1


@dataclass
class Rank:
    """One rank.

    Attributes:
        registered: whether it registered itself; else it was found by its environment, and only its
            end is seen.
        last: its final message, `result`, `refused` or `crashed`, once it has arrived.
        end: how it ended; None while it lives.
        ended_at: when the end was seen, in the kernel's ticks since boot.
        grouped: whether it has been in a process group.
    """

    registration: border.Registration
    registered: bool
    pidfd: int
    memory: BeatMemory | None = None
    events: border.EventsOf | None = None
    last: FinalMessage | None = None
    phase: str = "start"
    step: int = 0
    end: RankEnd | None = None
    ended_at: int = 0
    grouped: bool = False

    def close(self) -> None:
        """Releases its memory and its descriptor."""
        if self.memory is not None:
            self.memory.close()
        os.close(self.pidfd)


@dataclass
class ProgramRanks:
    """The ranks of the newest start on this node, for supervise.rank_monitor.

    A launcher may restart its ranks, and a program may start a new launcher when one has ended:
    each is a start. Of launchers that run at the same time, only the first one's ranks are watched.

    Attributes:
        folder: of the border.
        root: the process whose descendants they are.
        newest: the number of their start, from 0.
        is_orphaned: whether the program itself has ended: remaining processes are ended by us.
    """

    folder: Path
    run: RunDir
    node_rank: int
    host: str
    root: int
    newest: int = 0
    is_orphaned: bool = False
    _ranks: dict[int, Rank] = field(default_factory=dict)
    _starts_before: int = 0  # those of launchers that have ended
    _earlier: set[tuple[int, int]] = field(default_factory=set)  # ranks of earlier starts
    _ancestors: set[tuple[int, str]] = field(default_factory=set)  # of ranks: pid and program
    _unwatched: set[int] = field(default_factory=set)  # launchers already reported
    _searched: float = 0.0
    _looked: float = 0.0
    _kills_before: int = field(default_factory=lambda: oom_kills() or 0)

    @property
    def places(self) -> list[RankPlace]:
        """Places of all known ranks."""
        return [self._place(self._ranks[number]) for number in sorted(self._ranks)]

    @property
    def world_size(self) -> int:
        """The world size by the ranks; 0 while there are none."""
        return max((rank.registration.world_size for rank in self._ranks.values()), default=0)

    @property
    def _restarts(self) -> int:
        """How often their launcher restarts them."""
        return max((rank.registration.restarts for rank in self._ranks.values()), default=0)

    @property
    def oom_killed(self) -> bool | None:
        """Whether the kernel counted an OOM kill in this cgroup meanwhile; None if the count cannot
        be read.
        """
        kills = oom_kills()
        return None if kills is None else kills > self._kills_before

    @property
    def beats(self) -> dict[int, BeatMemory]:
        """Heartbeats of the ranks that have them."""
        return {n: rank.memory for n, rank in self._ranks.items() if rank.memory is not None}

    @property
    def all_ended(self) -> bool:
        """Whether every known rank has ended; False while none is known."""
        return bool(self._ranks) and all(rank.end is not None for rank in self._ranks.values())

    @property
    def unseen(self) -> list[int]:
        """Ranks without heartbeats, of which only the end is seen."""
        return sorted(number for number, rank in self._ranks.items() if not rank.registered)

    def pid(self, rank: int) -> int | None:
        """The pid of a rank's process while it lives."""
        process = self._ranks.get(rank)
        return process.registration.pid if process is not None and process.end is None else None

    def workers(self, rank: int) -> list[WorkerProcess]:
        """Processes that a rank has started, e.g. those of its loaders; the caller closes their
        files.
        """
        pid = self.pid(rank)
        return workers_below(pid) if pid is not None else []

    def final_message(self, rank: int) -> FinalMessage | None:
        """The final message of a rank, once it has arrived."""
        process = self._ranks.get(rank)
        return process.last if process is not None else None

    def fds(self) -> list[int]:
        """File descriptors that are readable when a rank has ended."""
        return [rank.pidfd for rank in self._ranks.values() if rank.end is None]

    def close(self) -> None:
        """Releases memory and descriptors; the ranks are not affected."""
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()

    def new_messages(self, *, at_once: bool = False) -> list[NodeNews]:
        """News for the head: the current ranks, their messages and their ends."""
        now = time.monotonic()
        ended: list[NodeNews] = [*self._take_ends()]
        if not (at_once or ended) and now - self._looked < _LOOK_EVERY_S:
            return ended
        self._looked = now
        changed, unwatched = self._find(now)
        said = [message for number in sorted(self._ranks) for message in self._read_messages(number)]
        news: list[NodeNews] = [*unwatched, *said, *ended]
        if changed:
            ranks = RanksRegistered(
                tuple(self.places), self.world_size, self.newest, tuple(self.unseen), self._restarts
            )
            news.insert(0, ranks)
        return news

    # --- who is there

    def _find(self, now: float) -> tuple[bool, list[LauncherUnwatched]]:
        """Takes new ranks: whether there are any or one has changed, and messages about launchers
        that are not watched.
        """
        changed = False
        for one in border.registrations(self.folder):
            changed |= self._take(one)
        others: list[LauncherUnwatched] = []
        if now - self._searched >= _SEARCH_EVERY_S:
            self._searched = now
            seen = search(self.root, self.host)
            for rank in seen.found:
                changed |= self._take(rank.registration, launcher=rank.launcher)
            changed |= self._keep_to_one_launcher(seen)
            self._keep_ancestors(seen)
            others = [text for rank in seen.found for text in self._unwatched_launchers(rank, seen)]
        return changed, others

    def _keep_ancestors(self, seen: Search) -> None:
        """Keeps the processes above the living ranks: a shell may become the next launcher."""
        for rank in self._ranks.values():
            pid = rank.registration.pid
            while rank.end is None and pid in seen.parents:
                pid = seen.parents[pid]
                self._ancestors.add((pid, _program_of(pid)))

    def _take(self, one: border.Registration, *, launcher: int | None = None) -> bool:
        """Takes a rank that registered itself, or that was seen below a launcher; whether anything
        changed.
        """
        registered = launcher is None
        previous = self._ranks.get(one.rank)
        if previous is not None and _identity(previous.registration) == _identity(one):
            return self._update(previous, one, registered=registered)
        start = self._start_of(one, previous, launcher)
        rank = self._open_process(one) if start is not None else None
        if start is None or rank is None:
            return False
        if start > self.newest:
            self._earlier |= {_identity(other.registration) for other in self._ranks.values()}
            self.close()
            self._ancestors.clear()
            self.newest, self._starts_before = start, start - one.attempt
        elif previous is not None:
            previous.close()
        self._ranks[one.rank] = rank
        if registered:
            self._attach(rank)
        return True

    def _start_of(self, one: border.Registration, previous: Rank | None, launcher: int | None) -> int | None:
        """The start that a process belongs to; None if it is not watched: of two processes with the
        same rank the first counts.
        """
        if _identity(one) in self._earlier:
            return None
        start = self._starts_before + one.attempt
        if start <= self.newest and self._follows(one, previous, launcher):
            return self.newest + 1
        is_free = start > self.newest or previous is None or _runs(previous, one, registered=launcher is None)
        return start if start >= self.newest and is_free else None

    def _follows(self, one: border.Registration, previous: Rank | None, launcher: int | None) -> bool:
        """Whether a process is a rank of a new launcher, started after all ranks of the previous
        one had ended.

        Processes that ranks leave behind have the same environment. They do not register, they
        started before the ranks ended, and their parent is by then an ancestor of the ranks. With a
        different parent, it does not matter that a busy machine reported the end of the ranks late.
        """
        if not self.all_ended or (previous is None and one.world_size == self.world_size):
            return False
        if launcher is None:
            return all(one.started > rank.registration.started for rank in self._ranks.values())
        if self._ancestors and (launcher, _program_of(launcher)) not in self._ancestors:
            return True
        return all(one.started > rank.ended_at for rank in self._ranks.values())

    def _keep_to_one_launcher(self, seen: Search) -> bool:
        """Keeps ranks of one launcher only, if several start at the same time and ranks of both
        were seen; whether any rank was exchanged.

        Ranks with a launcher each, e.g. a shell, stay: no other rank has that launcher.
        """
        living = {number: rank for number, rank in sorted(self._ranks.items()) if rank.end is None}
        launchers = {number: seen.launcher_of(rank.registration.pid) for number, rank in living.items()}
        one = next((launcher for launcher in launchers.values() if launcher is not None), None)
        changed = False
        for candidate in seen.found:
            number = candidate.registration.rank
            previous = living.get(number)
            if previous is None or candidate.launcher != one or launchers[number] in (None, one):
                continue
            if (rank := self._open_process(candidate.registration)) is not None:
                previous.close()
                self._ranks[number] = rank
                changed = True
        return changed

    def _unwatched_launchers(self, candidate: FoundRank, seen: Search) -> list[LauncherUnwatched]:
        """Reports, once per launcher, that ranks of a further launcher are not watched."""
        watched = self._ranks.get(candidate.registration.rank)
        if watched is None or watched.end is not None or candidate.launcher in (self.root, *self._unwatched):
            return []
        pid, launcher = watched.registration.pid, seen.launcher_of(watched.registration.pid)
        if launcher in (None, candidate.launcher) or seen.is_below(candidate.registration.pid, pid):
            return []
        self._unwatched.add(candidate.launcher)
        text = (
            f"process {candidate.launcher} starts ranks while process {launcher} still has running ranks;"
            " unisono watches one launcher at a time and ignores the new ranks: start each launcher with a"
            " separate `unisono run`"
        )
        return [LauncherUnwatched(text)]

    def _update(self, rank: Rank, one: border.Registration, *, registered: bool) -> bool:
        """Updates a known rank by its newer registration; whether it changed."""
        if not registered or rank.end is not None:
            return False
        is_new = not rank.registered or rank.registration.uuid != one.uuid
        rank.registration = one
        rank.grouped |= one.grouped
        if not rank.registered:
            self._attach(rank)
        return is_new

    @staticmethod
    def _open_process(one: border.Registration) -> Rank | None:
        """A rank for the process; None if the process is gone."""
        try:
            pidfd = os.pidfd_open(one.pid)
        except OSError:
            return None
        if border.start_of(one.pid) == one.started:
            return Rank(one, registered=False, pidfd=pidfd)
        os.close(pidfd)
        return None

    def _attach(self, rank: Rank) -> None:
        rank.registered = True
        rank.events = border.EventsOf(self.folder, rank.registration.pid)
        with contextlib.suppress(OSError):
            rank.memory = border.memory_of(self.folder, rank.registration.pid)

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

    def _read_messages(self, number: int) -> list[RankSaid]:
        rank = self._ranks[number]
        messages = rank.events.new() if rank.events is not None else []
        for message in messages:
            if is_final(message):
                rank.last = message
            elif message["kind"] == "phase":
                rank.phase = str(message.get("phase"))
        return [RankSaid(number, message) for message in messages]

    def _take_ends(self) -> list[RankSaid | RankEnded]:
        alive = {rank.pidfd: number for number, rank in self._ranks.items() if rank.end is None}
        messages: list[RankSaid | RankEnded] = []
        for pidfd in select.select(list(alive), [], [], 0)[0] if alive else []:
            number = alive[pidfd]
            messages += self._read_messages(number)
            rank = self._ranks[number]
            rank.end = self._end_of(number, rank)
            rank.ended_at = _ticks()
            messages.append(RankEnded(rank.end, self.newest))
        return messages

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
            rank=number,
            returncode=code if code is not None else 0,
            last=last,
            phase=beat.phase if beat else rank.phase,
            step=max(0, beat.step - 1) if beat else rank.step,
            oom_killed=bool(self.oom_killed),
            end_reason=why or (UNKNOWN_END if self._is_unknown(rank, code, last) else ""),
        )

    def _is_unknown(self, rank: Rank, code: int | None, last: FinalMessage | None) -> bool:
        """Whether its end says nothing about the cause."""
        if self.is_orphaned:
            return last is None or last["kind"] != "result"
        return last is None and (code is None or self._had_left_group(rank, code))

    def _had_left_group(self, rank: Rank, code: int) -> bool:
        """Whether no peer needed it any longer, since it had left its process group.

        Ray ends its workers like this, with status 1.
        """
        registrations = (
            one for one in border.registrations(self.folder) if _identity(one) == _identity(rank.registration)
        )
        now = next(registrations, rank.registration)
        return code > 0 and rank.grouped and not now.grouped


def _identity(one: border.Registration) -> tuple[int, int]:
    """The identity of a process, also if its pid is reused."""
    return one.pid, one.started


def _runs(previous: Rank, one: border.Registration, *, registered: bool) -> bool:
    """Whether a process found by its environment is only the shell in which the rank runs."""
    if previous.registered or not registered or previous.end is not None:
        return False
    return any(pid == one.pid for pid, _ in processes_below(previous.registration.pid))


def _program_of(pid: int) -> str:
    """The program that a process executes; empty if it is gone or belongs to a different user."""
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def _ticks() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
