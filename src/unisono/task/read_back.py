"""The task `rehearsed`: reads a run's first checkpoint back from disk, as a later start would.

Request: path, run_id. Message `room`: the measured disk space. Result: seconds, bytes, tensors.
"""

import contextlib
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.manifest import user_key
from unisono.checkpoint.retention import measure_disk_space, record_verified
from unisono.checkpoint.verify import read_through
from unisono.errors import IntegrityError, Problem
from unisono.events import Reporter
from unisono.facts import read_environment

if TYPE_CHECKING:
    from unisono.checkpoint.state import CheckpointReader


def run_rehearsed(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Reports the disk space at once, then reads everything.

    Raises:
        IntegrityError: with everything that is wrong with the checkpoint.
    """
    path, key = Path(request["path"]), user_key(read_environment().settings_dir)
    report.send("room", **asdict(measure_disk_space(path.parent, key=key)))
    began = time.monotonic()
    for file in path.iterdir():
        forget_cached(file)
    reading = read_through(path, key=key, run_id=request["run_id"])
    if reading.manifest is None or not reading.intact or reading.is_foreign:
        findings = [finding for finding in reading.findings if finding.kind != "extra"]
        raise IntegrityError(*(Problem(str(finding), str(path / finding.file)) for finding in findings))
    tensors = _read_tensors(path)
    record_verified(path.parent, [reading])
    return {"seconds": time.monotonic() - began, "bytes": reading.manifest.total_bytes, "tensors": tensors}


def _read_tensors(path: Path) -> int:
    """Reads every tensor; gives their number.

    Raises:
        IntegrityError: if they do not match state.json.
    """
    from unisono.checkpoint.state import CheckpointReader  # imports torch, which the digests do not need

    reader = CheckpointReader(path)
    problems = _misfits(reader)
    if problems:
        raise IntegrityError(*(Problem(text, str(path)) for text in problems))
    count = 0
    for group, outlines in reader.groups.items():
        for name, outline in outlines.items():
            tensor = reader.tensor(group, name)
            assert (tuple(tensor.shape), tensor.dtype) == (outline.shape, outline.dtype)
            count += 1
    return count


def _misfits(reader: "CheckpointReader") -> list[str]:
    """The differences between the tensors and the parameters in the optimizer groups of state.json."""
    optimizers = reader.values["optimizer"]
    named = {name for state in optimizers.values() for group in state["groups"] for name in group["names"]}
    found = [
        f"{name} is in state.json, but has no tensor"
        for name in sorted(named - set(reader.groups["trainable"]))
    ]
    found += [
        f"{name} is a tensor, but not in state.json"
        for name in sorted(set(reader.groups["trainable"]) - named)
    ]
    for optimizer in optimizers:
        for label, outline in reader.groups[f"optimizer-{optimizer}"].items():
            parameter = reader.groups["trainable"].get(label.rpartition("::")[0])
            if parameter is None or outline.shape not in ((), parameter.shape):
                found.append(f"{label} does not match its parameter")
    return found[:8]


def forget_cached(file: Path, *, flush: bool = False) -> None:
    """Drops a file from the page cache, so that later reads come from the disk.

    Args:
        file: the file.
        flush: whether to sync the file first; otherwise the kernel keeps pages that are not on disk yet.

    Raises:
        OSError: if it cannot be opened or synced.
    """
    fd = os.open(file, os.O_RDONLY)
    try:
        if flush:
            os.fsync(fd)
        with contextlib.suppress(OSError):  # the file system has no page cache, or does not support it
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
