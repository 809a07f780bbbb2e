"""Lines for a file that are written by a process of their own: whoever writes to a disk that hangs cannot even end."""

import contextlib
import os
import subprocess
import threading
from pathlib import Path

_CLOSE_S = 1.0
# A thousandth of Python's memory. The file is opened by the process, too: that alone can hang.
_APPEND = ("sh", "-c", 'umask 077; exec cat >> "$1"', "sh")


class Appender:
    """Appends to one file. The process is begun with the first line, and ends with whoever began it, as soon as its disk answers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def add(self, line: bytes) -> None:
        """Hands a line, of 4,096 bytes at the most, over and waits for nothing. After an error nothing more is tried.

        Raises:
            OSError: if the process has given up (what it wrote to is full or gone), or does not take any more.
        """
        if self._is_over:
            return
        try:
            os.write(self._pipe(), line)  # whole or not at all, up to PIPE_BUF
        except BlockingIOError:
            self._is_over = True
            raise OSError(None, "the storage does not answer") from None
        except BrokenPipeError:
            self._is_over = True
            raise OSError(None, self._last_words() or "the file cannot be written") from None

    def close(self) -> None:
        """Lets it finish what it has, if the disk answers within a second; else what it still has is lost, and it ends when the disk lets it."""
        process, self._process, self._is_over = self._process, None, True
        if process is None:
            return
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stderr.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            threading.Thread(target=process.wait, name="reap", daemon=True).start()

    def _pipe(self) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                (*_APPEND, str(self._path)), bufsize=0, start_new_session=True,  # not ended by the terminal's Ctrl-C
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def _last_words(self) -> str:
        """Why it gave up, in its own words."""
        assert self._process is not None
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        said = (self._process.stderr.read() or b"").decode(errors="replace").strip()
        return said.splitlines()[-1] if said else ""
