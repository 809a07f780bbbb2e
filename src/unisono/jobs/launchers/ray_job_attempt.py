"""One attempt of a job on its nodes: the fronts, the mirrored directory, and the outcome.

Runs in the driver's process.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from unisono.base.causes import Verdict
from unisono.base.errors import UnfitError, storage_remedy
from unisono.base.events import Reporter
from unisono.base.files import objects_of
from unisono.base.messages import ResultMessage, StartRefusedMessage, VerdictMessage, read_message
from unisono.base.text import one_line
from unisono.base.user_key import user_key
from unisono.guard.control.protocol import new_token
from unisono.guard.facts import read_environment
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import read_result
from unisono.jobs.launchers.ray_cluster import head_endpoint
from unisono.jobs.launchers.ray_mirror import Mirror, MirrorThread
from unisono.jobs.launchers.ray_node_fronts import (
    ActorLost,
    JobNode,
    NodeFronts,
    RayHead,
    loss_file,
    lost_node_verdict,
    ray_head_lost,
    ray_label,
)
from unisono.jobs.launchers.ray_requests import RayJobRequest
from unisono.jobs.runs.train_request import config_yaml

_POLL_S = 0.3
_WITHOUT_HEAD_S = 15.0
_SILENT_S = 3.0
_WITHOUT_RAY_S = 20.0
"""Ray ends its nodes a minute after its head: by then the run must be saved and copied here."""
_RANK_FOLDERS = ("logs/", "events/")


class SignalSource(Protocol):
    """The signals that the user's command passes on."""

    signals: list[str]


@dataclass
class JobAttemptEnd:
    """How an attempt ended.

    Attributes:
        last: the head's final message, `result` or `start_refused`; None if there was none.
        lost: the verdict on the head's node, if that was lost.
        step: the last reported step.
        saved_step: the step of the latest checkpoint here.
    """

    last: ResultMessage | StartRefusedMessage | None = None
    lost: Verdict | None = None
    step: int = 0
    saved_step: int = 0
    seconds: float = 0.0


