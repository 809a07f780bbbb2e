"""Sandboxes of drills: where a run takes place, and the fault that is injected from outside."""

import contextlib
import http.client
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unisono.guard.facts.limits import cgroup_folders
from unisono.trainer.plan.run_plan import permutation

_FOREIGN_BYTES = (
    b"GET / HTTP/1.1\r\nHost: unisono\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\0" * 4096,
    b"",
)
_RANDOM_BYTES = 1 << 16
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The options of `unisono train` that name a node."""

    nodes: str | None = None
    node_rank: int | None = None
    head: str | None = None
    token_file: str | None = None


class Sandbox:
    """This machine as it is, with one node.

    A context manager: everything that it created is removed on exit.

    Attributes:
        nodes: number of nodes, each with a front.
    """

    nodes = 1

    def __init__(self) -> None:
        self.folder = Path()

    def why_unavailable(self) -> str:
        """Why it is not possible on this machine; empty if it is."""
        return ""

    def prepare(self, folder: Path) -> None:
        """Creates what is needed, below the drill's folder."""
        self.folder = folder

    def host(self, node: int) -> str | None:
        """Host name of a node; None: this machine's."""
        del node
        return None

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """The command line that starts a front in the sandbox, in the same process."""
        del node
        return list(words)

    def options(self, node: int) -> NodeOptions:
        """The options of a front in this sandbox."""
        del node
        return NodeOptions()

    def output_dir(self) -> Path:
        """Output folder of the run."""
        return self.folder / "out"

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The config of the drill, with what is known only here."""
        return config

    def started(self, pids: Sequence[int]) -> None:
        """Called with the pids of the fronts, by node."""

    def inject(self) -> None:
        """Injects the fault from outside, once the run trains or a rank has begun its part."""

    def close(self) -> None:
        """Removes everything that was created."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TwoFronts(Sandbox):
    """Two nodes on this machine's loopback, with one output_dir and one host name."""

    nodes = 2

    def prepare(self, folder: Path) -> None:
        """Creates the job's token, and finds a port."""
        super().prepare(folder)
        self._token = write_token(folder)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = int(listener.getsockname()[1])

    def options(self, node: int) -> NodeOptions:
        """The options of one of two nodes."""
        return NodeOptions("2", node, f"127.0.0.1:{self._port}", str(self._token))


class HeadKilled(TwoFronts):
    """Two nodes; the head's front is killed."""

    def started(self, pids: Sequence[int]) -> None:
        """Keeps the head's pid."""
        self._head = pids[0]

    def inject(self) -> None:
        """Kills the head with SIGKILL."""
        os.kill(self._head, signal.SIGKILL)


class ForeignCallers(TwoFronts):
    """Two nodes, where other programs connect to the head's port."""

    def inject(self) -> None:
        """Connections that send other protocols, nothing, or a lot."""
        with contextlib.ExitStack() as stack:
            for piece in (*_FOREIGN_BYTES, secrets.token_bytes(_RANDOM_BYTES)) * 3:
                stranger = stack.enter_context(
                    socket.create_connection(("127.0.0.1", self._port), _CONNECT_S)
                )
                with contextlib.suppress(OSError):  # it was shown the door
                    stranger.sendall(piece)
            time.sleep(0.5)  # the silent ones stay for a while


_SERVER = "unisono.trainer.worker.sampling_server"
_SERVER_START_S = 120.0
_KILLED_S = 10.0


