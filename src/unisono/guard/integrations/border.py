"""The border between a front and the processes of a program that it guards: a private folder in
memory, and who writes what in it.

The front makes the folder `/dev/shm/unisono-<uid>-<nonce>` (0700) and in it `guard.json` (0600),
and names that file to the program's processes by one variable, UNISONO_GUARD. Nothing else is
passed, and nothing is secret but the folder: whoever can read it is the user.

    held                   locked by the front and its subreaper: a folder that no process holds is
                           removed by the next front
    guard.json             the front: what every process may know (Guard)
    rank-<pid>.json        a rank: its identity (Registration); replaced atomically whenever more is
                           known
    beat-<pid>             a rank: its heartbeat record (unisono.guard.watch), RECORD_BYTES; stays
                           readable after its death
    stacks-<pid>           faulthandler in the rank
    answers-<pid>          the rank's second thread: the flight recorder's dump, requested by the
                           front through the record
    events-<pid>.jsonl     a rank, or a launcher: messages of unisono.base.events, one a line
    facts-<pid>-<name>.json    a rank or a launcher: its facts for an agreement (ReportedFacts);
                               then it waits for
    answer-<pid>-<name>.json   the front: the result (Answer)

A process is a rank once it has registered: it does so when it has RANK, LOCAL_RANK and WORLD_SIZE
and loads torch. A program without them that loads torch is rank 0 of 1. Processes that a rank
starts (loaders) inherit the variable and must not register: they look for `rank-<pid>.json` of a
parent with the same RANK.

The last event of a rank says how it ended: `result` when it leaves in good order, `crashed` (error,
where, traceback, peer_lost) at an uncaught exception. A rank that is gone without either was
killed.

Nothing here loads torch, or anything beside the standard library before a record is made.
"""

import contextlib
import fcntl
import json
import mmap
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from unisono.base.messages import Message
    from unisono.guard.watch.views import BeatMemory

VARIABLE = "UNISONO_GUARD"
"""The only variable of the border: the path of guard.json."""

GUARD_FILE = "guard.json"
HELD = "held"
"""A file in the border, locked by its users. A pid would mean nothing in a different container."""
ENDS_WITH_FRONT = "ends_with_front"
"""The option of a guard whose front and subreaper outlive the program: without both, a rank ends
itself.
"""
LAUNCHER = "launcher"
"""The name of what a launcher (torchrun's agent) brings: `nproc`, `node_rank`, `nodes`, and more;
the answer has the store's address.
"""

