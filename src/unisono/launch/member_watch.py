"""On a node that is not the head: what becomes of its output_dir when that is removed, renamed or replaced while ranks run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from unisono.causes import Evidence, Verdict
from unisono.events import Message, Show
from unisono.facts.path_probes import PathMonitor, PathState, identity_of
from unisono.files import read_object
from unisono.launch.output_watch import CAUSE, HeldFiles, device_of, growing, warning_of
from unisono.plan import RankPlace, RunPlan
from unisono.rundir import RunDir
from unisono.rundir.lock import LockTaken, RunLock
from unisono.supervise.bounded_io import RunsDisk
from unisono.text import one_line

_FIX = "end a run first (Ctrl-C), then remove, rename or unmount its directory, on every node"


class MemberWatch:
    """For one start of this node's ranks.

    A directory of this node's own is made again if it was removed; if it was replaced, the head ends the run on all nodes. The head's
    directory is the head's to make again; this node then writes the logs of its ranks there.
    """

    def __init__(
        self,
        run: RunDir,
        lock: RunLock | None,
        plan: RunPlan,
        places: Sequence[RankPlace],
        disk: RunsDisk,
        show: Show,
        *,
        send: Callable[[Message], None],
        write_plan: Callable[[], None],
    ) -> None:
        """Begins to watch.

        Args:
            run: the directory, with this node's copy of the plan.
            lock: of a directory of this node's own, held; None if the directory is the head's.
            send: passes a message on to the head.
            write_plan: writes this node's copy of the plan, with the folders for its ranks.
        """
        self._run, self._lock, self._run_id, self._disk, self._show = run, lock, plan.run_id, disk, show
        self._send, self._write_plan = send, write_plan
        self._host = places[0].host
        self._held = HeldFiles(run, places)
        self._watch: PathMonitor | None = None
        self._has_ended = False
        if lock is not None:
            disk.need("what is in this node's output_dir", self._remember)

    def ranks_ready(self) -> None:
        """Ranks have opened their files."""
        self._disk.later(self._held.hold)

    def look(self) -> None:
        """Acts on what has changed. Never waits if nothing has."""
        found = self._watch.poll() if self._watch is not None and not self._disk.is_lost else None
        if found is not None:
            self._judge(*found)

    def settle(self) -> None:
        """The last look, once the ranks have ended: what is written at the end needs the directory."""
        self._has_ended = True
        if self._lock is not None:
            seen = self._disk.write("what is in this node's output_dir", self._look_now)
            if seen is not None:
                self._judge(*seen)
        if self._watch is not None:
            self._watch.close()
        self._disk.write("logs and events", self._restore_files)
        self._held.close()

    def _restore_files(self) -> None:
        if self._lock is not None or read_object(self._run.plan).get("run_id") == self._run_id:
            self._held.restore()

    def _remember(self) -> None:
        self._root, self._own_lock = identity_of(self._run.root), identity_of(self._run.lock)
        self._device = device_of(self._run.root.parent)
        if self._watch is not None:
            self._watch.close()
        self._watch = None if self._has_ended else PathMonitor((self._run.root, self._run.lock))

    def _look_now(self) -> list[PathState]:
        return [PathState(identity_of(path), None) for path in (self._run.root, self._run.lock)]

    def _judge(self, root: PathState, lock: PathState) -> None:
        assert self._lock is not None
        if root.identity is None:
            self._restore(root.now_at)
        elif root.identity != self._root and self._disk.write("run.lock", self._lock.names_us) is not True:
            where = f"; this node's own is now {root.now_at}" if root.now_at else ""
            self._lose(f"a different directory replaced {self._run.root}{where}")
        elif lock.identity != self._own_lock:
            what = f"{self._run.lock} was removed or replaced, while its run is active"
            self._make_good(what, self._lock_again, "it is locked again, and training continues")

    def _restore(self, now_at: str | None) -> None:
        path = self._run.root
        what = f"{path} was {f'renamed to {now_at}' if now_at else 'removed'}, while its run is active"
        if self._disk.write("run.lock", lambda: device_of(path.parent)) != self._device:
            self._lose(f"{path} is gone, and the file system that it was on")
            return
        done = f"it is created again, and training continues; {growing(self._held)}"
        self._make_good(what, self._make_again, done)

    def _make_good(self, what: str, work: Callable[[], bool], done: str) -> None:
        try:
            is_good = self._disk.write("this node's output_dir", work)
        except LockTaken as taken:
            self._lose(f"{what}, and a different start has taken it: {taken.holder}")
            return
        if not is_good:
            self._lose(f"{what}, and it cannot be created again")
            return
        self._report(f"{what}: {done}", severity="warning")

    def _make_again(self) -> bool:
        self._run.root.mkdir(mode=0o700, parents=True)  # fails if there is one by now, of someone else
        return self._lock_again()

    def _lock_again(self) -> bool:
        assert self._lock is not None
        self._lock.keep()
        self._write_plan()
        self._held.restore()
        self._remember()
        return True

    def _lose(self, what: str) -> None:
        """Nothing is written at the path from here on; the head ends the ranks of all nodes."""
        self._disk.is_lost = True
        self._report(what, severity="fatal")

    def _report(self, what: str, *, severity: Literal["fatal", "warning"]) -> None:
        verdict = Verdict(
            cause=CAUSE,
            when="during",
            severity=severity,
            summary=one_line(f"on {self._host}: {what}", limit=600),
            hosts=(self._host,),
            phase="save",
            fix=(_FIX,),
            evidence=(Evidence(where=str(self._run.root), text=f"device and inode were {self._root}"),),
        )
        message = warning_of(verdict, Path(self._run.root))
        self._show(message)
        self._send(message)
