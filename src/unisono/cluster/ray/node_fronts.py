"""The fronts on the nodes: started through their keepers, heard, and ended. In the driver's process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono import __version__
from unisono.agree.display import name_node, plain_host
from unisono.causes import Evidence, Verdict, find_cause
from unisono.errors import Disagreed, UnfitError
from unisono.events import read_message
from unisono.facts import package_versions
from unisono.facts.versions import code_digests
from unisono.text import one_line

_ANSWER_S = 60.0
_POLL_S = 0.5
_GONE_S = 15.0
_BACK_S = 25.0
_AGAIN_S = 0.5
_ONCE = ("start", "make_place")
"""What is not done twice where it is not known whether it was done."""
_TAIL_LINES = 6
_OF_MEMORY = ("OutOfMemory", "out of memory", "memory pressure", "low on memory", "OOM")
_OF_NODES = ("node is dead", "node has died", "its node", "NODE_DIED", "node was terminated")
"""What Ray 2.60 says of an actor that it has ended for the memory of its node, and of one whose node is gone."""


class ActorLost(Exception):  # noqa: N818 - named for what happened
    """An actor does not answer any more.

    Attributes:
        why: Ray's words on it.
        place: where it was; None where nobody has said so.
    """

    def __init__(self, why: str, place: "JobNode | None" = None) -> None:
        super().__init__(why)
        self.why = why
        self.place = place


@dataclass
class JobNode:
    """One node of the job.

    Attributes:
        node_rank: its number.
        actor: Ray's handle of its keeper.
        address: the node's.
        facts: what `Keeper.facts` told.
        shares: whether it sees the run's directory of who typed the command.
        folder: this job's own on it.
        lost: Ray's words, once its actor is gone.
        code: of its front, once that has ended.
        tail: the last lines that its front printed.
    """

    node_rank: int
    actor: Any
    address: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    shares: bool = False
    folder: str = ""
    lost: str = ""
    code: int | None = None
    tail: list[str] = field(default_factory=list)
    _taken: int = 0
    _over: bool = False
    _away_since: float | None = None

    @property
    def host(self) -> str:
        """The node's name."""
        return str(self.facts.get("host", self.address))

    @property
    def label(self) -> str:
        """How it is written."""
        return name_node(self.node_rank, self.host)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come from it."""
        return self._over or bool(self.lost)

    def call(self, method: str, *arguments: object, timeout_s: float = _ANSWER_S) -> Any:
        """Calls the keeper, and waits for its answer.

        Raises:
            KeeperLost: if its process or node is gone, or it does not answer in time.
            OSError: as there.
        """
        import ray

        limit = time.monotonic() + _BACK_S
        while True:
            try:
                return ray.get(getattr(self.actor, method).remote(*arguments), timeout=timeout_s)
            except ray.exceptions.GetTimeoutError as error:
                raise ActorLost(f"no answer to `{method}` in {timeout_s:.0f} s", self) from error
            except ray.exceptions.RayTaskError:
                raise  # it is the error of the method as well
            except ray.exceptions.ActorUnavailableError as error:
                if method in _ONCE or time.monotonic() > limit:
                    raise ActorLost(one_line(str(error), limit=600), self) from error
                time.sleep(_AGAIN_S)
            except ray.exceptions.RayError as error:
                raise ActorLost(one_line(str(error), limit=600), self) from error

    def listing(self, root: str) -> dict[str, tuple[int, int, int]]:
        """As `Keeper.listing`."""
        found: dict[str, tuple[int, int, int]] = self.call("listing", root)
        return found

    def read(self, path: str, offset: int, size: int) -> bytes:
        """As `Keeper.read`."""
        found: bytes = self.call("read", path, offset, size)
        return found

    def write(self, path: str, offset: int, data: bytes, mode: int) -> None:
        """As `Keeper.write`."""
        self.call("write", path, offset, data, mode)

    def ask(self, word: str) -> None:
        """As `Keeper.ask`; one that is gone needs not be asked."""
        if not self.lost:
            self.actor.ask.remote(word)

    def leave_word(self, path: str, text: str) -> None:
        """Leaves a file for its front, which can do without; nobody waits for it."""
        if not self.lost:
            self.actor.write.remote(path, 0, text.encode(), 0o600)

    def poll(self) -> Any:
        """Asks for what comes next."""
        return self.actor.poll.remote(self._taken, _POLL_S)

    def away(self, why: str) -> None:
        """Ray cannot reach the actor at the moment, or can again. It says itself, after a quarter of a minute, if it is for good."""
        if not why:
            self._away_since = None
            return
        self._away_since = self._away_since or time.monotonic()
        if time.monotonic() - self._away_since > _BACK_S:
            self.lost = why
        time.sleep(_AGAIN_S)

    def take(self, lines: Sequence[tuple[str, bytes]], *, over: bool) -> list[tuple[str, str]]:
        """Takes what was asked for; gives the lines as text."""
        self._taken += len(lines)
        self._over = over
        found = [(stream, data.decode("utf-8", "replace")) for stream, data in lines]
        told = [one_line(text, limit=300) for stream, text in found if stream == "err" and text.strip()]
        self.tail = [*self.tail, *told][-_TAIL_LINES:]
        for stream, text in found:
            message = read_message(text) if stream == "out" else None
            if message is not None and message["kind"] == "front_ended":
                self.code = int(message["code"])
        return found


@dataclass
class NodeFronts:
    """The fronts of one start. What they print is kept in `logs`, a file for each host.

    Attributes:
        places: by node rank; that of node 0 first.
        logs: the folder, or None.
        hear: is told every message of node 0, and how its lines are to be read.
    """

    places: list[JobNode]
    logs: Path | None
    hear: Callable[[str], None]
    _polls: dict[Any, JobNode] = field(default_factory=dict)

    @property
    def head(self) -> JobNode:
        """Node 0."""
        return self.places[0]

    def listen(self, timeout_s: float) -> None:
        """Takes what has come from all, after waiting for the first at most `timeout_s`."""
        import ray

        asked = set(map(id, self._polls.values()))
        for place in self.places:
            if not place.ended and id(place) not in asked:
                self._polls[place.poll()] = place
        if not self._polls:
            return
        ready, _ = ray.wait(list(self._polls), num_returns=len(self._polls), timeout=timeout_s)
        for reference in ready:
            place = self._polls.pop(reference)
            try:
                lines, over = ray.get(reference)
            except ray.exceptions.ActorUnavailableError as error:
                place.away(one_line(str(error), limit=600))
                continue
            except ray.exceptions.RayError as error:
                place.lost = one_line(str(error), limit=600)
                continue
            place.away("")
            self._keep(place, place.take(lines, over=over))

    def wait_gone(self) -> None:
        """Ends all, and waits a bounded time until they say that they are gone."""
        for place in self.places:
            place.ask("end")
        limit = time.monotonic() + _GONE_S
        while time.monotonic() < limit and not all(place.ended for place in self.places):
            self.listen(_POLL_S)

    def _keep(self, place: JobNode, lines: list[tuple[str, str]]) -> None:
        printed = [text for stream, text in lines if stream == "err"]
        if printed and self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.logs / f"{plain_host(place.host)}-front.log"
            with path.open("a", encoding="utf-8") as file:
                file.write("\n".join([*printed, ""]))
        if place is self.head:
            for stream, text in lines:
                if stream == "out":
                    self.hear(text)


def ray_label(place: JobNode) -> str:
    """Where Ray's words on a node are evidence."""
    return f"Ray, on {place.label}"


