"""Jobs on three Ray nodes without a shared disk, the first of which has no room for ranks.

Run: pytest -m long tests/jobs/ray/test_separate_disks.py
"""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.ray.cluster import RayCluster, json_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
]  # a cluster may take long to come up on a loaded machine

Config = Callable[..., str]
_TWO = ("--launcher", "ray", "--nodes", "2", "--nproc", "1")
_LIMIT_S = 1000.0


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[[list[int]], RayCluster]) -> RayCluster:
    return cluster_of([0, 2, 2])


def steps_in(out: Path) -> list[int]:
    """The steps of metrics.jsonl, as they stand there."""
    path = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_run_is_whole_at_the_place_of_its_command_despite_other_disks(
    cluster: RayCluster, config: Config
) -> None:
    """Its ranks write to the disks of their own nodes."""
    path = config(cluster)
    front = cluster.type("train", path, *_TWO)
    assert front.wait(limit_s=_LIMIT_S) == 0, front.text()
    out = cluster.out_of(path)
    assert steps_in(out) == [1, 2, 3, 4]
    here = json_of(cluster.on_disk(0, Path(path)))["output_dir"]
    result, plan = json_of(out / "result.json"), json_of(out / "plan.json")
    assert (result["outcome"], result["output_dir"], plan["output_dir"]) == ("completed", here, here)
    assert result["weights"] == f"{here}/adapter"
    assert [node["host"] for node in plan["nodes"]] == [cluster.ground.host(n) for n in (1, 2)]
    assert sorted(p.name for p in out.glob("logs/*-rank-*.log")) == [
        "bob-rank-00000.log",
        "cyd-rank-00001.log",
    ]
    for kept in out.rglob("*"):
        if kept.is_file() and kept.name != "agreement.json":  # it tells what each node had, as it was there
            assert b"cache/unisono/ray" not in kept.read_bytes(), f"{kept} names a folder of a node"
    verified = cluster.type("checkpoint", "verify", here)
    assert verified.wait(limit_s=_LIMIT_S) == 0, verified.text()
    cluster.nothing_left()


def test_a_rank_that_is_killed_is_named_and_the_run_continues(cluster: RayCluster, config: Config) -> None:
    path = config(cluster, duration="40 steps")
    front = cluster.type("train", path, *_TWO)
    front.wait_until(lambda: 1.0 if len(front.messages("step")) > 3 else None, limit_s=_LIMIT_S, what="steps")
    cluster.ranks()[1].send_signal(signal.SIGKILL)
    assert front.wait(limit_s=_LIMIT_S) == 0, front.text()
    assert [verdict.cause for verdict in front.verdicts] == ["rank_killed"]
    assert len(front.result["restarts"]) == 1
    assert steps_in(cluster.out_of(path)) == list(range(1, 41))
    cluster.nothing_left()


def test_the_node_of_the_head_is_lost_and_the_run_continues_elsewhere(
    cluster: RayCluster, config: Config
) -> None:
    path = config(cluster, duration="60 steps")
    front = cluster.type("train", path, "--launcher", "ray", "--nodes", "1:2", "--nproc", "1")
    saved = cluster.out_of(path) / "checkpoints"
    cluster.until(lambda: any(saved.glob("step-????????")), limit_s=_LIMIT_S, what="a checkpoint is here")
    lost = cluster.node_of(cluster.ranks()[0])
    cluster.stop_node(lost)
    assert front.wait(limit_s=_LIMIT_S) == 0, front.text()
    assert front.verdicts[0].cause == "node_unreachable"
    assert front.verdicts[0].hosts == (cluster.ground.host(lost),)
    assert [restart["from_step"] > 0 for restart in front.result["restarts"]] == [True]
    assert steps_in(cluster.out_of(path)) == list(range(1, 61))
    cluster.nothing_left()
    cluster.start_nodes(lost)


