"""The actor on a node: starts its front, hands on what it says, and reads and writes files there.

It is sent to the node as it stands here, since unisono may be missing or be another version there, and has to be able to say so.
So it needs nothing but the standard library.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

_MOST_LINES = 2_000
_LOCK_FILE = ".held"
_PROCESS_VARIABLES = ("UNISONO_TOKEN", "XDG_CONFIG_HOME")


class NodeActor:
    """What a driver has on one node. Its methods run in threads, several at a time."""

    def __init__(self) -> None:
        self._place: Path | None = None
        self._held: int | None = None
        self._input: IO[bytes] | None = None
        self._lines: list[tuple[str, bytes]] = []
        self._open = 0
        self._news = threading.Condition()

    def facts(self) -> dict[str, Any]:
        """What runs here: host, python, unisono and a digest of its code; `trouble` where there is none."""
        found = {
            "host": socket.gethostname(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "program": sys.executable,
            "unisono": "",
            "code": {},
            "trouble": "",
            "cpus": os.cpu_count() or 1,
        }
        import ray  # here it runs inside of Ray

        found["ray_node"] = ray.get_runtime_context().get_node_id()
        try:
            import unisono
            from unisono.facts.versions import code_digests

            found["unisono"], found["code"] = unisono.__version__, code_digests()
        except ImportError as error:
            found["trouble"] = f"{type(error).__name__}: {error}"
        return found

    def sees(self, path: str) -> bool:
        """Whether a file is here, too, in a folder that can be written."""
        return Path(path).exists() and os.access(Path(path).parent, os.W_OK | os.X_OK)

    def free_port(self, address: str) -> int:
        """A port of this node that nobody listens on."""
        with socket.socket(
            socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
        ) as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def make_place(self, job: str) -> str:
        """Makes this job's own folder here; folders of jobs that were killed are removed."""
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = (home if home.is_absolute() else Path("~/.cache").expanduser()) / "unisono" / "ray"
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in base.iterdir():
            if _is_abandoned(old):
                shutil.rmtree(old, ignore_errors=True)
        self._place = base / job
        self._place.mkdir(mode=0o700)
        self._held = os.open(self._place / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._held, fcntl.LOCK_SH)
        return str(self._place)

    def write(self, path: str, offset: int, data: bytes, mode: int) -> None:
        """Writes a part of a file, whose folder is made where it is missing."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.seek(offset)
            file.write(data)

    def start(
        self, config: str, request: dict[str, Any], token: bytes, key: str, variables: dict[str, str]
    ) -> None:
        """Starts this node's front.

        Args:
            config: the text of its config.
            request: for `unisono.cluster.ray.node_main`.
            token: the job's secret; it goes by a pipe.
            key: the user's, under which checkpoints are signed.
            variables: of the environment, that are to be equal everywhere.
        """
        assert self._place is not None, "make_place comes first"
        assert self._held is not None
        settings = self._place / "settings"
        for name, text in (("settings/unisono/checkpoint.key", key + "\n"), ("config.yaml", config)):
            self.write(str(self._place / name), 0, text.encode(), 0o600)
        asked = {**request, "config": str(self._place / "config.yaml")}
        self.write(str(self._place / "request.json"), 0, json.dumps(asked).encode(), 0o600)
        kept = {name: value for name, value in os.environ.items() if not _is_of_ray(name)}
        kept |= {**variables, "XDG_CONFIG_HOME": str(settings)}
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono.cluster.ray.process_guard", str(self._place)],
            cwd=self._place,
            env=kept,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(self._held,),
        )
        assert process.stdin is not None
        self._input, self._open = process.stdin, 2
        self._send(token)
        for name, stream in (("out", process.stdout), ("err", process.stderr)):
            threading.Thread(target=self._read, args=(name, stream), daemon=True).start()
        process.wait()  # the warden goes on by itself, so that Ray, which ends an actor's children first, does not know it

    def poll(self, since: int, timeout_s: float) -> tuple[list[tuple[str, bytes]], bool]:
        """The lines from number `since` on, each with `out` or `err`, after waiting for one; and whether there will be no more."""
        with self._news:
            limit = time.monotonic() + timeout_s
            while len(self._lines) <= since and self._open and time.monotonic() < limit:
                self._news.wait(limit - time.monotonic())
            found = self._lines[since : since + _MOST_LINES]
            return found, not self._open and since + len(found) >= len(self._lines)

    def ask(self, word: str) -> None:
        """Tells the warden: `signal NAME`, or `end`."""
        with contextlib.suppress(OSError):
            self._send(word.encode())

    def listing(self, root: str) -> dict[str, tuple[int, int, int]]:
        """Each file below a folder, by its path from there: size in bytes, time of change in ns, inode."""
        found = {}
        for folder, _, names in os.walk(root, onerror=_unless_gone):
            for name in names:
                path = str(Path(folder, name))
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    known = os.lstat(path)
                    found[os.path.relpath(path, root)] = (known.st_size, known.st_mtime_ns, known.st_ino)
        return found

    def read(self, path: str, offset: int, size: int) -> bytes:
        """A part of a file."""
        with Path(path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def leave(self) -> None:
        """Removes this job's folder."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._input is not None:
                self._input.close()

    def _send(self, line: bytes) -> None:
        assert self._input is not None
        self._input.write(line + b"\n")
        self._input.flush()

    def _read(self, name: str, stream: IO[bytes]) -> None:
        for line in stream:
            with self._news:
                self._lines.append((name, line.rstrip(b"\n")))
                self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()


def _unless_gone(error: OSError) -> None:
    """What cannot be read is not taken for deleted."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_of_ray(name: str) -> bool:
    """Ray's own variables, its token among them; and the threads that it sets for its workers, where nobody else has."""
    if name == "OMP_NUM_THREADS":
        return not _raylet_has(name)
    return name.startswith("RAY_") or name in _PROCESS_VARIABLES


def _raylet_has(name: str) -> bool:
    pid = os.environ.get("RAY_RAYLET_PID", "")
    with contextlib.suppress(OSError):
        return any(
            line.startswith(f"{name}=".encode())
            for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
    return False


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody holds a job's folder any more."""
    try:
        fd = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
