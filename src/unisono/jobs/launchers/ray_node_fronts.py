"""The fronts on the nodes, seen from the driver: called through their actors, read, and ended; and
what Ray says of lost nodes and of its own head.
"""

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from unisono.base._version import __version__
from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed, UnfitError
from unisono.base.files import read_json
from unisono.base.messages import read_message
from unisono.base.text import one_line, plain
from unisono.guard.agree.reports import name_node, plain_host
from unisono.guard.facts import package_versions
from unisono.guard.facts.environment import code_digests

_ANSWER_S = 60.0
_POLL_S = 0.5
_END_S = 15.0
_BACK_S = 25.0
_AGAIN_S = 0.5
_ONCE = ("start", "make_place")
"""Methods that are not retried if it is unknown whether they ran."""
_TAIL_LINES = 6
_OF_MEMORY = ("OutOfMemory", "out of memory", "memory pressure", "low on memory", "OOM")
_OF_NODES = ("node is dead", "node has died", "its node", "NODE_DIED", "node was terminated")
"""Phrases in Ray 2.60's errors: an actor ended to free its node's memory, and an actor whose node
is gone.
"""


class ActorLost(Exception):  # noqa: N818 - named for what happened
    """An actor no longer answers.

    Attributes:
        node: where it was; None if unknown.
    """

    def __init__(self, why: str, node: "JobNode | None" = None) -> None:
        super().__init__(why)
        self.why = why
        self.node = node


class NodeFacts(TypedDict, total=False):
    """The installation on a node, from `NodeActor.facts`; empty until the node has answered.

    Attributes:
        program: the Python that runs there.
        code: digests of unisono's files, by path.
        trouble: why unisono is missing.
        ray_node: Ray's id of the node.
    """

    host: str
    python: str
    program: str
    unisono: str
    code: Mapping[str, str]
    trouble: str
    cpus: int
    ray_node: str


