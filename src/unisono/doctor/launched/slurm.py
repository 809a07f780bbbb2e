"""`unisono doctor --launcher slurm`: srun starts the same look on nodes of the cluster, and waits for them as long as the queue is."""

import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from unisono.cluster.slurm.controller import has_gpus, partitions, refuse_impossible
from unisono.cluster.slurm.job_request import checked_partitions, gpus_of, nodes_of
from unisono.cluster.slurm.srun_step import SrunStep
from unisono.config import LoadedConfig
from unisono.doctor.asked import DoctorRequest
from unisono.doctor.examining import Examination
from unisono.doctor.launched.answer import examination_of, read_answer, without_answer
from unisono.doctor.looking import read_config
from unisono.supervise.child_process import option_words
from unisono.text import one_line, plain

_EXITS = re.compile(r"^srun: (error: .*(Exited with exit code|Terminated)|Terminating|Job step aborted)")
_TAIL = 8
_CONFIG = "/dev/stdin"  # srun gives it to every task: as it is here, also where no disk is shared


@dataclass(frozen=True)
class LookAsked:
    """What the look needs of the cluster.

    Attributes:
        least_nodes: so many are enough.
        nodes: how many at the most.
        nproc: ranks on each; None: as many as its devices.
        gpus: accelerators that each node is asked for.
        partitions: those that are named.
        time: as it was typed; None: the partition's own limit.
    """

    least_nodes: int
    nodes: int
    nproc: int | None
    gpus: int
    partitions: tuple[str, ...]
    time: str | None

    def options(self) -> list[str]:
        """Of srun: one look a node."""
        number = str(self.nodes) if self.least_nodes == self.nodes else f"{self.least_nodes}-{self.nodes}"
        options = {
            "--nodes": number, "--ntasks-per-node": "1", "--job-name": "unisono-doctor",
            "--cpus-per-task": str(self.nproc) if self.nproc else None, "--gpus-per-node": str(self.gpus) if self.gpus else None,
            "--partition": ",".join(self.partitions) or None, "--time": self.time,
        }  # fmt: skip
        return [f"{name}={value}" for name, value in options.items() if value is not None]


def examine_on_slurm(request: DoctorRequest) -> Examination:
    """Has the nodes look, and gives what they have found together.

    Raises:
        ConfigError: with every problem of the config, before the cluster is asked for anything.
        UsageError: if the cluster never has such nodes.
        UnfitError: if too many of them are out of order, or the look ended without an answer.
    """
    loaded, known = read_config(request), partitions()
    asked = _asked(request, loaded)
    refuse_impossible(asked, known)
    text = request.config_path.read_text(encoding="utf-8-sig") if request.config_path is not None else ""
    heard = _Heard(request)
    command = [sys.executable, "-m", "unisono", *_look(request)]
    with SrunStep(asked.options(), command, text, hear=heard.take, hear_talk=heard.talk) as step:
        code = step.wait()
    answer = read_answer(heard.printed.decode("utf-8", "replace"))
    if answer is None:
        raise without_answer(
            where=f"srun, exit code {code}",
            said=list(heard.said),
            fix="look at `sinfo -R` and `squeue`; on nodes that you have: srun --ntasks-per-node=1 unisono doctor",
        )
    nodes = "one node" if asked.nodes == 1 else f"{asked.nodes} nodes"
    return examination_of(answer, code=code, host=f"{nodes} of Slurm")


def _asked(request: DoctorRequest, loaded: LoadedConfig) -> LookAsked:
    named = checked_partitions(request.training)
    least, nodes = nodes_of(request.nodes)
    gpus = gpus_of(request.nproc, loaded.config) if has_gpus(named) else 0
    return LookAsked(least, nodes, request.nproc, gpus, named, request.time)


def _look(request: DoctorRequest) -> list[str]:
    """The look of each node; its place it takes from the step."""
    words, options = request.look(_CONFIG if request.config_path is not None else None)
    return ["--json", *words, *option_words(options)]


@dataclass
class _Heard:
    """What the tasks and srun have said."""

    request: DoctorRequest
    printed: bytes = b""
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL))

    def take(self, task: int | None, piece: bytes) -> None:
        """What node 0 prints is one object, in pieces."""
        if task == 0:
            self.printed += piece

    def talk(self, task: int | None, line: bytes) -> None:
        """A line of stderr: node 0's and srun's are shown. Of those that say how a task ended the answer says more."""
        text = line.decode("utf-8", "replace")
        if task not in (None, 0) or not text.strip() or _EXITS.match(text):
            return
        self.said.append(one_line(text, limit=300))
        self.request.show({"kind": "note", "time": time.time(), "text": plain(text.rstrip())})
