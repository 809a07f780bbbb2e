"""A local mirror of the run's directory on the head's node.

The head writes its run's directory on its own disk. If the machine of the command does not share
that disk, each file is copied here as soon as it changes: a checkpoint appears complete or not at
all, and a log grows by its new lines. Before the start the directory is sent to the node, so that
the run resumes on whichever node the head is placed.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

import yaml

from unisono.base.files import fsync_dir, make_private_dir, path_below, whole_file, write_text
from unisono.guard.rundir import RunDir
from unisono.jobs.launchers.ray_node_fronts import ActorLost
from unisono.jobs.runs.train_request import config_yaml
from unisono.trainer.config import RunConfig

_PART_BYTES = 8 << 20
_TAIL_BYTES = 256
_EVERY_S = 1.0
_MOST_FAILURES = 3  # consecutive failures, of a minute each: a node may be slow
_GROWS = (".jsonl", ".log")
_LAST = ("result.json", "verdict.json")
_NOT_TAKEN = re.compile(
    r"-front\.log$|(^|/)(run\.lock|\.bringing|\.unisono-head-[^/]*|\..+\.tmp-[^/]*|\.trash-[^/]*)($|/)"
    r"|\.tmp-[0-9a-f]+($|/)|^nodes/"
)
"""Files that concern the head alone, or are incomplete."""
_CHECKPOINT = re.compile(r"checkpoints/(step-\d+[^/]*)/.+")

Stamp = tuple[int, int, int]
"""Size in bytes, modification time in ns, inode."""


class NodeFiles(Protocol):
    """Access to the files of a node."""

    def listing(self, root: str) -> dict[str, Stamp]:
        """Each file below a folder."""
        ...

    def read(self, path: str, offset: int, size: int) -> bytes:
        """A part of a file; FileNotFoundError if it is gone."""
        ...

    def write(self, path: str, offset: int, data: bytes, mode: int) -> None:
        """Writes a part of a file."""
        ...


@dataclass
class _CopiedPrefix:
    """How much of a growing file was copied: its stamp, the number of bytes, and the last of
    them.
    """

    stamp: Stamp
    taken: int = 0
    tail: bytes = b""


@dataclass
class Mirror:
    """Copies the directory `remote` of a node to `run` here.

    Attributes:
        remote: the directory on it. In files that contain this path, it is replaced by that of
            `run`.
        only: folders of it; empty: all of it.
    """

    node: NodeFiles
    remote: str
    run: RunDir
    only: tuple[str, ...] = ()
    _seen: dict[str, Stamp] = field(default_factory=dict)
    _grown: dict[str, _CopiedPrefix] = field(default_factory=dict)
    _final: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def push(self) -> None:
        """Sends the local files to the node."""
        for path in sorted(self.run.root.rglob("*")):
            name = path.relative_to(self.run.root).as_posix()
            if path.is_symlink() or not path.is_file() or not self._takes(name):
                continue
            self._send(path, f"{self.remote}/{name}")
        for name, stamp in self._listing().items():
            self._seen[name] = stamp
            if name.endswith(_GROWS):
                size = (self.run.root / name).stat().st_size
                self._grown[name] = _CopiedPrefix(stamp, size, self._local_tail(name))

    def sync(self, *, final: bool = False) -> None:
        """Copies the changed files, and deletes files that were deleted on the node.

        Args:
            final: whether nothing will change any more.

        Raises:
            OSError: if it cannot be written here.
            ActorLost: if the node does not answer, or its directory is gone: then nothing is
                deleted here.
        """
        with self._lock:
            self._final = final
            now = self._listing()
            if self._seen and not now:
                raise ActorLost(f"the run's directory on it, {self.remote}, is gone")
            changed = [name for name, stamp in now.items() if self._seen.get(name) != stamp]
            steps = sorted({matched[1] for name in changed if (matched := _CHECKPOINT.fullmatch(name))})
            others = sorted(name for name in changed if not _CHECKPOINT.fullmatch(name))
            # The metrics of a checkpoint's steps, which a resume needs, come before it; the result
            # comes last.
            for name in [name for name in others if name not in _LAST]:
                self._copy(name, now[name])
            for step in steps:
                self._copy_checkpoint(step, now)
            for name in [name for name in others if name in _LAST]:
                self._copy(name, now[name])
            for name in sorted(set(self._seen) - set(now)):
                self._remove(name, {matched[1] for one in now if (matched := _CHECKPOINT.fullmatch(one))})

    def _listing(self) -> dict[str, Stamp]:
        stamps = self.node.listing(self.remote)
        try:
            return {
                path_below(Path(), name).as_posix(): (s[0], s[1], s[2])
                for name, s in stamps.items()
                if self._takes(name)
            }
        except ValueError as error:
            raise ActorLost(f"it lists a file outside the run's directory: {error}") from error

    def _takes(self, name: str) -> bool:
        return not _NOT_TAKEN.search(name) and (not self.only or name.startswith(self.only))

    def _copy_checkpoint(self, step: str, now: dict[str, Stamp]) -> None:
        prefix = f"checkpoints/{step}/"
        names = [name for name in now if name.startswith(prefix)]
        target = self.run.checkpoints / step
        temporary = target.with_name(f"{step}.tmp-{secrets.token_hex(4)}")
        make_private_dir(temporary)
        try:
            for name in names:
                destination = temporary / name.removeprefix(prefix)
                destination.parent.mkdir(parents=True, exist_ok=True)
                self._fetch(name, destination)
            if target.exists():  # the same step, saved again
                _discard(target)
            temporary.rename(target)
            fsync_dir(target.parent)
        except FileNotFoundError:  # pruned in the meantime
            shutil.rmtree(temporary, ignore_errors=True)
            return
        except BaseException:  # leaves no partial checkpoint; raised again
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._seen |= {name: now[name] for name in names}

    def _copy(self, name: str, stamp: Stamp) -> None:
        target = self.run.root / name
        if not target.parent.exists():
            make_private_dir(target.parent)
        try:
            if name.endswith(_GROWS):
                self._grow(name, stamp, target)
            elif name == "config.yaml":
                self._copy_config(target)
            else:
                with whole_file(target, mode=0o600) as temporary:
                    self._fetch(name, temporary)
                    self._replace_path_inside(temporary, name)
        except FileNotFoundError:  # deleted in the meantime
            return
        known = self._grown.get(name)
        if known is None or known.taken == stamp[0]:  # otherwise a line is incomplete
            self._seen[name] = stamp

    def _grow(self, name: str, stamp: Stamp, target: Path) -> None:
        """Appends new data to a growing file; a truncated or replaced file is copied again."""
        known = self._grown.get(name)
        path = f"{self.remote}/{name}"
        if known is not None and known.stamp[2] == stamp[2] and stamp[0] >= known.taken and target.exists():
            start = known.taken - len(known.tail)
            if self.node.read(path, start, len(known.tail)) == known.tail:
                known.stamp = stamp
                self._append(path, target, known)
                return
        fresh = self._grown[name] = _CopiedPrefix(stamp)
        with whole_file(target, mode=0o600) as temporary:
            self._append(path, temporary, fresh)

    def _append(self, path: str, target: Path, known: _CopiedPrefix) -> None:
        """Appends complete lines, since a line may contain the directory; at the end an incomplete
        one, too.
        """
        with target.open("ab") as file:
            while data := self.node.read(path, known.taken, _PART_BYTES):  # to its end, which may have moved
                line_ends = data.rfind(b"\n") + 1
                data = data if self._final else data[: line_ends or len(data) // _PART_BYTES * _PART_BYTES]
                if not data:
                    return
                file.write(self._with_local_path(data, json_text=path.endswith(".jsonl")))
                known.taken += len(data)
                known.tail = (known.tail + data)[-_TAIL_BYTES:]

    def _copy_config(self, target: Path) -> None:
        body = yaml.safe_load(self._read_all("config.yaml"))
        config = RunConfig.model_validate({**body, "output_dir": str(self.run.root)})
        write_text(target, config_yaml(config, command=f"unisono train {target}"), mode=0o600)

    def _replace_path_inside(self, path: Path, name: str) -> None:
        """Replaces the path in JSON files of the run's directory itself; files of models are not
        changed.
        """
        if name.endswith(".json") and (
            len(PurePosixPath(name).parts) == 1 or name.startswith(("verdicts/", "evidence/"))
        ):
            data = path.read_bytes()
            renamed = self._with_local_path(data, json_text=True)
            if renamed != data:
                path.write_bytes(renamed)

    def with_local_path(self, text: bytes) -> bytes:
        """A line of JSON with the local directory in place of the node's."""
        return self._with_local_path(text, json_text=True)

    def _with_local_path(self, data: bytes, *, json_text: bool) -> bytes:
        local_root = str(self.run.root)
        return data.replace(
            self.remote.encode(), (json.dumps(local_root)[1:-1] if json_text else local_root).encode()
        )

    def _read_all(self, name: str) -> bytes:
        content = b""
        while data := self.node.read(f"{self.remote}/{name}", len(content), _PART_BYTES):
            content += data
        return content

    def _fetch(self, name: str, target: Path) -> None:
        with target.open("wb") as file:
            while data := self.node.read(f"{self.remote}/{name}", file.tell(), _PART_BYTES):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _send(self, path: Path, target: str) -> None:
        mode = path.stat().st_mode & 0o777
        with path.open("rb") as file:
            offset = 0
            while True:
                data = file.read(_PART_BYTES)
                if not data and offset:
                    return
                self.node.write(target, offset, data, mode)
                offset += len(data)
                if not data:
                    return

    def _local_tail(self, name: str) -> bytes:
        with (self.run.root / name).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read()

    def _remove(self, name: str, kept: set[str]) -> None:
        """Deletes a file; a checkpoint only as a whole, and only while the head has a different
        one.
        """
        path = self.run.root / name
        del self._seen[name]
        self._grown.pop(name, None)
        with contextlib.suppress(OSError):
            if matched := _CHECKPOINT.fullmatch(name):
                folder = self.run.checkpoints / matched[1]
                if kept and matched[1] not in kept and folder.exists():
                    _discard(folder)
            else:
                path.unlink()
                if path.parent != self.run.root and not any(path.parent.iterdir()):
                    path.parent.rmdir()


