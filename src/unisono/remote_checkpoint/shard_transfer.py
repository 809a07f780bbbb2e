"""Parts of a checkpoint whose ranks do not see the head's output_dir: their front sends them, the head's takes them.

A rank writes into `checkpoints/TEMPORARY/` of its own node's output_dir and says `shard_written`. What is sent is deleted
there, whatever comes of it. The head passes `shard_written` on to rank 0, the only one who publishes, once the files are in
`checkpoints/TEMPORARY/` of its own output_dir with the sizes and digests that the rank has written, or with the reason why not.
"""

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import is_file_name
from unisono.control.events import FileReceived
from unisono.control.file_receiver import FileReceiver
from unisono.control.file_sender import Content, FileSender, Offer, OfferRefused, TransferOutcome
from unisono.control.server import HeadServer
from unisono.events import Message
from unisono.plan import RunPlan
from unisono.text import one_line

SHARD_KIND = "shard"
"""The label's kind of a part on its way."""
_TELLS_EVERY_S = 2.0
_LOOK_S = 0.02
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")


def is_temporary_name(name: object) -> bool:
    """Whether a directory of this name is a checkpoint that is being written."""
    return isinstance(name, str) and _TEMPORARY.fullmatch(name) is not None


def is_shard_of(name: str, rank: int, world_size: int) -> bool:
    """Whether a file of this name is one that this rank writes, and nobody else."""
    return is_file_name(name) and name.endswith(f".shard-{rank:05d}-of-{world_size:05d}.safetensors")


@dataclass
class _PendingMessage:
    """A rank's `shard_written`, until its files have arrived or not."""

    rank: int
    message: Message
    waits_for: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


class ShardSender:
    """On a node that does not see the head's output_dir.

    Args:
        transfers: to the head.
        checkpoints: the directory of this node's own output_dir.
        tell: tells the head what a rank has said, once its files are there.
        later: has work on files done by somebody else: the front must not wait for a disk that hangs.
    """

    def __init__(
        self,
        transfers: FileSender,
        checkpoints: Path,
        tell: Callable[[int, Message], None],
        later: Callable[[Callable[[], object]], None],
    ) -> None:
        self._later = later
        self._transfers = transfers
        self._checkpoints = checkpoints
        self._tell = tell
        self._of_transfer: dict[int, _PendingMessage] = {}

    def written(self, rank: int, message: Message) -> None:
        """A rank has written its part, or could not."""
        waiting = _PendingMessage(rank, message)
        temporary, files = message.get("temporary"), message.get("files") or {}
        if message.get("error") or not is_temporary_name(temporary) or not all(map(is_file_name, files)):
            self._end(waiting)
            return
        for name, entry in files.items():
            label = {"kind": SHARD_KIND, "rank": rank, "temporary": temporary, "name": name}
            content = Content(entry["bytes"], entry["xxh3_128"])
            number = self._transfers.send(self._checkpoints / str(temporary) / name, label, content)
            waiting.waits_for.add(number)
            self._of_transfer[number] = waiting
        if not files:
            self._end(waiting)

    def ended(self, outcome: TransferOutcome) -> None:
        """A file is at the head, or it is not."""
        waiting = self._of_transfer.pop(outcome.transfer, None)
        if waiting is None:
            return
        waiting.waits_for.discard(outcome.transfer)
        if outcome.error:
            waiting.errors.append(f"{outcome.label['name']}: {outcome.error}")
        if not waiting.waits_for:
            self._end(waiting)

    def _end(self, waiting: _PendingMessage) -> None:
        temporary = waiting.message.get("temporary")
        if is_temporary_name(temporary):
            self._later(partial(self._delete, waiting.rank, str(temporary)))
        error = waiting.message.get("error") or "; ".join(waiting.errors)
        self._tell(waiting.rank, {**waiting.message, "error": error})

    def _delete(self, rank: int, temporary: str) -> None:
        """This rank's files, and the directory where they were the last."""
        folder = self._checkpoints / temporary
        with contextlib.suppress(OSError):  # `clear_parts` tries again at the end
            for path in folder.glob(f"*.shard-{rank:05d}-of-*"):
                path.unlink()
            folder.rmdir()


