"""Fire drills, for real. Run: pytest tests/front/drill/test_drills.py"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from unisono.front.drill.drills import DEAD_S, DRILLS, Drill, DrillResult, choose
from unisono.front.drill.execution import processes_in, run_drills

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

QUICK = ("sigkill",)  # each of the others has a short test in the room that names it


def carried_out(drill: Drill) -> DrillResult:
    (row,) = run_drills([drill], lambda drill, text: None)
    return row


@pytest.mark.parametrize(
    "drill",
    [
        pytest.param(drill, id=drill.fault, marks=() if drill.fault in QUICK else pytest.mark.long)
        for drill in DRILLS
    ],
)
def test_each_fault_is_named_with_its_culprit_and_leaves_nothing(drill: Drill) -> None:
    # The machine may have other work than this; `unisono drill` itself holds a death to its own
    # limit.
    row = carried_out(replace(drill, limit_s=max(drill.limit_s, 5 * DEAD_S)))
    if row.skipped is not None:
        pytest.skip(f"needs what the drill {drill.fault} takes: {row.skipped}")
    assert row.is_good, row


@pytest.mark.long
def test_a_run_that_names_somebody_else_fails_the_drill() -> None:
    """The same death, of which the table says that rank 0 is to be blamed."""
    (killed,) = choose(("sigkill",))
    row = carried_out(replace(killed, ranks=(0,)))
    assert (row.right, row.named, row.ranks) == (False, "rank_killed", (1,))


class Command:
    """`unisono drill …`, all of whose temporary files are in one place."""

    def __init__(self, *words: str, temporary: Path) -> None:
        self.temporary = temporary
        self.printed = ""
        environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        self.process = front_server.start(
            [sys.executable, "-m", "unisono", "drill", *words], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.printed += line

    def until(self, condition: Callable[[], bool], *, limit_s: float = 120.0) -> None:
        limit = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < limit, self.printed
            time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def processes(self) -> list[int]:
        return processes_in(self.temporary)


@pytest.fixture
def drill_of(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*words: str) -> Command:
        commands.append(Command(*words, temporary=tmp_path))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting", signal.SIGINT),
        pytest.param("waiting for the cause", signal.SIGINT, marks=pytest.mark.long),
        pytest.param("waiting for the cause", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_drill_that_is_interrupted_leaves_nothing_behind(
    drill_of: Callable[..., Command], moment: str, number: signal.Signals
) -> None:
    command = drill_of("sigstop")
    command.until(lambda: moment in command.printed and bool(command.processes()))
    command.process.send_signal(number)
    assert command.process.wait(30) == 130, command.printed
    command.until(lambda: not command.processes(), limit_s=5)
    assert list(command.temporary.iterdir()) == []


@pytest.mark.long
def test_no_process_outlives_a_drill_that_is_killed(drill_of: Callable[..., Command]) -> None:
    command = drill_of("sigstop")
    command.until(lambda: "waiting for the cause" in command.printed)
    assert len(command.processes()) >= 3
    command.process.kill()
    command.until(lambda: not command.processes(), limit_s=10)


def command_line(*words: str) -> tuple[int, str, str]:
    done = front_server.run([sys.executable, "-m", "unisono", "drill", *words], timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_list_has_every_fault_and_what_must_be_named() -> None:
    code, text, _ = command_line("--list")
    assert code == 0
    for drill in DRILLS:
        assert any(line.split()[0] == drill.fault for line in text.splitlines())
    code, text, _ = command_line("--list", "--json")
    body: dict[str, Any] = json.loads(text)
    assert [entry["fault"] for entry in body["faults"]] == [drill.fault for drill in DRILLS]


def test_an_unknown_fault_is_refused_with_those_that_are_known() -> None:
    code, _, text = command_line("sigkil")
    assert code == 2
    assert "sigkill" in text