@dataclass
class JobNode:
    """One node of the job.

    Attributes:
        facts: the result of `NodeActor.facts`.
        shares: whether it sees the run's directory of the user's command.
        lost: Ray's message, once its actor is gone.
        code: the exit code of its front, once that has exited.
        tail: the last lines that its front printed.
    """

    node_rank: int
    actor: Any
    address: str = ""
    facts: NodeFacts = field(default_factory=NodeFacts)
    shares: bool = False
    folder: str = ""
    lost: str = ""
    code: int | None = None
    tail: list[str] = field(default_factory=list)
    _taken: int = 0
    _over: bool = False
    _unreachable_since: float | None = None

    @property
    def host(self) -> str:
        """The node's name."""
        return str(self.facts.get("host", self.address))

    @property
    def label(self) -> str:
        """The node as it appears in messages."""
        return name_node(self.node_rank, self.host)

    @property
    def ended(self) -> bool:
        """Whether no more output will come from it."""
        return self._over or bool(self.lost)

    def call(self, method: str, *arguments: object) -> Any:
        """The result of a method of the actor.

        Raises:
            ActorLost: if its process or node is gone, or it does not answer in time.
            OSError: from the method.
        """
        import ray

        limit = time.monotonic() + _BACK_S
        while True:
            try:
                return ray.get(getattr(self.actor, method).remote(*arguments), timeout=_ANSWER_S)
            except ray.exceptions.GetTimeoutError as error:
                raise ActorLost(f"no answer to `{method}` in {_ANSWER_S:.0f} s", self) from error
            except ray.exceptions.RayTaskError:
                raise  # it is also an instance of the method's own error
            except ray.exceptions.ActorUnavailableError as error:
                if method in _ONCE or time.monotonic() > limit:
                    raise ActorLost(one_line(str(error), limit=600), self) from error
                time.sleep(_AGAIN_S)
            except ray.exceptions.RayError as error:
                raise ActorLost(one_line(str(error), limit=600), self) from error

    def listing(self, root: str) -> dict[str, tuple[int, int, int]]:
        """Calls `NodeActor.listing`."""
        stamps: dict[str, tuple[int, int, int]] = self.call("listing", root)
        return stamps

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Calls `NodeActor.read`."""
        content: bytes = self.call("read", path, offset, size)
        return content

    def write(self, path: str, offset: int, data: bytes, mode: int) -> None:
        """Calls `NodeActor.write`."""
        self.call("write", path, offset, data, mode)

    def command(self, text: str) -> None:
        """Calls `NodeActor.command`; nothing is sent to a lost actor."""
        if not self.lost:
            self.actor.command.remote(text)

    def write_async(self, path: str, text: str) -> None:
        """Writes an optional file for its front, without waiting."""
        if not self.lost:
            self.actor.write.remote(path, 0, text.encode(), 0o600)

    def poll(self) -> Any:
        """A reference to the next lines of output."""
        return self.actor.poll.remote(self._taken, _POLL_S)

    def unreachable(self, why: str) -> None:
        """Records that Ray cannot reach the actor now, or can again (empty).

        After about 15 s Ray itself reports a permanent loss.
        """
        if not why:
            self._unreachable_since = None
            return
        self._unreachable_since = self._unreachable_since or time.monotonic()
        if time.monotonic() - self._unreachable_since > _BACK_S:
            self.lost = why
        time.sleep(_AGAIN_S)

    def take(self, lines: Sequence[tuple[str, bytes]], *, over: bool) -> list[tuple[str, str]]:
        """Records lines of output; gives them as text."""
        self._taken += len(lines)
        self._over = over
        texts = [(stream, data.decode("utf-8", "replace")) for stream, data in lines]
        printed = [one_line(text, limit=300) for stream, text in texts if stream == "err" and text.strip()]
        self.tail = [*self.tail, *printed][-_TAIL_LINES:]
        for stream, text in texts:
            message = read_message(text) if stream == "out" else None
            if message is not None and message["kind"] == "front_ended":
                self.code = int(message["code"])
        return texts


@dataclass
class NodeFronts:
    """The fronts of one attempt. Their output is kept in `logs`, one file for each host.

    Attributes:
        nodes: by node rank, node 0 first.
        logs: the folder, or None.
        on_line: called with every message line of node 0.
    """

    nodes: list[JobNode]
    logs: Path | None
    on_line: Callable[[str], None]
    _polls: dict[Any, JobNode] = field(default_factory=dict)

    @property
    def head(self) -> JobNode:
        """Node 0."""
        return self.nodes[0]

    def listen(self, timeout_s: float) -> None:
        """Takes the output of all fronts, after waiting at most `timeout_s` for the first."""
        import ray

        polled = set(map(id, self._polls.values()))
        for node in self.nodes:
            if not node.ended and id(node) not in polled:
                self._polls[node.poll()] = node
        if not self._polls:
            return
        ready, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=timeout_s)
        for reference in ready:
            node = self._polls.pop(reference)
            try:
                lines, over = ray.get(reference)
            except ray.exceptions.ActorUnavailableError as error:
                node.unreachable(one_line(str(error), limit=600))
                continue
            except ray.exceptions.RayError as error:
                node.lost = one_line(str(error), limit=600)
                continue
            node.unreachable("")
            self._keep(node, node.take(lines, over=over))

    def wait_ended(self) -> None:
        """Ends all fronts, and waits a bounded time for their end."""
        for node in self.nodes:
            node.command("end")
        limit = time.monotonic() + _END_S
        while time.monotonic() < limit and not all(node.ended for node in self.nodes):
            self.listen(_POLL_S)

    def _keep(self, node: JobNode, lines: list[tuple[str, str]]) -> None:
        printed = [text for stream, text in lines if stream == "err"]
        if printed and self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.logs / f"{plain_host(node.host)}-front.log"
            with path.open("a", encoding="utf-8") as file:
                file.write("\n".join([*printed, ""]))
        if node is self.head:
            for stream, text in lines:
                if stream == "out":
                    self.on_line(text)


def ray_label(node: JobNode) -> str:
    """The source of evidence for Ray's messages about a node."""
    return f"Ray, on {node.label}"


def lost_node_verdict(node: JobNode, ranks: Sequence[int] = ()) -> Verdict:
    """The verdict on a node whose actor is gone, with Ray's message as evidence.

    It names ranks only if their processes are gone but not their node.
    """
    message = node.lost
    by_memory = any(phrase in message for phrase in _OF_MEMORY)
    cause = "host_oom_killed" if by_memory else "node_unreachable"
    if node.code is not None:
        what = "its front exited without a message"
    elif by_memory:
        what = "Ray's memory monitor ended its processes"
    else:
        by_node = any(phrase in message for phrase in _OF_NODES)
        what = "its node has left the Ray cluster" if by_node else "Ray's process on it has ended"
    known = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        ranks=tuple(ranks) if by_memory else (),
        hosts=(plain_host(node.host),),
        phase="ray",
        summary=f"{node.label} is lost: {what}",
        evidence=(
            Evidence(where=ray_label(node), text=one_line(message, limit=400)),
            *(Evidence(where=f"{node.label}, its front's output", text=text) for text in node.tail),
        ),
        fix=(
            "`ray status` and the raylet's log on that node (/tmp/ray/session_latest/logs) show why",
            *(known.remedy[:1] if known else ()),
        ),
    )


