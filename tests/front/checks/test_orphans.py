"""Processes that earlier runs have left behind: named by run, ended only when asked.

Run: pytest tests/front/checks/test_orphans.py

Each test has processes of its own (a pid namespace), so that no other test's ranks are seen, or
ended.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.front.checks.doctor_process import doctor

# As a loader that a rank has forked: the rank's command line, and a front that is gone. It is
# stopped, as by a debugger.
_ORPHAN = "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"


def orphan(folder: Path, *, front: str = "$gone") -> str:
    """Shell commands that leave one behind, and wait until it is stopped."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"run_id": "run-of-yesterday"}))
    words = shlex.join([sys.executable, "-c", _ORPHAN, "-m", "unisono.worker", str(plan), "--events", "e"])
    return (
        f"sleep 0 & gone=$!; wait $gone; ({words} --front-pid {front} > {folder}/pid & ); until [ -s"
        f" {folder}/pid ] && grep -q 'T (stopped)' /proc/$(cat {folder}/pid)/status; do sleep 0.05; done"
    )


@pytest.mark.makes("system.orphans", "pass")
def test_a_machine_without_any_passes_also_while_a_run_continues(tmp_path: Path) -> None:
    seen = doctor(tmp_path, before=orphan(tmp_path, front="$$"), unshare=True)
    assert (seen.status("system.orphans"), seen.code) == ("pass", 0), seen.text("system.orphans")


def in_a_container(folder: Path) -> str:
    """Shell commands for a rank in processes of its own, whose front lives there; here its front's
    number is nobody's.
    """
    pid = folder / "pid"
    rank = (
        orphan(folder, front="$front").partition(";")[2].partition(";")[2]
    )  # without the front that is gone
    inside = (
        f"i=0; while [ $i -lt 30 ]; do /bin/true; i=$((i+1)); done; sleep 1000 & front=$!; {rank}; touch"
        f" {folder}/there; wait $front"
    )
    own = "unshare --pid --fork --mount-proc --kill-child sh -c"
    return f"{own} {shlex.quote(inside)} & until [ -e {folder}/there ]; do sleep 0.05; done; [ -s {pid} ]"


def test_a_rank_in_a_container_whose_front_lives_there_is_no_orphan(tmp_path: Path) -> None:
    seen = doctor(tmp_path, "--end-orphans", before=in_a_container(tmp_path), unshare=True)
    assert (seen.status("system.orphans"), seen.text("system.orphans")) == ("pass", "none")


@pytest.mark.makes("system.orphans", "warn")
def test_a_rank_without_its_front_is_named_by_its_run_and_left_alone(tmp_path: Path) -> None:
    twice = f"{orphan(tmp_path)}; {shlex.join([sys.executable, '-m', 'unisono', 'doctor'])} >&2"
    seen = doctor(tmp_path, before=twice, unshare=True)
    pid = (tmp_path / "pid").read_text().strip()
    assert (seen.status("system.orphans"), seen.code) == ("warn", 0)
    text = seen.text("system.orphans")
    assert f"run run-of-yesterday: process {pid}, " in text
    assert "state T" in text
    assert "`unisono doctor --end-orphans`" in text
    assert f"kill -9 {pid}" in text


def test_it_is_ended_when_that_is_requested(tmp_path: Path) -> None:
    twice = (
        f"{orphan(tmp_path)}; {shlex.join([sys.executable, '-m', 'unisono', 'doctor', '--end-orphans'])} >&2"
    )
    seen = doctor(tmp_path, before=twice, unshare=True)
    assert "1 ended" in seen.err
    assert seen.text("system.orphans") == "none"
