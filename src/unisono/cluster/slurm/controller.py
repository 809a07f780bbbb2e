"""What Slurm's controller says: what the cluster can give, before anything is submitted, and a job with its state, its wait and its nodes."""

import re
from dataclasses import dataclass
from typing import Protocol

from unisono.errors import Problem, UnfitError, UsageError
from unisono.facts.slurm import (
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
"""Slurm's programs, where no slurm.conf says which cluster is theirs."""

_SHOWN = 8


class NodesRequest(Protocol):
    """What is asked of the cluster, as far as it can be refused before it is submitted."""

    @property
    def least_nodes(self) -> int:
        """So many are enough."""
        ...

    @property
    def partitions(self) -> tuple[str, ...]:
        """Those that are named."""
        ...

    @property
    def time(self) -> str | None:
        """As it was typed; None: the partition's own limit."""
        ...


@dataclass(frozen=True)
class Partition:
    """A partition as the controller has it.

    Attributes:
        name: of it.
        up: whether jobs are started in it.
        state: in Slurm's word.
        nodes: how many it has.
        most_nodes: that one job may have; None: any number.
        most_time: a job's limit as Slurm writes it.
        nodelist: its nodes as Slurm writes them.
        is_default: whether it is taken where none is named.
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
    """All that there are.

    Raises:
        UsageError: if Slurm is not installed here.
        UnfitError: if its controller does not answer, or does not tell them.
    """
    if not has_slurm():
        raise UsageError.of(
            "--launcher slurm needs sbatch, and it is not installed here",
            where="this machine",
            fix="type the command on a login node of the cluster, or take --launcher nodes and --hosts",
        )
    answer = run_slurm("scontrol", "show", "partition", "-o")
    if not answer.ok:
        raise _unanswered(answer) or UnfitError.of(
            "Slurm does not tell its partitions",
            where=f"Slurm says: {answer.words}",
            fix="scontrol show partition   # says the same by hand",
        )
    found = {}
    for line in answer.out.splitlines():
        fields = fields_of(line)
        name = fields.get("PartitionName")
        if name:
            most = fields.get("MaxNodes", "")
            found[name] = Partition(
                name,
                fields.get("State") == "UP",
                fields.get("State", "?"),
                int(fields.get("TotalNodes") or 0),
                int(most) if most.isdigit() else None,
                fields.get("MaxTime", ""),
                fields.get("Nodes", ""),
                fields.get("Default") == "YES",
            )
    return found


def has_gpus(names: tuple[str, ...]) -> bool:
    """Whether nodes of these partitions, or of any, have accelerators that Slurm gives out."""
    words = ["-p", ",".join(names)] if names else []
    return "gpu" in run_slurm("sinfo", "-h", "-o", "%G", *words).out


def refuse_impossible(asked: NodesRequest, known: dict[str, Partition]) -> None:
    """Checks that a partition can give the nodes at all, and now or soon.

    Raises:
        UsageError: if there is no such partition, or it never has so many nodes for one job.
        UnfitError: if too many of its nodes are out of order.
    """
    strange = [name for name in asked.partitions if name not in known]
    if strange:
        raise UsageError.of(
            f"there is no partition {', '.join(strange)}",
            where="--partition",
            why=f"this cluster has {', '.join(sorted(known)) or 'none'}",
            fix="choose one of them (`sinfo`)",
        )
    chosen = [known[name] for name in asked.partitions] or [
        each for each in known.values() if each.is_default
    ]
    if not chosen:
        return  # sbatch will say that a partition is to be named
    problems = [problem for problem in (_too_small(asked, each) for each in chosen) if problem is not None]
    if len(problems) == len(chosen):
        raise UsageError(*problems)
    refuse_unusable_nodes(asked, chosen)


def refuse_unusable_nodes(asked: NodesRequest, chosen: list[Partition]) -> None:
    """Node by node, where fewer can be used than are asked for.

    Raises:
        UnfitError: in that case.
    """
    best: tuple[int, str, list[NodeState]] = (-1, "", [])
    for each in chosen:
        if not each.up:
            best = max(best, (-1, f"partition {each.name} is {each.state}", []), key=lambda found: found[0])
            continue
        nodes = node_states(each.nodelist)
        usable = sum(node.usable for node in nodes)
        if not nodes or usable >= asked.least_nodes:
            return
        best = max(
            best,
            (usable, f"partition {each.name}", [node for node in nodes if not node.usable]),
            key=lambda found: found[0],
        )
    usable, where, bad = best
    told = "; ".join(node.told for node in bad[:_SHOWN]) + (
        f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    )
    if usable < 0:
        raise UnfitError.of(
            f"no job is started now: {where or 'no partition is up'}",
            where="--partition",
            fix="choose one that is up (`sinfo`)",
        )
    raise UnfitError.of(
        f"{asked.least_nodes} nodes are asked for, and {usable} of {where} can be used now",
        where=told,
        why="a job would wait until they are back",
        fix=f"--nodes {usable}, another --partition, or ask who looks after them (`sinfo -R`)"
        if usable
        else "another --partition, or ask who looks after them (`sinfo -R`)",
    )


def slurm_error(what: str, answer: SlurmAnswer) -> UsageError | UnfitError:
    """An error in Slurm's own words: 6 where it does not answer, 2 where it does not want, or this machine is of no cluster."""
    words = answer.words or f"exit code {answer.code}"
    return _unanswered(answer, what) or UsageError.of(
        what,
        where=f"Slurm says: {words}",
        fix="change --nodes, --partition or --time; account and QOS are read from SBATCH_ACCOUNT and SBATCH_QOS",
    )


def _unanswered(
    answer: SlurmAnswer, what: str = "its partitions are not told"
) -> UsageError | UnfitError | None:
    """The error where no controller has said anything; None where one has."""
    words = answer.words or f"exit code {answer.code}"
    if _NO_CLUSTER.search(words):
        return UsageError.of(
            "this machine is of no Slurm cluster: sbatch is here, and nothing says where its controller is",
            where=f"Slurm says: {words}",
            fix="type the command on a login node of the cluster; or export SLURM_CONF, where its slurm.conf is kept elsewhere",
        )
    if answer.code is None or _SILENT.search(words):
        return UnfitError.of(
            f"Slurm does not answer: {what}",
            where=words,
            why="its controller (slurmctld) is down, or cannot be reached from here",
            fix="scontrol ping   # says which controller is up",
        )
    return None


def _too_small(asked: NodesRequest, partition: Partition) -> Problem | None:
    most = partition.nodes if partition.most_nodes is None else min(partition.nodes, partition.most_nodes)
    if asked.least_nodes <= most:
        return _too_long(asked, partition)
    has = f"partition {partition.name} has {partition.nodes} node{'' if partition.nodes == 1 else 's'}"
    one = f"{has}, of which one job may have {most}" if most < partition.nodes else has
    return Problem(
        f"{asked.least_nodes} nodes are asked for, and {one}",
        where="--nodes",
        why="the job would wait for ever",
        fix=f"--nodes {most}, or another --partition (`sinfo`)",
    )


def _too_long(asked: NodesRequest, partition: Partition) -> Problem | None:
    limit, wanted = seconds_of(partition.most_time), seconds_of(asked.time or "")
    if limit is None or wanted is None or wanted <= limit:
        return None
    return Problem(
        f"--time {asked.time} is longer than partition {partition.name} allows",
        where=f"MaxTime={partition.most_time}",
        why="the job would wait for ever",
        fix=f"--time {partition.most_time}: the run goes on in the next job; or another --partition",
    )


_ENDED = frozenset(
    [
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("BOOT_FAIL", "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    ]
)
_NEVER = re.compile(  # what no waiting changes; the rest of Slurm's reasons may
    r"PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|BadConstraints|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|QOSUsageThreshold"
    r"|Max(Wall|Node|Cpu|CPU|GRES|Mem|TRES)\w*PerJob|MaxWallDuration|MinCpuNotSatisfied|DependencyNeverSatisfied|can't use this partition|not permitted",
)


@dataclass(frozen=True)
class JobState:
    """What the controller says of a job.

    Attributes:
        job: its id.
        state: `PENDING`, `RUNNING`, … ; `GONE`: the controller has forgotten it.
        reason: why it waits, or why it ended.
        restarts: how often it was requeued.
        nodelist: where it runs; empty while it waits.
        partition: of it.
        starts: when it is expected to start, or `Unknown`.
        code: the exit code of its script; None while it has none.
        script: the path of its script.
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
        """Whether it is in the queue, or on its way back into it."""
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
        """Whether nothing more comes of it."""
        return self.state in _ENDED or self.state == "GONE"

    @property
    def never(self) -> bool:
        """Whether it waits for what does not come."""
        return self.state == "PENDING" and _NEVER.search(self.reason) is not None


def read_job(job: str) -> JobState | None:
    """The job; None if the controller does not answer now."""
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
    """`3 of 7 in partition gpu`; empty where it cannot be told."""
    answer = run_slurm("squeue", "-h", "-t", "PENDING", "-p", state.partition, "-S", "-p,i", "-o", "%A")
    waiting = answer.out.split() if answer.ok else []
    if state.job not in waiting:
        return ""
    return f"place {waiting.index(state.job) + 1} of {len(waiting)} in partition {state.partition}"


def jobs_named(name: str) -> list[str] | None:
    """This user's jobs of that name that wait or run; None if the controller does not say."""
    answer = run_slurm("squeue", "-h", "--me", "-n", name, "-o", "%A")
    return answer.out.split() if answer.ok else None


def _reason(job: str, fields: dict[str, str]) -> str:
    """As squeue tells it: with the nodes that are not available, and in a sentence where there is one."""
    short = fields.get("Reason", "").replace("None", "")
    if fields.get("JobState", "").startswith("PENDING"):
        told = run_slurm("squeue", "-h", "-j", job, "-o", "%r").out.strip()
        return (told or short).replace("None", "")
    return short