class SamplerKilled(Sandbox):
    """This machine, with a server that samples; it is killed."""

    def prepare(self, folder: Path) -> None:
        """Starts the server, and waits until it is ready.

        Raises:
            RuntimeError: if it does not start.
        """
        super().prepare(folder)
        words = [sys.executable, "-m", _SERVER, "--model", "builtin:tiny", "--parent", str(os.getpid())]
        self._server = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], _SERVER_START_S)
        port = self._server.stdout.readline().strip() if ready else ""
        if not port:
            self.close()
            raise RuntimeError("the server that samples did not start")
        self._port = int(port)

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the address of the server."""
        url = f"http://127.0.0.1:{self._port}"
        return {**config, "rollout": {**config["rollout"], "engine": "vllm", "url": url}}

    def inject(self) -> None:
        """Kills the server with SIGKILL."""
        self._server.kill()

    def close(self) -> None:
        """Ends the server."""
        self._server.kill()
        with self._server:
            self._server.wait(_KILLED_S)


class SamplerStale(SamplerKilled):
    """This machine, with a server that samples; from some step on it does so with an adapter of
    the step before.
    """

    def inject(self) -> None:
        """Lets it load adapters that it already has."""
        body = json.dumps({"kind": "older-version"}).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_CONNECT_S)
        with contextlib.closing(connection):
            connection.request("POST", "/fault", body)
            connection.getresponse().read()


_GALLERY = "unisono.trainer.worker.drawn_pictures"
_DRAWING_S = 300.0
_PICTURE_ROWS = 720
_PICTURE_BATCH = 6
_READ_AT = 100
"""The step that reads the picture for the first time, long after the fault."""


class ChangedPicture(Sandbox, ABC):
    """This machine, with a vision-language model and rows with pictures, of which one is changed
    before its row is read.
    """

    def why_unavailable(self) -> str:
        """Pictures are drawn with Pillow."""
        return "" if find_spec("PIL") is not None else "pictures need Pillow: pip install 'unisono[vision]'"

    def prepare(self, folder: Path) -> None:
        """Makes the model and the pictures.

        Raises:
            RuntimeError: if they cannot be made.
        """
        super().prepare(folder)
        words = [sys.executable, "-m", _GALLERY, str(folder / "gallery"), "--rows", str(_PICTURE_ROWS)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_DRAWING_S)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise RuntimeError(f"the pictures could not be made: {last}")

    def config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the model and the rows."""
        gallery = self.folder / "gallery"
        return {
            **config,
            "model": {"path": str(gallery / "model"), "dtype": "float32"},
            "data": {"train": str(gallery / "rows.jsonl"), "max_length": 64, "packing": False},
            "batch": {"global": _PICTURE_BATCH},
        }

    def inject(self) -> None:
        """Changes the picture of a row that is read many steps later."""
        order = permutation(_PICTURE_ROWS, seed=0, epoch=0)
        self.change(self.folder / "gallery" / "pictures" / f"{order[_READ_AT * _PICTURE_BATCH]}.png")

    @abstractmethod
    def change(self, file: Path) -> None:
        """Changes a picture."""


class PictureRemoved(ChangedPicture):
    """A picture is removed."""

    def change(self, file: Path) -> None:
        """Removes it."""
        file.unlink()


