"""The words for what ends a meeting: the same on every node."""

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
    """The error that a front ends with: exit code 3, the first verdict, and a problem for each."""
    return Disagreed(*(_as_problem(verdict) for verdict in verdicts), verdict=verdicts[0])


def show_verdicts(show: Callable[[Message], None], verdict: Verdict, others: Sequence[str]) -> None:
    """Shows why nothing is started: the decisive verdict whole, of the others a line each."""
    show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
    for summary in others:
        show({"kind": "note", "time": time.time(), "text": f"also: {summary}"})


def end_message(verdicts: Sequence[Verdict], *, exit_code: int = Disagreed.exit_code) -> dict[str, Any]:
    """The message `ended` for a job of which nothing was trained."""
    return {
        "kind": "ended",
        "exit_code": exit_code,
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "result": None,
    }


def stop_message(stopped: Stopped) -> dict[str, Any]:
    """The message `ended` for a job that somebody stopped before there were ranks: no verdict, for nothing is wrong."""
    return {
        "kind": "ended",
        "exit_code": exit_code_of(stopped.number),
        "verdicts": [],
        "result": None,
        "stopped": {"signal": stopped.number.name, "where": stopped.where},
    }


def stop_of_message(message: dict[str, Any]) -> Stopped | None:
    """The signal that an `ended` message tells of, if that is what ended the job."""
    told = message.get("stopped")
    return parse_stop(told.get("signal"), str(told.get("where", ""))) if isinstance(told, dict) else None


def parse_stop(name: Any, where: str) -> Stopped:
    """A signal by its name, as another node tells it; one that is not known here is taken for SIGTERM."""
    known = signal.Signals.__members__.get(str(name), signal.SIGTERM)
    return Stopped(known, one_line(where, limit=200))


def node_left(node_rank: int, host: str, why: str, *, moment: str = "the start") -> Verdict:
    """A node was here and is gone, before there were ranks; or, where the moment is the restart, before there were new ones."""
    return lost_node(node_rank, host, why, silent=why.startswith("silent"), moment=moment)


def bad_report(node_rank: int, host: str, why: str) -> Verdict:
    """What a node reported cannot be read: it runs other code."""
    who = name_node(node_rank, host)
    return Verdict(
        cause="code_mismatch",
        when="before",
        hosts=(host,),
        phase="agree.nodes",
        summary=f"{who} sent a report that the head cannot read: its unisono is another one",
        evidence=(Evidence(where=who, text=one_line(why, limit=300)),),
        fix=_remedy("code_mismatch"),
    )


def node_count_mismatch(why: str, *, hosts: Sequence[str] = ()) -> Verdict:
    """A node that knows the token means another number of nodes."""
    return Verdict(
        cause="world_mismatch",
        when="before",
        hosts=tuple(hosts),
        phase="agree.call",
        summary=why,
        fix=("give the same --nodes to all nodes, and each its own --node-rank from 0",),
    )


def head_lost(me: str, head: str, why: str) -> Verdict:
    """The head was here and is gone, before there were ranks."""
    why = one_line(why, limit=200)
    return Verdict(
        cause="head_unreachable",
        when="before",
        phase="agree.call",
        summary=f"{me} has lost the head at {head} before anything was started: {why}",
        evidence=(Evidence(where=me, text=f"the connection to the head is over: {why}"),),
        fix=(
            "look at node 0's own terminal or log: its error is there",
            "then start the command again on every node",
        ),
    )


def refusal_of(error: BaseException) -> dict[str, Any]:
    """What is told to others of an error here."""
    if isinstance(error, UnisonoError):
        return error.to_json()
    what = f"a defect of unisono: {one_line(repr(error), limit=300)}"
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
