"""Execution of one drill: a real run, the fault, and what the run reported.

`python -m unisono.front.drill.execution REQUEST.json` is the front of that run and prints JSON
lines.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Self, cast

from unisono.base.child import end_with_front
from unisono.base.errors import UnisonoError
from unisono.base.files import objects_of, read_json
from unisono.base.messages import Message, ResultMessage, VerdictMessage, message_of
from unisono.front.drill.drills import (
    Drill,
    DrillResult,
    FrontExit,
    History,
    NamedCause,
    is_named,
    judge,
    named_cause_in,
    skipped_result,
)
from unisono.front.drill.sandbox import NodeOptions, Sandbox
from unisono.guard.facts import Probes, read_environment
from unisono.guard.supervise.child_process import child_environment
from unisono.guard.supervise.codec import decode, encode
from unisono.jobs.runs.run_records import refused_result
from unisono.jobs.runs.session import train
from unisono.jobs.runs.train_request import TrainRequest

_KILLED_S = 10.0
_TAIL_LINES = 20
LEFTOVER_S = 5.0
"""Time for a run's processes and files to disappear after its end."""
_LISTEN_STATE = "0A"
_SHM = Path("/dev/shm")  # noqa: S108 - it is looked at, not written to


@dataclass(frozen=True)
class TimedLine:
    """A JSON line, and when it came, in seconds of the monotonic clock."""

    at: float
    message: Message


@dataclass(frozen=True)
class DrillRequest:
    """What a front of a drill trains, which ends with its parent."""

    config_path: Path
    nproc: int
    faults: Mapping[str, object]
    parent: int
    clock_jump_s: float
    node: NodeOptions


class FrontProcess:
    """A front process. A context manager: on exit the process is killed."""

    def __init__(self, words: Sequence[str], *, node: int, cwd: Path, environment: dict[str, str]) -> None:
        self.node = node
        self.ended_at: float | None = None
        self.returncode: int | None = None
        self._lines: list[TimedLine] = []
        self._errors: list[str] = []
        self._process = subprocess.Popen(
            list(words),
            cwd=cwd,
            env=environment,
            text=True,
            errors="replace",
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def lines(self) -> list[TimedLine]:
        """Its JSON lines so far."""
        return list(self._lines)

    @property
    def errors(self) -> list[str]:
        """The last lines of stderr."""
        return self._errors[-_TAIL_LINES:]

    def has_ended(self) -> bool:
        """Whether the process has ended and its output is read."""
        if self.ended_at is None and self._process.poll() is not None:
            self.ended_at = time.monotonic()
            self.returncode = self._process.returncode
            for reader in self._readers:
                reader.join(_KILLED_S)
        return self.ended_at is not None

    def kill(self) -> None:
        """Kills the process group; its ranks end with it."""
        if self.has_ended():
            return
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_KILLED_S)
        self.has_ended()

    def _read(self, stream: IO[str]) -> None:
        for text in stream:
            at = time.monotonic()
            try:
                message = json.loads(text)
            except ValueError:
                self._errors.append(text.rstrip())
                continue
            if isinstance(message, dict) and "kind" in message:
                self._lines.append(TimedLine(at, cast("Message", message)))
        stream.close()

    def _read_errors(self, stream: IO[str]) -> None:
        self._errors.extend(text.rstrip() for text in stream)
        stream.close()


_START_S = 180.0
_BEGIN_STEP = 20  # from then on something may be done from outside
_EFFECT_S = 120.0
_LATE_S = 10.0  # beyond its limit, to see how late a name comes
_POLL_S = 0.02
_ROWS = 48
_TINY_CONFIG: dict[str, object] = {
    "model": {"path": "builtin:tiny", "dtype": "float32"},
    "adapter": {"rank": 4, "alpha": 8},
    "optim": {"lr": 1e-3},
    "batch": {"global": 6},
    "device": "cpu",
    "restarts": 0,
}
_TINY_CHECKPOINT = {"every": "100000 steps"}

Progress = Callable[[str], None]


