"""The job's shared secret: its sources, and which tokens are refused. It is never part of a command line, a log or a plan."""

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from unisono.control.protocol import new_token
from unisono.errors import UsageError
from unisono.files import open_given
from unisono.text import one_line

SMALLEST_BYTES = 16
LARGEST_BYTES = 4_096
HOW_TO_MAKE_ONE = (
    '(umask 077; python3 -c "import secrets; print(secrets.token_urlsafe(32))" > ~/.unisono-token)'
)
"""A command that can be pasted; the file is then copied to the other nodes, e.g. with scp."""

_FROM_STDIN = "-"


@dataclass(frozen=True)
class Token:
    """The secret that all nodes of a job share.

    Attributes:
        secret: the bytes; not in its repr, so that no log or traceback shows them.
        origin: its source, for messages.
        from_stdin: the rest of stdin is the lifeline to whoever started this front; see `watch_lifeline`.
    """

    secret: bytes = field(repr=False)
    origin: str
    from_stdin: bool = False


def read_token(
    token_file: str | None,
    from_environment: str | None,
    *,
    nodes: int,
    stdin: BinaryIO | None = None,
) -> Token | None:
    """The token, or None for a single node, which opens no port.

    Args:
        token_file: `--token-file`; `-`: the first line of stdin.
        from_environment: UNISONO_TOKEN, already removed from the environment (`facts.environment.take_token`).
        nodes: of the job.
        stdin: in place of this process's.

    Raises:
        UsageError: if there is none, its length is wrong, or other users may read the file.
    """
    if token_file == _FROM_STDIN:
        return _from_stdin(stdin or sys.stdin.buffer)
    if nodes == 1:
        return None
    if token_file is not None:
        path = Path(token_file).expanduser()
        return Token(_checked(_read_private(path), str(path)), "--token-file")
    if from_environment:
        return Token(_checked(from_environment.encode(), "UNISONO_TOKEN"), "UNISONO_TOKEN")
    raise UsageError.of(
        f"{nodes} nodes need a shared token, and this node has none",
        where="--token-file, UNISONO_TOKEN",
        why="the nodes authenticate each other with it",
        fix=f"{HOW_TO_MAKE_ONE}; copy the file to every node, and add to the command: --token-file ~/.unisono-token",
    )


def make_token() -> Token:
    """A new token, for a job whose nodes this front starts itself."""
    return Token(new_token().encode(), "made for this start")


def watch_lifeline(on_close: Callable[[], None] | None = None, *, stdin: BinaryIO | None = None) -> None:
    """Calls `on_close` when stdin closes: whoever started this front is gone, so the run ends, too.

    Args:
        on_close: called from a different thread; without one, this process gets SIGTERM, as from a scheduler.
        stdin: in place of this process's.
    """
    source = stdin or sys.stdin.buffer

    def watch() -> None:
        try:
            # Not through the buffer: this thread would hold its lock forever, and Python aborts at exit if it cannot take that lock.
            while os.read(source.fileno(), LARGEST_BYTES):  # the content is ignored
                continue
        except (OSError, ValueError):  # closed in this process: the same
            pass
        (on_close or _terminate)()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _from_stdin(stdin: BinaryIO) -> Token:
    line = stdin.readline(LARGEST_BYTES + 2)
    return Token(_checked(line, "stdin"), "stdin", from_stdin=True)


def _read_private(path: Path) -> bytes:
    """The first line of a file that only its owner may read."""
    try:
        with open_given(path) as file:
            mode = os.fstat(
                file.fileno()
            ).st_mode  # of the open file, so that it cannot be exchanged in between
            line = b"" if mode & 0o077 else file.readline(LARGEST_BYTES + 2)
    except OSError as error:
        raise UsageError.of(
            f"the token file {path} cannot be read",
            where="--token-file",
            why=error.strerror or str(error),
            fix=f"make one: {HOW_TO_MAKE_ONE}",
        ) from error
    if mode & 0o077:
        raise UsageError.of(
            f"the token file {path} can be read or changed by other users",
            where="--token-file",
            why=f"its mode is {stat.S_IMODE(mode):04o}; whoever has the token controls this job",
            fix=f"chmod 600 {path}",
        )
    return line


def _checked(line: bytes, source: str) -> bytes:
    secret = line.strip()
    if SMALLEST_BYTES <= len(secret) <= LARGEST_BYTES:
        return secret
    what = "empty" if not secret else f"{len(secret)} bytes long"
    raise UsageError.of(
        f"the token in {one_line(source)} is {what}",
        where=one_line(source),
        why=f"a token needs {SMALLEST_BYTES} to {LARGEST_BYTES} bytes, so that it cannot be guessed",
        fix=HOW_TO_MAKE_ONE,
    )
