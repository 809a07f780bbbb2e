"""Run what a person would start on one or several nodes with a tool's own virtual environment, and
write it down as logs are found.

DIAGNOSE_ENVS names a folder with the environments: `tools` (accelerate, TRL, Lightning, DeepSpeed,
Ray, torchtune), `lf` (LLaMA-Factory), `swift` (ms-swift).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import HERE, PLACES, PROGRAMS, Want, case, environment
from tests.guard.diagnosis.making.spaces import NET, PREFIX, nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ENVS = Path(os.environ.get("DIAGNOSE_ENVS", "/opt/envs"))
FOLDERS = {"lf": os.environ.get("DIAGNOSE_LF", "lf")}
TINY = HERE.parents[3] / "src/unisono/builtin/tiny"
NAMES = [
    ["gpu-a", "gpu-b", "gpu-c"],
    ["node-0", "node-1", "node-2"],
    ["cn041", "cn042", "cn043"],
    ["dgx01", "dgx02", "dgx03"],
    ["worker-0", "worker-1", "worker-2"],
]
SOURCES = {
    "tools": (
        "made: accelerate 1.15, trl 1.16, lightning 2.6, deepspeed 0.19, ray 2.60, torchtune 0.6, torch 2.13"
        " CPU (gloo); paths and hosts rewritten"
    ),
    "lf": "made: LLaMA-Factory 0.9.5, torch 2.13 CPU (gloo); paths and hosts rewritten",
    "swift": "made: ms-swift 4.6, torch 2.13 CPU (gloo); paths and hosts rewritten",
}
LONGEST = 18_000
Record = tuple[float, int, str]  # when, which part, a line


@dataclasses.dataclass(frozen=True)
class Part:
    """A command that a person, or a launcher that is none of ours, starts on a node."""

    argv: tuple[str, ...]
    node: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    after_s: float = 0.0
    venv: str = ""


@dataclasses.dataclass
class Stage:
    """Where a case is played: its folder, its environment, its nodes."""

    name: str
    base: Path
    venv: str = "tools"
    size: int = 1
    loopback: Sequence[int] = ()
    bridge: str = ""
    limit_s: float = 90
    memory_mb: int = 0

    def __post_init__(self) -> None:
        self.number = int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16)
        self.hosts = NAMES[self.number % len(NAMES)][: self.size]
        self.work = self.base / self.name
        self.work.mkdir(parents=True, exist_ok=True)
        self.played: list[Record] = []
        self.parts: Sequence[Part] = ()
        self.kernel = ""

    def play(self, *parts: Part, during: Callable[[Stage], None] | None = None) -> Stage:
        """Run the parts at the same time; their groups are ended after the limit."""
        self.parts = parts
        with (
            nodes(self.size, self.loopback, self.hosts, self.bridge) as fronts,
            limited_memory(self.memory_mb) as outside,
        ):
            known = len(kernel_lines())
            before = [[*outside, *front] for front in fronts]
            threads = [
                threading.Thread(target=self._one, args=(i, p, before[p.node])) for i, p in enumerate(parts)
            ]
            for t in threads:
                t.start()
            if during:
                during(self)
            for t in threads:
                t.join()
            for node in range(self.size):
                self._end_all(node)
            self.kernel = "".join(f"{x}\n" for x in kernel_lines()[known:] if PREFIX not in x)
        return self

    def _one(self, number: int, part: Part, front: Sequence[str]) -> None:
        time.sleep(part.after_s)
        env = {
            "PATH": f"{folder(part.venv or self.venv)}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(self.work),
        }
        child = subprocess.Popen(
            [*front, *part.argv],
            cwd=self.work,
            env=environment(env | {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"} | dict(part.env)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        alarm = threading.Timer(self.limit_s, self._end_all, (part.node,))
        alarm.start()
        for line in iter(child.stdout.readline, b""):  # type: ignore[union-attr]
            self.played.append((time.monotonic(), number, line.decode(errors="replace").rstrip("\n")))
        child.wait()
        alarm.cancel()
        end(child)

    def _end_all(self, node: int) -> None:
        """End everything on a node; launchers give their workers sessions of their own."""
        found = subprocess.run(
            ["ip", "netns", "pids", f"{PREFIX}{node}"], capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def await_words(self, words: str, limit_s: float = 80) -> None:
        """Wait until something printed these words."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until and not any(words in line for _, _, line in list(self.played)):
            time.sleep(0.05)

    def send(self, rank: int, sign: int) -> None:
        """Give a signal to the process of a rank."""
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                env = (proc / "environ").read_bytes().split(b"\0")
                if (
                    f"RANK={rank}".encode() in env
                    and str(self.work) in str((proc / "cwd").readlink())
                    and b"python" in (proc / "cmdline").read_bytes()
                    and "dataloader" not in (proc / "comm").read_text()
                ):
                    os.kill(int(proc.name), sign)
                    return

    def send_to(self, program: bytes, sign: int) -> None:
        """Give a signal to the first process whose command line has these words."""
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (proc / "cmdline").read_bytes()
                if (
                    program in line
                    and b"exec" not in line
                    and str(self.work) in str((proc / "cwd").readlink())
                ):
                    found.append(int(proc.name))
        if found:
            os.kill(min(found), sign)

    def clean(self, text: str) -> str:
        """Without our paths and addresses."""
        lib, code, _ = PLACES[self.number % len(PLACES)]
        home, venv = lib.rsplit("/lib/", 1)[0], str(folder(self.venv))
        for old, new in (
            *((f"{folder(p.venv)}/lib/python3.11", lib) for p in self.parts if p.venv),
            *((str(folder(p.venv)), home) for p in self.parts if p.venv),
            (f"{venv}/lib/python3.11", lib),
            (venv, home),
            (str(PROGRAMS), code),
            (str(self.work), code),
            (str(self.base), "/data"),
            (str(TINY), "/data/models/tiny-llama"),
            (str(ENVS), "/opt"),
            (f"{NET}.", "10.20.0.1"),
        ):
            text = text.replace(old, new)
        text = re.sub(r"/[^\s\"']*/\.pyenv/versions/[^/\s]+", "/usr", text)
        return text.replace(f"{Path.home()}/", "/home/ubuntu/")

    def texts(self) -> list[str]:
        """What each part printed."""
        return [
            self.clean("".join(f"{x}\n" for _, who, x in sorted(self.played) if who == i))
            for i in range(len(self.parts))
        ]

    def one(self) -> str:
        """All in one file, in the order in which it was printed."""
        return self.clean("".join(f"{x}\n" for _, _, x in sorted(self.played)))

    def prefixed(self, front: str) -> str:
        """All in one file with a prefix: `{i}` is the part, `{host}` its node, `{t}` a time."""
        begin, out = min(self.played)[0], []
        for at, who, line in sorted(self.played):
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(1_795_000_000 + at - begin))
            t = f"{stamp}.{int((at % 1) * 1e9):09d}Z"
            out.append(front.format(i=who, host=self.hosts[self.parts[who].node], t=t) + line + "\n")
        return self.clean("".join(out))

    def rank_files(self, folder: str = "logs") -> dict[int, str]:
        """What torchrun's --log-dir holds, by rank."""
        found = {}
        for file in sorted(self.work.glob(f"{folder}/**/attempt_0/*/stderr.log")):
            both = (file.parent / "stdout.log").read_text(errors="replace") + file.read_text(errors="replace")
            found[int(file.parent.name)] = self.clean(both)
        return found

    def keep(self, want: Want, files: Mapping[str, str]) -> dict[str, object]:
        """The case; raises ValueError where something of this machine is left in it."""
        most = LONGEST // max(1, len(files))
        kept = {n: shortened(thin(t), most) for n, t in files.items()}
        for word in ("/work/", "runsc", "firecracker", "dgm", str(Path.home())):
            if any(word in t for t in kept.values()):
                raise ValueError(f"{self.name}: {word!r} is still in it")
        if any(re.search(rf"(?<![\w-]){os.uname().nodename}:\d", t) for t in kept.values()):
            raise ValueError(f"{self.name}: this machine's name is still in it")
        return case(self.name, want, kept, SOURCES[self.venv.split("-")[0]])


