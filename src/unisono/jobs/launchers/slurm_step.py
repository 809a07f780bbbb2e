"""A command of unisono as a Slurm step, e.g. `unisono doctor --launcher slurm`: srun requests the
nodes and starts it on each.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Self

from unisono.base.errors import UnfitError
from unisono.base.messages import Show
from unisono.base.text import one_line, plain
from unisono.guard.control.protocol import new_token
from unisono.guard.facts import take_token
from unisono.jobs.launchers.launcher import NodeOutput, NodesCommand
from unisono.jobs.launchers.slurm_controller import NodesRequest, has_gpus, partitions, refuse_impossible
from unisono.jobs.launchers.slurm_job_request import checked_partitions, gpus_of, nodes_of
from unisono.trainer.config.yaml_file import read_config_text

OnLine = Callable[[int | None, bytes], None]
"""Called with the number of the task that printed a line (None: srun itself), and the line; srun
splits longer lines into pieces of 1 KiB.
"""

_LABEL = re.compile(rb"^ *(\d{1,9}): ?")
_PATIENCE_S = 10.0


class SrunStep:
    """A step in this allocation, or in one that srun requests.

    As a context manager it ends all of its tasks.
    """

    def __init__(
        self,
        options: Sequence[str],
        command: Sequence[str],
        text: str,
        *,
        on_output: OnLine,
        on_error: OnLine,
    ) -> None:
        """Stores the command; `__enter__` starts it.

        Args:
            options: of srun, besides those for labels and for tasks that continue when one fails.
            command: of each task.
            text: the stdin of all tasks.
            on_error: gets the lines of stderr. Both are called from threads.
        """
        self._words = [
            *options,
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--label",
            *command,
        ]
        self._text = text
        self._on_output, self._on_error = on_output, on_error
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        """Starts srun.

        Raises:
            UnfitError: if srun cannot be started.
        """
        program = shutil.which("srun") or "srun"
        # The tasks' shared secret: srun passes it on, and it is in no command line.
        variables = {**os.environ, "UNISONO_TOKEN": take_token() or new_token()}
        try:
            self._process = subprocess.Popen(
                [program, *self._words],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise UnfitError.of(
                f"srun cannot be started: {error.strerror or error}",
                where=program,
                fix="check Slurm's installation on this machine",
            ) from error
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._begin(_read, self._process.stdout, self._on_output)
        self._begin(_read, self._process.stderr, self._on_error)
        self._begin(self._feed)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the step if it still runs: srun ends its tasks and releases its allocation."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self) -> int:
        """srun's exit code: the highest of its tasks'."""
        code = self._process.wait()
        for thread in self._threads:
            thread.join(_PATIENCE_S)
        return code

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _feed(self) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stream:
                stream.write(self._text.encode())
        except OSError:
            return  # srun has ended before it read: its own words say why


def _read(stream: IO[bytes], on_line: OnLine) -> None:
    with stream:
        for whole in stream:
            line = whole.rstrip(b"\n")
            label = _LABEL.match(line)
            on_line(int(label[1]) if label else None, line[label.end() :] if label else line)


_EXIT_LINE = re.compile(r"^srun: (error: .*(Exited with exit code|Terminated)|Terminating|Job step aborted)")
_TAIL = 8
_CONFIG = "/dev/stdin"  # srun copies its stdin to every task, also without a shared disk


def run_as_step(command: NodesCommand, *, partition: str | None, time_limit: str | None) -> NodeOutput:
    """Runs a command on the nodes that srun allocates; each takes its rank from the step.

    Raises:
        UsageError: if the cluster has no such nodes.
        UnfitError: if too many of them are down, or srun cannot be started.
    """
    known = partitions()
    request = _nodes_request(command, partition, time_limit)
    refuse_impossible(request, known)
    config = [] if command.config_path is None else [_CONFIG]
    words = ["--json", command.name, *config, *command.request.overrides, *command.options]
    text = "" if command.config_path is None else read_config_text(command.config_path)
    output = _StepOutput(command.show)
    with SrunStep(
        _options(request),
        [sys.executable, "-m", "unisono", *words],
        text,
        on_output=output.take,
        on_error=output.talk,
    ) as step:
        code = step.wait()
    nodes = "one node" if request.nodes == 1 else f"{request.nodes} nodes"
    return NodeOutput(
        lines=[output.printed.decode("utf-8", "replace")],
        code=code,
        host=f"{nodes} of Slurm",
        where=f"srun, exit code {code}",
        tail=list(output.tail),
        fix="see `sinfo -R` and `squeue`; inside an allocation: srun --ntasks-per-node=1 unisono doctor",
    )


def _nodes_request(command: NodesCommand, partition: str | None, time_limit: str | None) -> NodesRequest:
    named, nproc = checked_partitions(partition, time_limit), command.request.nproc
    least, nodes = nodes_of(command.request.nodes)
    gpus = gpus_of(nproc, command.loaded.config) if has_gpus(named) else 0
    return NodesRequest(least, nodes, nproc, gpus, partition, time_limit)


def _options(request: NodesRequest) -> list[str]:
    """Options of srun: one task per node."""
    options = {
        "--nodes": request.number,
        "--ntasks-per-node": "1",
        "--job-name": "unisono-doctor",
        "--cpus-per-task": str(request.nproc) if request.nproc else None,
        "--gpus-per-node": str(request.gpus) if request.gpus else None,
        "--partition": request.partition or None,
        "--time": request.time,
    }
    return [f"{name}={value}" for name, value in options.items() if value is not None]


@dataclass
class _StepOutput:
    """Output of the tasks and of srun."""

    show: Show
    printed: bytes = b""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL))

    def take(self, task: int | None, piece: bytes) -> None:
        """Collects node 0's output, one object in pieces."""
        if task == 0:
            self.printed += piece

    def talk(self, task: int | None, line: bytes) -> None:
        """A line of stderr: those of node 0 and srun are shown, except how a task ended, which the
        result says better.
        """
        text = line.decode("utf-8", "replace")
        if task not in (None, 0) or not text.strip() or _EXIT_LINE.match(text):
            return
        self.tail.append(one_line(text, limit=300))
        self.show({"kind": "note", "time": time.time(), "text": plain(text.rstrip())})
