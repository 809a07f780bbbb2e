"""Takes a run's directory for one start: decided, made, locked; and given back, with nothing left if nothing came of it."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unisono.config import RunConfig
from unisono.errors import UsageError
from unisono.files import make_private_dir
from unisono.launch.bounded import refuse_if_silent
from unisono.launch.resuming import Earlier
from unisono.launch.stored import remove_half_a_copy
from unisono.rundir import RunDir
from unisono.rundir.lock import RunLock
from unisono.rundir.start import StartDecision, decide_start, set_aside


@dataclass
class Claim:
    """A directory that is ours until the end of the start.

    Attributes:
        run: its names.
        decision: what this start is: fresh, resume or extend.
        made: whether this start made the directory.
        earlier: what the start before has left, to be put back.
        lock: of the directory, held.
        worth_keeping: whether something came of it; otherwise a directory that was made is removed again.
        trained: whether ranks were ready to train; otherwise the plan of the start before is put back.
    """

    run: RunDir
    decision: StartDecision
    made: bool
    earlier: Earlier
    lock: RunLock
    worth_keeping: bool = False
    trained: bool = False

    def decide_again(self, config: RunConfig, *, allow: frozenset[str]) -> None:
        """What this start is, now that a run was brought into the directory.

        Raises:
            UsageError: if it is another run than the config means.
        """
        self.worth_keeping = True
        self.decision = decide_start(self.run, config, resume=True, fresh=False, allow=allow)
        self.earlier = Earlier.of(self.run)


@contextlib.contextmanager
def claim(
    config: RunConfig,
    *,
    host: str,
    port: int = 0,
    resume: bool,
    fresh: bool,
    say: Callable[[str], None],
    allow: frozenset[str] = frozenset(),
) -> Iterator[Claim]:
    """Decides, makes the directory, locks it, and decides again under the lock.

    Args:
        config: of this start; its output_dir is what is claimed.
        host: this node.
        port: on which the job's other nodes are met; 0 where there are none.
        resume: `--resume`.
        fresh: `--fresh`.
        say: shows a line.
        allow: keys of the config that may have changed.

    Raises:
        UsageError: if the directory is taken, finished, another run's, or cannot be written.
        UnfitError: if its storage does not answer.
    """
    run = RunDir(Path(config.output_dir))
    refuse_if_silent(run.root)
    decide_start(run, config, resume=resume, fresh=fresh, allow=allow)  # refuses before anything is touched
    if fresh and run.root.exists() and any(run.root.iterdir()):
        with _locked(run, host, port, say):  # nobody renames a run under the feet of one that lives
            moved = set_aside(run)
        say(f"the earlier run is now {moved}")
    missing, made = not run.root.exists(), False
    _make(run)
    try:
        with _locked(run, host, port, say) as lock:
            made = missing  # from here on: who is refused may not take away what another start has just made
            if remove_half_a_copy(run):
                say(f"what a start that was killed had begun to bring into {run.root} is removed")
            decision = decide_start(run, config, resume=resume, fresh=False, allow=allow)
            claimed = Claim(run, decision, made, Earlier.of(run), lock)
            try:
                yield claimed
            finally:
                made = claimed.made and not claimed.worth_keeping
                puts_back = claimed.decision.kind != "fresh" and not claimed.trained
                if (made or puts_back) and not _is_in_place(lock):
                    made = puts_back = False  # what somebody else has put at the path stays as it is
                if puts_back:
                    claimed.earlier.put_back()
    finally:
        if made:
            shutil.rmtree(run.root, ignore_errors=True)


def _make(run: RunDir) -> None:
    try:
        make_private_dir(run.root)
    except OSError as error:
        raise UsageError.of(
            f"the run's directory {run.root} cannot be made", where="output_dir", why=str(error),
            fix="set output_dir to a directory that you may write",
        ) from error  # fmt: skip
    if not os.access(run.root, os.W_OK | os.X_OK):
        raise UsageError.of(
            f"the run's directory {run.root} cannot be written", where="output_dir", why="it is not yours to write in",
            fix="set output_dir to a directory that you may write",
        )  # fmt: skip


def _is_in_place(lock: RunLock) -> bool:
    try:
        return lock.is_in_place()
    except OSError:
        return False


@contextlib.contextmanager
def _locked(run: RunDir, host: str, port: int, say: Callable[[str], None]) -> Iterator[RunLock]:
    lock = RunLock(run.lock)
    note = lock.acquire(host, os.getpid(), port=port)
    if note:
        say(note)
    try:
        yield lock
    finally:
        lock.release()
