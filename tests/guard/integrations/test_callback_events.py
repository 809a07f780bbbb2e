"""What the callbacks tell a watch while a real trainer trains, in this process.

Run: pytest tests/guard/integrations/test_callback_events.py
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.guard.integrations.launched_programs import PROGRAMS
from unisono.guard.integrations import trainer_callback

# Lightning imports matplotlib where it is installed, and its first import on a machine runs
# fc-list.
PROGRAMS_TO_RUN = ["hf_trainer", pytest.param("lightning_fit", marks=pytest.mark.processes)]


class Kept:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.steps: list[int] = []
        self.transcript: list[tuple[str, dict[str, Any]]] = []

    def phase(self, name: str) -> None:
        if self.phases[-1:] != [name]:
            self.phases.append(name)

    def step(self, step: int) -> None:
        self.steps.append(step)

    def emit(self, kind: str, **fields: Any) -> None:
        self.transcript.append((kind, fields))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What the callback of this test tells."""
    made = Kept()
    monkeypatch.setattr(trainer_callback, "find_recorder", lambda: made)
    monkeypatch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
    return made


def _run(program: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--out", str(out), "--callback", "--steps", "3"])
    loaded = __import__(program)
    loaded.main()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS_TO_RUN)
def test_steps_phases_and_losses_are_reported_in_their_order(
    program: str, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(program, tmp_path, monkeypatch)
    assert kept.steps == [1, 2, 3]
    assert kept.phases[-1] == "finish"
    of_a_step = ["data", "compute", "update"]
    assert [name for name in kept.phases if name in of_a_step][:9] == of_a_step * 3
    assert len([fields["loss"] for kind, fields in kept.transcript if kind == "step"]) == 3
    assert next(kind for kind, _ in kept.transcript) == "facts"


@pytest.mark.filterwarnings("ignore")
def test_evaluation_and_saving_are_phases_of_their_own(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run("hf_trainer", tmp_path, monkeypatch)
    assert kept.phases[-4:] == ["evaluate", "save", "data", "finish"]


@pytest.mark.filterwarnings("ignore")
def test_an_accelerator_reports_its_steps(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run("accelerate_loop", tmp_path, monkeypatch)
    assert kept.steps == [2, 3, 4]
    assert kept.phases == ["compute", "update", "data"] * 3
