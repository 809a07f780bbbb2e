"""The table of drills: the fault of a run, and the verdict it must lead to; and their results:
whether the right cause was reported in time.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from unisono.base.causes import find_cause
from unisono.base.errors import UsageError
from unisono.base.text import one_line
from unisono.front.drill.sandbox import (
    ForeignCallers,
    HeadKilled,
    MemoryGroup,
    PictureRemoved,
    PictureReplaced,
    PictureTruncated,
    ReadOnlyDisk,
    RemovedOutput,
    SamplerKilled,
    SamplerStale,
    Sandbox,
    SmallDisk,
    TwoNetworks,
)

_TOLERATED = ("straggler",)  # a machine that is busy beside may make any rank slow, and that may be said
_FAULT_STEP = 30  # the step of most faults: how long a step takes has been seen by then
_LONG_S = 3600.0
_ENDLESS = {"duration": "100000 steps"}
_REWARDS = Path(__file__).with_name("rewards.py")
_DEADLINE_S = 3.0
_PATIENCE_S = 3.0

_READ_LATER_S = 60.0  # a picture is noticed when its row is read

DEAD_S = 2.0
"""Time limit to name a rank that ended, also on other nodes."""
STALL_S = 10.0
"""Time limit to name a rank that hangs, for steps under a second; the goal is half of it."""
CUT_S = 10.0
"""Time limit to name a network that was cut, on both sides."""


@dataclass(frozen=True)
class Drill:
    """One fault, and the expected result.

    Attributes:
        text: what happens, for display.
        want: acceptable causes; empty: no cause may be named, and the run succeeds.
        nproc: ranks per node.
        sandbox: its sandbox: this machine, or something created for it.
        faults: `plan.faults` of the run.
        config: sections that override those of the tiny run.
        limit_s: time limit from the effect to the cause being named.
        end_s: time limit to the end of the run; then the drill kills it.
        words: for a fault without verdict: the code of the warning that names it, and parts of its
            text of which one must match.
        killed: nodes whose fronts the drill kills: their messages and exit codes are not checked.
    """

    fault: str
    text: str
    want: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    nproc: int = 2
    sandbox: Callable[[], Sandbox] = Sandbox
    faults: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=lambda: dict(_ENDLESS))
    limit_s: float = STALL_S
    end_s: float = 90.0
    words: tuple[str, ...] = ()
    clock_jump_s: float = 0.0
    killed: tuple[int, ...] = ()


def _death_drill(fault: str, text: str, *want: str, how: str) -> Drill:
    faults = {"die": {"rank": 1, "step": _FAULT_STEP, "how": how}}
    return Drill(fault, text, want, (1,), faults=faults, limit_s=DEAD_S, end_s=30.0)


def _hang_drill(fault: str, text: str, want: str, *, how: str) -> Drill:
    return Drill(
        fault, text, (want,), (1,), faults={how: {"rank": 1, "step": _FAULT_STEP, "seconds": _LONG_S}}
    )


def _picture_drill(fault: str, text: str, sandbox: Callable[[], Sandbox]) -> Drill:
    return Drill(
        fault,
        text,
        ("picture_changed",),
        (0,),
        nproc=1,
        sandbox=sandbox,
        limit_s=_READ_LATER_S,
        end_s=_READ_LATER_S,
    )


def _grpo(reward: str, *, tokens: int = 8, duration: str = "100000 steps") -> Mapping[str, Any]:
    """The config of two ranks that sample and reward one group of answers each in a step."""
    return {
        "objective": "grpo",
        "rewards": [{"use": f"{_REWARDS}:{reward}", "deadline": f"{_DEADLINE_S:g} seconds"}],
        "rollout": {"group": 3, "max_new_tokens": tokens},
        "grpo": {"truncated": "keep"},
        "duration": duration,
    }


def _sampled() -> Mapping[str, Any]:
    """The same, sampled by a server that is waited for only shortly."""
    config = _grpo("length")
    return {**config, "rollout": {**config["rollout"], "patience": f"{_PATIENCE_S:g} seconds"}}


# fmt: off - as a table: the formatter would give each value a line
DRILLS: tuple[Drill, ...] = (
    _death_drill("sigkill", "a rank is killed (kill -9)", "rank_killed", how="sigkill"),
    _death_drill("exception", "an exception in one rank", "user_code_error", how="exception"),
    _death_drill(
        "exit0", "a rank exits early with status 0", "user_code_error", "unequal_steps", how="exit0"
    ),
    Drill(
        "oom",
        "the kernel kills a rank for lack of memory (cgroup)",
        ("host_oom_killed",),
        (1,),
        faults={"die": {"rank": 1, "step": _FAULT_STEP, "how": "oom", "bytes": 2 << 30}},
        sandbox=MemoryGroup,
        limit_s=DEAD_S,
        end_s=30.0,
    ),
    Drill(
        "sigstop",
        "a rank is stopped (kill -STOP)",
        ("rank_stopped",),
        (1,),
        faults={"stop": {"rank": 1, "step": _FAULT_STEP}},
    ),
    _hang_drill("gil", "native code of a rank holds the GIL", "gil_held", how="hold_gil"),
    _hang_drill("sleep", "a rank sleeps in Python code", "user_code_stuck", how="sleep"),
    _hang_drill("spin", "a rank loops in Python code", "user_code_stuck", how="spin"),
    Drill(
        "data",
        "the data of a rank stalls (a FIFO without a writer)",
        ("data_starved",),
        (1,),
        faults={"starve": {"rank": 1, "step": _FAULT_STEP, "fifo": "fifo"}},
    ),
    Drill(
        "one_step_less",
        "a rank runs one step less than the others, and exits",
        ("unequal_steps",),
        (1,),
        faults={"one_step_less": [1]},
        config={"duration": "60 steps"},
    ),
    Drill(
        "other_collective",
        "a rank calls a different collective",
        ("collective_mismatch",),
        (1,),
        nproc=3,
        faults={"other_collective": {"rank": 1, "step": _FAULT_STEP}},
    ),
    Drill(
        "other_shape",
        "a rank all-reduces a tensor with one element more",
        ("collective_mismatch",),
        (1,),
        nproc=3,
        faults={"other_shape": {"rank": 1, "step": _FAULT_STEP}},
    ),
    Drill(
        "nan",
        "the loss of a rank is NaN, three times",
        ("nan_loss",),
        (1,),
        faults={"nan_loss": {"rank": 1, "steps": [_FAULT_STEP, _FAULT_STEP + 1, _FAULT_STEP + 2]}},
    ),
    Drill(
        "slow",
        "a rank is slower than the others in every step",
        ("straggler",),
        (1,),
        nproc=3,
        limit_s=45.0,
        faults={"slow": {"rank": 1, "step": _FAULT_STEP, "seconds": 0.3}},
        config={"duration": "140 steps"},
    ),
    Drill(
        "drift",
        "a weight of one replica changes",
        ("replicas_diverged",),
        (1,),
        nproc=3,
        limit_s=30.0,
        faults={"drift": {"rank": 1, "step": _FAULT_STEP}},
        config={"duration": "160 steps"},
    ),
    Drill(
        "reward_hangs",
        "a reward never returns",
        ("reward_timeout",),
        (0,),
        faults={"reward": True},
        config=_grpo("hangs"),
        limit_s=_DEADLINE_S + DEAD_S,
        end_s=30.0,
    ),
    Drill(
        "reward_raises",
        "a reward raises an exception",
        ("reward_error",),
        (0,),
        faults={"reward": True},
        config=_grpo("raises"),
        limit_s=DEAD_S,
        end_s=30.0,
    ),
    Drill(
        "sampler_killed",
        "the server that samples answers is killed",
        ("sampler_unreachable",),
        sandbox=SamplerKilled,
        config=_sampled(),
        limit_s=_PATIENCE_S + 2 * DEAD_S,
        end_s=30.0,
    ),
    Drill(
        "sampler_stale",
        "the server samples answers with weights of an earlier step",
        ("sampler_stale",),
        sandbox=SamplerStale,
        config=_sampled(),
        limit_s=DEAD_S,
        end_s=30.0,
    ),
    Drill(
        "one_rank_samples_long",
        "a rank samples answers for much longer than the other",
        faults={"slow_sampling": {"rank": 1, "seconds": 0.5}},
        config=_grpo("length", tokens=32, duration="3 steps"),
    ),
    _picture_drill("picture_removed", "a picture of a row is removed", PictureRemoved),
    _picture_drill("picture_truncated", "a picture of a row is truncated", PictureTruncated),
    _picture_drill(
        "picture_replaced", "a picture of a row is replaced by one of a different size", PictureReplaced
    ),
    Drill(
        "disk_full",
        "the disk of output_dir is full",
        ("disk_full",),
        sandbox=SmallDisk,
        words=("checkpoint_failed", "not enough space", "no room", "No space left"),
        config={"duration": "60 steps", "checkpoint": {"every": "10 steps"}},
    ),
    Drill(
        "disk_readonly",
        "the disk of output_dir becomes read-only",
        ("storage_unfit",),
        sandbox=ReadOnlyDisk,
        config={"duration": "60 steps", "checkpoint": {"every": "10 steps"}},
    ),
    Drill(
        "output_removed",
        "output_dir is removed during the run (rm -rf)",
        ("output_removed",),
        sandbox=RemovedOutput,
        config={"duration": "60 steps", "checkpoint": {"every": "10 steps"}},
    ),
    Drill(
        "cut",
        "the network between two nodes is cut",
        ("node_unreachable",),
        nodes=(1,),
        nproc=1,
        sandbox=TwoNetworks,
        limit_s=CUT_S,
    ),
    Drill(
        "head_killed",
        "the front of node 0, the head of two nodes, is killed (kill -9)",
        ("node_unreachable",),
        nodes=(0,),
        nproc=1,
        sandbox=HeadKilled,
        killed=(0,),
        limit_s=DEAD_S,
        end_s=30.0,
    ),
    Drill(
        "garbage",
        "other programs connect to the head's port",
        nproc=1,
        sandbox=ForeignCallers,
        config={"duration": "80 steps"},
    ),
    Drill(
        "clock_jump",
        "the wall clock jumps by an hour",
        clock_jump_s=3600.0,
        faults={"clock_jump": {"step": _FAULT_STEP, "seconds": 3600.0}},
        config={"duration": "80 steps", "checkpoint": {"every": "20 steps"}},
    ),
    Drill(
        "destroy_twice",
        "the process group is destroyed twice",
        faults={"destroy_twice": {"rank": 1}},
        config={"duration": "40 steps"},
    ),
    Drill(
        "teardown",
        "a rank hangs after its result, during teardown",
        faults={"hang_in_teardown": {"rank": 1}},
        config={"duration": "40 steps"},
    ),
)
# fmt: on


def choose(names: tuple[str, ...]) -> tuple[Drill, ...]:
    """The drills with these names, in the order of the table; all if none is given.

    Raises:
        UsageError: with all unknown names.
    """
    known = {drill.fault for drill in DRILLS}
    odd = [name for name in names if name not in known]
    if odd:
        raise UsageError.of(
            f"there is no drill {', '.join(map(repr, odd))}",
            where="command line",
            fix=f"one of {', '.join(sorted(known))}",
        )
    return tuple(drill for drill in DRILLS if not names or drill.fault in names)


@dataclass(frozen=True)
class NamedCause:
    """A cause that a front named.

    Attributes:
        at: seconds of the monotonic clock.
        of_node: the node with which its summary begins, if any.
        is_end: whether it is a verdict that ended the run; else a warning.
    """

    at: float
    node: int
    cause: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    is_end: bool = True
    of_node: int | None = None


@dataclass(frozen=True)
class FrontExit:
    """The end of a front.

    Attributes:
        at: seconds of the monotonic clock.
        by_drill: the drill killed it, since it did not end in time.
    """

    at: float
    code: int
    by_drill: bool = False


@dataclass(frozen=True)
class History:
    """Events of a drill.

    Attributes:
        effect: when the fault took effect; None if it never did.
        detected: causes that were named, in order of time.
        ends: of the fronts, by node.
        hosts: host names of the nodes, if they have their own.
        left_behind: leftovers after the end.
        trouble: stderr of the fronts, normally empty.
    """

    effect: float | None
    detected: Sequence[NamedCause]
    ends: Sequence[FrontExit]
    hosts: Sequence[str | None] = (None,)
    left_behind: Sequence[str] = ()
    trouble: str = ""


@dataclass(frozen=True)
class DrillResult:
    """Result of a drill: a row of the table and of `unisono drill --json`.

    Attributes:
        want: the expected cause; None: none.
        named: the cause that was named; None: none.
        hosts: culprits that were named, if nodes are the culprits.
        right: the right cause and culprits, no others, in time, with the right exit code.
        named_after_s: seconds from the effect of the fault; with several nodes the last one's.
        ended_after_s: seconds to the end of the last front.
        limit_s: time limit to name the cause; None: no cause expected.
        left_behind: leftovers 5 s after the end.
        skipped: why it was skipped; None: it ran.
        why: the first mistake; empty: none.
    """

    fault: str
    want: str | None
    named: str | None = None
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    right: bool = False
    named_after_s: float | None = None
    ended_after_s: float | None = None
    limit_s: float | None = None
    left_behind: tuple[str, ...] = ()
    skipped: str | None = None
    why: str = ""
    trouble: str = field(default="", repr=False)

    @property
    def is_good(self) -> bool:
        """Right without leftovers, or skipped."""
        return self.skipped is not None or (self.right and not self.left_behind)

    def to_json(self) -> Mapping[str, object]:
        """For `--json`."""
        return asdict(self)


def named_cause_in(
    message: Mapping[str, Any], *, at: float, node: int, words: tuple[str, ...]
) -> NamedCause | None:
    """The cause that a JSON line of a front names; None for other lines.

    Args:
        words: the code of a warning that counts without a verdict, and parts of its text of which
            one must match.
    """
    if message.get("kind") == "verdict":
        return _from_verdict(message, at=at, node=node, is_end=True)
    if message.get("kind") != "warning":
        return None
    verdict = message.get("verdict")
    if isinstance(verdict, Mapping):
        return _from_verdict(verdict, at=at, node=node, is_end=False)
    code, *parts = words or ("",)
    if code and message.get("code") == code and any(part in str(message.get("text", "")) for part in parts):
        return NamedCause(at, node, "", is_end=False)
    return None


def skipped_result(drill: Drill, why: str) -> DrillResult:
    """The result of a drill that could not run."""
    return DrillResult(drill.fault, _want(drill), skipped=why)


def judge(drill: Drill, history: History) -> DrillResult:
    """The result of a drill that ran."""
    if history.effect is None:
        why = ", ".join(["the run ended before the fault took effect", *map(_describe, history.detected)])
        return DrillResult(
            drill.fault,
            _want(drill),
            why=why,
            trouble=history.trouble,
            left_behind=tuple(history.left_behind),
        )
    detected = [
        entry for entry in history.detected if entry.cause not in _TOLERATED or entry.cause in drill.want
    ]
    right = [entry for entry in detected if _is_right(drill, entry, history.hosts)]
    after = _named_after(drill, right, history)
    of_head = [entry for entry in right if entry.node == 0]
    shown = next(reversed(of_head or right or detected), None)
    ended = max((end.at for end in history.ends), default=history.effect) - history.effect
    why = _first_mistake(drill, history, detected, right, after)
    return DrillResult(
        fault=drill.fault,
        want=_want(drill),
        named=_name(drill, shown),
        ranks=shown.ranks if shown is not None else (),
        hosts=shown.hosts if shown is not None and drill.nodes else (),
        right=not why,
        named_after_s=after if drill.want else None,
        ended_after_s=ended,
        limit_s=drill.limit_s if drill.want else None,
        left_behind=tuple(history.left_behind),
        why=why,
        trouble=history.trouble if why else "",
    )


def is_named(drill: Drill, detected: Sequence[NamedCause], hosts: Sequence[str | None]) -> bool:
    """Whether every node has reported the right cause."""
    nodes = {entry.node for entry in detected if _is_right(drill, entry, hosts)}
    return nodes.issuperset(_alive(drill, hosts))


def _alive(drill: Drill, hosts: Sequence[str | None]) -> set[int]:
    """Nodes that are not killed by the drill."""
    return set(range(len(hosts))).difference(drill.killed)


def _from_verdict(verdict: Mapping[str, Any], *, at: float, node: int, is_end: bool) -> NamedCause:
    ranks, hosts = tuple(map(int, verdict["ranks"])), tuple(map(str, verdict["hosts"]))
    begins = re.match(r"node (\d+) \(", str(verdict.get("summary", "")))
    of_node = int(begins[1]) if begins is not None else None
    return NamedCause(at, node, str(verdict["cause"]), ranks, hosts, is_end, of_node)


def _want(drill: Drill) -> str | None:
    return drill.want[0] if drill.want else None


def _name(drill: Drill, detected: NamedCause | None) -> str | None:
    if detected is None:
        return None
    return detected.cause or _want(drill)


def _is_right(drill: Drill, detected: NamedCause, hosts: Sequence[str | None]) -> bool:
    if not detected.cause:
        return True
    if detected.cause not in drill.want or detected.ranks != drill.ranks:
        return False
    if not drill.nodes:
        return True
    if drill.killed:  # there is no line of which either half may be cut; and the nodes may have one host name
        return (detected.of_node,) == drill.nodes
    culprits = tuple(str(hosts[node]) for node in drill.nodes)
    # Neither of two halves can know which one was cut off: each may name the other, or itself.
    return (
        detected.hosts == culprits
        if detected.node == 0
        else len(detected.hosts) == 1 and detected.hosts[0] in hosts
    )


def _named_after(drill: Drill, right: Sequence[NamedCause], history: History) -> float | None:
    """Seconds until the last node reported the right cause."""
    first: dict[int, float] = {}
    for entry in right:
        first.setdefault(entry.node, entry.at)
    alive = _alive(drill, history.hosts)
    if not first.keys() >= alive or history.effect is None:
        return None
    return max(first[node] for node in alive) - history.effect


def _first_mistake(
    drill: Drill,
    history: History,
    detected: Sequence[NamedCause],
    right: Sequence[NamedCause],
    after: float | None,
) -> str:
    """The first mistake; empty if there is none."""
    wrong = [entry for entry in detected if entry not in right]
    if wrong:
        return f"reported {_describe(wrong[0])}"
    if drill.want and after is None:
        return f"not reported within {drill.limit_s:g} s" if not right else "not reported on every node"
    if drill.want and after is not None and after > drill.limit_s:
        return f"detected after {after:.1f} s; {drill.limit_s:g} s are allowed"
    if any(end.by_drill for end in history.ends):
        return f"the run did not end within {drill.end_s:g} s"
    expected = _exit_code(drill, right)
    codes = [end.code for node, end in enumerate(history.ends) if node not in drill.killed]
    if any(code != expected for code in codes):
        return f"exit code {', '.join(map(str, codes))} instead of {expected}"
    return ""


def _exit_code(drill: Drill, right: Sequence[NamedCause]) -> int:
    """The expected exit code: of the cause that ended the run, or of a run that continues."""
    if not drill.want:
        return 0
    cause = find_cause(right[-1].cause or drill.want[0])
    assert cause is not None, "the table contains known causes"
    return cause.exit_code


def _describe(detected: NamedCause) -> str:
    who = (
        [f"rank {rank}" for rank in detected.ranks]
        or [f"host {host}" for host in detected.hosts]
        or ["nobody"]
    )
    return f"{detected.cause}, {', '.join(who)}"


_COLUMNS = ("fault", "expected", "reported", "who", "found, s", "ended, s", "left behind", "")
_WIDTH = 150  # where there is no terminal, lines are not wrapped to one
_LIST_WIDTH = 80  # of `--list`, likewise


def results_table(
    rows: Sequence[DrillResult], *, width: int = 0, shown: Callable[[str], str] = str
) -> list[str]:
    """Lines of the table, the mistakes and the summary.

    Args:
        rows: of the table.
        width: of the terminal; 0 without one.
        shown: gives a cell in the language of the command.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in _COLUMNS:
        table.add_column(shown(title), justify="right" if title.endswith(", s") else "left")
    for row in rows:
        fault, *cells = _cells(row)
        table.add_row(Text(fault), *(Text(shown(cell)) for cell in cells))
    lines = _table_lines(table, width) or [f"{row.fault}: {result_line(row)}" for row in rows]
    return [*lines, *_problems(rows), _summary(rows)]


