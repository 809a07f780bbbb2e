"""Whether Ray's head node still answers, and Ray's reports about lost nodes."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from unisono.agree.reports import plain_host
from unisono.causes import Evidence, Verdict, find_cause
from unisono.files import read_json
from unisono.text import one_line, plain

_REACH_S = 3.0
_EVERY_S = 1.0
_AGAIN_S = 0.3


def connect_error(address: str) -> str:
    """Why a connection to HOST:PORT fails; empty if it succeeds."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@dataclass
class RayHead:
    """Probes Ray's head node regularly, in a background thread.

    Attributes:
        address: HOST:PORT.
        host: its name, if Ray reports one.
    """

    address: str
    host: str = ""
    _clock: Callable[[], float] = time.monotonic
    _silent_since: float | None = None
    _why: str = ""
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "RayHead":
        threading.Thread(target=self._call, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @property
    def label(self) -> str:
        """The head as it appears in messages."""
        return f"Ray's head ({f'{plain(self.host)}, ' if self.host else ''}{plain(self.address)})"

    @property
    def silent_s(self) -> float:
        """Seconds since it last answered; 0 while it answers."""
        since = self._silent_since
        return 0.0 if since is None else self._clock() - since

    @property
    def why(self) -> str:
        """The error of the last probe; empty while it answers."""
        return self._why

    def probe(self) -> None:
        """Probes it once."""
        began = self._clock()
        self._why = connect_error(self.address)
        if not self._why:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = began

    def probe_for(self, limit_s: float) -> None:
        """Probes it until a probe fails, at most for `limit_s`."""
        began = self._clock()
        self.probe()
        while not self._why and self._clock() - began < limit_s:
            time.sleep(_AGAIN_S)
            self.probe()

    def _call(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.probe()


def ray_head_lost(head: RayHead, *, message: str = "", after_s: float | None = None) -> Verdict:
    """The verdict on a lost head of the Ray cluster.

    Args:
        message: Ray's message, if one of our processes ended with it.
        after_s: seconds from its silence to the verdict.
    """
    known = find_cause("node_unreachable")
    place = plain_host(head.host or head.address.rpartition(":")[0].strip("[]"))
    return Verdict(
        cause="node_unreachable",
        when="during",
        hosts=(place,),
        phase="ray",
        named_after_s=after_s,
        summary=f"{head.label} is lost: {head.why or 'it did not answer for too long'}; a Ray cluster ends its nodes a minute after its head",
        evidence=(
            Evidence(where=f"Ray cluster {plain(head.address)}", text=head.why or "it answers again"),
            *(
                [Evidence(where="Ray, on the machine of the command", text=one_line(message, limit=400))]
                if message
                else ()
            ),
        ),
        fix=(
            "restart the cluster (`ray start --head` there, then its nodes), and run the same command: it resumes from the latest checkpoint here",
            *(known.remedy[:1] if known else ()),
        ),
    )


_PATIENCE_S = 3.0
"""Ray reports an ended actor within a second, but a lost node only after about 15 s: a verdict does not wait for that."""
_POLL_S = 0.05


def loss_file(folder: str | Path, node_rank: int) -> str:
    """The path of Ray's report about a lost node."""
    return f"{folder}/lost-{node_rank}.json"


class RayLossFiles:
    """Reads Ray's reports about lost nodes, at the head; the `witness` of a TrainRequest."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads from a folder of the head's front."""
        self._folder = folder
        self._clock = clock

    def of_lost(self, node_rank: int) -> tuple[Verdict, float] | None:
        """Ray's verdict on a node and the seconds it took; None if none arrives in time."""
        began = self._clock()
        while True:
            found = _read(Path(loss_file(self._folder, node_rank)))
            waited_s = self._clock() - began
            if found is not None:
                return found, waited_s
            if waited_s > _PATIENCE_S:
                return None
            time.sleep(_POLL_S)


def _read(path: Path) -> Verdict | None:
    """The verdict in a file; None if the file is missing or incomplete."""
    try:
        return Verdict.from_json(read_json(path))
    except (FileNotFoundError, ValueError):
        return None
