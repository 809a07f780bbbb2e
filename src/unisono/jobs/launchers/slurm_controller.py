"""Queries to Slurm's controller: what the cluster can provide before a job is submitted, and a
job's state, wait and nodes.
"""

import re
from dataclasses import dataclass

from unisono.base.errors import Problem, UnfitError, UsageError
from unisono.guard.facts.slurm import (
    NodeState,
    SlurmAnswer,
    fields_of,
    has_slurm,
    node_states,
    run_slurm,
    seconds_of,
)

_SILENT = re.compile(r"contact slurm controller|timed out|Connection refused|did not answer", re.IGNORECASE)
_NO_CLUSTER = re.compile(r"configuration source|DNS SRV lookup|unable to status file", re.IGNORECASE)
"""Messages of Slurm's programs on a machine without a slurm.conf."""

_SHOWN = 8


@dataclass(frozen=True)
class NodesRequest:
    """The nodes of a job or a step.

    Attributes:
        least_nodes: the smallest sufficient number of nodes.
        nodes: the largest number of nodes.
        nproc: ranks on each node; None: one for each device.
        gpus: accelerators requested on each node; 0: none.
        partition: as typed; None: the cluster's default.
        time: the time limit as typed; None: the partition's own limit.
    """

    least_nodes: int
    nodes: int
    nproc: int | None
    gpus: int
    partition: str | None
    time: str | None

    @property
    def number(self) -> str:
        """The number of nodes as Slurm takes it: `2`, or `2-4`."""
        return str(self.nodes) if self.least_nodes == self.nodes else f"{self.least_nodes}-{self.nodes}"

    @property
    def partitions(self) -> tuple[str, ...]:
        """The requested partitions."""
        return tuple(self.partition.split(",")) if self.partition else ()


@dataclass(frozen=True)
class Partition:
    """A partition of the cluster.

    Attributes:
        up: whether it starts jobs.
        nodes: the number of its nodes.
        most_nodes: the largest number for one job; None: no limit.
        most_time: a job's limit as Slurm writes it.
        is_default: whether jobs without a partition go there.
    """

    name: str
    up: bool
    state: str
    nodes: int
    most_nodes: int | None
    most_time: str
    nodelist: str
    is_default: bool


def partitions() -> dict[str, Partition]:
    """All partitions, by name.

    Raises:
        UsageError: if Slurm is not installed here.
        UnfitError: if its controller does not answer, or does not list them.
    """
    if not has_slurm():
        raise UsageError.of(
            "--launcher slurm needs sbatch, which is not installed here",
            where="this machine",
            fix="run the command on a login node of the cluster, or use --launcher nodes with --hosts",
        )
    answer = run_slurm("scontrol", "show", "partition", "-o")
    if not answer.ok:
        raise _unanswered(answer) or UnfitError.of(
            "Slurm does not list its partitions",
            where=f"Slurm reports: {answer.words}",
            fix="scontrol show partition   # shows the same error",
        )
    by_name = {}
    for line in answer.out.splitlines():
        fields = fields_of(line)
        name = fields.get("PartitionName")
        if name:
            most = fields.get("MaxNodes", "")
            by_name[name] = Partition(
                name,
                fields.get("State") == "UP",
                fields.get("State", "?"),
                int(fields.get("TotalNodes") or 0),
                int(most) if most.isdigit() else None,
                fields.get("MaxTime", ""),
                fields.get("Nodes", ""),
                fields.get("Default") == "YES",
            )
    return by_name


def has_gpus(names: tuple[str, ...]) -> bool:
    """Whether Slurm allocates accelerators in these partitions, or in any."""
    words = ["-p", ",".join(names)] if names else []
    return "gpu" in run_slurm("sinfo", "-h", "-o", "%G", *words).out


