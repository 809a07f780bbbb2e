"""`unisono doctor` on recorded machines, and on this one.

Run: pytest tests/front/checks/devices/test_doctor.py
"""

from pathlib import Path

import pytest

from tests.front.checks.doctor_process import doctor
from tests.front.checks.replay import recorded


def test_a_recorded_machine_is_looked_at_with_its_choice_and_a_better_one(tmp_path: Path) -> None:
    answers = {"machine": recorded("l20_two_sockets_10"), "packages": {"torch": "2.8.0+cu126"}}
    seen = doctor(tmp_path, "--devices", "3,4,5,6", answers=answers)
    assert seen.status("devices.selection") == "warn"
    assert "across NUMA nodes: node 0: 3, 4; node 1: 5, 6" in seen.text("devices.selection")
    assert "export CUDA_VISIBLE_DEVICES=" in seen.text("devices.selection")
    assert "10 physical, 10 visible, 4 for this node's ranks" in seen.text("devices.seen")


@pytest.mark.long
def test_variables_that_hide_devices_are_seen(tmp_path: Path) -> None:
    answers = {"machine": recorded("a10g_4"), "packages": {"torch": "2.8.0+cu126"}}
    seen = doctor(tmp_path, answers=answers, env={"CUDA_VISIBLE_DEVICES": "2,1"})
    assert "4 physical, 2 visible, 2 for this node's ranks" in seen.text("devices.seen")
    assert "rank 0 → 2, rank 1 → 1" in seen.text("devices.selection")


def test_the_rows_of_a_table_stay_below_each_other(tmp_path: Path) -> None:
    answers = {"machine": recorded("a10g_4"), "packages": {"torch": "2.8.0+cu126"}}
    seen = doctor(tmp_path, answers=answers)
    rows = [line for finding in seen.of("devices.seen") for line in finding["evidence"][1:]]
    assert len({row.index("0000:1") for row in rows[1:]}) == 1


@pytest.mark.long
def test_this_machine_is_reported_to_have_processors(tmp_path: Path) -> None:
    seen = doctor(tmp_path)
    assert "NUMA node" in seen.text("devices.processor")
