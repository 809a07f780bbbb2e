"""A rank of a program that hangs while another waits for it: reported soon, with its line, and for
as long as it lasts.

Run: pytest tests/guard/programs/test_stalls.py; all of them: pytest tests/guard/programs/test_stalls.py -m "long or not
long"
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from tests.guard.programs.guarded import LIMIT_S, TORCHRUN, Guarded, Program

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
STALLS = Program("torch DDP that hangs, torchrun", "stalls.py", TORCHRUN)
STALLS_ALONE = Program("torch, one rank that hangs, torchrun", "stalls.py", (*TORCHRUN[:-1], "1"), ranks=1)
STALLS_OF_FOUR = Program(
    "torch DDP of four that hangs, torchrun", "stalls.py", (*TORCHRUN[:-1], "4"), ranks=4
)
GRPO = Program("TRL GRPOTrainer of two, torchrun", "trl_grpo.py", TORCHRUN)
GRPO_ALONE = Program("TRL GRPOTrainer, torchrun", "trl_grpo.py", (*TORCHRUN[:-1], "1"), ranks=1)
WARNINGS = 3  # of a rank for which others wait: after about 5, 10 and 20 s
_WARNING = re.compile(r"warning: (rank 0, .* for (\d+) s, .*)")
# The first warning may come before the stack of the rank has arrived; it is an investigation then.
_WARNING_WITH_LINE = re.compile(r"warning: rank 0, .*stalls\.py:\d+ in sleep")
_LINE_OF_SLEEP = re.compile(r"stalls\.py:\d+ in sleep")
_IDLE = re.compile(r"warning: no rank computes, .* for (\d+) s: (.*?); the run is ended if nothing moves for")
_FIXES = {"prompt": "Answer by a setting"} | dict.fromkeys(
    ("fork", "spawn", "forkserver"), "Prepare the data once"
)
"""Of waits_for_input and data_starved; else that of user_code_stuck."""


def run_until(
    stack: ExitStack, started: dict[str, Guarded], pattern: re.Pattern[str], count: int
) -> dict[str, str]:
    """What fronts have printed once each has so many matches of a pattern; the programs are ended
    then.
    """
    for one in started.values():
        stack.callback(one.close)
    limit = time.monotonic() + LIMIT_S
    while any(len(pattern.findall(one.front.text())) < count for one in started.values()):
        assert time.monotonic() < limit, {name: one.front.text() for name, one in started.items()}
        time.sleep(0.2)
    texts = {name: one.front.text() for name, one in started.items()}
    stack.close()
    return texts


@pytest.fixture(scope="module")
def stalled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of programs in which rank 0 stalls in several ways at the same time, by fault."""
    with ExitStack() as stack:
        started = {
            fault: Guarded(STALLS, tmp_path_factory.mktemp(fault), "--fault", fault)
            for fault in request.param
        }
        return run_until(stack, started, _WARNING, WARNINGS)


