"""Checkpoints that come from elsewhere: `--resume` without a local one downloads the latest
complete one from checkpoint.storage; and shards of ranks that do not share the head's output_dir
are sent to it by their front.
"""

import contextlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from unisono.base.errors import IntegrityError, UnfitError
from unisono.base.files import fsync_dir, make_private_dir, read_object, write_json
from unisono.base.messages import Message, ShardMovesMessage, ShardWrittenMessage, Show
from unisono.base.text import one_line, show_bytes, show_seconds
from unisono.base.user_key import KEY_FILE, user_key
from unisono.guard.control.channel_ends import HeadServer
from unisono.guard.control.connection import FileReceived
from unisono.guard.control.file_transfer import (
    Content,
    FileReceiver,
    FileSender,
    Offer,
    OfferRefused,
    TransferOutcome,
)
from unisono.guard.facts import Environment
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.task_process import run_request
from unisono.guard.supervise.task_requests import TaskRequest
from unisono.jobs.remote_checkpoint.storage import STALLED_S, storage_url
from unisono.trainer.checkpoint.manifest import Manifest, is_file_name
from unisono.trainer.checkpoint.store import CheckpointStore, temporary_name
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.task_requests import FetchCopy, FindCopy

_NOTE_AFTER_S, _NOTE_EVERY_S = 2.0, 10.0
_RUN_FILES = ".brought.tmp-"
Result = TypeVar("Result")


def download_newest(
    config: RunConfig, environment: Environment, *, who: str, programs: Programs, trust: bool, show: Show
) -> bool:
    """Downloads a checkpoint into an output_dir without an intact one, so that the run can resume
    there.

    The caller holds the directory's lock. A kill at any time leaves a complete download, or what
    `remove_partial_download` removes.

    Args:
        config: with or without checkpoint.storage.
        who: this node, for notes on other nodes; empty for a single node.
        trust: `--trust`: accept a checkpoint without this user's signature.

    Returns:
        Whether a checkpoint was downloaded.

    Raises:
        UnfitError: if the storage cannot be read, so that its content is unknown.
        IntegrityError: if its checkpoint is damaged or signed with a different key.
    """
    run = RunDir(Path(config.output_dir))
    if config.checkpoint.storage is None:
        return False
    store = CheckpointStore(run.checkpoints, key=user_key(environment.settings_dir))
    plan = read_object(run.plan)
    run_id = plan.get("run_id") if isinstance(plan.get("run_id"), str) else None
    if (run_id is None and store.list()) or store.newest_intact(run_id=run_id, trust=trust) is not None:
        return False
    download = _Download(run, store, storage_url(config.checkpoint.storage, run.root), who, programs, show)
    before, damage = None, None
    while (manifest := download.look(run_id, before=before)) is not None:
        if not trust and not manifest.is_signed_by(user_key(environment.settings_dir)):
            raise _not_signed(manifest, download.url)
        try:
            download.do(manifest, is_new=not plan)
        except IntegrityError as error:
            damage, before, run_id = error, manifest.step, manifest.run_id
            download.warn(error)
            continue
        return True
    if damage is not None:
        raise damage
    _note(
        show,
        f"{download.url} holds no complete checkpoint of"
        f" {f'run {run_id}' if run_id else 'a run of this name'}",
    )
    return False


def remove_partial_download(run: RunDir) -> bool:
    """Removes a download that a killed start left in a directory without a run.

    The caller holds the directory's lock.

    Returns:
        Whether one was removed. A download with its plan is complete, and stays.
    """
    for folder in run.root.glob(f"{_RUN_FILES}*"):
        shutil.rmtree(folder, ignore_errors=True)
    if not run.bringing.exists():
        return False
    is_complete = run.plan.exists()
    if not is_complete:
        shutil.rmtree(run.checkpoints, ignore_errors=True)  # there were none before
        for path in (run.config, run.environment, run.data, run.metrics):
            path.unlink(missing_ok=True)
        fsync_dir(run.root)
    run.bringing.unlink()
    return not is_complete


def _not_signed(manifest: Manifest, url: str) -> IntegrityError:
    return IntegrityError.of(
        f"the checkpoint of step {manifest.step} in the storage is not signed with your key",
        where=f"{url}/{manifest.run_id}",
        why="checkpoints signed with a different key need --trust",
        fix=(
            f"copy {KEY_FILE} from the machine that wrote it to your settings folder (~/.config/unisono), or"
            " pass --trust"
        ),
    )


