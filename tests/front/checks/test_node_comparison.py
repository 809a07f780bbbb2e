"""Nodes of a job, looked at together without a run.

Run: pytest tests/front/checks/test_node_comparison.py
"""

import json
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.harness import Job
from unisono.front.checks.check import LocalRun
from unisono.front.checks.machine_checks import judge_clock
from unisono.front.checks.node_trials import _storage_mark, merge_findings
from unisono.guard.agree.reports import Member
from unisono.guard.rundir.lock import RunLock
from unisono.trainer.config import build_config


def checks(front: Front) -> dict[str, list[dict[str, object]]]:
    """The findings of a front that spoke JSON, by check."""
    found: dict[str, list[dict[str, object]]] = {}
    for finding in json.loads(front.text("out"))["checks"]:
        found.setdefault(finding["id"], []).append(finding)
    return found


@pytest.mark.makes("peers.agreement", "pass")
def test_nodes_that_agree_show_the_same_table_and_start_nothing(pair: Job) -> None:
    fronts = [pair.start(node, command="doctor", config=False, json=True) for node in range(2)]
    assert together(fronts) == [0, 0], pair.transcript()
    one, other = map(checks, fronts)
    assert one == other
    [found] = one["peers.agreement"]
    rows = "\n".join(map(str, found["evidence"]))  # type: ignore[call-overload]
    assert "2 nodes have the same run" in rows
    for rule in ("network.dial", "network.size", "network.collective", "versions", "env", "nproc"):
        assert f"\n{rule}: " in rows
    unknown = [
        name for name, found in one.items() if any(finding["status"] == "unknown" for finding in found)
    ]
    assert not [name for name in unknown if name.startswith("peers.")], (
        "without a config nothing of one is missing"
    )
    assert not pair.out.exists()
    pair.wait_gone()


def test_nodes_wrong_in_the_same_way_share_a_line_whenever_they_looked() -> None:
    looks = {
        Member(node, -1, host): [judge_clock(1.7e9 + node, installed_s=1.6e9, synchronised=False)]
        for node, host in enumerate("abc")
    }
    [found] = merge_findings(looks)
    assert (found.status, found.where) == ("warn", "nodes 0 (a), 1 (b) and 2 (c)")


def marking(output_dir: Path) -> LocalRun:
    """What is asked for a run with this output_dir; nothing of the machine is looked at."""
    raw = {"model": {"path": "builtin:tiny"}, "data": {"train": "-"}, "output_dir": str(output_dir)}
    return LocalRun(build_config(raw, lines={}, name="c.yaml"), given=True, local_node=None)  # type: ignore[arg-type]


def test_the_mark_of_a_look_goes_with_the_folders_that_were_made_for_it(tmp_path: Path) -> None:
    with _storage_mark(marking(tmp_path / "runs" / "out")) as mark:
        assert mark
        assert len(list((tmp_path / "runs" / "out").iterdir())) == 1
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    before = {"run.lock"}
    with RunLock(tmp_path / "run.lock") as lock:
        lock.acquire("here", 4711)
        with _storage_mark(marking(tmp_path)) as mark:
            assert mark == {}
            assert {entry.name for entry in tmp_path.iterdir()} == before


@pytest.mark.makes("peers.agreement", "fail")
def test_differing_setting_exits_3_on_all_nodes_with_same_words_and_fix(pair: Job) -> None:
    odd = {"NCCL_ALGO": "Tree"}
    fronts = [
        pair.start(node, command="doctor", config=False, json=False, env=odd if node else {})
        for node in range(2)
    ]
    assert together(fronts) == [3, 3], pair.transcript()
    tables = [front.text("out").partition("peers.agreement")[2] for front in fronts]
    assert tables[0].partition("\n\n")[0] == tables[1].partition("\n\n")[0]
    assert "NCCL_ALGO" in tables[0]
    assert "fix: " in tables[0]


@pytest.mark.long
def test_findings_of_one_node_are_reported_on_all_with_the_same_code(
    pair: Job,
) -> None:
    """Each finding names the node that it is about."""
    pair.config(1, track=["tensorboard"], checkpoint={"storage": "gs://bucket/x"})
    pair.config(0, track=["tensorboard"], checkpoint={"storage": "gs://bucket/x"})
    fronts = [
        pair.start(node, command="doctor", json=True, env={"OMP_NUM_THREAD": "2"} if node else {})
        for node in range(2)
    ]
    assert together(fronts) == [6, 6], pair.transcript()
    one, other = map(checks, fronts)
    assert one == other
    [misspelt] = one["settings.misspelt"]
    assert misspelt["where"] == fronts[1].label
    [packages] = one["config.packages"]
    assert packages["where"] == f"nodes 0 ({fronts[0].host}) and 1 ({fronts[1].host})"
    assert not list(pair.folder.glob("out*"))


def test_a_node_that_never_comes_is_named_when_time_is_over(pair: Job) -> None:
    front = pair.start(0, "--join-timeout", "3", command="doctor", config=False, json=False)
    assert front.wait() == 3
    assert "node 1 has never connected" in front.text() or "1 of 2 nodes" in front.text()
