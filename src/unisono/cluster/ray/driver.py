"""The driver of a job on Ray, or of a look (`unisono doctor`): `python -m unisono.cluster.ray driver REQUEST.json`, a child of the front that was typed."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.manifest import user_key
from unisono.cluster.ray.cluster_health import RayHead
from unisono.cluster.ray.job_attempt import AttemptEnd, JobAttempt, RayJobRequest
from unisono.cluster.ray.node_fronts import (
    ActorLost,
    JobNode,
    NodeFronts,
    lost_node_verdict,
    refuse_different_install,
)
from unisono.cluster.ray.ray_cluster import (
    connected,
    find_ray_head,
    head_endpoint,
    identify_nodes,
    living_nodes,
    reserved,
    resources_for,
)
from unisono.control.protocol import new_token
from unisono.errors import UnfitError, UsageError
from unisono.events import Reporter, read_message
from unisono.facts import read_environment
from unisono.facts.storage import leave_nonce, remove_nonce
from unisono.rundir import RunDir

if TYPE_CHECKING:
    from unisono.causes import Verdict


_TOKEN_SIGN = b"InvalidAuthToken"


def drive(reporter: Reporter, body: dict[str, Any]) -> dict[str, Any]:
    """Carries the job to its end; gives `result` (or None) and `lost`, the verdict on node 0's node.

    Raises:
        UnisonoError: if it is refused before anything was started, or files cannot be brought here.
    """
    asked = RayJobRequest.from_json(body)
    front = _FrontInput()
    connecting = threading.Event()
    threading.Thread(target=refuse_wrong_token, args=(reporter, connecting), daemon=True).start()
    with connected(asked.address):
        connecting.set()
        with find_ray_head() as head:
            reporter.send("connected", address=head.address, host=head.host)
            return _Driver(reporter, asked, front, head).run()


class _FrontInput:
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
    asked: RayJobRequest
    front: _FrontInput
    ray_head: RayHead
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
                return self._told(AttemptEnd(lost=lost))
            lost = start.lost
            if lost is not None:
                self.reporter.send("verdict", **lost.to_json())
            if lost is None or self.front.signals or len(self.restarts) >= self.asked.config.restarts:
                return self._told(start)
            if self.ray_head.silent_s:
                self._note(f"it cannot start again: {self.ray_head.label} does not answer")
                return self._told(start)
            self.restarts.append(
                {"verdict": lost.to_json(), "from_step": start.saved_step, "seconds": start.seconds}
            )
            self.reporter.send("restarting", restart=self.restarts[-1])
            self._note(
                f"starting again on the nodes that are left ({len(self.restarts)} of {self.asked.config.restarts})"
            )

    def _told(self, start: AttemptEnd) -> dict[str, Any]:
        lost = start.lost.to_json() if start.lost is not None else None
        return {"last": start.last, "lost": lost, "restarts": self.restarts, "step": start.step}

    def _start(self) -> AttemptEnd:
        wanted = resources_for(self.asked.nproc, self.asked.config.device, living_nodes())
        several = "node" if self.asked.nodes == 1 else "nodes"
        self._note(f"asking the Ray cluster for {self.asked.nodes} {several}: {wanted}")
        with reserved(
            wanted,
            nodes=self.asked.nodes,
            least=self.asked.least,
            timeout_s=self.asked.join_timeout_s,
            note=self._note,
            stopped=lambda: bool(self.front.signals),
        ) as actors:
            places = identify_nodes(actors, cluster=self.asked.address)
            refuse_different_install(places)
            self._see_who_shares(places)
            # Each start: the head's node may be another one, which sees the directory where the last did not.
            self.front.go.clear()
            self.reporter.send("placed", shared=places[0].shares, hosts=[place.host for place in places])
            self.front.go.wait()
            return JobAttempt(self.reporter, self.asked, self.front, places, self.ray_head).run()

    def _see_who_shares(self, places: list[JobNode]) -> None:
        """Which nodes have the run's directory themselves, by a file that is left in it for a moment."""
        nonce = leave_nonce(self.run_dir.root)
        try:
            for place in places:
                try:
                    place.shares = bool(place.call("sees", str(self.run_dir.root / nonce)))
                except ActorLost as error:
                    raise UnfitError.of(
                        f"{place.label} was lost before anything was started",
                        where=place.address,
                        why=error.why,
                        fix="the same command again; `ray status` says what became of that node",
                    ) from error
        finally:
            remove_nonce(self.run_dir.root, nonce)

    def _note(self, text: str) -> None:
        self.reporter.send("note", text=text)


