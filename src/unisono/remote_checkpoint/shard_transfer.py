"""Shards of a checkpoint from ranks that do not share the head's output_dir: their front sends them, the head's receives them.

A rank writes into `checkpoints/TEMPORARY/` of its own node's output_dir and sends `shard_written`. Sent files are deleted
there in any case. The head passes `shard_written` to rank 0, which alone publishes, once the files are in
`checkpoints/TEMPORARY/` of its own output_dir with the sizes and digests that the rank wrote; or with an error.
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
from unisono.control.channel_ends import HeadServer
from unisono.control.events import FileReceived
from unisono.control.file_receiver import FileReceiver
from unisono.control.file_sender import Content, FileSender, Offer, OfferRefused, TransferOutcome
from unisono.events import Message
from unisono.plan import RunPlan
from unisono.text import one_line

SHARD_KIND = "shard"
"""The kind in the label of a shard's transfer."""
_MOVES_EVERY_S = 2.0
_LOOK_S = 0.02
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]+")


def is_temporary_name(name: object) -> bool:
    """Whether this is the directory name of a checkpoint in progress."""
    return isinstance(name, str) and _TEMPORARY.fullmatch(name) is not None


def is_shard_of(name: str, rank: int, world_size: int) -> bool:
    """Whether this is the name of a file that only this rank writes."""
    return is_file_name(name) and name.endswith(f".shard-{rank:05d}-of-{world_size:05d}.safetensors")


@dataclass
class _PendingMessage:
    """A rank's `shard_written`, until the transfers of its files have ended."""

    rank: int
    message: Message
    pending: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


class ShardSender:
    """Sends shards from a node that does not share the head's output_dir.

    Args:
        checkpoints: the checkpoint directory of this node's own output_dir.
        forward: sends a rank's message to the head, once its files are there.
        run_later: runs work on files elsewhere: the front must not wait for a hanging disk.
    """

    def __init__(
        self,
        transfers: FileSender,
        checkpoints: Path,
        forward: Callable[[int, Message], None],
        run_later: Callable[[Callable[[], object]], None],
    ) -> None:
        self._run_later = run_later
        self._transfers = transfers
        self._checkpoints = checkpoints
        self._forward = forward
        self._of_transfer: dict[int, _PendingMessage] = {}

    def written(self, rank: int, message: Message) -> None:
        """Sends the shard that a rank has written, or its error."""
        waiting = _PendingMessage(rank, message)
        temporary, files = message.get("temporary"), message.get("files") or {}
        if message.get("error") or not is_temporary_name(temporary) or not all(map(is_file_name, files)):
            self._end(waiting)
            return
        for name, entry in files.items():
            label = {"kind": SHARD_KIND, "rank": rank, "temporary": temporary, "name": name}
            content = Content(entry["bytes"], entry["xxh3_128"])
            number = self._transfers.send(self._checkpoints / str(temporary) / name, label, content)
            waiting.pending.add(number)
            self._of_transfer[number] = waiting
        if not files:
            self._end(waiting)

    def transfer_ended(self, outcome: TransferOutcome) -> None:
        """Records the end of a transfer, successful or not."""
        waiting = self._of_transfer.pop(outcome.transfer, None)
        if waiting is None:
            return
        waiting.pending.discard(outcome.transfer)
        if outcome.error:
            waiting.errors.append(f"{outcome.label['name']}: {outcome.error}")
        if not waiting.pending:
            self._end(waiting)

    def _end(self, waiting: _PendingMessage) -> None:
        temporary = waiting.message.get("temporary")
        if is_temporary_name(temporary):
            self._run_later(partial(self._delete, waiting.rank, str(temporary)))
        error = waiting.message.get("error") or "; ".join(waiting.errors)
        self._forward(waiting.rank, {**waiting.message, "error": error})

    def _delete(self, rank: int, temporary: str) -> None:
        """Deletes this rank's files, and the directory if it is empty then."""
        folder = self._checkpoints / temporary
        with contextlib.suppress(OSError):  # `clear_parts` tries again at the end
            for path in folder.glob(f"*.shard-{rank:05d}-of-*"):
                path.unlink()
            folder.rmdir()


