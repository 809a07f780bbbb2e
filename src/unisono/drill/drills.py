"""The table of drills: the fault of a run, and the verdict it must lead to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.drill.sandbox import (
    ForeignCallers,
    HeadKilled,
    MemoryGroup,
    ReadOnlyDisk,
    RemovedOutput,
    Sandbox,
    SmallDisk,
    TwoNetworks,
)
from unisono.errors import UsageError

_FAULT_STEP = 30  # the step of most faults: how long a step takes has been seen by then
_LONG_S = 3600.0
_ENDLESS = {"duration": "100000 steps"}

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
        words: for a fault without verdict: the code of the warning that names it, and parts of its text of which one must match.
        killed: nodes whose fronts the drill kills: their messages and exit codes are not checked.
        exit_code: of the run, if different from that of the cause.
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
    exit_code: int | None = None


def _death_drill(fault: str, text: str, *want: str, how: str) -> Drill:
    faults = {"die": {"rank": 1, "step": _FAULT_STEP, "how": how}}
    return Drill(fault, text, want, (1,), faults=faults, limit_s=DEAD_S, end_s=30.0)


def _hang_drill(fault: str, text: str, want: str, *, how: str) -> Drill:
    return Drill(
        fault, text, (want,), (1,), faults={how: {"rank": 1, "step": _FAULT_STEP, "seconds": _LONG_S}}
    )


# fmt: off
DRILLS: tuple[Drill, ...] = (
    _death_drill("sigkill", "a rank is killed (kill -9)", "rank_killed", how="sigkill"),
    _death_drill("exception", "an exception in one rank", "user_code_error", how="exception"),
    _death_drill(
        "exit0", "a rank exits early with status 0", "user_code_error", "unequal_steps", how="exit0"
    ),
    Drill(
        "oom", "the kernel kills a rank for lack of memory (cgroup)", ("host_oom_killed",), (1,), sandbox=MemoryGroup,
        faults={"die": {"rank": 1, "step": _FAULT_STEP, "how": "oom", "bytes": 2 << 30}}, limit_s=DEAD_S, end_s=30.0,
    ),
    Drill("sigstop", "a rank is stopped (kill -STOP)", ("rank_stopped",), (1,), faults={"stop": {"rank": 1, "step": _FAULT_STEP}}),
    _hang_drill("gil", "native code of a rank holds the GIL", "gil_held", how="hold_gil"),
    _hang_drill("sleep", "a rank sleeps in Python code", "user_code_stuck", how="sleep"),
    _hang_drill("spin", "a rank loops in Python code", "user_code_stuck", how="spin"),
    Drill(
        "data", "the data of a rank stalls (a FIFO without a writer)", ("data_starved",), (1,),
        faults={"starve": {"rank": 1, "step": _FAULT_STEP, "fifo": "fifo"}},
    ),
    Drill(
        "one_step_less", "a rank runs one step less than the others, and exits", ("unequal_steps",), (1,),
        faults={"one_step_less": [1]}, config={"duration": "60 steps"},
    ),
    Drill(
        "other_collective", "a rank calls a different collective", ("collective_mismatch",), (1,), nproc=3,
        faults={"other_collective": {"rank": 1, "step": _FAULT_STEP}},
    ),
    Drill(
        "other_shape", "a rank all-reduces a tensor with one element more", ("collective_mismatch",), (1,), nproc=3,
        faults={"other_shape": {"rank": 1, "step": _FAULT_STEP}},
    ),
    Drill(
        "nan", "the loss of a rank is NaN, three times", ("nan_loss",), (1,),
        faults={"nan_loss": {"rank": 1, "steps": [_FAULT_STEP, _FAULT_STEP + 1, _FAULT_STEP + 2]}},
    ),
    Drill(
        "slow", "a rank is slower than the others in every step", ("straggler",), (1,), nproc=3, limit_s=45.0,
        faults={"slow": {"rank": 1, "step": _FAULT_STEP, "seconds": 0.3}}, config={"duration": "140 steps"},
    ),
    Drill(
        "drift", "a weight of one replica changes", ("replicas_diverged",), (1,), nproc=3, limit_s=30.0,
        faults={"drift": {"rank": 1, "step": _FAULT_STEP}}, config={"duration": "160 steps"},
    ),
    Drill(
        "disk_full", "the disk of output_dir is full", ("disk_full",), sandbox=SmallDisk, words=("checkpoint_failed", "not enough space", "no room", "No space left"),
        config={"duration": "60 steps", "checkpoint": {"every": "10 steps"}},
    ),
    Drill(
        "disk_readonly", "the disk of output_dir becomes read-only", ("storage_unfit",), sandbox=ReadOnlyDisk,
        config={"duration": "60 steps", "checkpoint": {"every": "10 steps"}},
    ),
    Drill(
        "output_removed", "output_dir is removed during the run (rm -rf)", ("output_removed",), sandbox=RemovedOutput, exit_code=0,
        config={"duration": "60 steps", "checkpoint": {"every": "10 steps"}},
    ),
    Drill(
        "cut", "the network between two nodes is cut", ("node_unreachable",), nodes=(1,), nproc=1, sandbox=TwoNetworks, limit_s=CUT_S,
    ),
    Drill(
        "head_killed", "the front of node 0, the head of two nodes, is killed (kill -9)", ("node_unreachable",), nodes=(0,), nproc=1,
        sandbox=HeadKilled, killed=(0,), limit_s=DEAD_S, end_s=30.0,
    ),
    Drill(
        "garbage", "other programs connect to the head's port", nproc=1, sandbox=ForeignCallers, config={"duration": "80 steps"},
    ),
    Drill(
        "clock_jump", "the wall clock jumps by an hour", faults={"clock_jump": {"step": _FAULT_STEP, "seconds": 3600.0}},
        config={"duration": "80 steps", "checkpoint": {"every": "20 steps"}}, clock_jump_s=3600.0,
    ),
    Drill(
        "destroy_twice", "the process group is destroyed twice", faults={"destroy_twice": {"rank": 1}}, config={"duration": "40 steps"},
    ),
    Drill(
        "teardown", "a rank hangs after its result, during teardown", faults={"hang_in_teardown": {"rank": 1}},
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
