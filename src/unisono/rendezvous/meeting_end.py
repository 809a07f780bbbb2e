"""The verdicts and messages that end a meeting: the same on every node."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from unisono.agree.display import name_node
from unisono.agree.membership import lost_node
from unisono.causes import Evidence, Verdict, find_cause
from unisono.errors import Disagreed, Problem, UnisonoError
from unisono.events import Message
from unisono.supervise.interrupts import Stopped, exit_code_of
from unisono.text import one_line

_MOST_PROBLEMS = 8


def disagreement(verdicts: Sequence[Verdict]) -> Disagreed:
    """The error with which a front ends: exit code 3, the first verdict, and a problem for each verdict."""
    return Disagreed(*(_as_problem(verdict) for verdict in verdicts), verdict=verdicts[0])


def show_verdicts(show: Callable[[Message], None], verdict: Verdict, others: Sequence[str]) -> None:
    """Shows why nothing starts: the decisive verdict in full, one line for each of the others."""
    show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
    for summary in others:
        show({"kind": "note", "time": time.time(), "text": f"also: {summary}"})


def end_message(verdicts: Sequence[Verdict], *, exit_code: int = Disagreed.exit_code) -> dict[str, Any]:
    """The message `ended` for a job that trained nothing."""
    return {
        "kind": "ended",
        "exit_code": exit_code,
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "result": None,
    }


def stop_message(stopped: Stopped) -> dict[str, Any]:
    """The message `ended` for a job that was stopped before ranks started: without a verdict, since nothing failed."""
    return {
        "kind": "ended",
        "exit_code": exit_code_of(stopped.number),
        "verdicts": [],
        "result": None,
        "stopped": {"signal": stopped.number.name, "where": stopped.where},
    }


def stop_of_message(message: dict[str, Any]) -> Stopped | None:
    """The signal in an `ended` message, if a signal ended the job."""
    stopped = message.get("stopped")
    return (
        parse_stop(stopped.get("signal"), str(stopped.get("where", "")))
        if isinstance(stopped, dict)
        else None
    )


def parse_stop(name: Any, where: str) -> Stopped:
    """The signal with a name that a different node sent; an unknown name counts as SIGTERM."""
    known = signal.Signals.__members__.get(str(name), signal.SIGTERM)
    return Stopped(known, one_line(where, limit=200))


def node_left(node_rank: int, host: str, why: str, *, moment: str = "the start") -> Verdict:
    """The verdict on a node that left before the ranks started, or before they were restarted."""
    return lost_node(node_rank, host, why, silent=why.startswith("silent"), moment=moment)


def bad_report(node_rank: int, host: str, why: str) -> Verdict:
    """The verdict on a node whose report cannot be read: it runs a different version."""
    who = name_node(node_rank, host)
    return Verdict(
        cause="code_mismatch",
        when="before",
        hosts=(host,),
        phase="agree.nodes",
        summary=f"{who} sent a report that the head cannot read: it runs a different version of unisono",
        evidence=(Evidence(where=who, text=one_line(why, limit=300)),),
        fix=_remedy("code_mismatch"),
    )


def node_count_mismatch(why: str, *, hosts: Sequence[str] = ()) -> Verdict:
    """The verdict on a node that has the token but a different number of nodes."""
    return Verdict(
        cause="world_mismatch",
        when="before",
        hosts=tuple(hosts),
        phase="agree.call",
        summary=why,
        fix=("set the same --nodes on all nodes, and a different --node-rank on each, from 0",),
    )


def head_lost(me: str, head: str, why: str) -> Verdict:
    """The verdict on a head that was lost before the ranks started."""
    why = one_line(why, limit=200)
    return Verdict(
        cause="head_unreachable",
        when="before",
        phase="agree.call",
        summary=f"{me} lost the head at {head} before anything was started: {why}",
        evidence=(Evidence(where=me, text=f"the connection to the head is closed: {why}"),),
        fix=(
            "see node 0's terminal or log for its error",
            "then run the command again on every node",
        ),
    )


def refusal_of(error: BaseException) -> dict[str, Any]:
    """The message to other nodes about an error of this node."""
    if isinstance(error, UnisonoError):
        return error.to_json()
    what = f"a bug in unisono: {one_line(repr(error), limit=300)}"
    return {
        "exit_code": 1,
        "problems": [{"what": what, "fix": "see the traceback on that node"}],
        "verdict": None,
    }


def _as_problem(verdict: Verdict) -> Problem:
    evidence = "; ".join(f"{item.where}: {item.text}" for item in verdict.evidence[:_MOST_PROBLEMS])
    return Problem(verdict.summary, where=evidence, fix="; ".join(verdict.fix))


def _remedy(cause: str) -> tuple[str, ...]:
    known = find_cause(cause)
    return known.remedy if known else ()