@dataclass
class JobAttempt:
    """An attempt on reserved nodes.

    Attributes:
        front: the signals of the user's command.
        nodes: by node rank.
    """

    reporter: Reporter
    request: RayJobRequest
    front: SignalSource
    nodes: list[JobNode]
    ray_head: RayHead
    _ended: JobAttemptEnd = field(default_factory=JobAttemptEnd)
    _planned: bool = False
    _lost_node: JobNode | None = None
    _missing_node: JobNode | None = None
    _ray_head_lost: Verdict | None = None
    _silence_shown: bool = False
    _ranks: list[dict[str, Any]] = field(default_factory=list)
    _pending_losses: dict[int, Verdict] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)
    _hosts_in_verdicts: set[str] = field(default_factory=set)
    _signals_sent: int = 0

    def run(self) -> JobAttemptEnd:
        """How the attempt ended, after starting the fronts, following them to their end and copying
        their files here.

        Raises:
            UnfitError: if files cannot be written here, or a node has no room for its folder.
        """
        began = time.monotonic()
        try:
            self._run()
        except ActorLost as error:
            self._lost_node = error.node or self.nodes[0]
            self._lost_node.lost = self._lost_node.lost or error.why
            if (
                self._ended.last is not None
                and self._ended.last["kind"] == "result"
                and not self._has_result()
            ):
                self._ended.last = None  # the files of that result did not arrive
        except OSError as error:
            raise UnfitError.of(
                f"the run's files cannot be written: {one_line(error.strerror or str(error), limit=400)}",
                where=str(error.filename or self.request.output_dir),
                why="the files of the head's node are copied to output_dir during the run",
                fix=f"{storage_remedy(error)}: it resumes from the latest checkpoint here",
            ) from error
        finally:
            self._leave()
        for node_rank in list(self._pending_losses):
            self._show_pending_loss(node_rank)
        head, ended = self.nodes[0], self._ended
        ended.seconds = time.monotonic() - began
        ended.saved_step = _newest_step(self._run_dir)
        if (
            self._ray_head_lost is not None
            and not self.front.signals
            and (ended.last is None or ended.last.get("exit_code") != 0)
        ):
            ended.last, ended.lost = None, self._ray_head_lost
        elif ended.last is None:
            lost = self._lost_node or head
            lost.lost = lost.lost or f"its front exited with exit code {lost.code}, without a message"
            ended.lost = lost_node_verdict(lost, self._ranks_on(lost))
        elif self._missing_node is not None and not self.front.signals and ended.last.get("exit_code") == 75:
            ended.last = _never_joined(
                self._missing_node
            )  # this driver ended the head, which waited for that node
        return ended

    def _has_result(self) -> bool:
        """Whether the result in the head's message is the one in the run's directory here."""
        last, result = self._ended.last, read_result(self._run_dir)
        return last is not None and result is not None and last.get("wall_time_s") == result.wall_time_s

    @property
    def _run_dir(self) -> RunDir:
        return RunDir(self.request.output_dir)

    def _run(self) -> None:
        mirrors = self._mirrors()
        self._start_fronts({node.node_rank: mirror.remote for node, mirror in mirrors})
        head_is_remote = not self.nodes[0].shares
        logs = self._run_dir.log("", 0).parent
        on_line = self._message_handler(mirrors[0][1] if head_is_remote else None)
        fronts = NodeFronts(self.nodes, logs if head_is_remote else None, on_line)
        with contextlib.ExitStack() as stack:
            following = [stack.enter_context(MirrorThread(mirror)) for _, mirror in mirrors]
            self._follow(fronts, following)
            fronts.wait_ended()
            # The head comes last: it has the result.
            for (node, _), one in reversed(list(zip(mirrors, following, strict=True))):
                self._finish(node, one)

    def _finish(self, node: JobNode, following: MirrorThread) -> None:
        """Copies the last changes of a node's files.

        Raises:
            ActorLost: if the head's node is gone; without a different node only its ranks' logs are
                missing.
        """
        is_head = node is self.nodes[0]
        if node.lost:
            if is_head:
                raise ActorLost(node.lost, node)
            return
        try:
            following.finish()
        except ActorLost as error:
            if is_head:
                raise
            node.lost = error.why

    def _mirrors(self) -> list[tuple[JobNode, Mirror]]:
        """Mirrors of nodes that do not share the run's directory: all of it for the head, the
        ranks' logs for the others.

        An existing run is sent to the node first, so that it can be resumed there.
        """
        mirrors = []
        job = (  # folders of an earlier attempt may still be in deletion
            f"{self.request.job}-{secrets.token_hex(4)}"
        )
        for node in self.nodes:
            folder = node.folder = str(node.call("make_place", job))
            if node.shares:
                continue
            only = _RANK_FOLDERS if node is not self.nodes[0] else ()
            mirror = Mirror(node, f"{folder}/{self.request.output_dir.name}", self._run_dir, only)
            if self._run_dir.plan.exists():
                self.reporter.send(
                    {"kind": "phase", "phase": "push", "text": f"sending the run to {node.label}"}
                )
                mirror.push()
            mirrors.append((node, mirror))
        return mirrors

    def _start_fronts(self, output_dirs: dict[int, str]) -> None:
        """Starts all fronts, the head first; nodes without the run's directory use a local one."""
        token = new_token().encode()
        key = user_key(read_environment().settings_dir).hex()
        head = head_endpoint(self.nodes)
        for node in self.nodes:
            output_dir = output_dirs.get(node.node_rank, self.request.config.output_dir)
            config = self.request.config.model_copy(update={"output_dir": output_dir})
            options: dict[str, object] = {**self.request.options, "nodes": "1"}
            if len(self.nodes) > 1:
                least = self.request.least
                count = str(len(self.nodes)) if least >= len(self.nodes) else f"{least}:{len(self.nodes)}"
                options |= {"nodes": count, "node_rank": node.node_rank, "head": head}
            text = config_yaml(config, command="unisono train, by --launcher ray")
            node.call("start", text, {"options": options}, token, key, self.request.variables)

    def _message_handler(self, mirror: Mirror | None) -> Callable[[str], None]:
        def handle(text: str) -> None:
            message = read_message(
                mirror.with_local_path(text.encode()).decode() if mirror is not None else text
            )
            if message is None:
                return
            match message["kind"]:
                case "result" | "start_refused":
                    self._ended.last = message
                    return
                case "front_ended":
                    return
                case "plan":
                    self._planned, self._ranks = True, objects_of(message.get("ranks"))
                case "verdict":
                    self._note_verdict(message)
                case "step":
                    self._ended.step = int(message["step"])
                case _:
                    pass
            self.reporter.send(message)

        return handle

    def _follow(self, fronts: NodeFronts, following: list[MirrorThread]) -> None:
        """Handles output, signals and losses until the head has ended."""
        head_is_remote = not self.nodes[0].shares
        missing_since: float | None = None
        while not fronts.head.ended:
            fronts.listen(_POLL_S)
            self._pass_on(fronts.head)
            self._report_losses()
            self._check_ray_head(fronts.head)
            head_is_silent = head_is_remote and following[0].error is not None
            if head_is_silent or any(isinstance(one.error, OSError) for one in following):
                return  # or the local disk failed; `finish` raises the error
            early = [node for node in fronts.nodes[1:] if node.lost or node.code not in (None, 0)]
            if len(self.nodes) - len(early) >= self.request.least or self._planned:
                continue
            missing_since = missing_since or time.monotonic()
            if (
                time.monotonic() - missing_since > _WITHOUT_HEAD_S
            ):  # otherwise the head would wait for it until its timeout
                self._note(f"{early[0].label} did not join: {'; '.join(early[0].tail[-2:]) or early[0].lost}")
                fronts.head.command("signal SIGTERM")
                self._missing_node = early[0]
                self._planned = True

    def _pass_on(self, head: JobNode) -> None:
        for name in self.front.signals[self._signals_sent :]:
            head.command(f"signal {name}")
            self._signals_sent += 1

    def _report_losses(self) -> None:
        """Passes Ray's message about a lost node to the head, whose verdict names the node.

        If it arrives after the verdict, it is shown as a warning.
        """
        for node in self.nodes[1:]:
            if not node.lost or node.node_rank in self._reported:
                continue
            self._reported.add(node.node_rank)
            verdict = lost_node_verdict(node)
            head = self.nodes[0]
            head.write_async(loss_file(head.folder, node.node_rank), json.dumps(verdict.to_json()))
            self._pending_losses[node.node_rank] = verdict
        for node_rank, verdict in list(self._pending_losses.items()):
            if self._hosts_in_verdicts.intersection(verdict.hosts):
                self._show_pending_loss(node_rank)

    def _check_ray_head(self, head: JobNode) -> None:
        """Has the run saved and ended if Ray's head is lost: the ranks continue only for a short
        time without it.
        """
        silent_s, rays = self.ray_head.silent_s, self.ray_head
        if silent_s < _SILENT_S:
            self._silence_shown = False
        elif not self._silence_shown:
            self._silence_shown = True
            self._note(
                f"{rays.label} does not answer: {rays.why}; if it is not back within {_WITHOUT_RAY_S:g} s,"
                " the run is saved and ends"
            )
        if silent_s > _WITHOUT_RAY_S and self._ray_head_lost is None:
            self._ray_head_lost = ray_head_lost(rays, after_s=silent_s)
            head.command("signal SIGTERM")

    def _note_verdict(self, message: VerdictMessage) -> None:
        """Records the hosts in the head's verdict; a loss that it already explains with Ray's
        message is not shown again.
        """
        where = {str(item["where"]) for item in message["evidence"]}
        for node in self.nodes:
            if ray_label(node) in where:
                self._reported.add(node.node_rank)
                self._pending_losses.pop(node.node_rank, None)
        self._hosts_in_verdicts.update(map(str, message["hosts"]))

    def _show_pending_loss(self, node_rank: int) -> None:
        verdict = self._pending_losses.pop(node_rank)
        text = f"{verdict.summary}: {verdict.evidence[0].text}"
        self.reporter.send(
            {"kind": "warning", "code": verdict.cause, "text": text, "fix": "; ".join(verdict.fix)}
        )

    def _ranks_on(self, node: JobNode) -> list[int]:
        """The ranks of a node in the last plan; none before the first plan."""
        return [int(rank["rank"]) for rank in self._ranks if rank["node_rank"] == node.node_rank]

    def _leave(self) -> None:
        for node in self.nodes:
            if not node.lost:
                try:
                    node.call("leave")
                except ActorLost as error:
                    node.lost = error.why

    def _note(self, text: str) -> None:
        self.reporter.send({"kind": "note", "text": text})


def _never_joined(node: JobNode) -> StartRefusedMessage:
    """The refusal of an attempt in which a node's front exited before it joined."""
    verdict = lost_node_verdict(node).model_copy(update={"cause": "node_missing_node", "when": "before"})
    problem = {
        "what": verdict.summary,
        "where": node.label,
        "why": "; ".join(node.tail[-2:]) or node.lost,
        "fix": "; ".join(verdict.fix),
    }
    return {"kind": "start_refused", "exit_code": 3, "verdict": verdict.to_json(), "problems": [problem]}


def _newest_step(run: RunDir) -> int:
    steps = [path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)
