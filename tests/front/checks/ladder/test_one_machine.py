"""The ladder over real ranks of this machine.

Run: pytest tests/front/checks/ladder/test_one_machine.py
"""

import os
from pathlib import Path

import pytest

from tests.front.checks.doctor_process import Seen, doctor
from unisono.front.checks.ladder_attempts import AttemptLogs, attempt_local, logs_name
from unisono.guard.places.ranks import DeviceChoice
from unisono.guard.supervise.child_process import Programs

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CPU = DeviceChoice(kind="cpu", name="a processor", memory_bytes=1 << 30, bfloat16=False)


def climbed(folder: Path, **env: str) -> Seen:
    seen = doctor(folder, "--nproc", "2", "--ladder", env=env)
    assert not [path.name for path in folder.iterdir() if path.name.startswith("unisono-")], (
        "children's folders are gone"
    )
    return seen


def test_a_wrong_interface_is_found_and_the_line_that_fix_it_is_printed(tmp_path: Path) -> None:
    seen = climbed(tmp_path, GLOO_SOCKET_IFNAME="ens34")
    (finding,) = seen.of("network.ladder")
    assert (finding["status"], finding["fix"]) == ("fail", ["unset GLOO_SOCKET_IFNAME"])
    assert "Unable to find address for: ens34" in finding["evidence"][0]
    assert "MB/s" in finding["evidence"][0]
    assert seen.code == 6


def test_debug_comm_keeps_the_logs_of_the_libraries_for_each_attempt(tmp_path: Path) -> None:
    seen = doctor(tmp_path, "--nproc", "2", "--ladder", "--debug-comm", env={"GLOO_SOCKET_IFNAME": "ens34"})
    (finding,) = seen.of("network.ladder")
    assert finding["fix"] == ["unset GLOO_SOCKET_IFNAME"]
    (printed,) = [
        line for line in finding["evidence"] if line.startswith("logs of the libraries: runs/doctor-")
    ]
    folder = tmp_path / printed.removeprefix("logs of the libraries: ")
    first, second = sorted(path.name for path in folder.iterdir())
    assert first == "01-current-settings"
    assert second == "02-without-the-current-settings-gloo-socket-ifname"
    for attempt in (first, second):
        assert [path.name for path in sorted((folder / attempt).iterdir())] == [
            "rank-00000.log",
            "rank-00001.log",
        ]
        assert "[c10d" in (folder / attempt / "rank-00000.log").read_text()
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_where_it_cannot_be_kept_the_ladder_is_climbed_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    (finding,) = doctor(tmp_path, "--nproc", "2", "--ladder", "--debug-comm").of("network.ladder")
    assert "works with the current settings" in finding["evidence"][0]
    assert "logs of the libraries are not kept: runs/doctor-" in finding["evidence"][-1]


def test_without_the_ladder_there_is_nothing_to_keep(tmp_path: Path) -> None:
    seen = doctor(tmp_path, "--nproc", "2", "--debug-comm", as_json=False)
    assert seen.code == 2
    assert "fix:   unisono doctor --ladder --debug-comm --nproc 2" in seen.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "name", [None, 7, "", "..", "doctor-../../x", "/doctor-1", "doctor-1\n", "run-1", "doctor-" + "a" * 80]
)
def test_no_other_node_reports_where_this_one_writes(name: object) -> None:
    assert AttemptLogs.of(name) is None


def test_a_name_that_a_look_has_made_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = AttemptLogs.of(logs_name("aB3_-x9"))
    assert record is not None
    path = record.attempt("interface pinned to ../../eth0")
    assert path is not None
    assert path.name == "01-interface-pinned-to-eth0"
    assert path.resolve().is_relative_to(tmp_path / "runs")


@pytest.mark.long
def test_two_ranks_that_reach_each_other_pass_with_their_bandwidth(tmp_path: Path) -> None:
    (finding,) = climbed(tmp_path).of("network.ladder")
    assert finding["status"] == "pass"
    assert "works with the current settings" in finding["evidence"][0]


@pytest.mark.long
def test_settings_live_in_the_children_alone() -> None:
    before = dict(os.environ)
    outcome = attempt_local(
        [CPU, CPU], {"GLOO_SOCKET_IFNAME": "lo"}, backend="gloo", deadline_s=30.0, programs=Programs()
    )
    assert outcome.ok, outcome
    assert dict(os.environ) == before


@pytest.mark.long
def test_a_transport_that_is_not_built_in_is_reported_and_ends_at_once() -> None:
    outcome = attempt_local(
        [CPU, CPU], {"GLOO_DEVICE_TRANSPORT": "UV"}, backend="gloo", deadline_s=30.0, programs=Programs()
    )
    assert outcome.ok or outcome.text, outcome