def clear_parts(checkpoints: Path) -> None:
    """Deletes what is left of checkpoints that ranks were writing in their own node's output_dir. For when none lives."""
    for folder in checkpoints.glob("step-*.tmp-*"):
        if is_temporary_name(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # there is none, or it holds what is not ours
        checkpoints.rmdir()


@contextlib.contextmanager
def receiving_shards(plan: RunPlan, server: HeadServer, checkpoints: Path) -> Iterator["ShardArrivals"]:
    """Takes the parts that the ranks of other nodes send, as long as the context lasts."""
    arrivals = ShardArrivals(plan, checkpoints)
    with FileReceiver(server, {SHARD_KIND: arrivals.place}) as receiving:
        arrivals.watches(receiving)
        try:
            yield arrivals
        finally:
            arrivals.close()


class ShardArrivals:
    """At the head: where parts of the other nodes go, and which of them have come.

    Args:
        plan: of this start of the ranks.
        checkpoints: the directory of the head's output_dir.
    """

    def __init__(self, plan: RunPlan, checkpoints: Path) -> None:
        self._plan = plan
        self._checkpoints = checkpoints
        self._there: dict[tuple[str, str], tuple[int, str]] = {}
        self._given_up: set[str] = set()
        self._receiving: FileReceiver | None = None
        self._coming = ""
        self._told = 0.0
        self._over = threading.Event()

    def watches(self, receiving: FileReceiver) -> None:
        """What takes the parts: it shows whether they move."""
        self._receiving, self._told = receiving, receiving.moved

    def moves(self) -> Message | None:
        """What rank 0 is told, from time to time, while parts arrive: it waits for them as long as they do."""
        if self._receiving is None or self._receiving.moved - self._told < _TELLS_EVERY_S:
            return None
        self._told = self._receiving.moved
        return {"kind": "shard_moves", "time": time.time(), "temporary": self._coming}

    def close(self) -> None:
        """This start of the ranks is over: no part waits any more."""
        self._over.set()

    def given_up(self, temporary: str) -> None:
        """Rank 0 has given this checkpoint up: what comes of it is not waited for."""
        self._given_up.add(temporary)

    def place(self, offer: Offer) -> Path:
        """Where it goes: into a checkpoint that is being written, under the name of a part of one of its node's ranks.

        Raises:
            Refused: for every other place.
        """
        rank, temporary, name = (offer.label.get(key) for key in ("rank", "temporary", "name"))
        own = [place.rank for place in self._plan.on_node(offer.node_rank)]
        if not isinstance(rank, int) or rank not in own:
            raise OfferRefused(f"rank {rank!r:.20} is none of node {offer.node_rank}")
        if not is_temporary_name(temporary):
            raise OfferRefused(f"{temporary!r:.80} is no checkpoint that is being written")
        if not isinstance(name, str) or not is_shard_of(name, rank, self._plan.world_size):
            raise OfferRefused(f"{name!r:.80} is no part of rank {rank}")
        folder = self._begun(str(temporary))
        self._coming = str(temporary)
        return folder / name

    def _begun(self, temporary: str) -> Path:
        """The directory, which rank 0 makes, and removes where it gives the checkpoint up: a part that comes late must not make it again.

        Rank 0 begins the same checkpoint at the same step, however long its own copies take.
        """
        folder = self._checkpoints / temporary
        while not folder.is_dir():
            if temporary in self._given_up or self._over.wait(_LOOK_S):
                raise OfferRefused(
                    f"rank 0 does not write checkpoint {temporary.partition('.')[0]} (any more)"
                )
        return folder

    def arrived(self, event: FileReceived) -> None:
        """A part has arrived, or has not."""
        if event.label.get("kind") == SHARD_KIND and event.path is not None:
            self._there[event.path.parent.name, event.path.name] = (event.bytes, event.xxh3_128)

    def confirmed(self, rank: int, message: Message) -> Message:
        """What rank 0 is told of a rank's `shard_written`: it counts only if what was to be sent is here."""
        node = self._plan.node(self._plan.ranks[rank].node_rank)
        told = {**message, "rank": rank}
        if node.node_rank == 0 or node.shares_output:
            return told
        error = one_line(str(message.get("error") or ""), limit=1_000)
        temporary, files = str(message.get("temporary")), message.get("files") or {}
        if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
            raise ValueError("the files of a part are none")
        error = error or self._missing(temporary, files)
        self._forget(temporary, files)
        return {**told, "error": error}

    def _missing(self, temporary: str, files: Mapping[str, Any]) -> str:
        for name, entry in files.items():
            if self._there.get((temporary, name)) != (entry.get("bytes"), entry.get("xxh3_128")):
                return f"{name} did not arrive as it was written"
        return ""

    def _forget(self, temporary: str, files: Mapping[str, Any]) -> None:
        for name in files:
            self._there.pop((temporary, name), None)
