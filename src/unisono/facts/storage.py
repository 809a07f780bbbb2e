"""Checks of an output folder: writable, free space, shared with the head. Run in a child process, since storage can hang."""

import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.facts import path_probes
from unisono.files import write_text
from unisono.text import one_line

_PREFIX = ".unisono-head-"
_CACHE_PATIENCE_S = 5.0
"""How long a network file system may keep what it knew of a folder (acdirmax of NFS is longer, but listing queries it again)."""


@dataclass(frozen=True)
class StorageFacts:
    """An output folder as seen by this node; None: not tested in time.

    Attributes:
        writable: whether a file could be written, synced, renamed, read back and removed in it, or in its nearest parent.
        trouble: why not, or why it could not be tested.
        shared: whether the head's file is in it; None also if not requested.
        file_system: its type, as `ext4` or `nfs4`.
    """

    path: str
    writable: bool | None
    trouble: str
    shared: bool | None
    free_bytes: int | None
    file_system: str


def probe_storage(
    folder: Path, *, nonce: str | None = None, limit_s: float = 5.0, program: tuple[str, ...] | None = None
) -> StorageFacts:
    """Tests a folder in a child process, which is abandoned if the storage does not respond.

    Leaves nothing behind: for a folder that does not exist yet its nearest parent is tested.

    Args:
        nonce: the name of the file that the head left in it; None: it is not looked for.
        limit_s: maximum silence. A network file system that responds gets five more seconds for its caches.
        program: the child's command; tests use a slow one.
    """
    command = [*(program or _PROBE), str(folder)]
    if nonce is not None:
        command += [nonce, str(_CACHE_PATIENCE_S)]
    answer, in_time = _run_child(command, limit_s)
    late = "" if in_time else f"the storage does not answer: nothing for {limit_s:g} s"
    return StorageFacts(
        path=str(folder),
        writable=answer.get("writable"),
        trouble=one_line(
            str(answer.get("trouble") or late or ("" if "writable" in answer else answer.get("error", "")))
        ),
        shared=answer.get("shared"),
        free_bytes=answer.get("free_bytes"),
        file_system=str(answer.get("file_system") or path_probes.file_system_of(folder)),
    )


def leave_nonce(folder: Path) -> str:
    """Creates the file in the head's folder by which other nodes recognize a shared folder; returns its name.

    Raises:
        OSError: what the file system says.
    """
    for old in folder.glob(f"{_PREFIX}*"):  # of a head that was killed; who calls this has the folder's lock
        old.unlink(missing_ok=True)
    name = _PREFIX + secrets.token_hex(8)
    write_text(folder / name, "unisono's head created this file for the start; it can be deleted\n")
    return name


def sees_nonce(folder: Path, name: str, *, limit_s: float = 5.0) -> bool | None:
    """Whether this node's folder is the head's; None where the storage does not answer.

    A name that is not one of `leave_nonce` is never looked for: it comes from another machine.
    """
    return probe_storage(folder, nonce=name, limit_s=limit_s).shared if is_nonce(name) else None


def is_nonce(name: str) -> bool:
    """Whether a name can be one that `leave_nonce` gave."""
    rest = name.removeprefix(_PREFIX)
    return rest != name and len(rest) == 16 and set(rest) <= set("0123456789abcdef")


def remove_nonce(folder: Path, name: str) -> None:
    """Removes the file, if it exists.

    Raises:
        OSError: what the file system says.
    """
    if is_nonce(name):
        (folder / name).unlink(missing_ok=True)


def responds(path: Path, *, limit_s: float | None = 5.0) -> bool:
    """Whether touching a file or folder completes, successfully or not, within the limit.

    Done in a child process, which is abandoned if it hangs: a process that hangs in a write cannot even exit.

    Args:
        path: of what is there already.
        limit_s: None: it is waited for.
    """
    _, in_time = _run_child([*_TOUCH, str(path)], limit_s)
    return in_time


# A millisecond, where Python would take twenty-five: the lock of a run is touched every few seconds.
_TOUCH = (
    ("touch", "-c", "--")
    if shutil.which("touch")
    else (sys.executable, "-I", "-S", "-c", "import os, sys; os.utime(sys.argv[1])")
)

# Isolated and without site: nothing of the user's own setup is imported, and it starts in a hundredth of a second.
_PROBE = (sys.executable, "-I", "-S", path_probes.__file__, "storage")


def _run_child(command: list[str], limit_s: float | None) -> tuple[dict[str, Any], bool]:
    """The child's findings, and whether it ended without a silence of more than `limit_s`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[bytes] = []
    with process.stdout as pipe:
        in_time = _read_to_end(pipe.fileno(), lines, limit_s)
    if not in_time:
        process.kill()
    # In the kernel's D state it outlives even SIGKILL: nobody waits for it here.
    threading.Thread(target=process.wait, name="reap", daemon=True).start()
    answer: dict[str, Any] = {}
    for line in b"".join(lines).decode(errors="replace").splitlines():
        try:
            answer |= json.loads(line)
        except (ValueError, TypeError):
            answer["error"] = line  # the last line of a traceback has the error
    return answer, in_time


def _read_to_end(fd: int, into: list[bytes], limit_s: float | None) -> bool:
    """Reads until the other end is closed; False if it said nothing for `limit_s`."""
    with (
        selectors.DefaultSelector() as selector
    ):  # select() knows no file above 1,024, and a head has that many
        selector.register(fd, selectors.EVENT_READ)
        while selector.select(limit_s):
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return True
            into.append(chunk)
    return False
