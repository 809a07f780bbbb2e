"""Verdicts on starts of ranks that ended without a result. Pure."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.causes.signatures import match_line
from unisono.base.causes.verdict import OwnRunOnly
from unisono.base.events import own_frame
from unisono.base.messages import CrashedMessage, fields_of
from unisono.base.text import one_line
from unisono.guard.agree.membership import refused_node
from unisono.guard.places.ranks import RankPlace
from unisono.guard.supervise.decision import Decision, NodeLoss, is_victim
from unisono.guard.supervise.local_ranks import Job, RankEnd
from unisono.guard.supervise.node_messages import readable_verdicts
from unisono.guard.supervise.task_process import how_it_ended
from unisono.guard.watch.rank_dumps import main_thread_of_faulthandler
from unisono.guard.watch.verdicts import describe_activity, mismatch
from unisono.guard.watch.views import RankView, RunView

_TAIL_LINES = 3
_STACK_FRAMES = 6
_STALLED_S = 0.2  # a living rank with a newer heartbeat has moved


def apart(seen: RunView | None, culprit: RankEnd | None) -> Verdict | None:
    """The verdict on ranks that failed because they were in different collectives; None if they
    were not.

    gloo ends ranks that receive a different size than they expect. Ranks that only lost their peers
    may be one collective apart because of the network.
    """
    if seen is None:
        return None
    died_at = _place(seen.views.get(culprit.rank)) if culprit is not None else None
    stalled = [
        v
        for v in seen.views.values()
        if v.has_ended or v.idle_s >= _STALLED_S or (died_at is not None and _place(v) == died_at)
    ]
    in_collectives = {v.rank: v for v in stalled if v.beat is not None and v.beat.phase == "comm"}
    if culprit is None or is_victim(culprit):
        counts = {(v.beat.step, v.beat.comm) for v in in_collectives.values() if v.beat is not None}
        if len(counts) != 1:
            return None
    elif culprit.returncode != -signal.SIGABRT or culprit.rank not in in_collectives:
        return None
    return mismatch(seen, list(in_collectives.values())) if len(in_collectives) > 1 else None


def _place(view: RankView | None) -> tuple[int, int] | None:
    """Step and number of the collective that a rank is in; None outside of collectives.

    A rank in the same one as the failed rank has not moved since.
    """
    if view is None or view.beat is None or view.beat.phase != "comm":
        return None
    return view.beat.step, view.beat.comm


def name_failure(
    decision: Decision, job: Job, *, after_s: float | None, seen: RunView | None = None
) -> Verdict | None:
    """The verdict on the rank or node that failed first; None if none is known.

    Args:
        decision: on ends of ranks and losses of nodes.
        job: whose ranks they are.
        after_s: seconds from the first news of the failure to this verdict; None: not said.
        seen: the ranks as they were seen last.
    """
    if decision.loss is not None:
        return name_loss(decision.loss, head=job.nodes[0].host, after_s=after_s or 0.0)
    divergence = apart(seen, decision.culprit)
    if divergence is not None:
        return divergence.model_copy(update={"named_after_s": after_s})
    if decision.culprit is None or decision.culprit.rank >= job.world_size:
        return None
    return name_death(decision.culprit, job, after_s=after_s, seen=seen)


def name_death(
    end: RankEnd, plan: Job, *, after_s: float | None = None, seen: RunView | None = None
) -> Verdict:
    """The verdict on a rank that crashed, was killed, or exited without a final message."""
    place = plan.ranks[end.rank]
    where = place.label
    at = f"in phase {end.phase}" + (f" after step {end.step}" if end.step else " before step 1")
    cause, what, evidence = _how(end, where)
    origin, fix = _own_origin(end, cause, plan.own_code)
    view = seen.views.get(end.rank) if seen is not None else None
    if view is not None and view.beat is not None:
        evidence.append(Evidence(where=where, text=f"last sign of life: {describe_activity(view)}"))
    evidence += _tail(end, where)
    entry = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        summary=f"{where} {what.format(at=at)}{origin}",
        # It is not known which of both ranks is wrong.
        ranks=() if cause == "collective_mismatch" else (place.rank,),
        hosts=(place.host,),
        phase=end.phase,
        step=end.step or None,
        evidence=tuple(evidence),
        fix=fix or (entry.remedy if entry else ()),
        named_after_s=after_s,
    )


def _own_origin(end: RankEnd, cause: str, code: Mapping[str, str] | None) -> tuple[str, tuple[str, ...]]:
    """How the summary continues and the fix, where the user's own code is the origin, or likely is;
    empty otherwise.
    """
    if cause not in ("user_code_error", "rank_killed") or code is None:
        return "", ()
    trace = fields_of(end.last).get("traceback", "") if end.last is not None else ""
    frame = own_frame(str(trace), code) or own_frame(end.tail, code)
    if frame:
        return f"; the likely origin is {frame}", (f"Fix {frame}.",)
    if end.last is not None or (end.returncode < 0 and end.phase != "objective"):
        return "", ()
    files = " or ".join(f"{name} {part}" if part.endswith(".py") else name for part, name in code.items())
    if files:
        does = "while it executed" if end.phase == "objective" else "whose likely origin is"
        return f", {does} {files}", (f"Remove os._exit, exit or a signal to itself from {files}.",)
    return "", () if "Traceback" in end.tail else (_NO_TRACEBACK,)


_NO_TRACEBACK = "Read the end of its log: without a traceback, exit() or os._exit() in a library ended it."
_OF_DEVICES = frozenset(
    {
        "cuda_oom",
        "no_cuda_build",
        "driver_too_old",
        "cuda_arch_unsupported",
        "ecc_error",
        "gpu_fell_off",
        "duplicate_gpu",
    }
)
"""Causes that the text of an exception tells, whatever code raised it."""


def _how(end: RankEnd, where: str) -> tuple[str, str, list[Evidence]]:
    """Cause, what happened (with `{at}` for phase and step), and the evidence."""
    last = end.last
    if last is not None and last["kind"] == "crashed":
        where_raised, error = str(last.get("where", "")), str(last.get("error", ""))
        text = one_line(error, limit=200).replace("{", "{{").replace("}", "}}")
        evidence = [Evidence(where=f"{where}, {where_raised}", text=error)]
        cause = next((one.cause for one in match_line(error) if one.cause in _OF_DEVICES), None)
        if cause == "cuda_oom":
            return cause, f"ran out of GPU memory {{at}}: {text}", evidence
        return cause or "user_code_error", f"failed with an exception {{at}}: {text}", evidence
    if last is not None and last["kind"] == "result":
        step = last.get("step", end.step)
        text = f"it sent its result after step {step}, while other ranks still needed it"
        return "unequal_steps", "left before the others {at}", [Evidence(where=where, text=text)]
    how = how_it_ended(end.returncode)
    if end.returncode == -signal.SIGKILL and end.oom_killed:
        text = "killed by SIGKILL; the cgroup's oom_kill count grew meanwhile"
        return (
            "host_oom_killed",
            "was killed by the OOM killer {at}",
            [Evidence(where=where, text=text)],
        )
    if end.returncode == -signal.SIGXFSZ:
        text = f"{how}: the kernel sends it when a file would exceed the limit of `ulimit -f`"
        return "ulimit", "was killed by the file size limit {at}", [Evidence(where=where, text=text)]
    if end.returncode == -signal.SIGABRT and _printed(end, "gloo_sizes"):
        what = "received data of a different size than expected {at}, so ranks are in different collectives"
        return "collective_mismatch", what, [Evidence(where=where, text=how)]
    if end.returncode < 0:
        return "rank_killed", f"was {how} {{at}}", [Evidence(where=where, text=how)]
    return "user_code_error", f"exited by itself {{at}}: {how}", [Evidence(where=where, text=how)]


def _printed(end: RankEnd, signature: str) -> bool:
    """Whether the end of a rank's output has a line with this signature of the catalogue."""
    return any(match.id == signature for line in end.tail.splitlines() for match in match_line(line))


