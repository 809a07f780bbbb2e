"""What ranks of other nodes have kept in memory, on its way to the head after a death: each front sends what its ranks held."""

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unisono.checkpoint.snapshot import read_slots
from unisono.checkpoint.store import temporary_name
from unisono.control.events import Arrived, Left, Said
from unisono.control.server import HeadServer
from unisono.control.transfer.content import Offer, Refused
from unisono.control.transfer.receiving import Receiving
from unisono.control.transfer.sending import Outcome, Transfers
from unisono.events import Message
from unisono.launch.attempt import Attempt
from unisono.launch.interrupts import Interrupts
from unisono.launch.kept import KeptMemory
from unisono.launch.nodes.words import stop_of
from unisono.launch.postmortem import NodeLoss
from unisono.launch.rescue import Found
from unisono.plan import RunPlan
from unisono.units import parse_seconds

WANTED = "kept_wanted"
SENT = "kept_sent"
_KEPT = "kept"
_LIMIT_S = 60.0
"""Without a piece for so long, nothing more comes."""
_AT_LEAST_S = 2.0
_FOR_THE_RESCUE_S = 1.0


class KeptSender:
    """On a node that is not the head.

    Args:
        transfers: to the head.
        memory: of this node's ranks.
        send: sends the head a message.
    """

    def __init__(self, transfers: Transfers, memory: KeptMemory, send: Callable[[Message], None]) -> None:
        self._transfers = transfers
        self._memory = memory
        self._send = send
        self._waits_for: set[int] = set()

    def wanted(self) -> None:
        """The head asks; the ranks have ended."""
        for rank in self._memory.ranks:
            content = self._memory.content(rank)
            if content is not None:
                self._waits_for.add(self._transfers.send(content, {"kind": _KEPT, "rank": rank}))
        if not self._waits_for:
            self._send({"kind": SENT})

    def ended(self, outcome: Outcome) -> None:
        """One of them is at the head, or it is not; the head knows."""
        if outcome.transfer in self._waits_for:
            self._waits_for.discard(outcome.transfer)
            if not self._waits_for:
                self._send({"kind": SENT})


def collect(
    plan: RunPlan, server: HeadServer, attempt: Attempt, found: Found, *, checkpoints: Path, interrupts: Interrupts
) -> None:  # fmt: skip
    """Adds what the ranks of the other nodes have kept. A node that is lost meanwhile is noted in `attempt`.

    Args:
        plan: that the ranks had; all of them have ended.
        server: the connections of the nodes.
        attempt: how it ended.
        found: what is known; more is added.
        checkpoints: the head's directory of checkpoints, in which files are until they are read.
        interrupts: a wish to stop that a node tells meanwhile is noted there.
    """
    waiting = {node.node_rank for node in plan.nodes[1:]} - {loss.node_rank for loss in attempt.lost}
    began = time.monotonic()
    with (
        _folder(checkpoints) as folder,
        Receiving(server, {_KEPT: lambda offer: _place(plan, folder, offer)}) as receiving,
    ):
        for node_rank in waiting:
            server.send(node_rank, {"kind": WANTED})
        while waiting and time.monotonic() < _limit(plan, interrupts, began, receiving.moved):
            for event in server.receive(0.2):
                match event:
                    case Arrived(label={"kind": "kept", "rank": int(rank)}, path=Path() as path):
                        found.steps[rank], found.damage[rank] = read_slots(memoryview(path.read_bytes()))
                    case Said(message={"kind": "kept_sent"}):
                        waiting.discard(event.node_rank)
                    case Said(message={"kind": "stop", "signal": name, **rest}):
                        stopped = stop_of(name, plan.node(event.node_rank).host)
                        interrupts.ask(stopped.number, where=stopped.where, again=rest.get("again") is True)
                    case Left():
                        waiting.discard(event.node_rank)
                        attempt.lost.append(NodeLoss.at_head(event))
                    case _:
                        pass  # the last words of ranks that are gone


def _limit(plan: RunPlan, interrupts: Interrupts, began: float, moved: float) -> float:
    """When it goes on with what has come, in monotonic seconds: a job that is asked to stop has its grace time, and no more."""
    if interrupts.first is None:
        return moved + _LIMIT_S
    grace = 0.0 if interrupts.twice else parse_seconds(plan.config.grace)
    return min(moved + _LIMIT_S, max(began + _AT_LEAST_S, interrupts.at + grace - _FOR_THE_RESCUE_S))


def _place(plan: RunPlan, folder: Path, offer: Offer) -> Path:
    rank: Any = offer.label.get("rank")
    if rank not in [place.rank for place in plan.on_node(offer.node_rank)]:
        raise Refused(f"rank {rank!r:.20} is none of node {offer.node_rank}")
    return folder / f"kept-{int(rank):05d}"


@contextlib.contextmanager
def _folder(checkpoints: Path) -> Iterator[Path]:
    """One that is swept at the next start, should this front die."""
    folder = checkpoints / temporary_name(0, secrets.token_hex(4))
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
