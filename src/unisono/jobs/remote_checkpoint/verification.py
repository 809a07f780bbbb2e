"""Verification of checkpoints during training: the first one of several ranks is rehearsed, and all
are read again as long as the run lasts.

The rehearsal reads it back, and checks that all later ones fit on disk, so a failure that would
come after ten hours comes in the first minute. (`train --rehearse` is different: a small run in a
separate directory.) Later ones are read so that disk damage is detected while there is a different
checkpoint: by a thread in the head's front, slow on purpose: at a limited rate, at the lowest
priority, and never while a checkpoint is written.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from unisono.base.causes import Evidence, Verdict
from unisono.base.errors import IntegrityError, Problem, RankDied, UnfitError, UnisonoError
from unisono.base.files import objects_of, read_object
from unisono.base.messages import CheckpointMessage, Message, Show, WarningMessage
from unisono.base.text import one_line, show_bytes, show_seconds
from unisono.guard.facts import Clock, SystemClock
from unisono.guard.facts.storage import responds
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs, child_environment
from unisono.guard.supervise.task_process import TaskProcess, cannot_start
from unisono.trainer.checkpoint.retention import DiskSpace, Rules, last_verified, max_on_disk, record_verified
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.verify import VerificationResult, read_manifest, read_through
from unisono.trainer.plan import ResumePoint, RunPlan

if TYPE_CHECKING:
    from unisono.trainer.plan.task_requests import Timed

_PATIENCE_S = 60.0
_TIMES_WRITING = 20.0
"""Reading back counts as slow after this many times the seconds of writing, and not before the
patience.
"""
_HOURS = 3600.0
_FINISH_S = 1.0  # for a read in progress; one that hangs on a dead disk ends with the process
_SAVE_AT_MOST_S = 600.0  # leftovers of a dead writer do not delay reading for longer
_LAST_PRIORITY = 19


def with_rehearsal(plan: RunPlan, run: RunDir, *, enabled: bool) -> RunPlan:
    """The plan, with the rehearsal if due: in a new run of several ranks, with a changed layout of
    ranks, and after a storage failure.

    Args:
        run: whose plan.json is still that of the previous start.
        enabled: whether it is enabled.
    """
    same_ranks = _rank_layout(plan.to_json()) == _rank_layout(read_object(run.plan))
    failed = read_object(run.result).get("outcome") in ("unfit", "corrupt")  # possibly in the rehearsal
    due = enabled and plan.world_size > 1 and (plan.resume is None or failed or not same_ranks)
    return plan.model_copy(update={"rehearse": due})


def still_due(plan: RunPlan, resume: ResumePoint | None) -> bool:
    """Whether a restart repeats the rehearsal: the failed start has left no checkpoint of its
    own.
    """
    before = plan.resume.step if plan.resume else None
    return plan.rehearse and before == (resume.step if resume else None)


def _rank_layout(plan: Mapping[str, object]) -> tuple[object, ...]:
    nodes = [(node.get("host"), node.get("nproc")) for node in objects_of(plan.get("nodes"))]
    return plan.get("world_size"), plan.get("strategy"), nodes


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint as the ranks report it: its path, size, duration, and the seconds in which it
    blocked training.
    """

    step: int
    path: Path
    bytes: int
    seconds: float
    blocking_s: float


