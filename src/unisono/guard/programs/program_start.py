"""State of one start of `unisono run` on this node: its place in the job, its directory with its
records, and the program.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from unisono.base.causes import Verdict
from unisono.base.errors import UsageError, storage_reason, storage_remedy
from unisono.base.files import BackgroundThread, make_private_dir, read_object, write_json
from unisono.base.messages import ResultMessage, Show, message_of, notify
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.reports import NodeReport
from unisono.guard.facts import Environment, Machine, Probes
from unisono.guard.facts.path_probes import Identity, identity_of
from unisono.guard.integrations.border import ENDS_WITH_FRONT, HELD, Guard
from unisono.guard.places.ranks import NodePlace
from unisono.guard.programs.local_program import LocalProgram, Program
from unisono.guard.programs.program_end import SignalQueue
from unisono.guard.programs.program_meeting import make_report
from unisono.guard.programs.program_ranks import ProgramRanks
from unisono.guard.programs.program_request import RunRequest, RunShape, build_environment
from unisono.guard.rendezvous.party import ChannelFacts
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import LockTaken, RunLock
from unisono.guard.rundir.records import Outcome, RunResult, outcome_of, set_verdict, write_result

_MEMORY = Path("/dev/shm")  # noqa: S108 - holds a folder with mode 0700 and an unguessable name


class ProgramDir(RunDir):
    """A run's directory with one log per node for the program's whole output."""

    def log(self, host: str, rank: int) -> Path:
        """The log of the program's output on that node."""
        del rank
        return self.root / "logs" / f"{host}-program.log"


def border_folder() -> tuple[Path, int]:
    """A new private folder in memory, and the file descriptor that locks it; without /dev/shm,
    among temporary files.

    The folder is in use as long as the descriptor is open, or that of the subreaper.
    """
    base = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    _remove_left(base)
    while True:
        folder = base / f"unisono-{os.getuid()}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        held = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_SH)
        if (folder / HELD).exists():
            return folder, held
        os.close(held)  # before the lock, a different front removed it as unused


