"""What ended an attempt that did not hand over a result: a verdict from what is known of it. Pure."""

import signal

from unisono.causes import Evidence, Verdict, find_cause
from unisono.launch.attempt import Attempt
from unisono.launch.tasks import how_it_ended
from unisono.plan import RunPlan
from unisono.text import one_line

_TAIL_LINES = 3


def name_death(attempt: Attempt, plan: RunPlan) -> Verdict:
    """The verdict on a rank that crashed, was killed, or left without a word."""
    where = f"rank 0, node 0 ({plan.host})"
    at = f"in phase {attempt.phase}" + (f" after step {attempt.step}" if attempt.step else " before step 1")
    if attempt.last is not None and attempt.last["kind"] == "crashed":
        place, error = str(attempt.last.get("where", "")), str(attempt.last.get("error", ""))
        cause, summary = (
            "user_code_error",
            f"{where} ended by an exception {at}: {one_line(error, limit=200)}",
        )
        evidence = [Evidence(where=f"{where}, {place}", text=error)]
    elif attempt.returncode == -signal.SIGKILL and attempt.oom_killed:
        cause, summary = "host_oom_killed", f"{where} was killed by the kernel for want of memory {at}"
        evidence = [
            Evidence(where=where, text="killed by SIGKILL; the cgroup's oom_kill count grew meanwhile")
        ]
    elif attempt.returncode < 0:
        how = how_it_ended(attempt.returncode)
        cause, summary = "rank_killed", f"{where} was {how} {at}"
        evidence = [Evidence(where=where, text=how)]
    else:
        how = how_it_ended(attempt.returncode)
        cause, summary = "user_code_error", f"{where} left by itself {at}: {how}"
        evidence = [Evidence(where=where, text=how)]
    evidence += _tail(attempt, where)
    known = find_cause(cause)
    return Verdict(
        cause=cause, when="during", summary=summary, ranks=(0,), hosts=(plan.host,), phase=attempt.phase,
        step=attempt.step or None, evidence=tuple(evidence), fix=known.remedy if known else (),
    )  # fmt: skip


def _tail(attempt: Attempt, where: str) -> list[Evidence]:
    """The last lines of its log; what a traceback says is told already."""
    lines = [line for line in attempt.tail.splitlines() if line.strip()]
    if attempt.last is not None or not lines:
        return []
    return [Evidence(where=f"{where}, log", text=one_line(line, limit=300)) for line in lines[-_TAIL_LINES:]]
