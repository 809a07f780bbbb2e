"""Beside the ranks of the head: notices that the run's directory, its checkpoints or its lock are
removed, renamed or replaced.

What was removed is created again from what the front knows, and training continues. If there is
something else at the path now, or the disk itself is gone from there, the run ends, and nothing is
written.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.events import Message, Show
from unisono.base.files import make_private_dir, read_bytes, whole_file
from unisono.base.text import one_line
from unisono.guard.facts.path_probes import Identity, PathMonitor, PathState, identity_of
from unisono.guard.facts.storage import RunsDisk
from unisono.guard.places.ranks import RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import LockTaken, RunLock
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.jobs.runs.run_records import Ending
from unisono.trainer.plan import RunPlan

_CHUNK_BYTES = 1 << 20


class HeldFiles:
    """The growing files of a run's directory: metrics, and logs, events and TensorBoard files of
    this node's ranks.
    """

    def __init__(self, run: RunDir, places: Sequence[RankPlace]) -> None:
        self._run, self._places = run, places
        self._fds: dict[Path, int] = {}

    def __bool__(self) -> bool:
        """Whether any file is held."""
        return bool(self._fds)

    def hold(self) -> None:
        """Opens the files that exist and are not held yet."""
        for path in self._paths():
            if path not in self._fds:
                with contextlib.suppress(OSError):  # nothing was written there yet
                    self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def restore(self) -> None:
        """Writes each file to its path again, unless what is there is as long.

        Raises:
            OSError: from the file system.
        """
        for path, fd in self._fds.items():
            if not path.exists() or os.fstat(fd).st_size > path.stat().st_size:
                if path.parent != self._run.root:
                    make_private_dir(path.parent)
                mode = stat.S_IMODE(os.fstat(fd).st_mode)  # logs may hold secrets
                with whole_file(path, mode=mode) as temporary, temporary.open("wb") as copy:
                    _copy(fd, copy.fileno())

    def close(self) -> None:
        """Holds nothing any more."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _paths(self) -> Iterator[Path]:
        yield self._run.metrics
        for place in self._places:
            log = self._run.log(place.host, place.rank)
            yield from (log, log.with_suffix(".times"), self._run.events(place.rank))
        if self._run.tensorboard.is_dir():
            yield from self._run.tensorboard.iterdir()


def _copy(source: int, target: int) -> None:
    offset = 0
    while chunk := os.pread(source, _CHUNK_BYTES, offset):
        offset += len(chunk)
        while chunk:
            chunk = chunk[os.write(target, chunk) :]


CAUSE = "output_removed"
_MOST_LEDGER_BYTES = 64 << 20
_GOES_ON = (0, 75, 130)  # they promise that a next command finds something in the directory