@dataclass
class DrillRun:
    """The execution of one drill.

    Attributes:
        folder: temporary, removed afterwards.
        caches: shared by drills: prepared data, a key.
        on_progress: receives progress.
        fronts: of the run, by node.
    """

    drill: Drill
    folder: Path
    caches: Path
    sandbox: Sandbox
    on_progress: Progress
    fronts: list[FrontProcess] = field(default_factory=list)

    def run(self) -> History:
        """Runs the drill to the end, natural or forced."""
        for name in ("work", "marks", "tmp"):
            (self.folder / name).mkdir()
        traces = Traces(self.folder / "work", self.folder / "tmp")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sandbox)
            self.sandbox.prepare(self.folder)
            # Ranks end a moment after their front is killed; until then they may write into the
            # folder, which is removed next.
            stack.callback(_wait_until_gone, self.folder)
            self._start(stack)
            effect = self._wait_for_effect()
            traces.note()
            if effect is not None:
                if self.drill.want:
                    self.on_progress("waiting for the cause")
                    self._wait_until(self._is_named, effect + self.drill.limit_s + _LATE_S)
                self.on_progress("waiting for the end")
                self._wait_until(self._has_ended, effect + self.drill.end_s)
            ends = self._ends()
            left = traces.left_behind()
            return History(
                self._moment() or effect,
                self._detected(),
                ends,
                [self.sandbox.host(node) for node in range(self.sandbox.nodes)],
                left,
                "\n".join(self._problem()),
            )

    def _start(self, stack: contextlib.ExitStack) -> None:
        self.on_progress("starting")
        rows = self.folder / "rows.jsonl"
        of_rewards = {"folder": str(self.folder)} if "rewards" in self.drill.config else {}
        rows.write_text("".join(json.dumps(_data_row(number) | of_rewards) + "\n" for number in range(_ROWS)))
        config = {
            **_TINY_CONFIG,
            "data": {"train": str(rows), "max_length": 64},
            **self.sandbox.config(self.drill.config),
            "output_dir": str(self.sandbox.output_dir()),
        }
        config["checkpoint"] = {**_TINY_CHECKPOINT, **self.drill.config.get("checkpoint", {})}
        (self.folder / "config.yaml").write_text(json.dumps(config))
        for node in range(self.sandbox.nodes):
            request = self.folder / f"request-{node}.json"
            request.write_text(json.dumps(encode(self._request(node))))
            words = [sys.executable, "-m", "unisono.front.drill.execution", str(request)]
            front = FrontProcess(
                self.sandbox.words(node, words),
                node=node,
                cwd=self.folder / "work",
                environment=self._environment(),
            )
            self.fronts.append(stack.enter_context(front))
        self.sandbox.started([front.pid for front in self.fronts])

    def _request(self, node: int) -> "DrillRequest":
        faults = dict(self.drill.faults) | {"marks": str(self.folder / "marks")}
        if "starve" in faults:
            faults["starve"] = {**faults["starve"], "fifo": str(self._fifo())}
        return DrillRequest(
            self.folder / "config.yaml",
            self.drill.nproc,
            faults,
            parent=os.getpid(),
            clock_jump_s=self.drill.clock_jump_s,
            node=self.sandbox.options(node),
        )

    def _fifo(self) -> Path:
        path = self.folder / "fifo"
        os.mkfifo(path, 0o600)
        return path

    def _environment(self) -> dict[str, str]:
        variables = {
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_CACHE_HOME": str(self.caches),
            "XDG_CONFIG_HOME": str(self.caches),
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "torch"),
        }
        return child_environment(threads=1, without=read_environment().leftovers) | variables

    def _wait_for_effect(self) -> float | None:
        """The moment from which seconds are counted, after doing what is to be done from
        outside.
        """
        if not self._wait_until(lambda: self._step() > 0, time.monotonic() + _START_S):
            return None
        self.on_progress("training")
        if not self.drill.faults:
            if not self._wait_until(lambda: self._step() >= _BEGIN_STEP, time.monotonic() + _EFFECT_S):
                return None
            moment = time.monotonic()
            self.sandbox.inject()
            return moment
        if not self._wait_until(lambda: self._moment() is not None, time.monotonic() + _EFFECT_S):
            return None
        self.sandbox.inject()
        return self._moment()

    def _wait_until(self, seen: Callable[[], bool], limit: float) -> bool:
        """Waits for a condition while a front is alive; returns whether it was met."""
        while not seen():
            if time.monotonic() > limit or self._has_ended():
                return seen()
            time.sleep(_POLL_S)
        return True

    def _step(self) -> int:
        steps = [int(line.message["step"]) for line in self.fronts[0].lines if line.message["kind"] == "step"]
        return steps[-1] if steps else 0

    def _moment(self) -> float | None:
        """When a rank recorded the effect of the fault; None: not yet."""
        for path in (self.folder / "marks").iterdir():
            text = path.read_text()
            if text.endswith("\n"):
                return int(text) / 1e9
        return None

    def _has_ended(self) -> bool:
        return all([front.has_ended() for front in self.fronts])  # noqa: C419 - each is asked

    def _is_named(self) -> bool:
        hosts = [self.sandbox.host(node) for node in range(self.sandbox.nodes)]
        return is_named(self.drill, self._detected(), hosts)

    def _detected(self) -> list[NamedCause]:
        causes = [
            named_cause_in(line.message, at=line.at, node=front.node, words=self.drill.words)
            for front in self.fronts
            for line in front.lines
        ]
        return sorted(
            (detected for detected in causes if detected is not None), key=lambda detected: detected.at
        )

    def _problem(self) -> Iterator[str]:
        """Problems of refused fronts, and stderr."""
        for front in self.fronts:
            for line in front.lines:
                if line.message.get("kind") == "result":
                    yield from (str(problem["what"]) for problem in objects_of(line.message.get("problems")))
            yield from front.errors

    def _ends(self) -> list[FrontExit]:
        """Ends of the fronts; fronts that still run are killed."""
        late = [front for front in self.fronts if not front.has_ended()]
        for front in late:
            front.kill()
        return [
            FrontExit(front.ended_at or 0.0, front.returncode or 0, by_drill=front in late)
            for front in self.fronts
        ]