class FirstCheckpoint:
    """The rehearsal, beside the ranks: has the first checkpoint read back, and estimates the cost
    of all checkpoints.
    """

    def __init__(self, plan: RunPlan, *, programs: Programs, leftovers: dict[str, str], show: Show) -> None:
        """For one attempt.

        Args:
            programs: the program of the task that reads it back.
        """
        self._plan = plan
        self._programs = programs
        self._leftovers = leftovers
        self._show = show
        self._saved: SavedCheckpoint | None = None
        self._error: UnisonoError | None = None
        self._task: TaskProcess | None = None
        self._held: CheckpointMessage | None = None
        self._room: DiskSpace | None = None
        self._began = 0.0
        self._is_over = not plan.rehearse

    def on_message(self, rank: int, message: Message) -> None:
        """Records the outcome of the rehearsed step's checkpoint."""
        if rank != 0 or self._saved is not None or message.get("step") != self._plan.rehearsed_step:
            return
        if message["kind"] == "checkpoint":
            self._saved = SavedCheckpoint(
                int(message["step"]),
                Path(message["path"]),
                int(message["bytes"]),
                float(message["seconds"]),
                float(message.get("blocking_s") or 0.0),
            )
        elif message["kind"] == "warning" and message.get("code") == "checkpoint_failed":
            self._error = _not_written(message, host=self._plan.host)

    def pass_on(self, message: Message) -> None:
        """Shows a message.

        That of the first checkpoint waits until it is read back, and then includes `estimate`: the
        cost of all checkpoints.
        """
        if (
            message["kind"] == "checkpoint"
            and message["step"] == self._plan.rehearsed_step
            and not self._is_over
        ):
            self._held = message
        else:
            self._show(message)

    def look(self) -> UnisonoError | None:
        """The error that ends the run, once there is one."""
        if self._is_over or self._error is not None or self._saved is None:
            return self._error
        try:
            if self._task is None:
                self._start(self._saved)
            assert self._task is not None
            for message in self._task.new_messages():
                self._take(message, self._saved)
        except RankDied as error:  # says nothing about the checkpoint; a damaged one is refused
            self._end()
            self._warn(
                "rehearsal_died", f"the first checkpoint was not read back: {error}", error.problems[0].fix
            )
        except UnisonoError as error:
            self._end()
            if self._saved.path.exists():  # otherwise it was pruned: in a run that saves at every step
                self._error = _not_read_back(self._saved, error)
        self._warn_if_slow(self._saved)
        return self._error

    def finish(self) -> None:
        """Ends the rehearsal with the run."""
        self._end()

    def _start(self, saved: SavedCheckpoint) -> None:
        environment = child_environment(threads=1, without=self._leftovers)  # the ranks use the other cores
        request = {"path": str(saved.path), "run_id": self._plan.run_id}
        self._began = time.monotonic()
        try:
            self._task = TaskProcess("rehearsed", request, programs=self._programs, environment=environment)
        except OSError as error:
            raise cannot_start("rehearsed", error) from error

    def _end(self) -> None:
        self._is_over = True
        if self._task is not None:
            self._task.close(patience_s=0)
            self._task = None
        self._release()

    def _release(self, estimate: dict[str, object] | None = None) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            if estimate is not None:
                held["estimate"] = estimate
            self._show(held)

    def _take(self, message: Message, saved: SavedCheckpoint) -> None:
        if message["kind"] == "room":
            self._room = DiskSpace(message["free_bytes"], message["own_bytes"], tuple(message["steps"]))
            self._error = _refusal(self._plan, saved, self._room)
            if self._error is not None:
                self._release(estimate(self._plan, saved, self._room, read_s=None))
                self._end()
        elif message["kind"] == "result" and self._room is not None:
            read_s = float(cast("Timed", message)["seconds"])
            self._release(estimate(self._plan, saved, self._room, read_s=read_s))
            self._end()
            text = summary(self._plan, saved, self._room, read_s=read_s)
            self._show({"kind": "note", "time": time.time(), "text": text})

    def _warn_if_slow(self, saved: SavedCheckpoint) -> None:
        patience = slow_after(saved.seconds)
        if self._is_over or time.monotonic() - self._began < patience:
            return
        self._end()
        self._warn(
            "rehearsal_is_slow",
            f"the first checkpoint was not read back within {show_seconds(patience)}: {saved.path} took"
            f" {show_seconds(saved.seconds)} to write",
            "check the storage; `unisono checkpoint verify RUN` reads it again",
        )

    def _warn(self, code: str, text: str, fix: str) -> None:
        self._show({"kind": "warning", "time": time.time(), "code": code, "text": text, "fix": fix})


def summary(plan: RunPlan, saved: SavedCheckpoint, room: DiskSpace, *, read_s: float) -> str:
    """A line about the cost of all checkpoints of the run."""
    due = steps_due(plan, saved.step)
    line = (
        f"rehearsal: checkpoint of {show_bytes(saved.bytes)} in {show_seconds(saved.seconds)}"
        f" ({show_seconds(saved.blocking_s)} of it blocking), read back and verified in"
        f" {show_seconds(read_s)}"
    )
    if not due:
        return f"{line}; it is the only one"
    at_once = at_most(plan, room.steps, due)
    return (
        f"{line}; {how_many_more(plan, due)}, at most {at_once} on disk: {show_bytes(at_once * saved.bytes)}"
        f" of {show_bytes(room.bytes)} free; {show_seconds(len(due) * saved.seconds)} in all"
    )