_Made = TypeVar("_Made", "Guard", "Registration", "ReportedFacts", "Answer")
_POLL_S = 0.02
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Guard:
    """Settings of a guarded process.

    Attributes:
        folder: where it leaves its files.
        front_pid: the front of this node; without it no process reads what is written.
        node_rank: of this node, from 0.
        store: HOST:PORT for torch's store, free on node 0 when the fronts agreed; empty on one node
            where torch chooses.
        uneven: whether nodes may have unequal numbers of ranks.
        options: other options of the front: `debug_comm`, `json`, `ends_with_front` (bool).
    """

    folder: Path
    run_id: str
    front_pid: int
    node_rank: int = 0
    nodes: int = 1
    host: str = ""
    store: str = ""
    uneven: bool = False
    options: dict[str, float] = field(default_factory=dict)

    @property
    def is_watched(self) -> bool:
        """Whether its front is alive."""
        try:
            stat = Path(f"/proc/{self.front_pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

    def is_left(self) -> bool:
        """Whether the front and its subreaper are both gone, so that nobody ends this process:
        neither locks the folder any more.
        """
        if not self.options.get(ENDS_WITH_FRONT):
            return False
        try:
            held = os.open(
                self.folder / HELD, os.O_RDWR | os.O_CLOEXEC
            )  # each time: a fork would keep the lock
        except FileNotFoundError:
            return not self.is_watched  # the next front has removed it
        except OSError:
            return False
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(held)

    def write(self) -> Path:
        """Creates the folder and guard.json, for the front; returns the path for the variable."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / GUARD_FILE
        _write(path, {"schema": 1, **asdict(self), "folder": str(self.folder)})
        return path


@dataclass(frozen=True, slots=True)
class Registration:
    """Identity of a rank.

    Attributes:
        started: the process's start in kernel ticks, to detect a reused process number.
        rank: over all nodes.
        world_size: ranks of all nodes.
        attempt: the launcher's restart count (TORCHELASTIC_RESTART_COUNT).
        uuid: of the bound device; empty if unknown.
        grouped: whether it has a process group.
        sees: what the hook observes: "beats", "collectives", "stacks"; the front reports what is
            missing.
        stacks_signal: at which faulthandler writes the stacks: a real-time signal that the program
            had left free; 0: none was. Ask `facts.processes.catches` before sending it: a program
            that replaces itself (exec) has no handler any more.
        restarts: maximum number of restarts of its launcher (TORCHELASTIC_MAX_RESTARTS).
    """

    pid: int
    started: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    attempt: int = 0
    uuid: str = ""
    grouped: bool = False
    sees: tuple[str, ...] = ("beats", "stacks")
    stacks_signal: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class ReportedFacts:
    """Facts of one process for an agreement, flat: a value that differs on one rank is reported by
    its key.

    Attributes:
        name: of the agreement, of small letters and _: "data", "split", "steps"; LAUNCHER is the
            launchers'.
        rank: of the rank; of a launcher the node's.
        world_size: number of processes that report before facts are compared; for a launcher, of
            nodes.
        facts: values that must be equal, by key: numbers, strings, booleans.
        details: values that may differ and are only reported.
    """

    pid: int
    name: str
    rank: int
    world_size: int
    facts: dict[str, object]
    details: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of an agreement.

    Attributes:
        agreed: whether the process may continue.
        text: otherwise the reason, in one line that the front prints, too: the process prints
            nothing and exits.
        exit_code: with which it exits then.
        facts: for a launcher: `node_rank`, `nodes`, `store` (HOST:PORT).
    """

    agreed: bool
    text: str = ""
    exit_code: int = 3
    facts: dict[str, object] = field(default_factory=dict)


class Presence:
    """The border as used by a guarded process."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.pid = os.getpid()
        self._events: int | None = None

    def make_memory(self) -> tuple[mmap.mmap, int, int]:
        """Creates the rank's record and the files for stacks and answers; called before
        `register`.

        Returns:
            The record, for Beats; the descriptors of the stacks (for faulthandler) and of the
            answers (for Pulse).
        """
        from unisono.guard.watch import RECORD_BYTES

        record, stacks, answers = (self._file(name) for name in ("beat", "stacks", "answers"))
        os.ftruncate(record, RECORD_BYTES)
        try:
            return mmap.mmap(record, RECORD_BYTES), stacks, answers
        finally:
            os.close(record)

    def register(self, registration: Registration) -> None:
        """Registers this rank, or updates its registration."""
        _write(self.guard.folder / f"rank-{self.pid}.json", {"schema": 1, **asdict(registration)})

    def emit(self, kind: str, **more: Any) -> None:
        """Appends an event (unisono.base.events). Errors of the folder are ignored."""
        line = json.dumps({"kind": kind, "time": time.time(), **more}, ensure_ascii=False, default=str) + "\n"
        with contextlib.suppress(OSError):
            if self._events is None:
                path = self.guard.folder / f"events-{self.pid}.jsonl"
                self._events = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(self._events, line.encode())

    def report_facts(
        self,
        name: str,
        facts: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        details: Mapping[str, object] | None = None,
        limit_s: float,
    ) -> Answer | None:
        """Reports facts to an agreement of that name, once, and waits for its result; all ranks
        must call it.

        Args:
            name: of the agreement.
            facts: values that must be equal.
            rank: of this rank, of a launcher the node's.
            world_size: number of processes that report.
            details: values that may differ and are only reported.
            limit_s: seconds to wait.

        Returns:
            None without an answer: the front is gone, or others have not reported in time. Then the
            process continues.
        """
        reported = ReportedFacts(self.pid, name, rank, world_size, dict(facts), dict(details or {}))
        answer = self.guard.folder / f"answer-{self.pid}-{name}.json"
        answer.unlink(missing_ok=True)
        _write(self.guard.folder / f"facts-{self.pid}-{name}.json", {"schema": 1, **asdict(reported)})
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and self.guard.is_watched:
            value = read_whole(answer)
            if value is not None:
                return _made(Answer, value)
            time.sleep(_POLL_S)
        return None

    def _file(self, name: str) -> int:
        path = self.guard.folder / f"{name}-{self.pid}"
        path.unlink(
            missing_ok=True
        )  # of an earlier process of this number: its front may still have it mapped
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def find_guard(environment: Mapping[str, str]) -> Guard | None:
    """The settings of this guarded process; None if it is not guarded, or guard.json is unreadable
    or belongs to a different user.
    """
    named = environment.get(VARIABLE)
    if not named:
        return None
    path = Path(named)
    try:
        status = path.stat()
    except OSError:
        return None
    value = read_whole(path) if status.st_uid == os.getuid() and not status.st_mode & 0o077 else None
    return _made(Guard, {**value, "folder": path.parent}) if value is not None else None


def own_registration(environment: Mapping[str, str], **more: Any) -> Registration | None:
    """The registration of this process from its environment; None if that has no rank."""
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
        local_world_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
        attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
        restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0))
    except (KeyError, ValueError):
        return None
    if not 0 <= rank < world_size:
        return None
    pid = os.getpid()
    return Registration(
        pid=pid,
        started=start_of(pid) or 0,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        host=socket.gethostname(),
        attempt=attempt,
        restarts=restarts,
        **more,
    )


def start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; None where there is none of that
    number.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


# --- the front's side


def registrations(folder: Path) -> Iterator[Registration]:
    """All registered ranks; a file that is not a registration is left out."""
    for path in _files(folder, "rank-"):
        registration = _made(Registration, read_whole(path) or {})
        if registration is not None:
            yield registration


def reported_facts(folder: Path) -> Iterator[ReportedFacts]:
    """Facts for agreements that have not been answered."""
    for path in _files(folder, "facts-"):
        facts = _made(ReportedFacts, read_whole(path) or {})
        if facts is not None and not (folder / f"answer-{facts.pid}-{facts.name}.json").exists():
            yield facts


def answer_facts(folder: Path, reported: ReportedFacts, answer: Answer) -> None:
    """Answers a process. If the folder is gone, so are all processes."""
    with contextlib.suppress(FileNotFoundError):
        _write(folder / f"answer-{reported.pid}-{reported.name}.json", {"schema": 1, **asdict(answer)})


def _files(folder: Path, prefix: str) -> list[Path]:
    """The JSON files with this prefix, in order; none once the folder is removed, which the
    subreaper does at the end.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208 - one look, where glob takes two
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names) if name.startswith(prefix) and name.endswith(".json")]


