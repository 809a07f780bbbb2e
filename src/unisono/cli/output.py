"""How the command line speaks: results to stdout, talk to stderr, with `--json` nothing but JSON on stdout."""

import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

GLOBAL_FLAGS = ("--json", "--quiet", "--debug", "--version")
_READER_GONE = (errno.EPIPE, errno.EIO)
"""Of a pipe (`| head`); of a terminal."""


class _Stream(io.TextIOWrapper):
    """stdout or stderr of the program. What cannot be written ends no command: a run must not die of its talk.

    Attributes:
        lost: why something could not be written, unless nobody was there to read it.
    """

    lost: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        silence(self)
        if error.errno not in _READER_GONE:
            self.lost = self.lost or error


def open_streams() -> None:
    """Makes stdin, stdout and stderr of this process ones that can be used, whatever it was started with.

    Daemons start programs with closed streams (`>&-`). Their numbers would go to the next files that are opened: a lock, or the
    connection to a node, into which whatever is started from here would then write.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            nowhere = os.open(os.devnull, flags)  # the lowest free number, which is this one
            os.set_inheritable(nowhere, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - of a number, for the life of the process
    sys.stdout, sys.stderr = _stream(1, sys.stdout, "strict"), _stream(2, sys.stderr, "backslashreplace")


def _stream(fd: int, given: TextIO | None, errors: str) -> _Stream:
    """A stream on a file number, with the encoding of the one that Python made of it."""
    raw = open(fd, "wb", closefd=False)  # noqa: SIM115 - of a number, for the life of the process
    encoding = (given and given.encoding) or "utf-8"
    return _Stream(raw, encoding, (given and given.errors) or errors, line_buffering=fd == 2 or raw.isatty())


def lost_output() -> OSError | None:
    """Why results could not be written to stdout; None if all of them were, or nobody read them any more."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return sys.stdout.lost if isinstance(sys.stdout, _Stream) else None


@dataclass(frozen=True, slots=True)
class Output:
    """What the flags that every command takes ask for.

    Attributes:
        json: stdout carries JSON only.
        quiet: no talk: only results, warnings and errors.
        debug: a user's mistake shows its traceback, too.
    """

    json: bool = False
    quiet: bool = False
    debug: bool = False

    def say(self, text: str) -> None:
        """Talk: a line on stderr, unless `--quiet`."""
        if not self.quiet:
            _write(sys.stderr, text)

    def warn(self, text: str) -> None:
        """A line on stderr, also with `--quiet`."""
        _write(sys.stderr, text)

    def result(self, text: str) -> None:
        """A result: a line on stdout. With `--json` it goes to stderr, as stdout is for JSON."""
        _write(sys.stderr if self.json else sys.stdout, text)

    def emit(self, value: Any) -> None:
        """One JSON value as a line on stdout. What is not a finite number becomes null: JSON has no word for it."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
        _write(sys.stdout, text)


_current = Output()  # set once by main, before the command runs


def output() -> Output:
    """How the command that runs now is to speak."""
    return _current


def set_output(value: Output) -> None:
    """Decides how to speak, for the rest of this process."""
    global _current
    _current = value


def split_globals(arguments: list[str]) -> tuple[list[str], set[str]]:
    """The arguments without the flags that every command takes, and those flags. `--` ends the search."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flags = {word for word in arguments[:end] if word in GLOBAL_FLAGS}
    return [word for word in arguments[:end] if word not in GLOBAL_FLAGS] + arguments[end:], flags


def _finite(value: Any) -> Any:
    """The same JSON value with null in place of nan and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _write(stream: TextIO, text: str) -> None:
    """Writes a line. A reader that is gone (`| head`) is not our death: from then on we speak to nobody."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except OSError as error:
        if error.errno not in _READER_GONE:
            raise
        silence(stream)
    except UnicodeEncodeError:  # a terminal that cannot show it, for example with LANG=C
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()


def until_unread(show: Callable[[Any], None]) -> Callable[[Any], None]:
    """`show` for the messages of a run: if they cannot be written, output goes to /dev/null and the run continues."""

    def shown(message: Any) -> None:
        try:
            show(message)
        except (
            OSError
        ):  # a closed terminal or a full disk is no reason to stop a run, whose directory has everything
            silence(sys.stdout)
            silence(sys.stderr)

    return shown


def silence(stream: TextIO) -> None:
    """Sends what is written from now on nowhere, so that also Python's flush at exit finds no broken pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