def kernel_lines() -> list[str]:
    """What dmesg prints."""
    return subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout.splitlines()


@contextlib.contextmanager
def limited_memory(size_mb: int) -> Iterator[list[str]]:
    """What to put before a command so that all its processes together have no more memory (control
    groups, version 1).
    """
    if not size_mb:
        yield []
        return
    group = Path("/sys/fs/cgroup/memory/job_88213")
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(size_mb << 20))
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "_"]
    finally:
        time.sleep(1)
        with contextlib.suppress(OSError):
            group.rmdir()


def folder(venv: str) -> Path:
    """Where an environment lies."""
    return ENVS / FOLDERS.get(venv, venv)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a child's whole group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def shortened(text: str, most: int) -> str:
    """A text that is too long keeps its first third and the end, cut at line ends."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 3], text[-(most - most // 3) :]
    return head[: head.rfind("\n") + 1] + tail[tail.find("\n") + 1 :]


def thin(text: str) -> str:
    """The text without most of the states of a progress bar, and without most repetitions of a
    line.
    """
    out: list[str] = []
    last, times = "", 0
    for line in text.split("\n"):
        pieces = line.split("\r")
        kept = "\r".join(pieces[:2] + pieces[-3:]) if len(pieces) > 6 else line
        shape = re.sub(r"\d+", "0", kept)
        times = times + 1 if shape == last else 0
        last = shape
        if times < 4:
            out.append(kept)
    return "\n".join(out)
