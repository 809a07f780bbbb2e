"""The ladder over real ranks of this machine. Run: pytest tests/doctor/ladder/test_here.py"""

import os
from pathlib import Path

import pytest

from tests.doctor.bedside import Seen, doctor
from unisono.doctor.ladder.attempt import attempt_here
from unisono.launch.command import Programs
from unisono.plan import DeviceChoice

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CPU = DeviceChoice(kind="cpu", name="a processor", memory_bytes=1 << 30, bfloat16=False)


def climbed(folder: Path, **env: str) -> Seen:
    seen = doctor(folder, "--nproc", "2", "--ladder", env=env)
    assert not [path.name for path in folder.iterdir() if path.name.startswith("unisono-")], (
        "children's folders are gone"
    )
    return seen


def test_a_wrong_interface_is_found_and_the_line_that_mends_it_is_printed(tmp_path: Path) -> None:
    seen = climbed(tmp_path, GLOO_SOCKET_IFNAME="ens34")
    (finding,) = seen.of("network.ladder")
    assert (finding["status"], finding["fix"]) == ("fail", ["unset GLOO_SOCKET_IFNAME"])
    assert "Unable to find address for: ens34" in finding["evidence"][0]
    assert "MB/s" in finding["evidence"][0]
    assert seen.code == 6


@pytest.mark.long
def test_two_ranks_that_reach_each_other_pass_with_their_bandwidth(tmp_path: Path) -> None:
    (finding,) = climbed(tmp_path).of("network.ladder")
    assert finding["status"] == "pass"
    assert "works as it is" in finding["evidence"][0]


@pytest.mark.long
def test_settings_live_in_the_children_alone() -> None:
    before = dict(os.environ)
    outcome = attempt_here(
        [CPU, CPU], {"GLOO_SOCKET_IFNAME": "lo"}, backend="gloo", deadline_s=30.0, programs=Programs()
    )
    assert outcome.ok, outcome
    assert dict(os.environ) == before


@pytest.mark.long
def test_a_transport_that_is_not_built_in_is_told_and_ends_at_once() -> None:
    outcome = attempt_here(
        [CPU, CPU], {"GLOO_DEVICE_TRANSPORT": "UV"}, backend="gloo", deadline_s=30.0, programs=Programs()
    )
    assert outcome.ok or outcome.text, outcome
