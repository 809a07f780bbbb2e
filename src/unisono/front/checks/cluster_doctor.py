"""`unisono doctor --launcher`: the checks run on nodes that Slurm or Ray allocates; node 0's table
comes back here.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Self

from unisono.base.errors import UnfitError, UsageError
from unisono.base.files import parse_json
from unisono.base.text import one_line, plain
from unisono.front.checks.check import DoctorRequest, findings_of, read_config
from unisono.front.checks.examination import Examination, examine, redacted
from unisono.guard.control.protocol import new_token
from unisono.guard.facts import read_environment, take_token
from unisono.guard.rendezvous.remote_fronts import forwarded_variables
from unisono.guard.supervise.child_process import option_args
from unisono.guard.supervise.task_process import refusal, run_task
from unisono.jobs.launchers.launchers import refuse_contradictions
from unisono.jobs.launchers.ray_job import DRIVER, cluster_address, ray_topology
from unisono.jobs.launchers.slurm_controller import has_gpus, partitions, refuse_impossible
from unisono.jobs.launchers.slurm_job_request import checked_partitions, gpus_of, nodes_of
from unisono.jobs.runs.train_request import config_yaml
from unisono.trainer.config import LoadedConfig
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


_DISAGREE = 3


def read_answer(line: str) -> dict[str, Any] | None:
    """The JSON object of a line of doctor's output: its checks, or its refusal; None for any other
    line.
    """
    try:
        body = parse_json(line)
    except ValueError:
        return None
    if isinstance(body, dict) and (isinstance(body.get("checks"), list) or body.get("kind") == "refused"):
        return body
    return None


def examination_of(answer: dict[str, Any], *, code: int, host: str) -> Examination:
    """The examination that node 0 reports.

    Args:
        answer: from `read_answer`.
        code: node 0's exit code.

    Raises:
        UnisonoError: the refusal of node 0, in the class of its exit code.
    """
    if "checks" not in answer:
        raise refusal(answer)
    return Examination(host, findings_of(answer), agreed=code != _DISAGREE)


def no_answer_error(*, where: str, tail: Sequence[str], fix: str) -> UnfitError:
    """The error for a doctor run on a cluster that printed no result."""
    return UnfitError.of(
        "doctor on the nodes ended without a result of node 0",
        where=where,
        why="; ".join(tail) or "it printed nothing",
        fix=fix,
    )


def examine_on_ray(request: DoctorRequest) -> Examination:
    """Runs doctor on the nodes, and gives their merged findings.

    Raises:
        ConfigError: with every problem of the config, before the cluster is contacted.
        UsageError: if an option does not apply to Ray, or there is no such cluster.
        UnfitError: if it cannot provide the nodes, one is lost, or doctor printed no result.
    """
    environment, loaded = read_environment(), read_config(request)
    shape = ray_topology(request.training, environment)
    given = request.config_path is not None
    body = {
        "job": secrets.token_hex(8),
        "address": cluster_address(request.training, environment),
        "config": config_yaml(loaded.config, command="unisono doctor, by --launcher ray") if given else None,
        "device": loaded.config.device,
        "words": _ray_words(request),
        "nodes": shape.nodes,
        "least": shape.enough,
        "nproc": shape.nproc,
        "join_timeout_s": request.join_timeout_s,
        "variables": forwarded_variables(environment.variables),
    }
    looked = run_task("look", body, on_message=request.show, programs=DRIVER)
    answer = next((found for line in reversed(looked["lines"]) if (found := read_answer(line))), None)
    hosts = ", ".join(looked["hosts"])
    if answer is None:
        raise no_answer_error(
            where=f"{looked['hosts'][0]}, exit code {looked['code']}",
            tail=looked["said"],
            fix="`ray status` shows the state of that node; or run there: unisono doctor",
        )
    return examination_of(answer, code=int(looked["code"]), host=f"Ray's {hosts}")


def _ray_words(request: DoctorRequest) -> list[str | None]:
    """Command words of each node's `unisono`; null stands for its config, which contains the
    overrides.
    """
    words, options = request.command_words(None, resolved=True)
    config = [None] if request.config_path is not None else []
    return ["--json", *words, *config, *option_args(options)]


_EXIT_LINE = re.compile(r"^srun: (error: .*(Exited with exit code|Terminated)|Terminating|Job step aborted)")
_TAIL = 8
_CONFIG = "/dev/stdin"  # srun copies its stdin to every task, also without a shared disk


@dataclass(frozen=True)
class SlurmNodesRequest:
    """The nodes that doctor needs from the cluster.

    Attributes:
        least_nodes: minimum number of nodes.
        nodes: maximum number.
        nproc: ranks per node; None: one for each device.
        gpus: accelerators per node.
        time: as typed; None: the partition's limit.
    """

    least_nodes: int
    nodes: int
    nproc: int | None
    gpus: int
    partitions: tuple[str, ...]
    time: str | None

    def options(self) -> list[str]:
        """Options of srun: one task per node."""
        number = str(self.nodes) if self.least_nodes == self.nodes else f"{self.least_nodes}-{self.nodes}"
        options = {
            "--nodes": number,
            "--ntasks-per-node": "1",
            "--job-name": "unisono-doctor",
            "--cpus-per-task": str(self.nproc) if self.nproc else None,
            "--gpus-per-node": str(self.gpus) if self.gpus else None,
            "--partition": ",".join(self.partitions) or None,
            "--time": self.time,
        }
        return [f"{name}={value}" for name, value in options.items() if value is not None]


def examine_on_slurm(request: DoctorRequest) -> Examination:
    """Runs doctor on the nodes, and gives their merged findings.

    Raises:
        ConfigError: with every problem of the config, before the cluster is contacted.
        UsageError: if the cluster has no such nodes.
        UnfitError: if too many of them are down, or doctor printed no result.
    """
    loaded, known = read_config(request), partitions()
    nodes_request = _nodes_request(request, loaded)
    refuse_impossible(nodes_request, known)
    text = read_config_text(request.config_path) if request.config_path is not None else ""
    output = _StepOutput(request)
    command = [sys.executable, "-m", "unisono", *_slurm_words(request)]
    with SrunStep(
        nodes_request.options(), command, text, on_output=output.take, on_error=output.talk
    ) as step:
        code = step.wait()
    answer = read_answer(output.printed.decode("utf-8", "replace"))
    if answer is None:
        raise no_answer_error(
            where=f"srun, exit code {code}",
            tail=list(output.tail),
            fix="see `sinfo -R` and `squeue`; inside an allocation: srun --ntasks-per-node=1 unisono doctor",
        )
    nodes = "one node" if nodes_request.nodes == 1 else f"{nodes_request.nodes} nodes"
    return examination_of(answer, code=code, host=f"{nodes} of Slurm")


def _nodes_request(request: DoctorRequest, loaded: LoadedConfig) -> SlurmNodesRequest:
    named = checked_partitions(request.training)
    least, nodes = nodes_of(request.nodes)
    gpus = gpus_of(request.nproc, loaded.config) if has_gpus(named) else 0
    return SlurmNodesRequest(least, nodes, request.nproc, gpus, named, request.time)


def _slurm_words(request: DoctorRequest) -> list[str]:
    """Command words of each node, which takes its rank from the Slurm step."""
    words, options = request.command_words(_CONFIG if request.config_path is not None else None)
    return ["--json", *words, *option_args(options)]


@dataclass
class _StepOutput:
    """Output of the tasks and of srun."""

    request: DoctorRequest
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
        self.request.show({"kind": "note", "time": time.time(), "text": plain(text.rstrip())})


def examine_with_launcher(request: DoctorRequest) -> Examination:
    """Runs doctor with the launcher of the request.

    Raises:
        UnisonoError: as `examine`; or if an option belongs to a different launcher, or its cluster
            cannot provide the nodes.
    """
    refuse_contradictions(request.training)
    if request.debug_comm and not request.ladder:
        raise UsageError.of(
            "--debug-comm keeps the libraries' logs of the collectives of --ladder",
            where="command line",
            why="without --ladder doctor reports only the outcome of a collective",
            fix=(
                "unisono doctor --ladder"
                f" --debug-comm{'' if request.nproc is None else f' --nproc {request.nproc}'}, with the other"
                " options as they are"
            ),
        )
    if request.launcher == "slurm":
        return _redacted_examination(examine_on_slurm(request))
    if request.launcher == "ray":
        return _redacted_examination(examine_on_ray(request))
    return examine(request)


def _redacted_examination(examination: Examination) -> Examination:
    """Text of a different process is redacted, too: people paste it into issues."""
    return Examination(examination.host, redacted(examination.findings), agreed=examination.agreed)