def lost_node_verdict(place: JobNode, ranks: Sequence[int] = ()) -> Verdict:
    """The verdict on a node whose actor is gone: Ray's words are evidence for it. Ranks are blamed where only they are gone, and not their node."""
    words = place.lost
    by_memory = any(sign in words for sign in _OF_MEMORY)
    cause = "host_oom_killed" if by_memory else "node_unreachable"
    if place.code is not None:
        what = "its front has ended without a word"
    elif by_memory:
        what = "Ray's memory monitor has ended what ran on it"
    else:
        by_node = any(sign in words for sign in _OF_NODES)
        what = "its node has left the Ray cluster" if by_node else "Ray's process on it has ended"
    known = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        ranks=tuple(ranks) if by_memory else (),
        hosts=(plain_host(place.host),),
        phase="ray",
        summary=f"{place.label} is lost: {what}",
        evidence=(
            Evidence(where=ray_label(place), text=one_line(words, limit=400)),
            *(Evidence(where=f"{place.label}, its front's output", text=text) for text in place.tail),
        ),
        fix=(
            "`ray status` and the raylet's log on that node (/tmp/ray/session_latest/logs) say why",
            *(known.remedy[:1] if known else ()),
        ),
    )


_SHOWN = 3


def refuse_different_install(places: Sequence[JobNode]) -> None:
    """Compares this process with what each keeper has told.

    Raises:
        UnfitError: if unisono is missing on a node.
        Disagreed: version_mismatch or code_mismatch, naming the nodes.
    """
    bare = [place for place in places if place.facts["trouble"]]
    if bare:
        raise UnfitError.of(
            f"unisono is not installed on {', '.join(place.label for place in bare)}",
            where=str(bare[0].facts["program"]),
            why=one_line(str(bare[0].facts["trouble"]), limit=300),
            fix="install it there, in the python that Ray runs in; or give it to the job by its runtime_env (see docs/how-to/ray.md)",
        )
    own = {"python": package_versions()["python"], "unisono": __version__}
    for name, mine in own.items():
        odd = [place for place in places if place.facts[name] != mine]
        if odd:
            _refuse("version_mismatch", name, mine, [(place, str(place.facts[name])) for place in odd])
    code = code_digests()
    for place in places:
        theirs = place.facts["code"]
        files = sorted(path for path in {*code, *theirs} if code.get(path) != theirs.get(path))
        if files:
            more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
            _refuse(
                "code_mismatch",
                "unisono's code",
                "",
                [(place, f"differs in {', '.join(files[:_SHOWN])}{more}")],
            )


def _refuse(cause: str, what: str, mine: str, odd: Sequence[tuple[JobNode, str]]) -> None:
    known = find_cause(cause)
    names = ", ".join(place.label for place, _ in odd)
    here = f": {mine} here, {odd[0][1]} there" if mine else f": it {odd[0][1]}"
    verdict = Verdict(
        cause=cause,
        when="before",
        phase="ray",
        hosts=tuple(place.host for place, _ in odd),
        summary=f"{what} is another on {names} than where the command was typed{here}",
        evidence=tuple(Evidence(where=place.label, text=text) for place, text in odd),
        fix=known.remedy if known else (),
    )
    raise Disagreed.of(verdict.summary, fix="; ".join(verdict.fix), verdict=verdict)
