"""`python -m unisono.launch.ray driver REQUEST.json`: the driver of a job on Ray, a child of the front that was typed.

It is a process of its own since Ray ends whoever is connected to it as it sees fit. It connects, asks for places, starts the fronts on them,
brings the run's directory here, and starts again where the head's node is lost. What the head says goes to the front, word for
word; from the front come `go` (once the directory is free, where all see it) and `signal`.
"""

import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UnfitError, UsageError
from unisono.events import Reporter, read_message
from unisono.facts.storage import leave_nonce, remove_nonce
from unisono.launch.ray.alike import refuse_unlike
from unisono.launch.ray.asked import RayAsked
from unisono.launch.ray.cluster import connected, living_nodes, placed, rays_head
from unisono.launch.ray.fronts import KeeperLost, Place
from unisono.launch.ray.places import met, wanted_of
from unisono.launch.ray.rays_head import RaysHead
from unisono.launch.ray.running import Ended, Running
from unisono.rundir import RunDir

if TYPE_CHECKING:
    from unisono.causes import Verdict

_TOKEN_SIGN = b"InvalidAuthToken"


def drive(reporter: Reporter, body: dict[str, Any]) -> dict[str, Any]:
    """Carries the job to its end; gives `result` (or None) and `lost`, the verdict on node 0's node.

    Raises:
        UnisonoError: if it is refused before anything was started, or files cannot be brought here.
    """
    asked = RayAsked.from_json(body)
    front = _FromFront()
    connecting = threading.Event()
    threading.Thread(target=watch_for_token, args=(reporter, connecting), daemon=True).start()
    with connected(asked.address):
        connecting.set()
        with rays_head() as head:
            reporter.send("connected", address=head.address, host=head.host)
            return _Driver(reporter, asked, front, head).run()


class _FromFront:
    """What the front says on stdin."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.go = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            message = read_message(line) or {"kind": ""}
            if message["kind"] == "signal":
                self.signals.append(str(message["name"]))
            elif message["kind"] == "go":
                self.go.set()


@dataclass
class _Driver:
    reporter: Reporter
    asked: RayAsked
    front: _FromFront
    rays_head: RaysHead
    restarts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.asked.config.output_dir))

    def run(self) -> dict[str, Any]:
        """One start after the other, until one ends by itself or no other is allowed."""
        lost: Verdict | None = None
        while True:
            try:
                start = self._start()
            except UnfitError as error:
                if lost is None:
                    raise
                self._note(f"it cannot start again: {error}")
                return self._told(Ended(lost=lost))
            lost = start.lost
            if lost is not None:
                self.reporter.send("verdict", **lost.to_json())
            if lost is None or self.front.signals or len(self.restarts) >= self.asked.config.restarts:
                return self._told(start)
            if self.rays_head.silent_s:
                self._note(f"it cannot start again: {self.rays_head.label} does not answer")
                return self._told(start)
            self.restarts.append(
                {"verdict": lost.to_json(), "from_step": start.saved_step, "seconds": start.seconds}
            )
            self.reporter.send("restarting", restart=self.restarts[-1])
            self._note(
                f"starting again on the nodes that are left ({len(self.restarts)} of {self.asked.config.restarts})"
            )

    def _told(self, start: Ended) -> dict[str, Any]:
        lost = start.lost.to_json() if start.lost is not None else None
        return {"last": start.last, "lost": lost, "restarts": self.restarts, "step": start.step}

    def _start(self) -> Ended:
        wanted = wanted_of(self.asked.nproc, self.asked.config.device, living_nodes())
        several = "node" if self.asked.nodes == 1 else "nodes"
        self._note(f"asking the Ray cluster for {self.asked.nodes} {several}: {wanted}")
        with placed(
            wanted, nodes=self.asked.nodes, least=self.asked.least, timeout_s=self.asked.join_timeout_s, note=self._note,
            stopped=lambda: bool(self.front.signals),
        ) as actors:  # fmt: skip
            places = met(actors, cluster=self.asked.address)
            refuse_unlike(places)
            self._see_who_shares(places)
            # Each start: the head's node may be another one, which sees the directory where the last did not.
            self.front.go.clear()
            self.reporter.send("placed", shared=places[0].shares, hosts=[place.host for place in places])
            self.front.go.wait()
            return Running(self.reporter, self.asked, self.front, places, self.rays_head).run()

    def _see_who_shares(self, places: list[Place]) -> None:
        """Which nodes have the run's directory themselves, by a file that is left in it for a moment."""
        nonce = leave_nonce(self.run_dir.root)
        try:
            for place in places:
                try:
                    place.shares = bool(place.call("sees", str(self.run_dir.root / nonce)))
                except KeeperLost as error:
                    raise UnfitError.of(
                        f"{place.label} was lost before anything was started", where=place.address, why=error.why,
                        fix="the same command again; `ray status` says what became of that node",
                    ) from error  # fmt: skip
        finally:
            remove_nonce(self.run_dir.root, nonce)

    def _note(self, text: str) -> None:
        self.reporter.send("note", text=text)


def watch_for_token(reporter: Reporter, connected_: threading.Event) -> None:
    """Ends this process where the cluster wants another token. Ray asks again for twenty seconds, and then says that it could not connect. What it writes on stderr meanwhile tells why."""
    read = 0
    while not connected_.wait(0.2):
        text = os.pread(sys.stderr.fileno(), 1 << 16, read)
        read += max(0, len(text) - len(_TOKEN_SIGN))
        if _TOKEN_SIGN in text:
            error = UsageError.of(
                "the Ray cluster refuses this driver: its token is missing here, or another one", where="RAY_AUTH_TOKEN, RAY_AUTH_MODE",
                why="Ray says InvalidAuthToken: the cluster was started with RAY_AUTH_MODE=token",
                fix="export RAY_AUTH_MODE=token and the cluster's own RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH), here as on its nodes",
            )  # fmt: skip
            reporter.send("refused", **error.to_json())
            os._exit(error.exit_code)
