"""One start of a job on its places: fronts, the directory that follows, and how it ended. In the driver's process."""

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unisono.causes import Verdict
from unisono.checkpoint.manifest import user_key
from unisono.cluster.ray.cluster_health import RayHead, loss_file, ray_head_lost
from unisono.cluster.ray.mirror import Mirror, MirrorThread
from unisono.cluster.ray.node_fronts import ActorLost, JobNode, NodeFronts, lost_node_verdict, ray_label
from unisono.cluster.ray.ray_cluster import head_endpoint
from unisono.config import RunConfig
from unisono.control.protocol import new_token
from unisono.errors import UnfitError
from unisono.events import Message, Reporter, read_message
from unisono.facts import read_environment
from unisono.launch.train_request import config_yaml
from unisono.rundir import RunDir
from unisono.rundir.records import read_result
from unisono.text import one_line


@dataclass
class RayJobRequest:
    """What the front asks for.

    Attributes:
        job: a name that no other has, for folders on the nodes.
        address: of the cluster.
        config: the resolved config.
        options: for the TrainRequest of each node.
        nodes: at the most.
        least: as few will do.
        nproc: ranks on each.
        join_timeout_s: how long to wait for room, and nodes for each other.
        variables: of the environment, for all nodes.
    """

    job: str
    address: str
    config: RunConfig
    options: dict[str, Any]
    nodes: int
    least: int
    nproc: int
    join_timeout_s: float
    variables: dict[str, str]

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "RayJobRequest":
        """Reads what the front wrote."""
        return cls(**{**body, "config": RunConfig.model_validate(body["config"])})

    @property
    def output_dir(self) -> Path:
        """The run's directory here."""
        return Path(self.config.output_dir)


_POLL_S = 0.3
_WITHOUT_HEAD_S = 15.0
_SILENT_S = 3.0
_WITHOUT_RAY_S = 20.0
"""A minute after its head Ray ends its nodes: until then what was trained is to be saved, and here."""
_OF_RANKS = ("logs/", "events/")
_LAST_WORDS = ("result", "start_refused")


class SignalSource(Protocol):
    """What the front that was typed passes on."""

    signals: list[str]


@dataclass
class AttemptEnd:
    """How a start ended.

    Attributes:
        last: the head's last word: `result`, or `start_refused`; None where there was none.
        lost: the verdict on the head's node, where that is gone.
        step: the last one that was told.
        saved_step: of the newest checkpoint that is here.
        seconds: how long the fronts ran.
    """

    last: Message | None = None
    lost: Verdict | None = None
    step: int = 0
    saved_step: int = 0
    seconds: float = 0.0