@pytest.fixture(scope="module")
def idle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of programs in which all ranks stall in several ways at the same time, by fault, or start of
    a loader's worker.
    """
    program, names = request.param
    with ExitStack() as stack:
        started = {
            name: Guarded(
                program,
                tmp_path_factory.mktemp(name),
                *(("--fault", name, "--everywhere") if name in FAULTS else ("--loader", name)),
            )
            for name in names
        }
        return run_until(stack, started, _IDLE, 1)


def sets(*names: str, of: object = None, marks: tuple[pytest.MarkDecorator, ...] = ()) -> list[object]:
    """A parameter for each name, with the names that run at the same time."""
    label = "" if not isinstance(of, Program) else f"{of.ranks} ranks, "
    return [
        pytest.param(names if of is None else (of, names), name, id=label + name, marks=marks)
        for name in names
    ]


FAULTS = ("sleep", "fifo", "http", "lock", "pool", "prompt")
LONG = (pytest.mark.long,)


@pytest.mark.parametrize(
    ("stalled", "fault"),
    [*sets("sleep", "fifo", "http"), *sets("lock", "pool", "prompt", marks=LONG)],
    indirect=["stalled"],
)
def test_a_stall_is_reported_with_its_line_each_time_that_its_age_doubles(
    stalled: dict[str, str], fault: str
) -> None:
    text = stalled[fault]
    found = list(_WARNING.finditer(text))
    ages = [int(one[2]) for one in found]
    assert ages[0] <= 10
    assert all(1.7 <= later / earlier <= 3 for earlier, later in pairwise(ages)), ages
    with_line = [bool(re.search(rf"stalls\.py:\d+ in {fault}", one[1])) for one in found]
    assert all(with_line[1:]), text  # the first may come before the stack of the rank, on a busy machine
    assert ("waits for input" in text) == (fault == "prompt")
    assert text.count("investigating: ") == 1
    assert "move again" not in text


@pytest.mark.parametrize(
    ("idle", "name"),
    [
        *sets("lock", "fork", of=STALLS),
        *sets("sleep", "fifo", "http", of=STALLS, marks=LONG),
        *sets("pool", "prompt", "spawn", of=STALLS, marks=LONG),
        *sets("sleep", "prompt", "forkserver", of=STALLS_ALONE, marks=LONG),
        *sets("lock", "fork", of=STALLS_OF_FOUR, marks=LONG),
    ],
    indirect=["idle"],
)
def test_program_with_only_idle_ranks_is_reported_with_the_line_of_each(
    idle: dict[str, str], name: str
) -> None:
    text = idle[name]
    found, *_ = _IDLE.finditer(text)  # others may have been waited for
    assert 30 <= int(found[1]) <= 40
    assert re.search(rf"stalls\.py:\d+ in {'loaded' if name not in FAULTS else name}", found[2]), text
    in_worker = re.search(r"with worker processes at \S*stalls\.py:\d+ in __getitem__", found[2])
    assert bool(in_worker) == (name not in FAULTS), text
    assert re.search(rf" s more  \[\w+\] \({_FIXES.get(name, 'Fix the code')}", text), text
    assert "move again" not in text


@pytest.mark.long
@pytest.mark.parametrize("program", [GRPO, GRPO_ALONE], ids=["2 ranks", "1 rank"])
def test_a_reward_of_trl_that_never_returns_is_reported_with_its_line(
    program: Program, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        started = {"grpo": Guarded(program, tmp_path / "out")}
        text = run_until(stack, started, _IDLE, 1)["grpo"]
    found, *_ = _IDLE.finditer(text)  # others may have been waited for
    assert 30 <= int(found[1]) <= 40
    ranks = "ranks 0 and 1" if program.ranks == 2 else "rank 0"
    assert re.match(rf"{ranks} waiting for the reward, at .*trl_grpo\.py:\d+ in judge", found[2]), text
    assert "move again" not in text


def _has_line(run: Path) -> bool:
    """Whether the timeline on disk has the warning with the line of the stack."""
    return any(
        _LINE_OF_SLEEP.search(entry) and "investigating" not in entry
        for path in run.glob("events/timeline-*.jsonl")
        for entry in path.read_text().splitlines()
    )


def test_what_a_killed_front_leaves_is_diagnosed_by_its_last_warning(tmp_path: Path) -> None:
    guarded = Guarded(STALLS, tmp_path, "--fault", "sleep")
    try:
        limit = time.monotonic() + LIMIT_S
        # The timeline is written by a thread, soon after the warning is shown.
        while not (_WARNING_WITH_LINE.search(guarded.front.text()) and _has_line(guarded.output_dir)):
            assert time.monotonic() < limit, guarded.front.text()
            time.sleep(0.2)
        os.kill(guarded.front.pid, signal.SIGKILL)
    finally:
        guarded.close()
    (tmp_path / "front.log").write_text(guarded.front.text())
    for left in (guarded.output_dir, tmp_path / "front.log"):
        words = [sys.executable, "-m", "unisono", "diagnose", "--json", str(left)]
        verdict = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        assert (verdict["cause"], verdict["ranks"]) == ("user_code_stuck", [0])
        assert _LINE_OF_SLEEP.search(verdict["summary"])