def refuse_impossible(request: NodesRequest, known: dict[str, Partition]) -> None:
    """Checks that a partition can ever provide the nodes, and can do so now or soon.

    Raises:
        UsageError: if a partition is unknown, or never provides so many nodes to one job.
        UnfitError: if too many of its nodes are unusable.
    """
    unknown = [name for name in request.partitions if name not in known]
    if unknown:
        raise UsageError.of(
            f"unknown partition {', '.join(unknown)}",
            where="--partition",
            why=f"this cluster has {', '.join(sorted(known)) or 'none'}",
            fix="choose one of them (`sinfo`)",
        )
    chosen = [known[name] for name in request.partitions] or [
        each for each in known.values() if each.is_default
    ]
    if not chosen:
        return  # sbatch reports that a partition is required
    problems = [problem for problem in (_too_small(request, each) for each in chosen) if problem is not None]
    if len(problems) == len(chosen):
        raise UsageError(*problems)
    refuse_unusable_nodes(request, chosen)


def refuse_unusable_nodes(request: NodesRequest, chosen: list[Partition]) -> None:
    """Checks node by node that enough nodes are usable.

    Raises:
        UnfitError: if fewer nodes are usable than requested.
    """
    best: tuple[int, str, list[NodeState]] = (-1, "", [])
    for each in chosen:
        if not each.up:
            best = max(
                best, (-1, f"partition {each.name} is {each.state}", []), key=lambda candidate: candidate[0]
            )
            continue
        nodes = node_states(each.nodelist)
        usable = sum(node.usable for node in nodes)
        if not nodes or usable >= request.least_nodes:
            return
        best = max(
            best,
            (usable, f"partition {each.name}", [node for node in nodes if not node.usable]),
            key=lambda candidate: candidate[0],
        )
    usable, where, bad = best
    states = "; ".join(node.description for node in bad[:_SHOWN]) + (
        f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    )
    if usable < 0:
        raise UnfitError.of(
            f"no job can start now: {where or 'no partition is up'}",
            where="--partition",
            fix="choose a partition that is up (`sinfo`)",
        )
    raise UnfitError.of(
        f"{request.least_nodes} nodes are requested, and {usable} of {where} are usable now",
        where=states,
        why="the job would wait until they are back",
        fix=(
            f"--nodes {usable}, a different --partition, or ask the administrator (`sinfo -R`)"
            if usable
            else "a different --partition, or ask the administrator (`sinfo -R`)"
        ),
    )


def slurm_error(what: str, answer: SlurmAnswer) -> UsageError | UnfitError:
    """An error with Slurm's message: exit code 6 if it does not answer; 2 if it refuses, or this
    machine belongs to no cluster.
    """
    words = answer.words or f"exit code {answer.code}"
    return _unanswered(answer, what) or UsageError.of(
        what,
        where=f"Slurm reports: {words}",
        fix=(
            "change --nodes, --partition or --time; account and QOS are read from SBATCH_ACCOUNT and"
            " SBATCH_QOS"
        ),
    )


def _unanswered(
    answer: SlurmAnswer, what: str = "its partitions are unknown"
) -> UsageError | UnfitError | None:
    """The error if no controller answered; None if one did."""
    words = answer.words or f"exit code {answer.code}"
    if _NO_CLUSTER.search(words):
        return UsageError.of(
            "this machine belongs to no Slurm cluster: sbatch is installed, but no controller is configured",
            where=f"Slurm reports: {words}",
            fix=(
                "run the command on a login node of the cluster; or export SLURM_CONF if its slurm.conf is in"
                " a different place"
            ),
        )
    if answer.code is None or _SILENT.search(words):
        return UnfitError.of(
            f"Slurm does not answer: {what}",
            where=words,
            why="its controller (slurmctld) is down or unreachable from here",
            fix="scontrol ping   # shows which controller is up",
        )
    return None


def _too_small(request: NodesRequest, partition: Partition) -> Problem | None:
    most = partition.nodes if partition.most_nodes is None else min(partition.nodes, partition.most_nodes)
    if request.least_nodes <= most:
        return _too_long(request, partition)
    has = f"partition {partition.name} has {partition.nodes} node{'' if partition.nodes == 1 else 's'}"
    limit = f"{has}, of which one job can have {most}" if most < partition.nodes else has
    return Problem(
        f"{request.least_nodes} nodes are requested, and {limit}",
        where="--nodes",
        why="the job would wait forever",
        fix=f"--nodes {most}, or a different --partition (`sinfo`)",
    )