def estimate(
    plan: RunPlan, saved: SavedCheckpoint, room: DiskSpace, *, read_s: float | None
) -> dict[str, object]:
    """The fields of `summary` for programs.

    `read_back_s` is null if it was not read to its end, since the checkpoints do not fit.
    """
    due = steps_due(plan, saved.step)
    at_once = at_most(plan, room.steps, due) if due else len(room.steps)
    return {
        "more": len(due),
        "at_once": at_once,
        "bytes": at_once * saved.bytes,
        "free_bytes": room.bytes,
        "seconds": len(due) * saved.seconds,
        "read_back_s": read_s,
    }


def slow_after(writing_s: float) -> float:
    """The seconds after which reading back counts as slow, from the seconds of writing."""
    return max(_PATIENCE_S, _TIMES_WRITING * writing_s)


def how_many_more(plan: RunPlan, due: Sequence[int]) -> str:
    """`12 more every 200 steps`."""
    if len(due) == 1:
        return f"one more at step {due[0]}"
    return f"{len(due)} more every {plan.checkpoint_every} steps"


def steps_due(plan: RunPlan, step: int) -> list[int]:
    """The steps of the checkpoints after a step, without those of the best evaluation."""
    every, last = plan.checkpoint_every, plan.total_steps
    steps = list(range((step // every + 1) * every, last + 1, every))
    return steps if last <= step or last in steps[-1:] else [*steps, last]


def at_most(plan: RunPlan, there: Sequence[int], due: Sequence[int], *, keep: int | None = None) -> int:
    """The largest number of checkpoints on disk at the same time, from the existing and the due
    ones.
    """
    section = plan.config.checkpoint
    rules = Rules(keep or section.keep, plan.keep_every)
    return max_on_disk(there, due, rules, best=section.best is not None)


def _refusal(plan: RunPlan, saved: SavedCheckpoint, room: DiskSpace) -> UnfitError | None:
    """The error if the checkpoints of the whole run do not fit; None if they do."""
    due = steps_due(plan, saved.step)
    at_once = at_most(plan, room.steps, due)
    needed = at_once * saved.bytes
    if not due or needed <= room.bytes:
        return None
    section = plan.config.checkpoint
    kept = [f"checkpoint.keep is {section.keep}, plus the one being written"]
    kept += ["the last one that was read back is kept until a newer one has been read back"]
    kept += ["the best is kept, too"] if section.best else []
    kept += (
        [f"one checkpoint in every {plan.keep_every} steps is kept permanently"] if plan.keep_every else []
    )
    missing = show_bytes(needed - room.bytes)
    lower = next(
        (
            k
            for k in range(section.keep - 1, 0, -1)
            if at_most(plan, room.steps, due, keep=k) * saved.bytes <= room.bytes
        ),
        None,
    )
    fix = f"free {missing} there" + (f", or set checkpoint.keep={lower}" if lower else "")
    if plan.keep_every:
        fix += ", or remove checkpoint.keep_every"
    problem = Problem(
        f"the checkpoints of this run do not fit: up to {at_once} at the same time need {show_bytes(needed)},"
        f" and {show_bytes(room.bytes)} are available",
        str(saved.path.parent),
        f"the checkpoint of step {saved.step} took {show_bytes(saved.bytes)}; {'; '.join(kept)};"
        f" {show_bytes(room.free_bytes)} are free besides the {show_bytes(room.own_bytes)} of existing"
        " checkpoints",
        f"{fix}, or set output_dir to a larger disk; then run the same command again, which resumes from step"
        f" {saved.step}",
    )
    return UnfitError(problem, verdict=_storage_unfit(problem, plan.host, saved.step))


def _storage_unfit(problem: Problem, host: str, step: int) -> Verdict:
    """The verdict on the head's disk, which is to hold all checkpoints."""
    return Verdict(
        cause="storage_unfit",
        when="during",
        hosts=(host,),
        summary=problem.what,
        phase="save",
        step=step,
        evidence=(Evidence(where=problem.where, text=problem.why),),
        fix=(problem.fix,),
    )


def _not_written(message: WarningMessage, *, host: str) -> UnfitError:
    value = message.get("verdict")
    fatal = {"severity": "fatal", "hosts": (host,)}
    verdict = Verdict.from_json(value).model_copy(update=fatal) if isinstance(value, dict) else None
    return UnfitError.of(
        f"the first checkpoint could not be written: {message.get('text', '')}",
        where=str(message.get("where", "")),
        why="it is written after the first step so that a run that cannot be saved does not train for hours",
        fix=str(message.get("fix", "")),
        verdict=verdict,
    )


def _not_read_back(saved: SavedCheckpoint, error: UnisonoError) -> UnisonoError:
    """The error in its class: damage, or a storage failure."""
    kind = type(error) if isinstance(error, UnfitError) else IntegrityError
    problems = [
        Problem(
            f"the first checkpoint differs when read back: {problem.what}",
            problem.where,
            problem.why
            or f"step {saved.step} was read from the disk in a new process: later checkpoints would be damaged as well",
            problem.fix
            or "test this disk and the memory of this machine, or set output_dir to a different disk; then start"
            " again with --fresh",
        )
        for problem in error.problems
    ]
    return kind(*problems)


@dataclass(frozen=True)
class ReadingRate:
    """The rate and frequency of reading.

    Attributes:
        look_every_s: seconds between searches for a checkpoint to read.
        again_after_s: seconds after which a checkpoint is read again.
    """

    bytes_per_s: float = 50e6
    look_every_s: float = 5.0
    again_after_s: float = 6 * _HOURS


class _RunEndedError(Exception):
    """The run has ended, so the reading ends."""


@dataclass
class ReadThrottle:
    """Limits the rate of a reader, and pauses it while a checkpoint is written.

    Attributes:
        bytes_per_s: the largest rate over the whole reading.
        clock: measures time.
        wait: waits for some seconds; True: the reading must end.
        is_saving: whether a checkpoint is being written.
    """

    bytes_per_s: float
    clock: Clock
    wait: Callable[[float], bool]
    is_saving: Callable[[], bool] = lambda: False
    _next: float | None = None
    """When the next bytes may be read, in monotonic seconds."""

    def __call__(self, n_bytes: int) -> None:
        """Waits as long as the bytes just read must take at this rate.

        Raises:
            _EndedError: if the reading must end.
        """
        now = self.clock.monotonic()
        self._next = max(now, self._next or now) + n_bytes / self.bytes_per_s
        if self.wait(self._next - now):
            raise _RunEndedError
        while self.is_saving():
            if self.wait(0.2):
                raise _RunEndedError


@dataclass
class Verifier:
    """A companion of an attempt that reads checkpoints once the ranks train.

    Attributes:
        show: gets warnings of damage, in the thread that calls `look`.
        clock: measures time, and dates the last reading of a checkpoint.
    """

    root: Path
    key: bytes
    show: Callable[[Message], None]
    rhythm: ReadingRate = ReadingRate()
    clock: Clock = field(default_factory=SystemClock)
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _warnings: "queue.SimpleQueue[Message]" = field(default_factory=queue.SimpleQueue, init=False)
    _read: dict[tuple[str, int], float | None] = field(default_factory=dict, init=False)
    """When each was last read, in seconds since 1970, by name and inode: a step may be saved
    again.
    """
    _saves: dict[str, float] = field(default_factory=dict, init=False)
    """When a directory in progress was first seen, in monotonic seconds."""
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)

    def on_message(self, rank: int, message: Message) -> None:
        """Starts when rank 0 is ready."""
        if rank == 0 and message["kind"] == "ready" and self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
            self._thread.start()

    def look(self) -> UnisonoError | None:
        """Shows the warnings; never ends the run."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.show(self._warnings.get_nowait())
        return None

    def finish(self) -> None:
        """Ends the reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_FINISH_S)
        self.look()

    def _run(self) -> None:
        with contextlib.suppress(
            OSError, AttributeError
        ):  # for this thread only; not possible on every system
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST_PRIORITY)
        try:
            while not self._stop.wait(self.rhythm.look_every_s):
                with contextlib.suppress(
                    OSError
                ):  # the storage is unavailable: saving reports that, and this thread tries again
                    self._look_for_work()
        except _RunEndedError:
            return
        except Exception as error:  # noqa: BLE001 - the edge of the thread: the run continues without it
            self._warn(
                "verifier_ended",
                f"checkpoints are no longer read again in the background: {error!r}",
                "`unisono checkpoint verify RUN` reads them; please report this",
            )

    def _look_for_work(self) -> None:
        """Reads the due checkpoints, one after the other."""
        while not self._is_saving():
            listed = CheckpointStore(self.root, key=self.key).list()
            marks = {path: mark for path in listed if (mark := _mark_of(path)) is not None}
            self._read = {mark: self._last_read(path, mark) for path, mark in marks.items()}
            seen = [(path, self._read[mark]) for path, mark in marks.items()]
            path = next_due(seen, now=self.clock.wall(), again_after_s=self.rhythm.again_after_s)
            if path is None:
                return
            self._read_again(path, marks[path])

    def _last_read(self, path: Path, mark: tuple[str, int]) -> float | None:
        """When a checkpoint was last read, by this start or an earlier one, in seconds since 1970;
        None if not since it was written.
        """
        if mark in self._read:
            return self._read[mark]
        verified = last_verified(self.root, path.name, read_manifest(path))
        if verified is None or not verified.read_again:
            return None
        try:
            return datetime.fromisoformat(verified.at).astimezone(UTC).timestamp()
        except ValueError:
            return None

    def _read_again(self, path: Path, mark: tuple[str, int]) -> None:
        pace = ReadThrottle(self.rhythm.bytes_per_s, self.clock, self._stop.wait, self._is_saving)
        reading = read_through(path, key=self.key, pace=pace)
        self._read[mark] = self.clock.wall()
        if _mark_of(path) != mark:  # pruned in the meantime
            return
        if responds(self.root):  # a thread that hangs in the kernel would block the exit of this process
            record_verified(self.root, [reading])
        if not reading.intact:
            self._warn_of_damage(reading)

    def _warn_of_damage(self, reading: VerificationResult) -> None:
        finding = next(finding for finding in reading.findings if finding.is_fatal)
        mark = (reading.path.name, str(finding))
        if mark in self._warned:
            return
        self._warned.add(mark)
        self._warn(
            "checkpoint_damaged",
            f"checkpoint {reading.path.name} was damaged after it was written: {finding}, in {reading.path}."
            " It no longer counts as kept",
            "the run continues; check for disk errors (dmesg), and restore the file from a copy if you need"
            " that step",
        )

    def _warn(self, code: str, text: str, fix: str) -> None:
        self._warnings.put(
            {"kind": "warning", "time": time.time(), "code": code, "text": one_line(text), "fix": fix}
        )

    def _is_saving(self) -> bool:
        """Whether the directory shows a checkpoint in progress."""
        try:
            names = {entry.name for entry in os.scandir(self.root) if ".tmp-" in entry.name}
        except OSError:
            return False
        now = self.clock.monotonic()
        self._saves = {name: self._saves.get(name, now) for name in names}
        return any(now - since < _SAVE_AT_MOST_S for since in self._saves.values())


def _mark_of(path: Path) -> tuple[str, int] | None:
    """Name and inode, which distinguish this directory from a different one of the same name; None
    if it is gone.
    """
    try:
        return path.name, path.stat().st_ino
    except FileNotFoundError:
        return None


def next_due(seen: Iterable[tuple[Path, float | None]], *, now: float, again_after_s: float) -> Path | None:
    """The checkpoint to read next: the latest unread one, otherwise the one read longest ago, if
    due again.

    Pure.

    Args:
        seen: the checkpoints, oldest first, with the time of their last reading in seconds since
            1970.
        now: in seconds since 1970.
        again_after_s: seconds after which a checkpoint is read again.
    """
    listed = list(seen)
    for path, read in reversed(listed):
        if read is None or read > now + again_after_s:  # the clock may have been set back
            return path
    due = [(read, path) for path, read in listed if read is not None and now - read >= again_after_s]
    return min(due)[1] if due else None