class OutputWatch:
    """A companion for one start of the ranks.

    Attributes:
        verdict: why nothing more can be written at the path; None while all is well.
        now_at: where the run's own directory is then, if that is known.
    """

    def __init__(
        self,
        plan: RunPlan,
        run: RunDir,
        lock: RunLock,
        disk: RunsDisk,
        show: Show,
        *,
        write_decision: Callable[[], object],
    ) -> None:
        """Begins to watch.

        Args:
            run: the directory, with all that is written before ranks start.
            lock: of it, held.
            show: receives the messages.
            write_decision: writes the files that are made before ranks start, the plan last.
        """
        self._plan, self._run, self._lock, self._disk, self._show = plan, run, lock, disk, show
        self._write_decision = write_decision
        self._step = plan.resume.step if plan.resume else 0
        self._saved: list[int] = []
        self._finished = self._keeps_path = self._has_stepped = False
        self.verdict: Verdict | None = None
        self.now_at: Path | None = None
        self._ledger = b""
        self._expected: list[Path] = []
        self._held = HeldFiles(run, plan.on_node(0))
        self._watch: PathMonitor | None = None
        disk.need("what is in the run's directory", self._remember)

    def on_message(self, rank: int, message: Message) -> None:
        """Takes the steps of rank 0, and what it has saved."""
        if rank == 0 and message["kind"] == "step":
            self._step = int(message["step"])
            if not self._has_stepped:
                self._has_stepped = True
                self._disk.later(self._held.hold)
        if rank == 0 and message["kind"] == "checkpoint":
            self._saved.append(int(message["step"]))
            self._disk.later(self._held.hold)  # what came later, as TensorBoard's files
        if message["kind"] == "warning" and message.get("code") == CAUSE and self.verdict is None:
            verdict = Verdict.from_json(message["verdict"])
            if (
                verdict.severity == "fatal"
            ):  # of a different node, whose own directory is lost; this one is not
                self.verdict, self._keeps_path = verdict, True

    def look(self) -> Verdict | None:
        """Acts on what has changed; gives the verdict that ends the ranks, once there is one."""
        found = self._watch.poll() if self._watch is not None and self.verdict is None else None
        if found is not None:
            self._judge(*found)
        return self.verdict

    def finish(self) -> None:
        """Ends the watching."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._finished = True

    def settle(self, attempt: Attempt) -> None:
        """Once the ranks have ended: looks a last time, and has `attempt` name a checkpoint that is
        there.
        """
        if self.verdict is not None or self._disk.hung is not None:
            return
        seen = self._disk.write("what is in the run's directory", self._look_now)
        if seen is not None:
            self._judge(*seen)
        if attempt.checkpoint is not None and not self._disk.is_lost:
            self._disk.write("which checkpoint is the newest", lambda: self._name_newest(attempt))
        missing = self._disk.write("the plan and the config", self._missing)
        if missing and self._disk.write("the plan and the config", self._write_missing_again):
            self._warn(
                f"{', '.join(missing)} in {self._run.root} was removed while the run was active: it is"
                " written again",
                "leave these files to the run: without plan.json, its directory is not a run",
            )
        self._disk.write("metrics, logs and events", self._held.restore)
        self._held.close()

    def judged(self, ending: Ending, attempt: Attempt) -> Ending:
        """How the run ended, without a promise of what is not there.

        Args:
            ending: as the ranks' own words have it.
        """
        fields = ending.fields
        if fields.get("checkpoint") is not None:
            fields = {**fields, "checkpoint": attempt.checkpoint}
        weights = fields.get("weights")
        if (
            self.verdict is None
            and weights is not None
            and self._disk.write("the result", lambda: Path(weights).is_dir()) is False
        ):
            self._lose(
                f"the trained weights, {weights}, were removed as soon as they were written", keeps_path=True
            )
            fields = {**fields, "weights": None}
        if self.verdict is None:
            return replace(ending, fields=fields)
        if not self._keeps_path:
            fields = {**fields, "checkpoint": None, "weights": None}
        if ending.verdict is not None and ending.verdict.cause != CAUSE and ending.exit_code not in _GOES_ON:
            return replace(ending, fields=fields)
        known = find_cause(CAUSE)
        assert known is not None
        return Ending(known.exit_code, fields, self.verdict)

    # Looking.

    def _remember(self) -> None:
        paths = (self._run.root, self._run.lock, self._run.checkpoints)
        self._root, self._own_lock, self._checkpoints = map(identity_of, paths)
        self._device = device_of(self._run.root.parent)
        self._saved = sorted(self._steps())
        with contextlib.suppress(OSError):  # there is none, or one that is too large
            self._ledger = read_bytes(self._run.data, most_bytes=_MOST_LEDGER_BYTES)
        ledger = (self._run.data,) if self._ledger else ()
        decided = (*ledger, self._run.config, self._run.environment, self._run.agreement, self._run.plan)
        self._expected = [path for path in decided if path.exists()]
        self._watch_anew()

    def _watch_anew(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if not self._finished:
            self._watch = PathMonitor((self._run.root, self._run.lock, self._run.checkpoints))

    def _look_now(self) -> list[PathState]:
        return [
            PathState(identity_of(path), None)
            for path in (self._run.root, self._run.lock, self._run.checkpoints)
        ]

    def _judge(self, root: PathState, lock: PathState, checkpoints: PathState) -> None:
        if root.identity is None:
            self._restore(root.now_at)
        elif root.identity != self._root and not self._is_still_ours():
            where = f"; the run's own is now {root.now_at}" if root.now_at else ""
            self.now_at = Path(root.now_at) if root.now_at else None
            self._lose(f"a different directory replaced {self._run.root}{where}")
        elif lock.identity != self._own_lock:
            self._lock_again(root.identity, lock.identity)
        if self.verdict is None and root.identity is not None:
            self._compare_checkpoints(checkpoints)

    def _is_still_ours(self) -> bool:
        """Whether what is at the path is the same directory under a different inode number, e.g.
        after a remount: our lock is in it.
        """
        return self._disk.write("run.lock", self._lock.names_us) is True

    # What is done.

    def _restore(self, now_at: str | None) -> None:
        """Makes the directory again, with everything but what only disks knew."""
        what = (
            f"{self._run.root} was {f'renamed to {now_at}' if now_at else 'removed'} after step {self._step},"
            " while its run is active"
        )
        if self._disk.write("run.lock", lambda: device_of(self._run.root.parent)) != self._device:
            self._lose(f"{self._run.root} is gone, and the file system that it was on")
            return
        lost = (
            f"what was saved before is in {now_at}"
            if now_at
            else _lost(self._saved[-self._plan.config.checkpoint.keep :])
        )
        try:
            done = self._disk.write("the run's directory", self._make_again)
        except LockTaken as taken:
            self._lose(f"{what}, and a different start has created it again: {taken.holder}")
            return
        if not done:
            self._lose(f"{what}, and it cannot be created again")
            return
        self._warn(
            f"{what}: it is created again, and training continues; {lost}; {growing(self._held)}, and the"
            " next checkpoint comes when it is due",
            "end a run first (Ctrl-C), then remove or rename its directory",
        )

    def _make_again(self) -> bool:
        self._run.root.mkdir(
            mode=0o700, parents=True
        )  # fails if there is a directory by now, which then belongs to someone else
        self._lock.keep()
        self._write_missing()
        self._held.restore()
        self._remember()
        return True

    def _lock_again(self, root: Identity, there: Identity | None) -> None:
        """A second start must not get in."""
        what = (
            f"{self._run.lock} was {'removed' if there is None else 'replaced'} after step {self._step},"
            " while its run is active"
        )
        try:
            done = self._disk.write("run.lock", self._take_again)
        except LockTaken as taken:
            self._lose(f"{what}, and a different start has taken the directory: {taken.holder}")
            return
        if done is None:
            self._lose(f"{what}, and the directory cannot be locked again")
        if not done:
            return
        self._root = root
        self._warn(
            f"{what}: it is locked again, and training continues",
            "leave that file to its run: it keeps a second start out",
        )

    def _take_again(self) -> bool:
        """False if the directory is being removed: the next look finds it gone."""
        try:
            self._lock.keep()
        except FileNotFoundError:
            return False
        self._own_lock = identity_of(self._run.lock)
        self._write_missing()
        self._watch_anew()
        return True

    def _missing(self) -> list[str]:
        """Names of the files that were there before ranks started, and are not now."""
        return [path.name for path in self._expected if not path.exists()]

    def _write_missing(self) -> None:
        missing = self._missing()
        if self._run.data.name in missing:
            with whole_file(self._run.data) as temporary:
                temporary.write_bytes(self._ledger)
        if set(missing) - {self._run.data.name}:
            self._write_decision()

    def _write_missing_again(self) -> bool:
        self._write_missing()
        return True

    def _compare_checkpoints(self, seen: PathState) -> None:
        if seen.identity == self._checkpoints:
            return
        gone, self._checkpoints = self._checkpoints is not None, seen.identity
        if not gone:  # made again by the next save
            return
        lost = (
            f"they are in {seen.now_at}"
            if seen.now_at
            else _lost(self._saved[-self._plan.config.checkpoint.keep :])
        )
        self._saved = []
        self._warn(
            f"{self._run.checkpoints} was {f'renamed to {seen.now_at}' if seen.now_at else 'removed'} after"
            f" step {self._step}, while its run is active: {lost}; training continues, and the next"
            " checkpoint is saved when it is due",
            "end a run first (Ctrl-C), then remove its checkpoints: unisono checkpoint prune RUN",
        )

    def _steps(self) -> dict[int, Path]:
        """The checkpoints that are there, by step."""
        found = self._run.checkpoints.iterdir() if self._run.checkpoints.is_dir() else ()
        names = {path: path.name.removeprefix("step-") for path in found if path.name.startswith("step-")}
        return {int(name): path for path, name in names.items() if name.isdigit()}

    def _name_newest(self, attempt: Attempt) -> None:
        if attempt.checkpoint is None or Path(attempt.checkpoint).exists():
            return
        steps = self._steps()
        attempt.saved_step = max(steps, default=0)
        attempt.checkpoint = str(steps[attempt.saved_step]) if steps else None

    # Messages.

    def _warn(self, what: str, fix: str) -> None:
        verdict = self._verdict(what, severity="warning", fix=fix)
        self._show({**warning_of(verdict, self._run.root), "step": self._step})

    def _lose(self, what: str, *, keeps_path: bool = False) -> None:
        """Ends the run.

        Unless the path is still the run's, nothing is written there from here on.
        """
        self._keeps_path = keeps_path
        if not keeps_path:
            self._disk.is_lost = True
        fix = "end a run first (Ctrl-C), then remove, rename or unmount its directory"
        self.verdict = self._verdict(what, severity="fatal", fix=fix)

    def _verdict(self, what: str, *, severity: Literal["fatal", "warning"], fix: str) -> Verdict:
        return Verdict(
            cause=CAUSE,
            when="during",
            severity=severity,
            summary=one_line(what, limit=600),
            hosts=(self._plan.host,),
            phase="save",
            step=self._step or None,
            fix=(fix,),
            evidence=(
                Evidence(
                    where=str(self._run.root),
                    text=f"device and inode were {self._root}, of the lock {self._own_lock}",
                ),
            ),
        )


def warning_of(verdict: Verdict, root: Path) -> Message:
    """The message about a directory that was removed or replaced."""
    return {
        "kind": "warning",
        "time": time.time(),
        "code": CAUSE,
        "text": verdict.summary,
        "where": str(root),
        "fix": verdict.fix[0],
        "verdict": verdict.to_json(),
    }


def growing(held: HeldFiles) -> str:
    """The effect on files that ranks write continuously, for messages."""
    if held:
        return (
            "logs and events of these ranks are complete again when they end, TensorBoard's curves may have a"
            " gap or end here"
        )
    return "logs and events of these ranks are not kept from here on"


def _lost(steps: list[int]) -> str:
    if not steps:
        return "no checkpoint was in it"
    return f"its checkpoints are gone (steps {', '.join(map(str, steps))})"


def device_of(path: Path) -> int:
    """The device of a directory, or of the nearest one above it that is there."""
    while True:
        found = identity_of(path)
        if found is not None or path == path.parent:
            return found[0] if found is not None else -1
        path = path.parent