def clear_parts(checkpoints: Path) -> None:
    """Deletes incomplete checkpoints in a node's own output_dir, after its ranks have ended."""
    for folder in checkpoints.glob("step-*.tmp-*"):
        if is_temporary_name(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is missing, or holds other files
        checkpoints.rmdir()


@contextlib.contextmanager
def receiving_shards(plan: RunPlan, server: HeadServer, checkpoints: Path) -> Iterator["ShardArrivals"]:
    """Receives the shards of other nodes' ranks inside the context."""
    arrivals = ShardArrivals(plan, checkpoints)
    with FileReceiver(server, {SHARD_KIND: arrivals.place}) as receiving:
        arrivals.watch(receiving)
        try:
            yield arrivals
        finally:
            arrivals.close()


class ShardArrivals:
    """The received shards, at the head.

    Args:
        checkpoints: the checkpoint directory of the head's output_dir.
    """

    def __init__(self, plan: RunPlan, checkpoints: Path) -> None:
        self._plan = plan
        self._checkpoints = checkpoints
        self._received: dict[tuple[str, str], tuple[int, str]] = {}
        self._given_up: set[str] = set()
        self._receiving: FileReceiver | None = None
        self._current = ""
        self._reported = 0.0
        self._over = threading.Event()

    def watch(self, receiving: FileReceiver) -> None:
        """Sets the receiver, whose progress `moves` reports."""
        self._receiving, self._reported = receiving, receiving.moved

    def moves(self) -> Message | None:
        """A message to rank 0 from time to time while shards arrive, so that it keeps waiting for them."""
        if self._receiving is None or self._receiving.moved - self._reported < _MOVES_EVERY_S:
            return None
        self._reported = self._receiving.moved
        return {"kind": "shard_moves", "time": time.time(), "temporary": self._current}

    def close(self) -> None:
        """Ends the attempt: no shard waits any more."""
        self._over.set()

    def given_up(self, temporary: str) -> None:
        """Records that rank 0 has abandoned this checkpoint: its shards are refused."""
        self._given_up.add(temporary)

    def place(self, offer: Offer) -> Path:
        """The path of an offered shard, inside a checkpoint in progress and with a name of one of its node's ranks.

        Raises:
            Refused: for any other path.
        """
        rank, temporary, name = (offer.label.get(key) for key in ("rank", "temporary", "name"))
        own = [place.rank for place in self._plan.on_node(offer.node_rank)]
        if not isinstance(rank, int) or rank not in own:
            raise OfferRefused(f"rank {rank!r:.20} is not on node {offer.node_rank}")
        if not is_temporary_name(temporary):
            raise OfferRefused(f"{temporary!r:.80} is not a checkpoint in progress")
        if not isinstance(name, str) or not is_shard_of(name, rank, self._plan.world_size):
            raise OfferRefused(f"{name!r:.80} is not a shard of rank {rank}")
        folder = self._wait_for_folder(str(temporary))
        self._current = str(temporary)
        return folder / name

    def _wait_for_folder(self, temporary: str) -> Path:
        """The directory, which rank 0 creates, and removes if it abandons the checkpoint: a late shard must not create it again.

        Rank 0 starts the same checkpoint at the same step, however long its own copies take.
        """
        folder = self._checkpoints / temporary
        while not folder.is_dir():
            if temporary in self._given_up or self._over.wait(_LOOK_S):
                raise OfferRefused(
                    f"rank 0 is not writing checkpoint {temporary.partition('.')[0]} (any more)"
                )
        return folder

    def arrived(self, event: FileReceived) -> None:
        """Records an arrived shard."""
        if event.label.get("kind") == SHARD_KIND and event.path is not None:
            self._received[event.path.parent.name, event.path.name] = (event.bytes, event.xxh3_128)

    def confirmed(self, rank: int, message: Message) -> Message:
        """The message to rank 0 for a rank's `shard_written`: without an error only if all of its files are here."""
        node = self._plan.node(self._plan.ranks[rank].node_rank)
        confirmed = {**message, "rank": rank}
        if node.node_rank == 0 or node.shares_output:
            return confirmed
        error = one_line(str(message.get("error") or ""), limit=1_000)
        temporary, files = str(message.get("temporary")), message.get("files") or {}
        if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
            raise ValueError("the files of a shard are not valid")
        error = error or self._missing(temporary, files)
        self._forget(temporary, files)
        return {**confirmed, "error": error}

    def _missing(self, temporary: str, files: Mapping[str, Any]) -> str:
        for name, entry in files.items():
            if self._received.get((temporary, name)) != (entry.get("bytes"), entry.get("xxh3_128")):
                return f"{name} did not arrive unchanged"
        return ""

    def _forget(self, temporary: str, files: Mapping[str, Any]) -> None:
        for name in files:
            self._received.pop((temporary, name), None)
