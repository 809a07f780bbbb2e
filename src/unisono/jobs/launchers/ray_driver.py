"""The Ray driver of a job, or of `unisono doctor` on its nodes: `python -m
unisono.jobs.launchers.ray_driver driver|look REQUEST.json`, a child of the user's command.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.base.child import parse_child_arguments, run_child
from unisono.base.errors import UnfitError, UsageError
from unisono.base.events import Reporter
from unisono.base.messages import RefusedMessage, VerdictMessage, message_of, read_message
from unisono.base.user_key import user_key
from unisono.guard.control.protocol import new_token
from unisono.guard.facts import read_environment
from unisono.guard.facts.storage import leave_nonce, remove_nonce
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import Restart
from unisono.guard.supervise.codec import decode
from unisono.jobs.launchers.ray_cluster import (
    connected,
    find_ray_head,
    head_endpoint,
    identify_nodes,
    living_nodes,
    reserved,
    resources_for,
)
from unisono.jobs.launchers.ray_job_attempt import JobAttempt, JobAttemptEnd
from unisono.jobs.launchers.ray_node_fronts import (
    ActorLost,
    JobNode,
    NodeFronts,
    RayHead,
    lost_node_verdict,
    refuse_different_install,
)
from unisono.jobs.launchers.ray_requests import Inspection, InspectionRequest, JobOutcome, RayJobRequest

if TYPE_CHECKING:
    from unisono.base.causes import Verdict

_TOKEN_SIGN = b"InvalidAuthToken"


def drive(reporter: Reporter, body: dict[str, object]) -> JobOutcome:
    """The outcome of a job, run to its end: `last`, the head's last message (or None), and `lost`,
    the verdict on a lost head node.

    Raises:
        UnisonoError: if the job is refused before anything starts, or files cannot be copied here.
    """
    request = decode(RayJobRequest, body)
    front = _FrontInput()
    connecting = threading.Event()
    threading.Thread(target=refuse_wrong_token, args=(reporter, connecting), daemon=True).start()
    with connected(request.address):
        connecting.set()
        with find_ray_head() as head:
            reporter.send({"kind": "connected", "address": head.address, "host": head.host})
            return _Driver(reporter, request, front, head).run()


class _FrontInput:
    """The front's messages on stdin."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.go = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            message = read_message(line)
            if message is None:
                continue
            if message["kind"] == "signal":
                self.signals.append(str(message["name"]))
            elif message["kind"] == "go":
                self.go.set()


@dataclass
class _Driver:
    reporter: Reporter
    request: RayJobRequest
    front: _FrontInput
    ray_head: RayHead
    restarts: list[Restart] = field(default_factory=list)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.request.config.output_dir))

    def run(self) -> JobOutcome:
        """The outcome after all attempts: until one ends by itself or no restart is left."""
        lost: Verdict | None = None
        while True:
            try:
                attempt = self._start()
            except UnfitError as error:
                if lost is None:
                    raise
                self._note(f"cannot restart: {error}")
                return self._outcome(JobAttemptEnd(lost=lost))
            lost = attempt.lost
            if lost is not None:
                self.reporter.send(message_of(VerdictMessage, lost.to_json()))
            if lost is None or self.front.signals or len(self.restarts) >= self.request.config.restarts:
                return self._outcome(attempt)
            if self.ray_head.silent_s:
                self._note(f"cannot restart: {self.ray_head.label} does not answer")
                return self._outcome(attempt)
            restart = Restart(verdict=lost.to_json(), from_step=attempt.saved_step, seconds=attempt.seconds)
            self.restarts.append(restart)
            self.reporter.send({"kind": "restarting", "restart": restart.model_dump()})
            self._note(
                f"restarting on the remaining nodes ({len(self.restarts)} of {self.request.config.restarts})"
            )

    def _outcome(self, attempt: JobAttemptEnd) -> JobOutcome:
        lost = attempt.lost.to_json() if attempt.lost is not None else None
        return {
            "last": attempt.last,
            "lost": lost,
            "restarts": [one.model_dump() for one in self.restarts],
            "step": attempt.step,
        }

    def _start(self) -> JobAttemptEnd:
        resources = resources_for(self.request.nproc, self.request.config.device, living_nodes())
        unit = "node" if self.request.nodes == 1 else "nodes"
        self._note(f"requesting {self.request.nodes} {unit} from the Ray cluster: {resources}")
        with reserved(
            resources,
            nodes=self.request.nodes,
            least=self.request.least,
            timeout_s=self.request.join_timeout_s,
            note=self._note,
            stopped=lambda: bool(self.front.signals),
        ) as actors:
            nodes = identify_nodes(actors, cluster=self.request.address)
            refuse_different_install(nodes)
            self._detect_shared(nodes)
            # In each attempt: the head may run on a different node, which sees the directory
            # although the last one did not.
            self.front.go.clear()
            self.reporter.send(
                {"kind": "placed", "shared": nodes[0].shares, "hosts": [node.host for node in nodes]}
            )
            self.front.go.wait()
            return JobAttempt(self.reporter, self.request, self.front, nodes, self.ray_head).run()

    def _detect_shared(self, nodes: list[JobNode]) -> None:
        """Detects which nodes share the run's directory, by a temporary file in it."""
        nonce = leave_nonce(self.run_dir.root)
        try:
            for node in nodes:
                try:
                    node.shares = bool(node.call("sees", str(self.run_dir.root / nonce)))
                except ActorLost as error:
                    raise UnfitError.of(
                        f"{node.label} was lost before anything was started",
                        where=node.address,
                        why=error.why,
                        fix="run the same command again; `ray status` shows the state of that node",
                    ) from error
        finally:
            remove_nonce(self.run_dir.root, nonce)

    def _note(self, text: str) -> None:
        self.reporter.send({"kind": "note", "text": text})


