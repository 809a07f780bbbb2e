"""How both sides prove that they know the job's secret, and who may come in. Pure: no socket, no clock.

    node → head   preamble
    head → node   preamble, greeting: a nonce, the run's nonce, the epoch          nothing is proven yet
    node → head   hello: its own nonce, rank, number of nodes, run, epoch          MAC by key(token, head's nonce)
    head → node   welcome, or refused with a reason                                MAC by key(token, all of it)

Nonces are fresh for each connection, so nothing that was recorded fits a second time. The head says nothing to a caller
that does not begin as we do.
"""

import re
import secrets
from dataclasses import asdict, dataclass
from typing import Any, Self

from unisono.control.events import RejectedKind
from unisono.control.frames import Body, Malformed, Seal, decode
from unisono.control.tokens import derive

_NAME = re.compile(r"(?!-)[A-Za-z0-9_.@:-]{1,255}\Z")
_NONCE = re.compile(r"[0-9a-f]{32}\Z")
_RUN = re.compile(r"[A-Za-z0-9_.:-]{0,64}\Z")
_MOST_NODES = 1 << 20


def is_host_name(name: object) -> bool:
    """Whether a peer may be called so (DESIGN B8)."""
    return isinstance(name, str) and _NAME.match(name) is not None


def fresh_nonce() -> str:
    """16 random bytes in hex."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Greeting:
    """The head's first words. Not proven: they count only through the keys that are made with them."""

    nonce: str
    run: str
    epoch: int

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "greeting", **asdict(self)}

    @classmethod
    def from_body(cls, body: Body) -> Self:
        """Reads a greeting.

        Raises:
            Malformed: if it is none.
        """
        nonce, run, epoch = body.get("nonce"), body.get("run"), body.get("epoch")
        if body["t"] != "greeting" or not _matches(_NONCE, nonce) or not _matches(_RUN, run):
            raise Malformed("sent no greeting")
        return cls(str(nonce), str(run), _whole(epoch, 0, 1 << 31, "an epoch"))


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls.

    Attributes:
        nonce: fresh for this connection.
        call: the same for all attempts of one process to join.
        nodes: how many it expects; 0: it does not say.
        run: the nonce of the start that it belongs to.
        epoch: of that start.
    """

    nonce: str
    call: str
    node_rank: int
    nodes: int
    host: str
    pid: int
    run: str
    epoch: int

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "hello", **asdict(self)}

    @classmethod
    def from_body(cls, body: Body) -> Self:
        """Reads a hello.

        Raises:
            Malformed: if it is none, or holds what no node of ours would send.
        """
        if body["t"] != "hello" or not all(_matches(_NONCE, body.get(name)) for name in ("nonce", "call")):
            raise Malformed("sent no hello")
        if not is_host_name(body.get("host")):
            raise Malformed("gives a host name that is none: allowed are letters, digits and _ . @ : -")
        if not _matches(_RUN, body.get("run")):
            raise Malformed("gives a run that is none")
        return cls(
            nonce=body["nonce"],
            call=body["call"],
            node_rank=_whole(body.get("node_rank"), -(1 << 31), 1 << 31, "a node rank"),
            nodes=_whole(body.get("nodes"), 0, _MOST_NODES, "a number of nodes"),
            host=body["host"],
            pid=_whole(body.get("pid"), 0, 1 << 31, "a process id"),
            run=body["run"],
            epoch=_whole(body.get("epoch"), 0, 1 << 31, "an epoch"),
        )


def claims(data: bytes) -> tuple[int | None, str]:
    """The rank and the host that an unproven hello claims; None and empty where it says nothing usable."""
    try:
        hello = Hello.from_body(decode(data))
    except Malformed:
        return None, ""
    return hello.node_rank, hello.host


def greeting_seal(*, sends: bytes) -> Seal:
    """For the greeting, and for refusing somebody who could not check a proof."""
    return Seal(b"", sends=sends)


def hello_seal(token: bytes, greeting: Greeting, *, sends: bytes) -> Seal:
    """For the hello: it fits only this greeting."""
    return Seal(derive(token, "control.hello", greeting.nonce), sends=sends)


def session_seal(token: bytes, greeting: Greeting, hello: Hello, *, sends: bytes) -> Seal:
    """For all that follows: bound to both nonces, the run, the epoch, the rank and the number of nodes."""
    parts = (greeting.nonce, hello.nonce, hello.run, hello.epoch, hello.node_rank, hello.nodes, hello.host)
    return Seal(derive(token, "control.session", *parts), sends=sends)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a proven caller is not let in. `text` goes on from `node R (HOST) `."""

    kind: RejectedKind
    text: str
    holder: str = ""

    def to_body(self) -> Body:
        """A frame's body."""
        return {"t": "refused", **asdict(self)}


def judge(
    hello: Hello, *, run: str, epoch: int, nodes: int, holder: str, settled: bool, left_out: str = ""
) -> Refusal | None:
    """Whether a proven caller may come in, and if not, why.

    Args:
        hello: who calls.
        run: the nonce of this start.
        epoch: of this start.
        nodes: how many the head expects.
        holder: who has its rank already, for people; empty: nobody.
        settled: whether the last word has been said.
        left_out: why the job goes on without its node; empty: it does not.
    """
    if hello.run != run:
        return Refusal(
            "stale", f"belongs to another start of the job (run {hello.run or '?'}, this is {run})"
        )
    if hello.epoch != epoch:
        age = "an earlier" if hello.epoch < epoch else "a later"
        return Refusal("stale", f"belongs to {age} epoch of the run ({hello.epoch}, this is {epoch})")
    if hello.nodes not in (0, nodes):
        return Refusal("misfit", f"expects {hello.nodes} nodes, the head expects {nodes}")
    if not 0 <= hello.node_rank < nodes:
        return Refusal("misfit", f"is none of the {nodes} nodes: ranks go from 0 to {nodes - 1}")
    if settled:
        return Refusal("late", "came after the last word")
    if left_out:
        return Refusal("left_out", left_out)
    if holder:
        return Refusal("duplicate", f"is here already: {holder} has this rank", holder)
    return None


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _whole(value: Any, least: int, most: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Malformed(f"gives {what} that is none")
    return value
