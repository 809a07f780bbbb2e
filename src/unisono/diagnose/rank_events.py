"""Reports of the ranks of one of our runs: events/, metrics.jsonl and the sizes of logs, in the form of facts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.diagnose.lines import shown
from unisono.diagnose.run_facts import Event, EventKind, Origin, RankFacts, RunFacts
from unisono.events import Message, read_message
from unisono.files import iterate_lines, objects_of, parse_json, read_object, read_text
from unisono.rundir import RunDir
from unisono.rundir.merged_logs import Clocks, is_time
from unisono.rundir.records import iterate_metrics
from unisono.text import one_line

_KINDS: dict[str, EventKind] = {
    "warning": "warning",
    "asked": "warning",
    "crashed": "error",
    "refused": "error",
    "result": "finished",
}
_LEFT_OUT = ("kind", "time", "traceback", "done", "total", "report", "facts")
_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class RankEvents:
    """Events of one rank of our own run, since its last start.

    Attributes:
        rank: its number; host: where it ran.
        events: in order.
        phase: the last phase that it reported.
        last_time: of its last event or log output. Seconds since 1970 by the head's clock; None: never.
    """

    rank: int
    host: str
    events: tuple[Event, ...]
    phase: str
    last_time: float | None
    messages: tuple[Message, ...]

    @property
    def crash(self) -> tuple[Event, Message] | None:
        """The exception that ended it, unless another rank's exit caused it."""
        for event, message in zip(self.events, self.messages, strict=True):
            if message["kind"] in ("crashed", "refused") and not message.get("peer_lost"):
                return event, message
        return None


def read_rank_events(run: RunDir) -> list[RankEvents]:
    """Events of all ranks that reported any, in order; incomplete lines are skipped."""
    clocks = Clocks(run)
    hosts = {
        _whole(place.get("rank")): one_line(str(place.get("host") or ""), limit=100) for place in _places(run)
    }
    return [
        _read_rank(path, hosts, clocks, run) for path in sorted(run.events(0).parent.glob("rank-*.jsonl"))
    ]


def facts_of(run: RunDir, reports: list[RankEvents]) -> RunFacts:
    """The same as RunFacts, for rules, judging and the timeline."""
    plan = read_object(run.plan)
    step = last_step(run)
    events = tuple(event for one in reports for event in one.events)
    ranks = {one.rank: _rank_facts(one, step) for one in reports}
    for rank in range(_whole(plan.get("world_size")) or 0) if len(ranks) < 10_000 else ():
        ranks.setdefault(rank, RankFacts(rank))
    return RunFacts(
        events=events,
        ranks=dict(sorted(ranks.items())),
        world_size=_whole(plan.get("world_size")),
        nodes=len(objects_of(plan.get("nodes"))) or None,
        hosts=tuple(dict.fromkeys(one.host for one in reports if one.host)),
        framework=_framework(plan, reports),
        step=step,
        steps=_whole(plan.get("total_steps")),
    )


def _framework(plan: Message, reports: list[RankEvents]) -> str:
    """The framework: "unisono", or what a program of `unisono run` has loaded; empty if unknown."""
    if not isinstance(plan.get("command"), list):
        return "unisono"
    names = (
        message.get("name") for one in reports for message in one.messages if message["kind"] == "framework"
    )
    return one_line(str(next(names, "")), limit=100)


def last_step(run: RunDir) -> int | None:
    """The last step in metrics.jsonl."""
    steps = (
        [step for line in iterate_metrics(run.metrics) if (step := _whole(line.get("step"))) is not None]
        if run.metrics.exists()
        else []
    )
    return max(steps, default=None)


def _rank_facts(one: RankEvents, step: int | None) -> RankFacts:
    finished = next((event for event in one.events if event.kind == "finished"), None)
    progress = next((event for event in reversed(one.events) if event.kind == "progress"), None)
    own = [found for message in one.messages if (found := _whole(message.get("step"))) is not None]
    return RankFacts(
        one.rank,
        host=one.host or None,
        first=one.events[0] if one.events else None,
        last=one.events[-1] if one.events else None,
        progress=progress,
        step=step if one.rank == 0 else max(own, default=None),
        finished=finished,
        ending="finished" if finished else "exception" if one.crash else "unknown",
    )


def _read_rank(path: Path, hosts: dict[int | None, str], clocks: Clocks, run: RunDir) -> RankEvents:
    rank = _whole(path.stem.rpartition("-")[2]) or 0
    host = hosts.get(rank, "")
    ahead_s = clocks.ahead_s(rank)
    events: list[Event] = []
    messages: list[Message] = []
    phase = ""
    for number, message in _messages(path):
        if message["kind"] == "phase":
            phase = one_line(str(message.get("phase") or ""), limit=40)
            if phase == "start":  # an earlier start is another run's story
                events, messages = [], []
        time = message.get("time")
        when = time - ahead_s if is_time(time) else None
        kind = _KINDS.get(message["kind"], "progress")
        events.append(
            Event(
                f"events/{path.name}",
                number,
                number,
                "told",
                kind,
                None,
                _text(message),
                Origin(rank=rank, host=host or None),
                when,
            )
        )
        messages.append(message)
    times = [event.time for event in events if event.time is not None]
    grew = [
        when - ahead_s
        for log in run.log("HOST", rank).parent.glob(f"*-rank-{rank:05d}.times")
        if (when := _last_growth(log)) is not None
    ]
    return RankEvents(rank, host, tuple(events), phase, max(times[-1:] + grew, default=None), tuple(messages))


def _messages(path: Path) -> Iterator[tuple[int, Message]]:
    try:
        for number, line in enumerate(iterate_lines(path), 1):
            message = read_message(line.decode("utf-8", "replace"))
            if message is not None:
                yield number, message
    except OSError:
        return


def _last_growth(path: Path) -> float | None:
    """The last time at which the front saw the log grow."""
    try:
        lines = read_text(path, errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines[-3:]):  # the last may be torn
        try:
            when = parse_json(line)[0]
        except (ValueError, TypeError, LookupError):
            continue
        if is_time(when):
            return float(when)
    return None


def _text(message: Message) -> str:
    shown_fields = {
        name: value for name, value in message.items() if name not in _LEFT_OUT and value not in (None, "")
    }
    return shown(
        one_line(
            f"{message['kind']}: " + ", ".join(f"{name} {value}" for name, value in shown_fields.items()),
            limit=_TEXT_CHARS,
        )
    )


def _places(run: RunDir) -> list[dict[str, Any]]:
    return objects_of(read_object(run.plan).get("ranks"))


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None
