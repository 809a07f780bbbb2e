"""How a job ended, as result.json would say it: the head's own word, or what can be told where it said none."""

from typing import Any

from unisono.causes import Evidence, Verdict, find_cause
from unisono.facts.slurm import NodeState, node_states
from unisono.launch.interrupts import exit_code_of
from unisono.launch.outcome import NOTHING_DONE, Ending, result_of
from unisono.launch.record import read_progress
from unisono.launch.slurm.following import Followed
from unisono.rundir import RunDir
from unisono.rundir.result import read_result

_CAUSES = {
    "TIMEOUT": "preempted_sigterm", "PREEMPTED": "preempted_sigterm", "CANCELLED": "preempted_sigterm", "DEADLINE": "preempted_sigterm",
    "NODE_FAIL": "node_unreachable", "BOOT_FAIL": "node_unreachable", "OUT_OF_MEMORY": "host_oom_killed",
}  # fmt: skip
_WORDS = {
    "TIMEOUT": "its time limit was over before a checkpoint was saved",
    "PREEMPTED": "another job took its nodes",
    "CANCELLED": "it was cancelled (scancel)",
    "DEADLINE": "its deadline was over",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not start",
    "OUT_OF_MEMORY": "a node's memory for it was used up",
    "FAILED": "its script failed",
    "GONE": "the controller has forgotten it",
}
_TAIL = 6


def result_of_job(
    followed: Followed, *, run: RunDir, seconds: float
) -> tuple[dict[str, Any], Verdict | None]:
    """The object of result.json, and a verdict to be told, if the head could not tell one itself."""
    if followed.result is not None:
        told = {name: value for name, value in followed.result.items() if name not in ("kind", "time")}
        return told, None
    state = followed.state.state
    if followed.asked is not None or (state == "CANCELLED" and not followed.nodes):
        code = exit_code_of(followed.asked) if followed.asked is not None else 75
        return result_of(
            Ending(code, _known(run)), run_id="", output_dir=str(run.root), restarts=[], seconds=seconds
        ), None
    verdict = _verdict(followed)
    cause = find_cause(verdict.cause)
    code = cause.exit_code if cause is not None and verdict.cause != "undetermined" else 5
    ending = Ending(code, _known(run), verdict)
    return result_of(ending, run_id="", output_dir=str(run.root), restarts=[], seconds=seconds), verdict


def _known(run: RunDir) -> dict[str, Any]:
    """How far the run is: as whoever wrote how it ended has it, else by its files."""
    before = read_result(run)
    if before is not None:
        return {name: getattr(before, name) for name in NOTHING_DONE}
    try:
        return read_progress(run)
    except OSError:  # the directory may be of compute nodes alone
        return NOTHING_DONE


def _verdict(followed: Followed) -> Verdict:
    job, state = followed.state.job, followed.state.state
    ill = (
        [node for node in node_states(",".join(followed.nodes)) if not node.usable] if followed.nodes else []
    )
    evidence = [Evidence(where=f"Slurm job {job}", text=_job_line(followed))]
    evidence += [Evidence(where=f"Slurm node {node.name}", text=node.told) for node in ill]
    evidence += [Evidence(where=f"output of job {job}", text=line) for line in followed.tail[-_TAIL:]]
    cause = _CAUSES.get(state, "undetermined")
    named = _named(ill, followed.nodes) if cause == "node_unreachable" else ""
    known = find_cause(cause)
    return Verdict(
        cause=cause, when="during", hosts=tuple(node.name for node in ill) if cause == "node_unreachable" else (),
        summary=f"job {job} ended without a word of its head: {_WORDS.get(state, state.lower())}{named}",
        evidence=tuple(evidence), confidence=0.7 if cause != "undetermined" else 0.3,
        fix=("start the same command again: the run goes on from its newest checkpoint", *(known.remedy if known else ())[:1]),
    )  # fmt: skip


def _job_line(followed: Followed) -> str:
    state = followed.state
    code = f", exit code {state.code}" if state.code is not None else ""
    reason = f", reason {state.reason}" if state.reason else ""
    where = f", nodes {','.join(followed.nodes)}" if followed.nodes else ""
    return f"{state.state}{reason}{code}{where}, requeued {state.restarts} times"


def _named(ill: list[NodeState], nodes: list[str]) -> str:
    names = [
        f"node {nodes.index(node.name)} ({node.name})" if node.name in nodes else node.name for node in ill
    ]
    return f": {', '.join(names)}" if names else ""
