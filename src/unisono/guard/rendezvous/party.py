"""Types that both sides of a meeting share: the node, the job's token, the facts of its channel,
and background work while the front listens.
"""

import os
import queue
import signal
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from unisono.base.errors import UsageError
from unisono.base.files import open_given
from unisono.base.messages import Message, Show
from unisono.base.text import one_line
from unisono.guard.agree.reports import NodeReport
from unisono.guard.control.channel_ends import HeadServer
from unisono.guard.control.protocol import new_token
from unisono.guard.facts.network import NetworkProbe, SystemNetwork
from unisono.guard.places.topology import Topology
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.node_messages import CheckpointIdentity

NONCE_FILE = "nonce_file"
"""The key of the head's welcome with the name of the file that it left in its output_dir
(`facts.storage.leave_nonce`).
"""


@dataclass(frozen=True)
class Party:
    """This node, as it joins the meeting.

    Attributes:
        topology: the job's nodes and ranks as this node knows them; `head_host` is set.
        show: gets notes and warnings; called from the caller's thread only.
        join_timeout_s: how long the nodes wait for each other.
        command: the command line, for messages that quote it.
    """

    topology: Topology
    token: bytes = field(repr=False)
    host: str
    show: Show
    join_timeout_s: float = 300.0
    programs: Programs = field(default_factory=Programs)
    network: NetworkProbe = field(default_factory=SystemNetwork)
    command: str = "unisono train CONFIG"

    @property
    def label(self) -> str:
        """This node as it appears in messages."""
        return f"node {self.topology.node_rank} ({self.host})"

    @property
    def head(self) -> str:
        """HOST:PORT of the head, as given on the command line."""
        host, port = self.topology.head_host, self.topology.head_port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class ChannelFacts:
    """Facts of the channel for a node's report.

    Attributes:
        address: this node's own address in its connection to the head.
        welcome: the head's message to every node that joins.
        clock_offset_s: this node's wall clock minus the head's; None: not measured; 0.0 on the
            head.
        probe_ports: on which this node answers the dial matrix.
    """

    address: str
    welcome: dict[str, object]
    clock_offset_s: float | None
    probe_ports: list[int]


MakeReport = Callable[[ChannelFacts, Show], NodeReport]
"""Makes this node's report. It runs in a background thread, since digests of large files take
minutes; the messages it shows are displayed. A UnisonoError that it raises is sent to all nodes.
"""


MakeRestartReport = Callable[[ChannelFacts, CheckpointIdentity | None], NodeReport]
"""Makes a node's report before a restart; a UnisonoError says why the node cannot continue."""


def restart_report_kind(round_: object) -> str:
    """The kind of the message with a node's report in one round before a restart."""
    return f"here_again_{round_}"


Result = TypeVar("Result")


class HeadSide(Protocol):
    """The part of the meeting at the head that a network trial uses."""

    party: Party
    server: HeadServer
    run_nonce: str

    @property
    def reports(self) -> list[NodeReport]:
        """The reports of all nodes, by node rank."""
        ...

    def broadcast(self, message: Mapping[str, object]) -> None:
        """Sends a message to all other nodes."""
        ...

    def run_in_background(self, work: Callable[[Show], Result]) -> Result:
        """The result of long work, done while the front listens to the nodes."""
        ...

    def gather(self, kind: str, *, timeout_s: float, what: str = "") -> dict[int, Mapping[str, object]]:
        """One message of a kind from every other node, by node rank."""
        ...


class NodeSide(Protocol):
    """The part of a member's connection that a network trial uses."""

    party: Party
    welcome: dict[str, object]

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message to the head."""
        ...

    def run_in_background(self, work: Callable[[Show], Result]) -> Result:
        """The result of long work, done while the front listens to the head."""
        ...

    def wait_for(self, *kinds: str) -> Mapping[str, object]:
        """The next message of one of these kinds."""
        ...


class BackgroundWork(Generic[Result]):
    """Work in a thread that starts at once.

    Its messages wait in `shown`, so that only the front's own thread displays them.

    The thread is a daemon: a front that exits does not wait for it, and a task that it started ends
    with the front.
    """

    def __init__(self, work: Callable[[Callable[[Message], None]], Result]) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outcome: list[Result] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(work,), name="background", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether `result` returns at once."""
        return not self._thread.is_alive()

    def shown(self) -> list[Message]:
        """The messages of the work since the last call."""
        messages = []
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def result(self) -> Result:
        """The result of the work; raises what the work raised."""
        self._thread.join()
        if self._error:
            raise self._error[0]
        return self._outcome[0]

    def _run(self, work: Callable[[Callable[[Message], None]], Result]) -> None:
        try:
            self._outcome.append(work(self._messages.put))
        except BaseException as error:  # noqa: BLE001
            # `result` raises it again, in the front's thread.
            self._error.append(error)


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
        from_stdin: the rest of stdin is the lifeline to whoever started this front; see
            `watch_lifeline`.
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
        from_environment: UNISONO_TOKEN, already removed from the environment
            (`facts.environment.take_token`).

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
    """Calls `on_close` when stdin closes: whoever started this front is gone, so the run ends,
    too.

    Args:
        on_close: called from a different thread; without one, this process gets SIGTERM, as from a
            scheduler.
    """
    source = stdin or sys.stdin.buffer

    def watch() -> None:
        try:
            # Not through the buffer: this thread would hold its lock forever, and Python aborts at
            # exit if it cannot take that lock.
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
            why=f"its mode is {stat.S_IMODE(mode):04o}; anyone who has the token controls this job",
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