def refuse_wrong_token(reporter: Reporter, connected_: threading.Event) -> None:
    """Ends this process if the cluster rejects its token: Ray retries for 20 s and then only
    reports a failed connection; the reason is in its stderr.
    """
    read = 0
    while not connected_.wait(0.2):
        text = os.pread(sys.stderr.fileno(), 1 << 16, read)
        read += max(0, len(text) - len(_TOKEN_SIGN))
        if _TOKEN_SIGN in text:
            error = UsageError.of(
                "the Ray cluster refuses this driver: its token is missing or different",
                where="RAY_AUTH_TOKEN, RAY_AUTH_MODE",
                why="Ray reports InvalidAuthToken: the cluster was started with RAY_AUTH_MODE=token",
                fix=(
                    "export RAY_AUTH_MODE=token and the cluster's RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH),"
                    " here and on its nodes"
                ),
            )
            reporter.send(message_of(RefusedMessage, error.to_json()))
            os._exit(error.exit_code)


_POLL_S = 0.3


def inspect_nodes(reporter: Reporter, body: dict[str, object]) -> Inspection:
    """The result of `unisono doctor` on the nodes.

    Raises:
        UnisonoError: if the cluster cannot provide the nodes, their installation differs, or one is
            lost.
    """
    request = decode(InspectionRequest, body)
    connecting = threading.Event()
    threading.Thread(target=refuse_wrong_token, args=(reporter, connecting), daemon=True).start()

    def note(text: str) -> None:
        reporter.send({"kind": "note", "text": text})

    with connected(request.address):
        connecting.set()
        resources = resources_for(request.nproc, request.device, living_nodes())
        with reserved(
            resources,
            nodes=request.nodes,
            least=request.least,
            timeout_s=request.join_timeout_s,
            note=note,
            stopped=lambda: False,
        ) as actors:
            nodes = identify_nodes(actors, cluster=request.address)
            refuse_different_install(nodes)
            note(f"placed by Ray: {', '.join(node.label for node in nodes)}")
            with _folders_removed(nodes):
                try:
                    _start(request, nodes)
                    return _collect_output(nodes)
                except ActorLost as error:
                    node = error.node or nodes[0]
                    node.lost = node.lost or error.why
                    raise _node_lost(node) from error


def _start(request: InspectionRequest, nodes: list[JobNode]) -> None:
    token = new_token().encode()
    key = user_key(read_environment().settings_dir).hex()
    head = head_endpoint(nodes)
    for node in nodes:
        node.folder = str(node.call("make_place", request.job))
        place_options = ["--nodes", str(len(nodes)), "--node-rank", str(node.node_rank), "--head", head]
        words = [*request.words, "--token-file", "-", *(place_options if len(nodes) > 1 else [])]
        node.call("start", request.config or "", {"look": words}, token, key, request.variables)


def _collect_output(nodes: list[JobNode]) -> Inspection:
    """The output of node 0, read to its end. The other nodes end with it."""
    lines: list[str] = []
    fronts = NodeFronts(nodes, None, lines.append)
    head = nodes[0]
    while not head.ended:
        fronts.listen(_POLL_S)
        lost = next((node for node in nodes if node.lost), None)
        if lost is not None:
            raise _node_lost(lost)
    fronts.wait_ended()
    assert head.code is not None
    return {"lines": lines, "code": head.code, "said": head.tail, "hosts": [node.host for node in nodes]}


@contextlib.contextmanager
def _folders_removed(nodes: list[JobNode]) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            with contextlib.suppress(
                ActorLost
            ):  # its process guard removes the folder, or the next job there does
                node.call("leave")


def _node_lost(node: JobNode) -> UnfitError:
    verdict = lost_node_verdict(node)
    return UnfitError.of(verdict.summary, where=node.address, why=node.lost, fix=verdict.fix[0])


if __name__ == "__main__":
    arguments = parse_child_arguments(sys.argv[1:], named=True)
    body = json.loads(arguments.file.read_text(encoding="utf-8"))
    work = {"driver": drive, "look": inspect_nodes}[arguments.name]
    sys.exit(run_child(lambda reporter: work(reporter, body), arguments))