def name_task_death(
    name: str,
    *,
    label: str,
    returncode: int,
    crash: CrashedMessage | None,
    tail: str,
    oom_killed: bool,
    host: str,
) -> Verdict:
    """The verdict on a task that crashed, was killed, or exited without a final message.

    Args:
        name: of the task.
        label: what the verdict calls its process.
        returncode: of its process; negative: a signal.
        crash: the message of the exception that ended it; None if there was none.
        tail: the end of its output.
        oom_killed: whether the kernel counted an OOM kill in this cgroup meanwhile.
        host: of this machine.
    """
    end = RankEnd(0, returncode, crash, name, 0, tail=tail, oom_killed=oom_killed)
    where = f"{label} ({host})"
    cause, what, evidence = _how(end, where)
    entry = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        summary=f"{where} {what.format(at=f'in phase {name}')}",
        hosts=(host,),
        phase=name,
        evidence=(*evidence, *_tail(end, where)),
        fix=tuple(line for line in entry.remedy if not isinstance(line, OwnRunOnly)) if entry else (),
    )


def name_task_hang(
    name: str, *, label: str, state: str, waits_in: str, silent_s: float, printed: str, host: str
) -> Verdict:
    """The verdict on a task that lives and no longer answers.

    Args:
        name: of the task.
        label: what the verdict calls its process.
        state: of its process, as in ps(1).
        waits_in: the kernel function that it waits in; empty if unknown.
        silent_s: seconds since its latest message.
        printed: the end of its output, with its stacks by faulthandler if it could write them.
        host: of this machine.
    """
    where = f"{label} ({host})"
    cause, what = _how_it_hangs(state, waits_in)
    stack = main_thread_of_faulthandler(printed)
    evidence = [
        Evidence(where=where, text=f"process state {state or 'unknown'}, silent for {silent_s:.0f} s")
    ]
    evidence += [Evidence(where=f"{where}, stack", text=frame) for frame in stack[:_STACK_FRAMES]]
    entry = find_cause(cause)
    return Verdict(
        cause=cause,
        when="during",
        summary=f"{where} {what}, for {silent_s:.0f} s",
        hosts=(host,),
        phase=name,
        evidence=tuple(evidence),
        fix=tuple(line for line in entry.remedy if not isinstance(line, OwnRunOnly)) if entry else (),
        named_after_s=round(silent_s, 3),
    )