@dataclass
class JobAttempt:
    """A start on places that were given.

    Attributes:
        reporter: to the front that was typed.
        asked: what it asks for.
        wishes: signals that it got.
        places: by node rank.
        ray_head: by which the cluster stands.
    """

    reporter: Reporter
    asked: RayJobRequest
    wishes: SignalSource
    places: list[JobNode]
    ray_head: RayHead
    _ended: AttemptEnd = field(default_factory=AttemptEnd)
    _planned: bool = False
    _gone: JobNode | None = None
    _missing: JobNode | None = None
    _headless: Verdict | None = None
    _silence_told: bool = False
    _plan: Message = field(default_factory=dict)
    _unsaid: dict[int, Verdict] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)
    _named: set[str] = field(default_factory=set)
    _passed: int = 0

    def run(self) -> AttemptEnd:
        """Starts the fronts, hears them to their end, and brings here what they made.

        Raises:
            UnfitError: if that cannot be written here, or a node has no room for its folder.
        """
        began = time.monotonic()
        try:
            self._run()
        except ActorLost as error:
            self._gone = error.place or self.places[0]
            self._gone.lost = self._gone.lost or error.why
            if (self._ended.last or {}).get("kind") == "result" and not self._result_is_here():
                self._ended.last = None  # what it told of did not come
        except OSError as error:
            raise UnfitError.of(
                f"the run's files cannot be kept: {one_line(error.strerror or str(error), limit=400)}",
                where=str(error.filename or self.asked.output_dir),
                why="what the head's node writes is copied to output_dir while it runs",
                fix="make room there, and start the same command again: it goes on from the newest checkpoint that is here",
            ) from error
        finally:
            self._leave()
        for node_rank in list(self._unsaid):
            self._say_unsaid(node_rank)
        head, ended = self.places[0], self._ended
        ended.seconds = time.monotonic() - began
        ended.saved_step = _newest_step(self._run_dir)
        if (
            self._headless is not None
            and not self.wishes.signals
            and (ended.last or {}).get("exit_code") != 0
        ):
            ended.last, ended.lost = None, self._headless
        elif ended.last is None:
            gone = self._gone or head
            gone.lost = gone.lost or f"its front ended with exit code {gone.code}, without a word"
            ended.lost = lost_node_verdict(gone, self._ranks_on(gone))
        elif self._missing is not None and not self.wishes.signals and ended.last.get("exit_code") == 75:
            ended.last = _never_joined(
                self._missing
            )  # it was this driver that ended the head, which waited for that node
        return ended

    def _result_is_here(self) -> bool:
        """Whether the result that the head told of is the one in the run's directory here."""
        told = (self._ended.last or {}).get("wall_time_s")
        found = read_result(self._run_dir)
        return found is not None and found.wall_time_s == told

    @property
    def _run_dir(self) -> RunDir:
        return RunDir(self.asked.output_dir)

    def _run(self) -> None:
        mirrors = self._mirrors()
        self._start_fronts({place.node_rank: mirror.there for place, mirror in mirrors})
        head_is_far = not self.places[0].shares
        logs = self._run_dir.log("", 0).parent
        hear = self._hearing(mirrors[0][1] if head_is_far else None)
        fronts = NodeFronts(self.places, logs if head_is_far else None, hear)
        with contextlib.ExitStack() as stack:
            following = [stack.enter_context(MirrorThread(mirror)) for _, mirror in mirrors]
            self._follow(fronts, following)
            fronts.wait_gone()
            # The head's, with its last word, last.
            for (place, _), one in reversed(list(zip(mirrors, following, strict=True))):
                self._finish(place, one)

    def _finish(self, place: JobNode, following: MirrorThread) -> None:
        """Brings the last of a node's files.

        Raises:
            KeeperLost: if it was the head's node, and it is gone; of another one only the logs of its ranks stay away.
        """
        is_head = place is self.places[0]
        if place.lost:
            if is_head:
                raise ActorLost(place.lost, place)
            return
        try:
            following.finish()
        except ActorLost as error:
            if is_head:
                raise
            place.lost = error.why

    def _mirrors(self) -> list[tuple[JobNode, Mirror]]:
        """For the head, if it does not have the run's directory itself, all of it; for the others the logs of their ranks.

        What is here already is sent there first, so that it is gone on with.
        """
        found = []
        job = (
            f"{self.asked.job}-{secrets.token_hex(4)}"  # what an earlier start has left may be going only now
        )
        for place in self.places:
            folder = place.folder = str(place.call("make_place", job))
            if place.shares:
                continue
            only = _OF_RANKS if place is not self.places[0] else ()
            mirror = Mirror(place, f"{folder}/{self.asked.output_dir.name}", self._run_dir, only)
            if self._run_dir.plan.exists():
                self.reporter.send("phase", phase="push", text=f"sending the run to {place.label}")
                mirror.push()
            found.append((place, mirror))
        return found

    def _start_fronts(self, output_dirs: dict[int, str]) -> None:
        """Starts all, the head first; those that do not see the run's directory with another one."""
        token = new_token().encode()
        key = user_key(read_environment().settings_dir).hex()
        head = head_endpoint(self.places)
        for place in self.places:
            output_dir = output_dirs.get(place.node_rank, self.asked.config.output_dir)
            config = self.asked.config.model_copy(update={"output_dir": output_dir})
            options: dict[str, Any] = {**self.asked.options, "nodes": "1"}
            if len(self.places) > 1:
                least = self.asked.least
                nodes = str(len(self.places)) if least >= len(self.places) else f"{least}:{len(self.places)}"
                options |= {"nodes": nodes, "node_rank": place.node_rank, "head": head}
            text = config_yaml(config, command="unisono train, by --launcher ray")
            place.call("start", text, {"asked": options}, token, key, self.asked.variables)

    def _hearing(self, mirror: Mirror | None) -> Callable[[str], None]:
        def hear(text: str) -> None:
            message = read_message(mirror.named_here(text.encode()).decode() if mirror is not None else text)
            if message is None or message["kind"] == "front_ended":
                return
            kind = message["kind"]
            if kind in _LAST_WORDS:
                self._ended.last = message
                return
            if kind == "plan":
                self._planned, self._plan = True, message
            if kind == "verdict":
                self._note_named(message)
            if kind == "step":
                self._ended.step = int(message["step"])
            self.reporter.send(**{name: value for name, value in message.items() if name != "time"})

        return hear

    def _follow(self, fronts: NodeFronts, following: list[MirrorThread]) -> None:
        """Until the head has ended."""
        head_is_far = not self.places[0].shares
        missing_since: float | None = None
        while not fronts.head.ended:
            fronts.listen(_POLL_S)
            self._pass_on(fronts.head)
            self._tell_who_is_lost()
            self._see_ray_head(fronts.head)
            head_is_silent = head_is_far and following[0].trouble is not None
            if head_is_silent or any(isinstance(one.trouble, OSError) for one in following):
                return  # or the disk here; `finish` raises it
            early = [place for place in fronts.places[1:] if place.lost or place.code not in (None, 0)]
            if len(self.places) - len(early) >= self.asked.least or self._planned:
                continue
            missing_since = missing_since or time.monotonic()
            if (
                time.monotonic() - missing_since > _WITHOUT_HEAD_S
            ):  # else the head would wait for it until its time is over
                self._note(f"{early[0].label} is not here: {'; '.join(early[0].tail[-2:]) or early[0].lost}")
                fronts.head.ask("signal SIGTERM")
                self._missing = early[0]
                self._planned = True

    def _pass_on(self, head: JobNode) -> None:
        for name in self.wishes.signals[self._passed :]:
            head.ask(f"signal {name}")
            self._passed += 1

    def _tell_who_is_lost(self) -> None:
        """The head names the node that is gone; what Ray says of it may be why, so the head is told. Where Ray says it later, it is a warning."""
        for place in self.places[1:]:
            if not place.lost or place.node_rank in self._told:
                continue
            self._told.add(place.node_rank)
            verdict = lost_node_verdict(place)
            head = self.places[0]
            head.leave_word(loss_file(head.folder, place.node_rank), json.dumps(verdict.to_json()))
            self._unsaid[place.node_rank] = verdict
        for node_rank, verdict in list(self._unsaid.items()):
            if self._named.intersection(verdict.hosts):
                self._say_unsaid(node_rank)

    def _see_ray_head(self, head: JobNode) -> None:
        """Without Ray's head the ranks can go on for a while, but not for long: they are asked to save and to end."""
        silent_s, rays = self.ray_head.silent_s, self.ray_head
        if silent_s < _SILENT_S:
            self._silence_told = False
        elif not self._silence_told:
            self._silence_told = True
            self._note(
                f"{rays.label} does not answer: {rays.why}; if it is not back in {_WITHOUT_RAY_S:g} s, the run is saved and ends"
            )
        if silent_s > _WITHOUT_RAY_S and self._headless is None:
            self._headless = ray_head_lost(rays, after_s=silent_s)
            head.ask("signal SIGTERM")

    def _note_named(self, message: Message) -> None:
        """The head has named nodes; of those whose loss it explains in Ray's words nothing more is to be said."""
        where = {str(item["where"]) for item in message["evidence"]}
        for place in self.places:
            if ray_label(place) in where:
                self._told.add(place.node_rank)
                self._unsaid.pop(place.node_rank, None)
        self._named.update(map(str, message["hosts"]))

    def _say_unsaid(self, node_rank: int) -> None:
        verdict = self._unsaid.pop(node_rank)
        text = f"{verdict.summary}: {verdict.evidence[0].text}"
        self.reporter.send("warning", code=verdict.cause, text=text, fix="; ".join(verdict.fix))

    def _ranks_on(self, place: JobNode) -> list[int]:
        """Those of a node, by the last plan; none before the first."""
        ranks = self._plan.get("ranks", [])
        return [int(rank["rank"]) for rank in ranks if rank["node_rank"] == place.node_rank]

    def _leave(self) -> None:
        for place in self.places:
            if not place.lost:
                try:
                    place.call("leave")
                except ActorLost as error:
                    place.lost = error.why

    def _note(self, text: str) -> None:
        self.reporter.send("note", text=text)


def _never_joined(place: JobNode) -> Message:
    """The refusal of a start for which a node's front ended before it had joined."""
    verdict = lost_node_verdict(place).model_copy(update={"cause": "node_missing", "when": "before"})
    problem = {
        "what": verdict.summary,
        "where": place.label,
        "why": "; ".join(place.tail[-2:]) or place.lost,
        "fix": "; ".join(verdict.fix),
    }
    return {"kind": "start_refused", "exit_code": 3, "verdict": verdict.to_json(), "problems": [problem]}


def _newest_step(run: RunDir) -> int:
    steps = [path.name.removeprefix("step-") for path in run.checkpoints.glob("step-*")]
    return max((int(step) for step in steps if step.isdecimal()), default=0)
