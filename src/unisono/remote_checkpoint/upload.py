"""Uploads published checkpoints to checkpoint.storage beside the ranks, in a child process, one at a time."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import RankDied, UnfitError, UnisonoError
from unisono.events import Message, Show
from unisono.plan import RunPlan
from unisono.rundir import RunDir
from unisono.supervise.child_process import Programs, child_environment
from unisono.supervise.interrupts import Interrupts
from unisono.supervise.task_process import TaskProcess, cannot_start
from unisono.text import parse_seconds, show_bytes, show_seconds

STALLED_S = 120.0
"""An upload without progress for this long is ended; the next checkpoint is uploaded again."""
_STAYS = "it is complete in output_dir; the next start that resumes the run uploads it"
_RESULT_S = 0.5
_NOTE_EVERY_S = 10.0


def storage_url(storage: str, output_dir: Path) -> str:
    """The URL of this run's copies: the storage and the directory's name."""
    return f"{storage.rstrip('/')}/{output_dir.name}"


@dataclass(frozen=True)
class CopyResult:
    """The result of one upload.

    Attributes:
        bytes: the uploaded bytes; 0 if it was already there.
        seconds: the duration.
        error: why it failed; None if it succeeded.
    """

    path: Path
    bytes: int = 0
    seconds: float = 0.0
    checksum: str = ""
    error: UnisonoError | None = None

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return _step_of(self.path)


class Uploads:
    """A companion for all attempts of one start of the run. As a context manager it ends its child process."""

    def __init__(
        self,
        plan: RunPlan,
        run: RunDir,
        *,
        programs: Programs,
        leftovers: dict[str, str],
        interrupts: Interrupts,
        show: Show,
    ) -> None:
        """Starts with the latest published checkpoint, which may not be uploaded yet.

        Args:
            interrupts: stop signals.
        """
        assert plan.config.checkpoint.storage is not None
        self._plan = plan
        self._run = run
        self._url = storage_url(plan.config.checkpoint.storage, run.root)
        self._programs = programs
        self._leftovers = leftovers
        self._interrupts = interrupts
        self._show = show
        self._due: Path | None = self._newest()
        self._task: TaskProcess | None = None
        self._path = Path()
        self._done_bytes = self._of_bytes = 0
        self._progress_at = 0.0
        self._ending = False
        self._expected: int | None = None
        self.first: CopyResult | None = None
        """The result of the expected copy."""
        self.uploaded: Path | None = None

    @property
    def url(self) -> str:
        """The URL of the copies of all runs in this directory."""
        return self._url

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def on_message(self, rank: int, message: Message) -> None:
        """Queues a published checkpoint as the next upload."""
        if rank == 0 and message["kind"] == "checkpoint":
            if self._due is not None and self._task is not None:
                text = f"{self._due.name} is not copied to {self._url}: uploads are slower than checkpoints, and there is a newer one"
                self._notify(text)
            self._due = Path(str(message["path"]))

    def expect(self, step: int) -> None:
        """Puts the result of the next copy of this step or a later one into `first`, for the caller to check; a failure is then no warning."""
        self._expected, self.first = step, None

    def expect_nothing(self) -> None:
        """Makes each failure a warning again."""
        self._expected = None

    def look(self) -> UnisonoError | None:
        """Continues the upload; a failing storage does not end the run."""
        if self._task is None:
            self._begin()
            return None
        try:
            for message in self._task.new_messages():
                self._take(message)
                if self._task is None:
                    return None
        except UnisonoError as error:
            self._failed(error)
            return None
        if time.monotonic() - self._progress_at > STALLED_S:
            self._failed(self._stalled())
        return None

    def finish(self) -> None:
        """Nothing: the ranks have ended, but the run may continue. `wait` ends the uploads."""

    def wait(self) -> None:
        """Waits until the latest checkpoint is uploaded, while its upload makes progress; after a stop signal, for the rest of `grace`.

        If the run ended because its first copy failed, it does not wait.
        """
        if self.first is not None and self.first.error is not None:
            self._close()
            return
        newest = self._newest()
        if newest is not None and newest not in (self.uploaded, self._path if self._task else None):
            self._due = newest
        self._ending = True
        noted = time.monotonic()
        while self._task is not None or self._due is not None:
            limit = self._end_of_grace()
            if self._interrupts.twice or time.monotonic() >= limit:
                break
            self.look()
            if time.monotonic() - noted > _NOTE_EVERY_S:
                noted = time.monotonic()
                at_most = f"; at most {show_seconds(limit - noted)} more" if limit < math.inf else ""
                self._notify(f"waiting for {self._progress()}{at_most}")
            time.sleep(0.05)
        if self._task is not None or self._due is not None:
            left = self._due or self._path
            self._warn(
                f"the latest checkpoint, {left}, is not in {self._url}: its upload did not finish in time",
                _STAYS,
            )
        self._close()

    def _end_of_grace(self) -> float:
        """The end of the wait in monotonic seconds; a stop signal may arrive during it."""
        if self._interrupts.first is None:
            return math.inf
        return self._interrupts.at + parse_seconds(self._plan.config.grace) - _RESULT_S

    def _newest(self) -> Path | None:
        found = [path for path in self._run.checkpoints.glob("step-*") if path.name[5:].isdigit()]
        return max(found, key=_step_of, default=None)

    def _begin(self) -> None:
        if self._due is None:
            return
        self._path, self._due = self._due, None
        if not self._path.is_dir():  # pruned before its upload started
            return
        request = {
            "action": "upload",
            "url": self._url,
            "run_id": self._plan.run_id,
            "path": str(self._path),
            "keep": self._plan.config.checkpoint.keep,
            "keep_every": self._plan.keep_every,
            "best": self._plan.config.checkpoint.best,
            "beside": str(self._run.root),
        }
        environment = child_environment(threads=1, without=self._leftovers)  # the ranks use the other cores
        self._done_bytes = self._of_bytes = 0
        try:
            self._task = TaskProcess("storage", request, programs=self._programs, environment=environment)
        except OSError as error:  # /tmp is full or there are no more processes: no reason to end training
            self._failed(cannot_start("storage", error))
        self._progress_at = time.monotonic()

    def _take(self, message: Message) -> None:
        self._progress_at = time.monotonic()
        if message["kind"] == "progress":
            self._done_bytes, self._of_bytes = int(message["bytes"]), int(message["of"])
        elif message["kind"] == "result":
            self._close()
            if message["pruned"]:
                text = f"{self._path.name} is not copied to {self._url}: it was pruned here before its upload started; checkpoints are faster than uploads"
                self._notify(text)
                return
            self.uploaded = self._path
            if self._is_expected():
                self.first = CopyResult(self._path, message["bytes"], message["seconds"], message["checksum"])
                self._expected = None
            if message["bytes"]:
                size, seconds = show_bytes(message["bytes"]), show_seconds(message["seconds"])
                self._notify(f"{self._path.name} is in {self._url}/{self._plan.run_id}: {size} in {seconds}")

    def _is_expected(self) -> bool:
        return self._expected is not None and _step_of(self._path) >= self._expected

    def _stalled(self) -> UnfitError:
        text = f"no progress for {show_seconds(STALLED_S)} ({self._progress()})"
        return UnfitError.of(text, where="checkpoint.storage", fix="check the storage and the network")

    def _failed(self, error: UnisonoError) -> None:
        """Warns of a failed upload, or stores it as the result of the expected copy."""
        self._close()
        if self._is_expected() and not isinstance(
            error, RankDied
        ):  # a dead task says nothing about the storage
            self.first, self._expected = CopyResult(self._path, error=error), None
            return
        what = f"{self._path.name} was not copied to {self._url}: "
        problem = error.problems[0]
        self._warn(
            what + "; ".join(part for part in (problem.what, problem.why) if part),
            f"{problem.fix or 'see there'}; {self._consequence()}",
        )

    def _consequence(self) -> str:
        return _STAYS if self._ending else "training continues, and the next checkpoint is uploaded again"

    def _progress(self) -> str:
        share = (
            f", {self._done_bytes / self._of_bytes:.0%} of {show_bytes(self._of_bytes)}"
            if self._of_bytes
            else ""
        )
        return f"the upload of {(self._due or self._path).name}{share}"

    def _close(self) -> None:
        if self._task is not None:
            self._task.close(patience_s=0)
            self._task = None

    def _notify(self, text: str) -> None:
        self._show({"kind": "note", "time": time.time(), "text": text})

    def _warn(self, text: str, fix: str) -> None:
        self._show(
            {"kind": "warning", "time": time.time(), "code": "upload_failed", "text": text, "fix": fix}
        )


def _step_of(path: Path) -> int:
    """The step in the name of a checkpoint's directory."""
    return int(path.name[len("step-") :])