class PictureTruncated(ChangedPicture):
    """A picture is truncated."""

    def change(self, file: Path) -> None:
        """Keeps the first half of its bytes."""
        os.truncate(file, file.stat().st_size // 2)


class PictureReplaced(ChangedPicture):
    """A picture is replaced by one of another size."""

    def change(self, file: Path) -> None:
        """Writes a gray picture of 5 × 7 pixels there."""
        file.write_bytes(gray_png(5, 7))


def gray_png(width: int, height: int) -> bytes:
    """A picture of one gray, in 8 bits."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    lines = (b"\0" + b"\x80" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def write_token(folder: Path) -> Path:
    """Writes a token for one job to a file that only its owner can read."""
    path = folder / "token"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    return path


def needs_root(what: str, *tools: str) -> str:
    """Why something is not possible: no root, or a missing program; empty if possible."""
    if os.geteuid() != 0:
        return f"{what} need root"
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return f"{', '.join(missing)} is not installed" if missing else ""


_DISK_BYTES = 160 << 20  # unisono keeps 64 MiB free
_CHUNK_BYTES = 1 << 16


class SmallDisk(Sandbox):
    """This machine, with output_dir on a small tmpfs."""

    def why_unavailable(self) -> str:
        """Mounts need root, and a system that allows them."""
        missing = needs_root("mounts", "unshare", "mount")
        if missing:
            return missing
        words = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return f"cannot mount here: {done.stderr.strip()}" if done.returncode else ""

    def prepare(self, folder: Path) -> None:
        """Creates the mount point."""
        super().prepare(folder)
        (folder / "disk").mkdir()

    def output_dir(self) -> Path:
        """On the small disk."""
        return self.folder / "disk" / "out"

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """The front starts in its own mount namespace."""
        del node
        mount = f'mount -t tmpfs -o size={_DISK_BYTES},mode=0700 tmpfs "$1"; shift; exec "$@"'
        return ["unshare", "--mount", "sh", "-ec", mount, "disk", str(self.folder / "disk"), *words]

    def started(self, pids: Sequence[int]) -> None:
        """Reaches the mounts through the front."""
        self._inside = Path(f"/proc/{pids[0]}/root{self.folder / 'disk'}")

    def inject(self) -> None:
        """Fills the disk."""
        with (self._inside / "filler").open("ab", buffering=0) as file:
            size = _CHUNK_BYTES
            while size:
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2


class ReadOnlyDisk(SmallDisk):
    """A small disk that becomes read-only.

    Without root: directories that lose their write permission.
    """

    def why_unavailable(self) -> str:
        """Why it cannot be mounted; empty without root, since nothing is mounted then."""
        return (super().why_unavailable() or needs_root("mounts", "nsenter")) if os.geteuid() == 0 else ""

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """With its own mount namespace, as root."""
        return super().words(node, words) if os.geteuid() == 0 else list(words)

    def started(self, pids: Sequence[int]) -> None:
        """Reaches the mounts through the front."""
        super().started(pids)
        self._front = pids[0]

    def inject(self) -> None:
        """Mounts the disk read-only over itself, since the kernel refuses to remount a disk with
        files open for writing.

        The mount becomes read-only at a place of its own and is then moved: nobody can open a file
        for writing in it before.
        """
        disk, aside = str(self.folder / "disk"), str(self.folder / "read-only")
        if os.geteuid() == 0:
            mount = 'mount --bind "$1" "$2"; mount -o remount,bind,ro "$2"; mount --move "$2" "$1"'
            inside = ["nsenter", "--target", str(self._front), "--mount"]
            Path(aside).mkdir()
            subprocess.run(
                [*inside, "sh", "-ec", mount, "disk", disk, aside], check=True, capture_output=True
            )
            return
        for folder in (self.output_dir(), self.output_dir() / "checkpoints"):
            folder.chmod(0o500)

    def close(self) -> None:
        """Restores the permission, so that the folder can be removed."""
        for folder in (self.output_dir(), self.output_dir() / "checkpoints"):
            if os.geteuid() != 0 and folder.exists():
                folder.chmod(0o700)


class RemovedOutput(Sandbox):
    """This machine, where the run's output_dir is removed."""

    def inject(self) -> None:
        """Removes output_dir like `rm -rf`. Files that the run creates meanwhile may stay."""
        shutil.rmtree(self.output_dir(), ignore_errors=True)


_SPARE_BYTES = 64 << 20
_GROUP_PREFIX = "unisono-drill-"
_FILES = (
    ("memory.max", "memory.current", "memory.swap.max"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ""),
)
_CLOSE_S = 5.0


class MemoryGroup(Sandbox):
    """This machine, with a cgroup for the run."""

    def __init__(self) -> None:
        super().__init__()
        self._group: Path | None = None
        self._files = _FILES[0]

    def why_unavailable(self) -> str:
        """cgroups need root, and are often read-only in containers."""
        missing = needs_root("control groups")
        if missing:
            return missing
        self._make()
        made = self._group is not None
        self.close()
        return "" if made else "cannot create a cgroup with a memory limit"

    def prepare(self, folder: Path) -> None:
        """Creates the cgroup, still without a limit."""
        super().prepare(folder)
        self._make()

    def started(self, pids: Sequence[int]) -> None:
        """Moves the front into the cgroup, which its ranks inherit."""
        assert self._group is not None
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))

    def inject(self) -> None:
        """Limits the memory to slightly more than is in use."""
        assert self._group is not None
        limit, used, swap = self._files
        if swap:
            with contextlib.suppress(OSError):  # not every kernel counts it
                (self._group / swap).write_text("0")
        (self._group / limit).write_text(str(int((self._group / used).read_text()) + _SPARE_BYTES))

    def close(self) -> None:
        """Removes the cgroup, which the kernel releases a moment after its last process."""
        until = time.monotonic() + _CLOSE_S
        while self._group is not None and self._group.is_dir() and time.monotonic() < until:
            with contextlib.suppress(OSError):
                self._group.rmdir()
                break
            time.sleep(0.02)
        self._group = None

    def _make(self) -> None:
        """Creates the cgroup in the first hierarchy that allows it: version 2, then 1."""
        for folder in cgroup_folders("memory"):
            _remove_old_groups(folder)
            group = folder / f"{_GROUP_PREFIX}{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            self._group = group
            for files in _FILES:
                if (group / files[0]).exists():
                    self._files = files
                    return
            self.close()