def test_a_killed_command_leaves_nothing_and_the_same_command_continues(
    cluster: RayCluster, config: Config
) -> None:
    path = config(cluster, duration="40 steps")
    front = cluster.type("train", path, *_TWO)
    saved = cluster.out_of(path) / "checkpoints"
    cluster.until(lambda: any(saved.glob("step-????????")), limit_s=_LIMIT_S, what="a checkpoint is here")
    front.signal(signal.SIGKILL)
    cluster.nothing_left()
    done = max(int(p.name[5:]) for p in saved.glob("step-????????"))
    again = cluster.type("train", path, *_TWO)
    assert again.wait(limit_s=_LIMIT_S) == 0, again.text()
    assert again.messages("plan")[0]["resume"]["step"] == done
    assert steps_in(cluster.out_of(path)) == list(range(1, 41))


def test_a_stop_is_heard_on_the_nodes_and_what_was_saved_is_here(cluster: RayCluster, config: Config) -> None:
    path = config(cluster, duration="4000 steps")
    front = cluster.type("train", path, *_TWO)
    front.wait_until(lambda: 1.0 if front.messages("step") else None, limit_s=_LIMIT_S, what="steps")
    os.kill(front.pid, signal.SIGTERM)
    assert front.wait(limit_s=_LIMIT_S) == 75, front.text()
    assert Path(front.result["checkpoint"]).name == f"step-{front.result['step']:08d}"
    assert cluster.on_disk(0, Path(front.result["checkpoint"])).is_dir()
    cluster.nothing_left()


def test_what_the_cluster_does_not_have_is_refused_in_seconds_node_by_node(
    cluster: RayCluster, config: Config
) -> None:
    front = cluster.type("train", config(cluster), "--launcher", "ray", "--nodes", "2", "--nproc", "9")
    assert front.wait(limit_s=_LIMIT_S) == 6, front.text()
    assert "no room for 2 nodes" in front.text("err")
    assert "9 CPU" in front.text("err")
    for node in range(3):
        assert re.search(rf"{cluster.ground.host(node)} \(.*?\): \d of \d CPU free", front.text("err"))
    cluster.nothing_left()


def test_room_that_others_have_is_waited_for_until_the_time_is_over(
    cluster: RayCluster, config: Config
) -> None:
    holder = cluster.type(
        "train", config(cluster, duration="4000 steps"), "--launcher", "ray", "--nproc", "2"
    )
    holder.wait_until(lambda: 1.0 if holder.messages("step") else None, limit_s=_LIMIT_S, what="steps")
    front = cluster.type("train", config(cluster), *_TWO, "--join-timeout", "3", speaks_json=False)
    assert front.wait(limit_s=_LIMIT_S) == 6, front.text()
    assert "no room became free within 3 s" in front.text()
    os.kill(holder.pid, signal.SIGINT)
    assert holder.wait(limit_s=_LIMIT_S) == 130, holder.text()
    cluster.nothing_left()


def test_an_address_without_a_cluster_and_a_wrong_token_are_refused(
    cluster: RayCluster, config: Config
) -> None:
    nobody = cluster.type(
        "train", config(cluster), *_TWO, "--ray-address", f"{cluster.ground.address(0)}:6999"
    )
    assert nobody.wait(limit_s=_LIMIT_S) == 2
    assert "no Ray cluster answers at" in nobody.text("err")
    stranger = cluster.type("train", config(cluster), *_TWO, RAY_AUTH_TOKEN="another" * 6)
    assert stranger.wait(limit_s=_LIMIT_S) == 2, stranger.text()
    assert "its token is missing or different" in stranger.text("err")


def test_a_node_with_other_code_is_named_before_anything_starts(cluster: RayCluster, config: Config) -> None:
    cluster.stop_node(2)
    cluster.start_nodes(2, PYTHONPATH=str(cluster.other_code()))
    front = cluster.type("train", config(cluster), *_TWO)
    assert front.wait(limit_s=_LIMIT_S) == 3, front.text()
    assert [verdict.cause for verdict in front.verdicts] == ["code_mismatch"]
    assert front.verdicts[0].hosts == (cluster.ground.host(2),)
    assert "unisono/base/text.py" in front.verdicts[0].summary
    cluster.nothing_left()
    cluster.stop_node(2)
    cluster.start_nodes(2)