def refuse_wrong_token(reporter: Reporter, connected_: threading.Event) -> None:
    """Ends this process where the cluster wants another token. Ray asks again for twenty seconds, and then says that it could not connect. What it writes on stderr meanwhile tells why."""
    read = 0
    while not connected_.wait(0.2):
        text = os.pread(sys.stderr.fileno(), 1 << 16, read)
        read += max(0, len(text) - len(_TOKEN_SIGN))
        if _TOKEN_SIGN in text:
            error = UsageError.of(
                "the Ray cluster refuses this driver: its token is missing here, or another one",
                where="RAY_AUTH_TOKEN, RAY_AUTH_MODE",
                why="Ray says InvalidAuthToken: the cluster was started with RAY_AUTH_MODE=token",
                fix="export RAY_AUTH_MODE=token and the cluster's own RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH), here as on its nodes",
            )
            reporter.send("refused", **error.to_json())
            os._exit(error.exit_code)


_POLL_S = 0.3


@dataclass(frozen=True)
class InspectionRequest:
    """What the front asks for.

    Attributes:
        job: a name that no other has, for folders on the nodes.
        address: of the cluster.
        config: its text; None: there is none.
        device: as the config has it.
        words: of `unisono doctor`, without its place; null where the config stands.
        nodes: at the most.
        least: as few will do.
        nproc: ranks on each.
        join_timeout_s: how long to wait for room.
        variables: of the environment, for all nodes.
    """

    job: str
    address: str
    config: str | None
    device: str
    words: list[str | None]
    nodes: int
    least: int
    nproc: int
    join_timeout_s: float
    variables: dict[str, str]


def inspect_nodes(reporter: Reporter, body: dict[str, Any]) -> dict[str, Any]:
    """Has the nodes look; gives `lines` (what node 0 printed), `code` (its exit code), `said` (the last on its stderr) and `hosts`.

    Raises:
        UnisonoError: if the cluster cannot give the nodes, they are unlike this machine, or one is lost.
    """
    asked = InspectionRequest(**body)
    connecting = threading.Event()
    threading.Thread(target=refuse_wrong_token, args=(reporter, connecting), daemon=True).start()

    def note(text: str) -> None:
        reporter.send("note", text=text)

    with connected(asked.address):
        connecting.set()
        wanted = resources_for(asked.nproc, asked.device, living_nodes())
        with reserved(
            wanted,
            nodes=asked.nodes,
            least=asked.least,
            timeout_s=asked.join_timeout_s,
            note=note,
            stopped=lambda: False,
        ) as actors:
            places = identify_nodes(actors, cluster=asked.address)
            refuse_different_install(places)
            note(f"placed by Ray: {', '.join(place.label for place in places)}")
            with _folders_removed(places):
                try:
                    _start(asked, places)
                    return _collect_output(places)
                except ActorLost as error:
                    place = error.place or places[0]
                    place.lost = place.lost or error.why
                    raise _lost(place) from error


def _start(asked: InspectionRequest, places: list[JobNode]) -> None:
    token = new_token().encode()
    key = user_key(read_environment().settings_dir).hex()
    head = head_endpoint(places)
    for place in places:
        place.folder = str(place.call("make_place", asked.job))
        several = ["--nodes", str(len(places)), "--node-rank", str(place.node_rank), "--head", head]
        words = [*asked.words, "--token-file", "-", *(several if len(places) > 1 else [])]
        place.call("start", asked.config or "", {"look": words}, token, key, asked.variables)


def _collect_output(places: list[JobNode]) -> dict[str, Any]:
    """Hears node 0 to its end. The others end with it."""
    lines: list[str] = []
    fronts = NodeFronts(places, None, lines.append)
    head = places[0]
    while not head.ended:
        fronts.listen(_POLL_S)
        lost = next((place for place in places if place.lost), None)
        if lost is not None:
            raise _lost(lost)
    fronts.wait_gone()
    return {"lines": lines, "code": head.code, "said": head.tail, "hosts": [place.host for place in places]}


@contextlib.contextmanager
def _folders_removed(places: list[JobNode]) -> Iterator[None]:
    try:
        yield
    finally:
        for place in places:
            with contextlib.suppress(
                ActorLost
            ):  # its folder goes with its warden, or when the next job comes there
                place.call("leave")


def _lost(place: JobNode) -> UnfitError:
    verdict = lost_node_verdict(place)
    return UnfitError.of(verdict.summary, where=place.address, why=place.lost, fix=verdict.fix[0])