def _remove_old_groups(folder: Path) -> None:
    """Removes cgroups of drills that were killed."""
    for old in folder.glob(f"{_GROUP_PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(_GROUP_PREFIX)).exists():
            with contextlib.suppress(OSError):
                old.rmdir()


_HOSTS = ("drill-a", "drill-b")
_NETWORK_PREFIX = "udr"
_PORT = 29411
_COMMAND_S = 30


class TwoNetworks(Sandbox):
    """Two nodes, each with its own network namespace and host name.

    Names contain this process's pid.
    """

    nodes = 2

    def __init__(self) -> None:
        super().__init__()
        self._name = f"{_NETWORK_PREFIX}{os.getpid()}"
        self._made = False

    def why_unavailable(self) -> str:
        """Namespaces need root, and a system that allows them."""
        missing = needs_root("network namespaces", "ip", "unshare", "mount", "hostname")
        if missing:
            return missing
        name = f"{self._name}try"
        done = _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
        return f"cannot create a network namespace: {done.stderr.strip()}" if done.returncode else ""

    def prepare(self, folder: Path) -> None:
        """Creates both namespaces, and the bridge between them."""
        super().prepare(folder)
        _remove_old_networks()
        self._made = True
        self._token = write_token(folder)
        lines = [f"{self._address(node)} {host}" for node, host in enumerate(_HOSTS)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        # A resolver that refuses at once: a real one cannot be reached from there, and each look-up
        # would wait for it.
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        _run_checked("ip", "link", "add", f"{self._name}b", "type", "bridge")
        _run_checked("ip", "link", "set", f"{self._name}b", "up")
        for node in range(self.nodes):
            self._make(node)

    def host(self, node: int) -> str | None:
        """A name of its own."""
        return _HOSTS[node]

    def words(self, node: int, words: Sequence[str]) -> list[str]:
        """The front starts in the node's namespace."""
        script = [
            f"hostname {_HOSTS[node]}",
            f"mount --bind '{self.folder}/hosts' /etc/hosts",
            f"mount --bind '{self.folder}/resolv.conf' /etc/resolv.conf",
            'exec "$@"',
        ]
        shell = ["sh", "-ec", "\n".join(script), "node", *words]
        return ["ip", "netns", "exec", self._space(node), "unshare", "--uts", *shell]

    def options(self, node: int) -> NodeOptions:
        """The options of one of two nodes."""
        return NodeOptions("2", node, f"{self._address(0)}:{_PORT}", str(self._token))

    def inject(self) -> None:
        """Detaches node 1 from the bridge: both sides keep their links, but no packet passes."""
        _run_checked("ip", "link", "set", f"{self._name}v1", "nomaster")

    def close(self) -> None:
        """Removes both namespaces and the bridge."""
        if self._made:
            for node in range(self.nodes):
                _remove_namespace(self._space(node))
            _run("ip", "link", "del", f"{self._name}b")

    def _make(self, node: int) -> None:
        name, veth = self._space(node), f"{self._name}v{node}"
        _run_checked("ip", "netns", "add", name)
        _run_checked("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run_checked("ip", "link", "set", veth, "master", f"{self._name}b", "up")
        _run_checked("ip", "-n", name, "addr", "add", f"{self._address(node)}/24", "dev", "eth0")
        _run_checked("ip", "-n", name, "link", "set", "eth0", "up")
        _run_checked("ip", "-n", name, "link", "set", "lo", "up")

    def _space(self, node: int) -> str:
        return f"{self._name}n{node}"

    def _address(self, node: int) -> str:
        return f"10.231.8.{node + 1}"


def _remove_old_networks() -> None:
    """Removes leftovers of drills that were killed."""
    for line in _run("ip", "netns", "list").stdout.splitlines():
        matched = re.match(rf"{_NETWORK_PREFIX}(\d+)n\d\b", line)
        if matched and not Path("/proc", matched[1]).exists():
            _remove_namespace(matched[0])
    for matched in re.finditer(rf"\d+: ({_NETWORK_PREFIX}(\d+)b):", _run("ip", "-o", "link").stdout):
        if not Path("/proc", matched[2]).exists():
            _run("ip", "link", "del", matched[1])


def _remove_namespace(namespace: str) -> None:
    for pid in _run("ip", "netns", "pids", namespace).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)  # only what runs in a network that a drill has made
    _run("ip", "netns", "del", namespace)


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_S)


def _run_checked(*words: str) -> None:
    done = _run(*words)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
