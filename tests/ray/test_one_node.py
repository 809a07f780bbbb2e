"""A job on a Ray cluster of one node. Run: pytest tests/ray/test_one_node.py"""

import json
from collections.abc import Callable

import pytest

from tests.ray.cluster import RayCluster

pytestmark = pytest.mark.timeout(1800)  # a cluster may take long to come up on a loaded machine

Config = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[[list[int]], RayCluster]) -> RayCluster:
    return cluster_of([2])


def test_two_ranks_train_on_ray_and_their_run_is_whole_where_the_command_was_typed(
    cluster: RayCluster, config: Config
) -> None:
    path = config(cluster)
    front = cluster.type(
        "train", path, "--launcher", "ray", "--nproc", "2", "--no-rehearse", speaks_json=False
    )
    assert front.wait(limit_s=600) == 0, front.text()
    assert f"placed by Ray: node 0 on {cluster.ground.host(0)}" in front.text()
    out = cluster.out_of(path)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert json.loads((out / "result.json").read_text())["outcome"] == "completed"
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
    assert (out / "adapter/adapter_model.safetensors").exists()
    cluster.nothing_left()