@dataclass
class Traces:
    """Traces of a run, recorded while it runs, to find leftovers afterwards.

    Its processes are those with a working directory inside the drill's folder, as all ranks and
    tasks of a front.

    Attributes:
        ports: ports on which its processes have listened, by the socket's inode.
    """

    folder: Path
    temporary: Path
    ports: dict[str, int] = field(default_factory=dict)
    _shm: set[str] = field(default_factory=lambda: set(_shared_memory()))

    def note(self) -> None:
        """Records ports of running processes; called during training."""
        for pid in processes_in(self.folder):
            self.ports |= _listening(pid)

    def left_behind(self, *, patience_s: float = LEFTOVER_S) -> list[str]:
        """Leftovers as text, after waiting for them to disappear."""
        until = time.monotonic() + patience_s
        while (leftovers := self._look()) and time.monotonic() < until:
            time.sleep(0.05)
        return leftovers

    def _look(self) -> list[str]:
        leftovers = [f"process {pid}: {_command(pid)}" for pid in processes_in(self.folder)]
        open_now = _listening_sockets(Path("/proc/net"))
        leftovers += [f"port {port}" for inode, port in sorted(self.ports.items()) if inode in open_now]
        new = [name for name in _shared_memory() if name not in self._shm]
        if new:  # another program's is open in one of its processes
            used = _open_in_shared_memory()
            leftovers += [str(_SHM / name) for name in new if name not in used]
        leftovers += (
            [str(path) for path in sorted(self.temporary.iterdir())] if self.temporary.is_dir() else []
        )
        return leftovers


def _wait_until_gone(folder: Path) -> None:
    """Returns once no process works in a folder, or after a while."""
    until = time.monotonic() + LEFTOVER_S
    while processes_in(folder) and time.monotonic() < until:
        time.sleep(0.05)


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is inside a folder, without those of other users."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        where = _target(entry / "cwd")
        if where and Path(where).is_relative_to(folder) and _state(entry) not in ("Z", ""):
            pids.append(int(entry.name))
    return pids


