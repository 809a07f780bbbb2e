"""srun as a child of this front: one task a node, whose lines come back behind the task's number."""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO, Self

from unisono.control.protocol import new_token
from unisono.errors import UnfitError
from unisono.facts import take_token

OnLine = Callable[[int | None, bytes], None]
"""Gets the number of the task that said a line (None: srun itself), and the line; of longer ones pieces of a kilobyte, as srun breaks them."""

_LABEL = re.compile(rb"^ *(\d{1,9}): ?")
_PATIENCE_S = 10.0


class SrunStep:
    """A step of this allocation, or of one that srun asks for. As a context manager it leaves no task behind."""

    def __init__(
        self, options: Sequence[str], command: Sequence[str], text: str, *, hear: OnLine, hear_talk: OnLine
    ) -> None:
        """Notes what is to be started.

        Args:
            options: of srun, besides those that label lines and leave the other tasks alone where one fails.
            command: of each task.
            text: what all tasks read on stdin.
            hear: gets the lines of stdout.
            hear_talk: gets those of stderr. Both are called from threads.
        """
        self._words = [
            *options,
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--label",
            *command,
        ]
        self._text = text
        self._hear, self._hear_talk = hear, hear_talk
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Starts srun.

        Raises:
            UnfitError: if srun cannot be started.
        """
        program = shutil.which("srun") or "srun"
        # The tasks' shared secret: srun hands it on, and no command line has it.
        variables = {**os.environ, "UNISONO_TOKEN": take_token() or new_token()}
        try:
            self._process = subprocess.Popen(
                [program, *self._words],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UnfitError.of(
                f"srun cannot be started: {error.strerror or error}",
                where=program,
                fix="look at Slurm's installation on this machine",
            ) from error
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._begin(_read, self._process.stdout, self._hear)
        self._begin(_read, self._process.stderr, self._hear_talk)
        self._begin(self._feed)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the step where it still runs: srun has its tasks ended, and gives back what it was given."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        """srun's exit code: the highest of its tasks'."""
        code = self._process.wait()
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        return code

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _feed(self) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stream:
                stream.write(self._text.encode())
        except OSError:
            return  # srun has ended before it read: its own words say why


def _read(stream: IO[bytes], hear: OnLine) -> None:
    with stream:
        for whole in stream:
            line = whole.rstrip(b"\n")
            label = _LABEL.match(line)
            hear(int(label[1]) if label else None, line[label.end() :] if label else line)