def result_line(row: DrillResult) -> str:
    """One result in one line."""
    if row.skipped is not None:
        return f"skipped: {one_line(row.skipped)}"
    *_, name_s, end_s, left, word = _cells(row)
    named = f"reported {row.named}, {_who(row)}, after {name_s} s" if row.named else "nothing reported"
    return f"{word}: {named}; ended after {end_s} s; left behind: {left}"


def drills_table(drills: Sequence[Drill], *, width: int = 0, shown: Callable[[str], str] = str) -> list[str]:
    """All drills, for `--list`; arguments as of `results_table`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("fault", "what happens", "expected", "within, s"):
        table.add_column(shown(title))
    for drill in drills:
        want = shown(" or ".join(drill.want) or "nothing")
        table.add_row(drill.fault, shown(drill.text), want, f"{drill.limit_s:g}" if drill.want else "")
    return _table_lines(table, width or _LIST_WIDTH) or [_drill_line(drill) for drill in drills]


def _drill_line(drill: Drill) -> str:
    want = f"{' or '.join(drill.want)} within {drill.limit_s:g} s" if drill.want else "nothing"
    return f"{drill.fault}: {drill.text}; expected: {want}"


def _table_lines(table: Table, width: int) -> list[str]:
    """The lines of the table; none if it needs more columns than `width`, unless that is 0."""
    file = io.StringIO()
    console = Console(file=file, width=width or _WIDTH, no_color=True)
    if width and Measurement.get(console, console.options.update(width=10 * _WIDTH), table).minimum > width:
        return []
    console.print(table)
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def _cells(row: DrillResult) -> tuple[str, ...]:
    if row.skipped is not None:
        return row.fault, row.want or "nothing", "", "", "", "", "", "skipped"
    return (
        row.fault,
        row.want or "nothing",
        row.named or "nothing",
        _who(row),
        _seconds(row.named_after_s),
        _seconds(row.ended_after_s),
        str(len(row.left_behind)) if row.left_behind else "nothing",
        "right" if row.is_good else "WRONG",
    )


def _who(row: DrillResult) -> str:
    ranks = [f"rank {rank}" for rank in row.ranks]
    return ", ".join(ranks or [one_line(host) for host in row.hosts]) or "nobody"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _problems(rows: Sequence[DrillResult]) -> list[str]:
    problems = []
    for row in rows:
        if row.skipped is not None:
            problems.append(f"{row.fault} was skipped: {one_line(row.skipped)}")
        if row.why:
            problems.append(f"{row.fault}: {one_line(row.why)}")
        problems += [f"{row.fault} left behind: {one_line(item)}" for item in row.left_behind]
        problems += [f"{row.fault}, stderr: {one_line(line)}" for line in row.trouble.splitlines() if line]
    return problems


def _summary(rows: Sequence[DrillResult]) -> str:
    tried = [row for row in rows if row.skipped is None]
    right = sum(row.is_good for row in tried)
    return (
        f"{right} of {len(tried)} faults were reported correctly and left nothing behind;"
        f" {len(rows) - len(tried)} were skipped"
    )
