"""`unisono doctor --launcher ray` on three Ray nodes without a shared disk, the first of which has
no room.

Run: pytest -m long tests/jobs/ray/test_doctor.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.ray.cluster import RayCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

Config = Callable[..., str]
_LIMIT_S = 1000.0


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[[list[int]], RayCluster]) -> RayCluster:
    return cluster_of([0, 2, 2])


def answer(front: Front) -> dict[str, Any]:
    """The one object that it prints."""
    found: dict[str, Any] = json.loads(next(line for line in front.text().splitlines() if "{" in line))
    return found


def test_the_nodes_that_ray_gives_look_together_and_their_table_comes_back(
    cluster: RayCluster, config: Config
) -> None:
    front = cluster.type(
        "--json", "doctor", config(cluster), "--launcher", "ray", "--nodes", "2", "--nproc", "1",
        speaks_json=False,
    )  # fmt: skip
    assert front.wait(limit_s=_LIMIT_S) in (0, 6), front.text()
    checks = answer(front)["checks"]
    agreed = next(one for one in checks if one["id"] == "peers.agreement")
    assert agreed["status"] == "pass", agreed
    hosts = [cluster.ground.host(node) for node in (1, 2)]
    assert any(all(host in one.get("where", "") for host in hosts) for one in checks), checks
    cluster.nothing_left()


def test_one_node_of_ray_is_looked_at_alone_and_the_table_names_it(cluster: RayCluster) -> None:
    front = cluster.type("doctor", "--launcher", "ray", "--nproc", "2", speaks_json=False)
    assert front.wait(limit_s=_LIMIT_S) in (0, 6), front.text()
    assert "doctor on Ray's " in front.text()
    assert "checks: " in front.text()
    cluster.nothing_left()


def test_what_the_cluster_cannot_give_is_reported_node_by_node(cluster: RayCluster) -> None:
    front = cluster.type("doctor", "--launcher", "ray", "--nodes", "3", "--nproc", "1", speaks_json=False)
    assert front.wait(limit_s=_LIMIT_S) == 6, front.text()
    assert "the Ray cluster has no room for 3 nodes" in front.text()
    for node in range(3):
        assert cluster.ground.host(node) in front.text()
    cluster.nothing_left()


def test_nodes_with_other_rows_do_not_agree_and_the_exit_code_reports_it(
    cluster: RayCluster, config: Config, rows_file: Path
) -> None:
    rows = cluster.disk / "rows.jsonl"
    for node in range(3):
        text = rows_file.read_text()
        cluster.on_disk(node, rows).write_text(text if node < 2 else text.replace("a", "e"))
    path = config(cluster, data={"train": str(rows), "max_length": 64})
    front = cluster.type(
        "--json", "doctor", path, "--launcher", "ray", "--nodes", "2", "--nproc", "1", speaks_json=False
    )
    assert front.wait(limit_s=_LIMIT_S) == 3, front.text()
    agreed = next(one for one in answer(front)["checks"] if one["id"] == "peers.agreement")
    assert agreed["status"] == "fail"
    assert all(cluster.ground.host(node) in agreed["evidence"][0] for node in (1, 2)), agreed
    cluster.nothing_left()