def _too_long(request: NodesRequest, partition: Partition) -> Problem | None:
    limit, requested = seconds_of(partition.most_time), seconds_of(request.time or "")
    if limit is None or requested is None or requested <= limit:
        return None
    return Problem(
        f"--time {request.time} is longer than partition {partition.name} allows",
        where=f"MaxTime={partition.most_time}",
        why="the job would wait forever",
        fix=f"--time {partition.most_time}: the run continues in the next job; or a different --partition",
    )


_ENDED = frozenset(
    [
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("BOOT_FAIL", "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    ]
)
_NEVER = re.compile(  # reasons that never change; all others may
    r"PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints|InvalidAccount|InvalidQOS"
    r"|AccountNotAllowed|QOSNotAllowed|QOSUsageThreshold"
    r"|Max(Wall|Node|Cpu|CPU|GRES|Mem|TRES)\w*PerJob|MaxWallDuration|MinCpuNotSatisfied|DependencyNeverSatisfied|can't"
    r" use this partition|not permitted",
)


@dataclass(frozen=True)
class JobState:
    """A job as the controller reports it.

    Attributes:
        state: `PENDING`, `RUNNING`, … ; `GONE`: the controller no longer knows it.
        reason: why it waits, or why it ended.
        nodelist: where it runs; empty while it waits.
        starts: its expected start, or `Unknown`.
        code: the exit code of its script; None while it runs.
    """

    job: str
    state: str
    reason: str = ""
    restarts: int = 0
    nodelist: str = ""
    partition: str = ""
    starts: str = ""
    code: int | None = None
    script: str = ""

    @property
    def waits(self) -> bool:
        """Whether it is queued, or about to be queued again."""
        return self.state in (
            "PENDING",
            "REQUEUED",
            "REQUEUE_HOLD",
            "REQUEUE_FED",
            "SPECIAL_EXIT",
            "CONFIGURING",
        )

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.state in _ENDED or self.state == "GONE"

    @property
    def never(self) -> bool:
        """Whether its reason for waiting never changes."""
        return self.state == "PENDING" and _NEVER.search(self.reason) is not None


def read_job(job: str) -> JobState | None:
    """The job's state; None if the controller does not answer now."""
    answer = run_slurm("scontrol", "show", "job", "-o", job)
    if not answer.ok:
        return JobState(job, "GONE") if "Invalid job id" in answer.err else None
    fields = fields_of(answer.out.splitlines()[0] if answer.out else "")
    code = fields.get("ExitCode", "").partition(":")[0]
    state = fields.get("JobState", "?").split()[0]
    return JobState(
        job=job,
        state=state,
        reason=_reason(job, fields),
        restarts=int(fields.get("Restarts") or 0),
        nodelist=fields.get("NodeList", "").replace("(null)", ""),
        partition=fields.get("Partition", ""),
        starts=fields.get("StartTime", ""),
        code=int(code) if code.isdigit() and state in _ENDED else None,
        script=fields.get("Command", ""),
    )


def queue_position(state: JobState) -> str:
    """`place 3 of 7 in partition gpu`; empty if unknown."""
    answer = run_slurm("squeue", "-h", "-t", "PENDING", "-p", state.partition, "-S", "-p,i", "-o", "%A")
    waiting = answer.out.split() if answer.ok else []
    if state.job not in waiting:
        return ""
    return f"place {waiting.index(state.job) + 1} of {len(waiting)} in partition {state.partition}"


def jobs_named(name: str) -> list[str] | None:
    """This user's queued and running jobs of that name; None if the controller does not answer."""
    answer = run_slurm("squeue", "-h", "--me", "-n", name, "-o", "%A")
    return answer.out.split() if answer.ok else None


def _reason(job: str, fields: dict[str, str]) -> str:
    """The reason as squeue shows it: with the unavailable nodes, and as a sentence if there is
    one.
    """
    short = fields.get("Reason", "").replace("None", "")
    if fields.get("JobState", "").startswith("PENDING"):
        reason = run_slurm("squeue", "-h", "-j", job, "-o", "%r").out.strip()
        return (reason or short).replace("None", "")
    return short