def _listening(pid: int) -> dict[str, int]:
    """Ports on which a process listens, in its network namespace."""
    table = _listening_sockets(Path("/proc", str(pid), "net"))
    ports = {}
    for link in _entries(Path("/proc", str(pid), "fd")):
        inode = _target(link).removeprefix("socket:[").removesuffix("]")
        if inode in table:
            ports[inode] = table[inode]
    return ports


def _listening_sockets(net: Path) -> dict[str, int]:
    """Listening TCP sockets of a network namespace: port by inode."""
    ports = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (net / name).read_text().splitlines()[1:]
        except OSError:  # the process is gone, or there is no such protocol
            continue
        for fields in map(str.split, lines):
            if len(fields) > 9 and fields[3] == _LISTEN_STATE:
                ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return ports


def _shared_memory() -> list[str]:
    """Names of files in /dev/shm.

    Ranks share no folders there, nor semaphores of multiprocessing; those of other programs come
    and go.
    """
    return [p.name for p in _entries(_SHM) if not p.is_dir() and not p.name.startswith("sem.mp-")]


def _open_in_shared_memory() -> set[str]:
    """Names in /dev/shm that a process has mapped or open."""
    names = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        for link in (*_entries(entry / "fd"), *_entries(entry / "map_files")):
            where = Path(_target(link))
            if where.parent == _SHM:
                names.add(where.name)
    return names


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:  # gone, or another user's
        return


def _target(link: Path) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - a Path would read `socket:[1]` as a relative path
    except OSError:
        return ""


def _state(process: Path) -> str:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def run_drills(drills: Sequence[Drill], on_progress: Callable[[Drill, str], None]) -> Iterator[DrillResult]:
    """Runs drills one after the other; yields the result of each."""
    with tempfile.TemporaryDirectory(prefix="unisono-drill-caches-") as caches:
        for drill in drills:
            yield _run_drill(drill, Path(caches), partial(on_progress, drill))


def _run_drill(drill: Drill, caches: Path, on_progress: Progress) -> DrillResult:
    sandbox = drill.sandbox()
    why_not = sandbox.why_unavailable()
    if why_not:
        return skipped_result(drill, why_not)
    with tempfile.TemporaryDirectory(prefix="unisono-drill-", ignore_cleanup_errors=True) as folder:
        return judge(drill, DrillRun(drill, Path(folder), caches, sandbox, on_progress).run())


def _data_row(number: int) -> dict[str, str]:
    """Rows of different lengths."""
    return {
        "prompt": f"count to {number % 7 + 2}",
        "completion": " ".join(map(str, range(1, number % 7 + 3))),
    }


@dataclasses.dataclass(frozen=True)
class JumpingClock:
    """The wall clock of this machine, which jumps as soon as a rank has created its mark."""

    marks: Path
    seconds: float

    def wall(self) -> float:
        """Seconds since 1970, plus the jump."""
        return time.time() + (self.seconds if any(self.marks.iterdir()) else 0.0)

    def monotonic(self) -> float:
        """The real monotonic clock, without the jump."""
        return time.monotonic()


def main(path: Path) -> int:
    """Trains as the request file says; returns the exit code."""
    request = decode(DrillRequest, read_json(path))
    end_with_front(request.parent)
    try:
        return train(_train_request(request), _show).exit_code
    except UnisonoError as error:
        verdict = error.verdict.to_json() if error.verdict else None
        if verdict:
            _show(message_of(VerdictMessage, verdict))
        result = refused_result(error.exit_code, [asdict(one) for one in error.problems], verdict)
        _show(message_of(ResultMessage, result.to_json()))
        return error.exit_code


def _train_request(request: DrillRequest) -> TrainRequest:
    faults, probes = dict(request.faults), Probes()
    if request.clock_jump_s:
        clock = JumpingClock(Path(str(faults["marks"])), request.clock_jump_s)
        probes = dataclasses.replace(probes, clock=clock)
    options = dataclasses.asdict(request.node)
    return TrainRequest(
        request.config_path,
        rehearse=False,
        nproc=request.nproc,
        faults=faults,
        probes=probes,
        trust_code=True,  # the rewards of drills
        **options,
    )


def _show(message: Message) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
