"""Where a drill's run takes place, and what is done to it from outside."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PIECES = (
    b"GET / HTTP/1.1\r\nHost: unisono\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\0" * 4096,
    b"",
)
_RANDOM_BYTES = 1 << 16
_SECONDS = 10.0


class Ground:
    """This machine as it is, with one node. A context: what was made is gone afterwards.

    Attributes:
        nodes: fronts of a run.
    """

    nodes = 1

    def __init__(self) -> None:
        self.folder = Path()

    def why_not(self) -> str:
        """What is missing for it here; an empty string where nothing is."""
        return ""

    def prepare(self, folder: Path) -> None:
        """Makes what is needed, below a folder of the drill's own."""
        self.folder = folder

    def host(self, node: int) -> str | None:
        """The host name that a node has; None: this machine's."""
        del node
        return None

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """The command line that starts a front there, in the same process."""
        del node
        return list(words)

    def request(self, node: int) -> dict[str, Any]:
        """Of the front's TrainRequest, what is about this ground."""
        del node
        return {}

    def output_dir(self) -> Path:
        """Where the run's results go."""
        return self.folder / "out"

    def started(self, pids: Sequence[int]) -> None:
        """The fronts run, by node."""

    def strike(self) -> None:
        """Does from outside what is to be done, now that the run trains, or that a rank has begun its part of it."""

    def close(self) -> None:
        """Takes away what was made."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TwoFronts(Ground):
    """Two nodes that meet on this machine's own loopback, with one output_dir and one host name."""

    nodes = 2

    def prepare(self, folder: Path) -> None:
        """Makes the job's secret, and finds a port."""
        super().prepare(folder)
        self._token = write_token(folder)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = int(listener.getsockname()[1])

    def request(self, node: int) -> dict[str, Any]:
        """Two nodes, of which this is one."""
        return {
            "nodes": "2", "node_rank": node, "head": f"127.0.0.1:{self._port}", "token_file": str(self._token)
        }  # fmt: skip


class HeadKilled(TwoFronts):
    """Two nodes, of which the head's front is killed."""

    def started(self, pids: Sequence[int]) -> None:
        """Remembers which one that is."""
        self._head = pids[0]

    def strike(self) -> None:
        """Leaves it no time for a word."""
        os.kill(self._head, signal.SIGKILL)


class Strangers(TwoFronts):
    """Two nodes, where strangers talk to the port on which they meet."""

    def strike(self) -> None:
        """Some that speak other languages, some that say nothing, some that say a lot."""
        with contextlib.ExitStack() as stack:
            for piece in (*_PIECES, secrets.token_bytes(_RANDOM_BYTES)) * 3:
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", self._port), _SECONDS))
                with contextlib.suppress(OSError):  # it was shown the door
                    stranger.sendall(piece)
            time.sleep(0.5)  # the silent ones stay for a while


def write_token(folder: Path) -> Path:
    """A secret for one job, in a file that only its owner may read."""
    path = folder / "token"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return path


def needs_root(what: str, *tools: str) -> str:
    """Why it cannot be done, as far as user and programs are concerned."""
    if os.geteuid() != 0:
        return f"{what} need root"
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""