class _Download:
    def __init__(
        self, run: RunDir, store: CheckpointStore, url: str, who: str, programs: Programs, show: Show
    ) -> None:
        self.url = url
        self._run = run
        self._who = who
        self._store = store
        self._programs = programs
        self._show = show

    def look(self, run_id: str | None, *, before: int | None) -> Manifest | None:
        """The manifest of the latest complete checkpoint in the storage, of one run or of the
        latest run; optionally before a step.
        """
        request = FindCopy(url=self.url, run_id=run_id, before=before)
        _note(self._show, f"looking in {self.url} for a checkpoint to resume from")
        manifest = self._ask(request)["manifest"]
        return Manifest.from_bytes(manifest.encode()) if manifest else None

    def warn(self, error: IntegrityError) -> None:
        """Warns of a damaged checkpoint, before an older one is tried."""
        problem = error.problems[0]
        text = f"{problem.what}: {problem.why}; trying an older one"
        self._show(
            {
                "kind": "warning",
                "time": time.time(),
                "code": "storage_damaged",
                "text": text,
                "fix": "delete it there",
            }
        )

    def do(self, manifest: Manifest, *, is_new: bool) -> None:
        """Downloads a checkpoint, completely or not at all.

        Args:
            is_new: whether there is no run here: its files besides the checkpoint are downloaded,
                too.
        """
        nonce = secrets.token_hex(4)
        temporary = self._run.checkpoints / temporary_name(manifest.step, nonce)
        beside = self._run.root / f"{_RUN_FILES}{os.getpid()}-{nonce}"
        if is_new:
            self._run.plan.unlink(
                missing_ok=True
            )  # an unreadable plan would make a partial download look complete
            body = {"schema": 1, "url": self.url, "run_id": manifest.run_id, "step": manifest.step}
            write_json(self._run.bringing, body, mode=0o600)
        try:
            make_private_dir(self._run.checkpoints)
            for folder in (temporary, beside):
                folder.mkdir(mode=0o700)
            self._fetch(manifest, temporary, beside)
            self._store.adopt(temporary, manifest)
            if is_new:
                self._place(beside)
        except BaseException:  # including Ctrl-C: leaves nothing partial; raised again
            remove_partial_download(self._run)
            raise
        finally:
            for folder in (temporary, beside):
                shutil.rmtree(folder, ignore_errors=True)
        self._run.bringing.unlink(missing_ok=True)

    def _fetch(self, manifest: Manifest, temporary: Path, beside: Path) -> None:
        step, run_id = manifest.step, manifest.run_id
        request = FetchCopy(url=self.url, run_id=run_id, step=step, to=temporary, beside=beside)
        line = f"{self._who} is downloading" if self._who else "downloading"
        line += f" step {step} of run {run_id} from {self.url}"
        _note(self._show, f"{line} ({show_bytes(manifest.total_bytes)})")
        result = self._ask(request, _FetchProgress(self._show, line))
        duration = f"{show_bytes(result['bytes'])} in {show_seconds(result['seconds'])}"
        _note(self._show, f"step {step} of run {run_id} is downloaded from {self.url}: {duration}")

    def _ask(
        self, request: TaskRequest[Result], on_message: Callable[[Message], None] | None = None
    ) -> Result:
        """The result of a storage task; a hanging storage is an error."""
        try:
            return run_request(request, on_message=on_message, programs=self._programs, silence_s=STALLED_S)
        except UnfitError as error:
            if error.problems[0].where != "storage":
                raise
            raise UnfitError.of(
                f"{self.url} does not answer: {error.problems[0].what}",
                where="checkpoint.storage",
                why="the run would resume from it",
                fix="fix the storage, or start without --resume to begin a new run here",
            ) from error

    def _place(self, beside: Path) -> None:
        """Moves the run's other files into its directory; the plan last, since it marks the
        directory as complete.
        """
        names = sorted((path.name for path in beside.iterdir()), key=lambda name: name == self._run.plan.name)
        for name in names:
            (beside / name).rename(self._run.root / name)
        fsync_dir(self._run.root)


class _FetchProgress:
    """Shows the progress of a download: after two seconds, then every ten."""

    def __init__(self, show: Show, line: str) -> None:
        self._show = show
        self._line = line
        self._next = time.monotonic() + _NOTE_AFTER_S

    def __call__(self, message: Message) -> None:
        if message["kind"] != "progress" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _NOTE_EVERY_S
        _note(self._show, f"{self._line}: {show_bytes(message['bytes'])} of {show_bytes(message['of'])}")


def _note(show: Show, text: str) -> None:
    show({"kind": "note", "time": time.time(), "text": text})


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
    message: ShardWrittenMessage
    pending: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