def _how_it_hangs(state: str, waits_in: str) -> tuple[str, str]:
    """Cause, and what the process does."""
    if state == "T":
        return "rank_stopped", "is stopped (state T)"
    if state == "D":
        return "io_blocked", f"waits for storage in the kernel{f' ({waits_in})' if waits_in else ''}"
    busy = "is busy" if state == "R" else "sleeps or waits"
    return "user_code_stuck", f"{busy}, and does not return"


def name_victims(ends: Sequence[RankEnd], plan: Job, *, after_s: float | None = None) -> Verdict:
    """The verdict if every rank lost a peer and none failed by itself: it names no rank."""
    evidence = tuple(_lost_peer(end, plan.ranks[end.rank]) for end in ends if end.last is not None)[:8]
    entry = find_cause("rank_died_first")
    return Verdict(
        cause="rank_died_first",
        when="during",
        evidence=evidence,
        fix=entry.remedy if entry else (),
        named_after_s=after_s,
        summary=(
            f"{len(ends)} of {plan.world_size} ranks lost the connection to a peer, and none is known to have"
            " failed by itself; the cause may be a silent rank or the network"
        ),
    )


def name_loss(loss: NodeLoss, *, head: str, after_s: float = 0.0) -> Verdict:
    """The verdict on the end of a connection between a node and the head: the same text on both.

    A closed connection means that the other side's process is gone. If it is silent and its machine
    still acknowledges data, the process there is stopped. If nothing is acknowledged, the head
    names the node, and a node that lost the head names itself as cut off.

    Args:
        head: node 0's host.
        after_s: seconds from the end of the connection to this verdict.
    """
    since_s = round(loss.silent_s + after_s, 3)
    if not loss.lost_head:
        return name_lost_node(loss, after_s=since_s)
    if not loss.is_cut:
        return name_lost_node(replace(loss, node_rank=0, host=head), after_s=since_s)
    return name_cut_off(loss, head=head, after_s=since_s)


