"""A job as the controller has it: its state, what it waits for, where it runs."""

import re
from dataclasses import dataclass

from unisono.facts.slurm import fields_of, run_slurm

_ENDED = frozenset(
    ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"]
)  # fmt: skip
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
        job=job, state=state, reason=_reason(job, fields), restarts=int(fields.get("Restarts") or 0), nodelist=fields.get("NodeList", "").replace("(null)", ""),
        partition=fields.get("Partition", ""), starts=fields.get("StartTime", ""),
        code=int(code) if code.isdigit() and state in _ENDED else None, script=fields.get("Command", ""),
    )  # fmt: skip


def place_in_queue(state: JobState) -> str:
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