class ShardSender:
    """Sends shards from a node that does not share the head's output_dir.

    Args:
        forward: sends a rank's message to the head, once its files are there.
        run_later: runs work on files elsewhere: the front must not wait for a hanging disk.
    """

    def __init__(
        self,
        transfers: FileSender,
        forward: Callable[[int, ShardWrittenMessage], None],
        run_later: Callable[[Callable[[], object]], None],
    ) -> None:
        self._run_later = run_later
        self._transfers = transfers
        self._forward = forward
        self._of_transfer: dict[int, _PendingMessage] = {}

    def written(self, rank: int, message: ShardWrittenMessage) -> None:
        """Sends the shard that a rank has written, or its error."""
        waiting = _PendingMessage(rank, message)
        temporary, files = message.get("temporary"), message.get("files") or {}
        if message.get("error") or not is_temporary_name(temporary) or not all(map(is_file_name, files)):
            self._end(waiting)
            return
        for name, entry in files.items():
            label = {"kind": SHARD_KIND, "rank": rank, "temporary": temporary, "name": name}
            content = Content(int(str(entry["bytes"])), str(entry["xxh3_128"]))
            number = self._transfers.send(Path(message["directory"]) / name, label, content)
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
        if is_temporary_name(waiting.message.get("temporary")):
            self._run_later(partial(_delete_shards, waiting.rank, Path(waiting.message["directory"])))
        error = waiting.message.get("error") or "; ".join(waiting.errors)
        self._forward(waiting.rank, {**waiting.message, "error": error})


def _delete_shards(rank: int, folder: Path) -> None:
    """Deletes this rank's files, and the directory if it is empty then."""
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

    def moves(self) -> ShardMovesMessage | None:
        """A message to rank 0 from time to time while shards arrive, so that it keeps waiting for
        them.
        """
        if self._receiving is None or self._receiving.moved - self._reported < _MOVES_EVERY_S:
            return None
        self._reported = self._receiving.moved
        return {"kind": "shard_moves", "time": time.time(), "temporary": self._current}

    def close(self) -> None:
        """Ends the attempt: no shard waits any more."""
        self._over.set()

    def moved(self, output_dir: Path) -> None:
        """Records that rank 0 writes into a different output_dir from here on."""
        self._checkpoints = RunDir(output_dir).checkpoints

    def given_up(self, temporary: str) -> None:
        """Records that rank 0 has abandoned this checkpoint: its shards are refused."""
        self._given_up.add(temporary)

    def place(self, offer: Offer) -> tuple[Path, str]:
        """The directory and name of an offered shard: of a checkpoint in progress, and of one of
        its node's ranks.

        Raises:
            Refused: for any other.
        """
        rank, temporary, name = (offer.label.get(key) for key in ("rank", "temporary", "name"))
        node_ranks = [place.rank for place in self._plan.on_node(offer.node_rank)]
        if not isinstance(rank, int) or rank not in node_ranks:
            raise OfferRefused(f"rank {rank!r:.20} is not on node {offer.node_rank}")
        if not is_temporary_name(temporary):
            raise OfferRefused(f"{temporary!r:.80} is not a checkpoint in progress")
        if not isinstance(name, str) or not is_shard_of(name, rank, self._plan.world_size):
            raise OfferRefused(f"{name!r:.80} is not a shard of rank {rank}")
        folder = self._wait_for_folder(str(temporary))
        self._current = str(temporary)
        return folder, name

    def _wait_for_folder(self, temporary: str) -> Path:
        """The directory, which rank 0 creates, and removes if it abandons the checkpoint: a late
        shard must not create it again.

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

    def confirmed(self, rank: int, message: ShardWrittenMessage) -> ShardWrittenMessage:
        """The message to rank 0 for a rank's `shard_written`: without an error only if all of its
        files are here.
        """
        node = self._plan.node(self._plan.ranks[rank].node_rank)
        confirmed: ShardWrittenMessage = {**message, "rank": rank}
        if node.node_rank == 0 or node.shares_output:
            return confirmed
        error = one_line(str(message.get("error") or ""), limit=1_000)
        temporary, files = str(message.get("temporary")), message.get("files") or {}
        if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
            raise ValueError("the files of a shard are not valid")
        error = error or self._missing(temporary, files)
        self._forget(temporary, files)
        return {**confirmed, "error": error}

    def _missing(self, temporary: str, files: Mapping[str, Mapping[str, object]]) -> str:
        for name, entry in files.items():
            if self._received.get((temporary, name)) != (entry.get("bytes"), entry.get("xxh3_128")):
                return f"{name} did not arrive unchanged"
        return ""

    def _forget(self, temporary: str, files: Iterable[str]) -> None:
        for name in files:
            self._received.pop((temporary, name), None)