class MirrorThread:
    """Synchronizes a mirror regularly in a background thread, inside its context; `finish`
    synchronizes it once more.

    Attributes:
        error: why it stopped: the local disk failed, or the node is gone.
    """

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.error: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def __enter__(self) -> "MirrorThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def finish(self) -> None:
        """Copies the last changes.

        Raises:
            OSError: if files cannot be written here.
            ActorLost: if the node does not answer.
        """
        self._over.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        for attempt in range(1, _MOST_FAILURES + 1):
            try:
                self.mirror.sync(final=True)
            except ActorLost:
                if attempt == _MOST_FAILURES:
                    raise
            else:
                return

    def _follow(self) -> None:
        failures = 0
        while not self._over.wait(_EVERY_S):
            try:
                self.mirror.sync()
                failures = 0
            except ActorLost as error:
                failures += 1
                if failures == _MOST_FAILURES:
                    self.error = error
                    return
            except Exception as error:  # noqa: BLE001 - of a background thread: stored, and raised by `finish`
                self.error = error
                return


def _discard(folder: Path) -> None:
    """Deletes a checkpoint: renames it first, so that it disappears at once."""
    trash = folder.with_name(f".trash-{folder.name.removeprefix('step-')[:8]}-{secrets.token_hex(4)}")
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
