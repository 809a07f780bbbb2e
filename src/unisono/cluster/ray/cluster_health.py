"""Whether Ray's own head still answers, and what Ray reports of lost nodes."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from unisono.agree.display import plain_host
from unisono.causes import Evidence, Verdict, find_cause
from unisono.files import read_json
from unisono.text import one_line, plain

_REACH_S = 3.0
_EVERY_S = 1.0
_AGAIN_S = 0.3


def connect_error(address: str) -> str:
    """Why nobody takes up a call at HOST:PORT; empty where somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


@dataclass
class RayHead:
    """Calls Ray's head now and then, in a thread of its own.

    Attributes:
        address: HOST:PORT.
        host: its name, where Ray has told it.
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
        """How it is written."""
        return f"Ray's head ({f'{plain(self.host)}, ' if self.host else ''}{plain(self.address)})"

    @property
    def silent_s(self) -> float:
        """For how long it has not answered; 0 while it does."""
        since = self._silent_since
        return 0.0 if since is None else self._clock() - since

    @property
    def why(self) -> str:
        """What calling it came to last; empty while it answers."""
        return self._why

    def look(self) -> None:
        """Calls it once."""
        began = self._clock()
        self._why = connect_error(self.address)
        if not self._why:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = began

    def look_for(self, limit_s: float) -> None:
        """Calls it until it does not answer, or for so long."""
        began = self._clock()
        self.look()
        while not self._why and self._clock() - began < limit_s:
            time.sleep(_AGAIN_S)
            self.look()

    def _call(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.look()


def ray_head_lost(head: RayHead, *, words: str = "", after_s: float | None = None) -> Verdict:
    """The verdict where it is gone.

    Args:
        head: that was called.
        words: Ray's own, where a process of ours has ended with them.
        after_s: seconds from its silence to the word on it.
    """
    known = find_cause("node_unreachable")
    place = plain_host(head.host or head.address.rpartition(":")[0].strip("[]"))
    return Verdict(
        cause="node_unreachable",
        when="during",
        hosts=(place,),
        phase="ray",
        named_after_s=after_s,
        summary=f"{head.label} is lost: {head.why or 'it was silent for too long'}; a Ray cluster ends its nodes a minute after its head",
        evidence=(
            Evidence(where=f"Ray cluster {plain(head.address)}", text=head.why or "it answers again"),
            *(
                [Evidence(where="Ray, where the command was typed", text=one_line(words, limit=400))]
                if words
                else ()
            ),
        ),
        fix=(
            "start the cluster again (`ray start --head` there, then its nodes), and type the same command: it goes on from the newest checkpoint that is here",
            *(known.remedy[:1] if known else ()),
        ),
    )


_PATIENCE_S = 3.0
"""Ray tells of an actor that it has ended within a second; of a node that is gone only after a quarter of a minute, for which a verdict does not wait."""
_POLL_S = 0.05


def loss_file(folder: str | Path, node_rank: int) -> str:
    """Where it lies."""
    return f"{folder}/lost-{node_rank}.json"


class RayLossFiles:
    """The head's side of it; a launch.train_request."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Looks into a folder of the head's front."""
        self._folder = folder
        self._clock = clock

    def of_lost(self, node_rank: int) -> tuple[Verdict, float] | None:
        """What Ray says of a node, waited for a bounded time, and how long that was."""
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
    """A file that is not there, or not whole yet, is none."""
    try:
        return Verdict.from_json(read_json(path))
    except (FileNotFoundError, ValueError):
        return None