_SHOWN = 3


def refuse_different_install(nodes: Sequence[JobNode]) -> None:
    """Compares the installation here with each node's facts.

    Raises:
        UnfitError: if unisono is missing on a node.
        Disagreed: version_mismatch or code_mismatch, with the nodes.
    """
    missing = [node for node in nodes if node.facts["trouble"]]
    if missing:
        raise UnfitError.of(
            f"unisono is not installed on {', '.join(node.label for node in missing)}",
            where=str(missing[0].facts["program"]),
            why=one_line(str(missing[0].facts["trouble"]), limit=300),
            fix=(
                "install it there, in Ray's Python; or add it to the job's runtime_env (see"
                " docs/how-to/ray.md)"
            ),
        )
    local_versions: dict[Literal["python", "unisono"], str] = {
        "python": package_versions()["python"],
        "unisono": __version__,
    }
    for name, own_value in local_versions.items():
        different = [node for node in nodes if node.facts[name] != own_value]
        if different:
            _refuse(
                "version_mismatch", name, own_value, [(node, str(node.facts[name])) for node in different]
            )
    code = code_digests()
    for node in nodes:
        node_code = node.facts["code"]
        files = sorted(path for path in {*code, *node_code} if code.get(path) != node_code.get(path))
        if files:
            more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
            _refuse(
                "code_mismatch",
                "unisono's code",
                "",
                [(node, f"differs in {', '.join(files[:_SHOWN])}{more}")],
            )


def _refuse(cause: str, what: str, own_value: str, nodes: Sequence[tuple[JobNode, str]]) -> None:
    known = find_cause(cause)
    names = ", ".join(node.label for node, _ in nodes)
    compared = f": {own_value} here, {nodes[0][1]} there" if own_value else f": it {nodes[0][1]}"
    verdict = Verdict(
        cause=cause,
        when="before",
        phase="ray",
        hosts=tuple(node.host for node, _ in nodes),
        summary=f"{what} differs on {names} from the machine of the command{compared}",
        evidence=tuple(Evidence(where=node.label, text=text) for node, text in nodes),
        fix=known.remedy if known else (),
    )
    raise Disagreed.of(verdict.summary, fix="; ".join(verdict.fix), verdict=verdict)


_REACH_S = 3.0
_EVERY_S = 1.0
_PROBED_AGAIN_S = 0.3


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
            time.sleep(_PROBED_AGAIN_S)
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
    host = plain_host(head.host or head.address.rpartition(":")[0].strip("[]"))
    return Verdict(
        cause="node_unreachable",
        when="during",
        hosts=(host,),
        phase="ray",
        named_after_s=after_s,
        summary=(
            f"{head.label} is lost: {head.why or 'it did not answer for too long'}; a Ray cluster ends its"
            " nodes a minute after its head"
        ),
        evidence=(
            Evidence(where=f"Ray cluster {plain(head.address)}", text=head.why or "it answers again"),
            *(
                [Evidence(where="Ray, on the machine of the command", text=one_line(message, limit=400))]
                if message
                else ()
            ),
        ),
        fix=(
            (
                "restart the cluster (`ray start --head` there, then its nodes), and run the same command: it"
                " resumes from the latest checkpoint here"
            ),
            *(known.remedy[:1] if known else ()),
        ),
    )


_PATIENCE_S = 3.0
"""Ray reports an ended actor within a second, but a lost node only after about 15 s: a verdict does
not wait for that.
"""
_LOOKED_AGAIN_S = 0.05


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
            verdict = _read_loss(Path(loss_file(self._folder, node_rank)))
            waited_s = self._clock() - began
            if verdict is not None:
                return verdict, waited_s
            if waited_s > _PATIENCE_S:
                return None
            time.sleep(_LOOKED_AGAIN_S)


def _read_loss(path: Path) -> Verdict | None:
    """The verdict in a file; None if the file is missing or incomplete."""
    try:
        return Verdict.from_json(read_json(path))
    except (FileNotFoundError, ValueError):
        return None