def memory_of(folder: Path, pid: int) -> "BeatMemory":
    """A reader of a rank's record, stacks and answers; the caller closes it.

    Raises:
        OSError: if the rank has not created them.
    """
    from unisono.guard.watch.views import BeatMemory

    with contextlib.ExitStack() as stack:
        opened = [
            os.open(folder / f"{name}-{pid}", os.O_RDWR | os.O_CLOEXEC)
            for name in ("beat", "stacks", "answers")
        ]
        for fd in opened:
            stack.callback(os.close, fd)
        try:
            memory = BeatMemory.opened(*opened)
        except ValueError as error:  # a record that is too short yet
            raise OSError(f"the record of process {pid} cannot be read: {error}") from error
        stack.pop_all()
    registration = _made(Registration, read_whole(folder / f"rank-{pid}.json") or {})
    memory.stacks_signal = registration.stacks_signal if registration is not None else 0
    return memory


class EventsOf:
    """Reads new events of one process. For the front."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._path = folder / f"events-{pid}.jsonl"
        self._at = 0

    def new(self) -> "list[Message]":
        """The complete lines since the last call, without invalid ones."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        whole, end, _ = data.rpartition(b"\n")
        if not end:
            self._at += len(data) if len(data) == _MOST_BYTES else 0
            return []
        self._at += len(whole) + 1
        from unisono.base.messages import read_message  # not in the program's own processes

        messages = (read_message(line.decode("utf-8", "replace")) for line in whole.split(b"\n"))
        return [message for message in messages if message is not None]


def read_whole(path: Path) -> dict[str, object] | None:
    """The JSON object in a file of the border; None if there is none."""
    try:
        with path.open("rb") as file:
            return _object(file.read(_MOST_BYTES))
    except OSError:
        return None


def _object(data: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _write(path: Path, value: dict[str, object]) -> None:
    """Writes a file atomically. It is in memory, so it is not synced."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, default=str)
    temporary.replace(path)


def _made(kind: type[_Made], value: Mapping[str, Any]) -> _Made | None:
    """A dataclass of what was read, without fields of a newer writer; None if some are missing."""
    names = {one.name for one in fields(kind)}
    try:
        return kind(**{name: given for name, given in value.items() if name in names})
    except TypeError:
        return None
