"""A checkpoint that somebody else has signed: refused, unless it is trusted.

Run: pytest tests/jobs/runs/test_trust.py
"""

import shutil
import sys
from typing import Any

import pytest

from tests import front_server

LONGER = ("--resume", "duration=5 steps")


@pytest.fixture
def died(front: Any) -> Any:
    """A run with stand-ins for its ranks that died after step 7, with checkpoints of steps 3 and
    6.
    """
    assert front.run(faults={"raise": 8}).returncode == 5
    return front


def as_somebody_else(front: Any) -> None:
    front.environment["XDG_CONFIG_HOME"] = str(front.folder / "settings of somebody else")


def test_run_of_another_user_is_refused_untouched_with_both_remedies(
    died: Any,
) -> None:
    as_somebody_else(died)
    before = {path: path.read_bytes() for path in died.out.rglob("*") if path.is_file()}
    done = died.run()
    assert done.returncode == 7
    assert "error: the run's checkpoints are not signed with your key" in done.stderr
    assert "pass --trust to resume from them" in done.stderr
    assert "checkpoint.key" in done.stderr
    assert {path: path.read_bytes() for path in died.out.rglob("*") if path.is_file()} == before


def test_newer_checkpoint_of_another_user_is_passed_over_or_trusted(died: Any) -> None:
    """With --trust it is used; without, a line names it."""
    mine = died.environment["XDG_CONFIG_HOME"]
    as_somebody_else(died)
    assert died.run("--trust", faults={"raise": 9, "always": True}).returncode == 5
    shutil.rmtree(died.out / "checkpoints" / "step-00000006")  # what is left: 3 of mine
    assert died.run("--trust", faults={"raise": 8, "always": True}).returncode == 5  # and 6 of theirs
    died.environment["XDG_CONFIG_HOME"] = mine
    shown = died.run("--dry-run")
    assert "from step 3" in shown.stdout
    assert "step-00000006: manifest.json: it is not signed with this user's key" in shown.stderr
    assert "pass --trust to resume from it anyway" in shown.stderr
    trusted = died.run("--trust")
    assert trusted.returncode == 0, trusted.stderr
    assert "from step 6, which is not signed with your key and is trusted (--trust)" in trusted.stderr  # fmt: skip
    assert died.read("plan.json")["resume"]["trust"] is True


def test_intact_checkpoint_of_another_user_behind_damaged_ones_is_named(died: Any) -> None:
    as_somebody_else(died)
    (died.out / "checkpoints" / "step-00000006" / "state.json").write_text("7")
    done = died.run()
    assert done.returncode == 7
    assert "step-00000003 is intact, and is not signed with your key" in done.stderr
    assert "its content has changed" in done.stderr or "its size" in done.stderr
    trusted = died.run("--trust")
    assert trusted.returncode == 0, trusted.stderr
    assert "from step 3" in trusted.stderr, "damage is never trusted"


def test_trust_that_was_not_needed_is_reported(died: Any) -> None:
    done = died.run("--trust")
    assert done.returncode == 0
    assert "--trust was not needed" in done.stderr
    assert died.read("plan.json")["resume"]["trust"] is False


@pytest.mark.slow
def test_trusted_run_continues_bit_equal_and_its_weights_need_no_trust(finished: Any, straight: Any) -> None:
    """Its optimizer continues, too, as its owner's would."""
    finished.environment["XDG_CONFIG_HOME"] = str(finished.folder / "settings of somebody else")
    out = finished.folder / "exported"
    exported = front_server.run(
        [sys.executable, "-m", "unisono", "export", str(finished.out), str(out), "--step", "3"],
        cwd=finished.folder,
        env=finished.environment,
        timeout=240,
    )
    assert exported.returncode == 0, exported.stderr
    assert (out / "adapter_model.safetensors").exists()
    assert "signed by a different key" in exported.stderr + exported.stdout
    trusted = finished.train(*LONGER, "--trust")
    assert trusted.returncode == 0, trusted.stderr
    assert finished.losses() == straight.losses(), "to the bit"