@contextmanager
def border() -> Iterator[Path]:
    """A border folder, removed on exit.

    The subreaper removes it too, so a front that is killed leaves none.
    """
    folder, held = border_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_left(base: Path) -> None:
    """Removes folders of fronts that were killed together with their subreapers, e.g. when a
    container ends.
    """
    for folder in base.glob(f"unisono-{os.getuid()}-*"):
        with contextlib.suppress(OSError):  # in use, being made, or of a version without locks
            held = os.open(folder / HELD, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def run_dir(output_dir: str, *, is_head: bool, host: str, port: int = 0) -> tuple[ProgramDir, RunLock]:
    """Makes the run's directory; gives it with its lock, which the head holds from now on.

    Args:
        output_dir: as typed; empty: `runs/run-<UTC time>-<pid>`.
        is_head: whether this is node 0; other nodes may find files of node 0 there.
        port: on which the head meets the other nodes; 0 for one node.

    Raises:
        UsageError: if it is not empty, a living run holds it, or it cannot be made.
    """
    name = output_dir or f"runs/run-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    path = Path(name).expanduser().absolute()
    run = ProgramDir(path)
    lock = RunLock(run.lock)
    try:
        if is_head:
            if not run.lock.exists():  # else the error about its holder is more helpful
                _refuse_used(run)
            lock.acquire(host, os.getpid(), port=port)
            _refuse_used(run)  # two simultaneous starts may both have found it empty
        make_private_dir(run.log("", 0).parent)
    except UsageError:
        lock.release()
        raise
    except OSError as error:
        lock.release()
        raise UsageError.of(
            f"{path} cannot be made: {error.strerror}",
            where="--output-dir",
            why=storage_reason(error),
            fix=storage_remedy(error, else_="pass a different --output-dir"),
        ) from error
    return run, lock


def _refuse_used(run: ProgramDir) -> None:
    """Refuses a directory in use.

    On a shared disk, a different node of the same job may already have made its folder of logs.
    """
    path, logs = run.root, run.log("", 0).parent
    if not path.exists() or (
        path.is_dir() and all(_is_of_this_start(one, run, logs) for one in path.iterdir())
    ):
        return
    raise UsageError.of(
        f"{path} exists and is not empty",
        where="--output-dir",
        why="files of an earlier run are not overwritten",
        fix="pass a different --output-dir, or none: then each run gets a new directory below runs/",
    )


def _is_of_this_start(one: Path, run: ProgramDir, logs: Path) -> bool:
    return one == run.lock or (one == logs and one.is_dir() and not any(one.iterdir()))


_LOOK_S = 0.2


class FolderWatch:
    """Notices that the head's directory is removed, renamed or replaced while the program runs, and
    makes it again.

    Attributes:
        is_lost: whether a different directory or start has its place: then nothing more is written
            there.
    """

    def __init__(self, run: ProgramDir, lock: RunLock, show: Show, write_plan: Callable[[], object]) -> None:
        """Starts to watch.

        Args:
            lock: of the directory, held.
            write_plan: writes the files that precede the program's start.
        """
        self.is_lost = False
        self._run, self._lock, self._show, self._write_plan = run, lock, show, write_plan
        self._root = identity_of(run.root)
        # The storage may hang, and the front must not.
        self._thread = BackgroundThread("output_dir")
        self._next = 0.0
        self._gone_twice = [False, False]

    def look(self) -> None:
        """Handles changes since the last call. Never waits if there are none."""
        if all(self._gone_twice) and not self.is_lost:  # once may be in the middle of a removal
            self._gone_twice = [False, False]
            self._judge(identity_of(self._run.root))
        elif time.monotonic() >= self._next and self._thread.is_idle:
            self._next = time.monotonic() + _LOOK_S
            self._thread.do(self._look)

    def _look(self) -> None:
        self._gone_twice = [self._gone_twice[1], not self._lock.is_held()]

    def settle(self) -> None:
        """The last check, before the result is written."""
        with contextlib.suppress(OSError):  # writing the result will fail too
            if not self.is_lost:
                self._judge(identity_of(self._run.root))

    def _judge(self, root: Identity | None) -> None:
        path = self._run.root
        what = f"{path} was removed or renamed while the program runs"
        try:
            if root is None:
                path.mkdir(mode=0o700, parents=True)
                self._make_whole(f"{what}: it is created again, with the program's log")
            elif root != self._root and not self._lock.names_us():
                self._lose(
                    f"{path} was replaced by a different directory: the log and the result of this run are"
                    " not written there"
                )
            elif not self._lock.is_in_place():
                self._make_whole(
                    f"{self._run.lock} was removed while the program runs: the directory is locked again"
                )
        except LockTaken as taken:
            self._lose(f"{what}, and a different start has taken its place: {taken.holder}")
        except FileNotFoundError:
            return  # it is being removed: the next look finds it gone
        except OSError as error:
            self._lose(f"{what}, and cannot be created again: {error.strerror} ({error.filename})")

    def _make_whole(self, what: str) -> None:
        self._lock.keep()
        make_private_dir(self._run.log("", 0).parent)
        self._root = identity_of(self._run.root)
        if not self._run.plan.exists():
            self._write_plan()
        self._warn(what)

    def _lose(self, what: str) -> None:
        self.is_lost = True
        self._warn(what)

    def _warn(self, what: str) -> None:
        fix = "stop a run first (Ctrl-C), then remove or rename its directory"
        self._show(
            {"kind": "warning", "time": time.time(), "code": "output_removed", "text": what, "fix": fix}
        )


def is_head_directory(run: ProgramDir, run_id: str) -> bool:
    """Whether this node's directory is the head's, which then alone writes the files that exist
    once.
    """
    return read_object(run.plan).get("run_id") == run_id


def program_outcome(exit_code: int, verdict: Verdict | None, *, stopped: str = "") -> Outcome:
    """The outcome in result.json. A program's own exit codes have no fixed meaning."""
    if verdict is not None:
        return outcome_of(exit_code)
    if stopped:
        return "interrupted" if stopped == "SIGINT" else "preempted"
    return "completed" if exit_code == 0 else "failed"


Diagnose = Callable[[Path], Verdict | None]
"""Finds the cause in a log; None if it finds none."""


@dataclass
class ProgramStart:
    """One start on this node.

    Attributes:
        lock: of the directory; the head holds it.
        show: gets notes, warnings, the verdict and the result.
        diagnose: finds the cause in the program's output.
        run_id: the head's, once it is known.
        began: when the command began, in monotonic seconds.
        reports: of all nodes, once they agree.
        pid: of the program, once it is started.
    """

    request: RunRequest
    shape: RunShape
    run: ProgramDir
    lock: RunLock
    machine: Machine
    environment: Environment
    variables: Mapping[str, str]
    show: Show
    diagnose: Diagnose
    probes: Probes
    run_id: str
    began: float
    reports: Sequence[NodeReport] = ()
    agreement: Agreement = field(default_factory=Agreement)
    pid: int = 0

    @property
    def log(self) -> Path:
        """The program's output on this node."""
        return self.run.log(self.machine.host, 0)

    def report(self, channel: ChannelFacts, show: Show) -> NodeReport:
        """This node's report to the meeting."""
        return make_report(
            self.request,
            self.shape,
            channel,
            machine=self.machine,
            environment=self.environment,
            probes=self.probes,
            output_dir=self.run.root,
            show=show,
        )

    @contextlib.contextmanager
    def local_program(self, store: tuple[str, int] | None) -> Iterator[LocalProgram]:
        """The started program with its border; nothing of it remains afterwards."""
        request, topology = self.request, self.shape.topology
        with border() as folder, SignalQueue() as signals:
            guard = Guard(
                folder,
                self.run_id,
                os.getpid(),
                topology.node_rank,
                topology.nodes,
                self.machine.host,
                store="" if store is None else f"{store[0]}:{store[1]}",
                uneven=request.uneven,
                options={
                    "debug_comm": request.debug_comm,
                    "json": request.json,
                    "join_timeout_s": request.join_timeout_s,
                    ENDS_WITH_FRONT: True,
                },
            )
            built = build_environment(
                request, self.shape, self.variables, guard_file=guard.write(), store=store
            )
            for note in built.notes:
                notify(self.show, note)
            with Program(
                request.words,
                environment=built.environment,
                log=self.log,
                folder=folder,
                owns_stdout=request.json,
                has_stdin=not request.from_stdin,
            ) as program:
                self.pid = program.pid
                ranks = ProgramRanks(
                    folder, self.run, topology.node_rank, self.machine.host, program.subreaper_pid
                )
                local = LocalProgram(program, ranks, folder, self.run, signals)
                try:
                    yield local
                finally:
                    local.close()

    def diagnose_output(self) -> Verdict | None:
        """The cause in the program's output on this node."""
        notify(self.show, "reading what the program printed")
        return self.diagnose(self.log)

    def set_log_aside(self, number: int) -> None:
        """The next start of the program gets a log of its own, so that this one's errors are not
        found there.
        """
        with contextlib.suppress(OSError):
            self.log.rename(f"{self.log}.{number}")

    def keep(self, reports: Sequence[NodeReport], agreement: Agreement) -> None:
        """Keeps and writes the nodes' reports and their comparison."""
        self.reports, self.agreement = reports, agreement
        self.write_agreement(Agreement())

    def write_agreement(self, more: Agreement) -> None:
        """Writes agreement.json: what nodes and ranks reported, and what came of it."""
        body = {
            "schema": 1,
            "nodes": [report.to_json() for report in self.reports],
            **self.agreement.merged(more).to_json(),
        }
        with contextlib.suppress(OSError):
            write_json(self.run.agreement, body, mode=0o600)

    def write_plan(self, nodes: Sequence[NodePlace]) -> None:
        """Writes what is about to be started, for later readers of the directory."""
        body = {
            "schema": 1,
            "run_id": self.run_id,
            "command": list(self.request.words),
            "kind": self.shape.command.kind,
            "nodes": [node.model_dump(mode="json") for node in nodes],
            "origins": self.shape.topology.origins,
        }
        with contextlib.suppress(OSError):
            write_json(self.run.plan, body, mode=0o600)

    def finish(
        self, exit_code: int, verdict: Verdict | None, *, stopped: str = "", writes: bool
    ) -> RunResult:
        """Writes and shows the result."""
        result = RunResult(
            run_id=self.run_id,
            outcome=program_outcome(exit_code, verdict, stopped=stopped),
            exit_code=exit_code,
            output_dir=str(self.run.root),
            verdict=verdict.to_json() if verdict else None,
            wall_time_s=time.monotonic() - self.began,
        )
        if writes:
            with contextlib.suppress(OSError):  # a full disk is in the verdict, if it is the cause
                set_verdict(self.run, verdict)
                write_result(self.run, result)
        self.show(message_of(ResultMessage, result.to_json()))
        return result