def name_lost_node(loss: NodeLoss, *, after_s: float | None = None) -> Verdict:
    """The verdict on a node whose front no longer answers."""
    where = f"node {loss.node_rank} ({loss.host})"
    return Verdict(
        cause="node_unreachable",
        when="during",
        hosts=(loss.host,),
        named_after_s=after_s,
        summary=f"{where} no longer answers: {one_line(loss.why, limit=200)}",
        evidence=(Evidence(where="the control channel", text=f"{where}: {one_line(loss.why, limit=200)}"),),
        fix=_remedy_of(loss, where),
    )


def _remedy_of(loss: NodeLoss, where: str) -> tuple[str, ...]:
    """The fix. It mentions the network only if nothing came through it."""
    entry = find_cause("node_unreachable")
    remedy = entry.remedy if entry else ()
    if loss.is_cut:
        return remedy
    if loss.silent_s:
        first = (
            f"on {where}: `ps -eo pid,stat,args | grep unisono` shows a stopped process as T, and `kill -CONT"
            " PID` continues it; `uptime` shows the load"
        )
    else:
        first = (
            f"check the terminal or the log of unisono on {where}; `dmesg | grep -i -E 'oom|killed process'`"
            " there shows whether the kernel killed it"
        )
    return (first, *remedy[1:])


def name_cut_off(loss: NodeLoss, *, head: str, after_s: float | None = None) -> Verdict:
    """The verdict of a node on itself, after it lost the head."""
    where = f"node {loss.node_rank} ({loss.host})"
    entry = find_cause("node_unreachable")
    text = f"it lost the connection to the head, node 0 ({head}): {one_line(loss.why, limit=200)}"
    return Verdict(
        cause="node_unreachable",
        when="during",
        hosts=(loss.host,),
        named_after_s=after_s,
        summary=f"{where} is cut off: {text}",
        evidence=(Evidence(where=f"{where}, the control channel", text=text),),
        fix=entry.remedy if entry else (),
    )


def _lost_peer(end: RankEnd, place: RankPlace) -> Evidence:
    assert end.last is not None
    return Evidence(where=place.label, text=one_line(str(fields_of(end.last).get("error", "")), limit=200))


def _tail(end: RankEnd, where: str) -> list[Evidence]:
    """The last lines of its log, unless a final message has the traceback already."""
    if stack := main_thread_of_faulthandler(end.tail):
        return [Evidence(where=f"{where}, stack", text=frame) for frame in stack[:_STACK_FRAMES]]
    lines = [line for line in end.tail.splitlines() if line.strip()]
    if end.last is not None or not lines:
        return []
    return [Evidence(where=f"{where}, log", text=one_line(line, limit=300)) for line in lines[-_TAIL_LINES:]]


def node_refused(node_rank: int, host: str, error: Mapping[str, Any]) -> Verdict:
    """The verdict on a node that refuses to start.

    `error`: the output of `UnisonoError.to_json` on that machine.
    """
    problems = [problem for problem in error.get("problems") or [] if isinstance(problem, dict)]
    verdict = error.get("verdict")
    verdicts = readable_verdicts([verdict]) if verdict else []
    return refused_node(node_rank, host, problems, verdict=verdicts[0] if verdicts else None)
