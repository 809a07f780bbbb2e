"""Ray's own head is lost in mid-run.

Run: pytest -m long tests/jobs/ray/test_rays_head.py. Three Ray nodes without a shared disk; Ray's own
limits are as they come.
"""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.ray.cluster import RayCluster, config_of, json_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),  # a cluster may take long to come up on a loaded machine
]

_TWO = ("--launcher", "ray", "--nodes", "2", "--nproc", "1", "--no-first-checkpoint")
_LIMIT_S = 1000.0
_ENDS_S = 240.0
"""For the command to end: it waits 20 s for Ray's head to come back, and then saves."""
_NODES_END_S = 300.0
"""For what ran on the nodes: Ray ends them a minute after its head, and with them our fronts."""


@pytest.fixture(scope="module")
def made(cluster_of: Callable[[list[int]], RayCluster]) -> RayCluster:
    return cluster_of([0, 2, 2])


class Whole:
    """A cluster that is whole, and the disks of its nodes, which stay as long as the test whatever
    becomes of Ray.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self._holders = {
            node: subprocess.Popen(cluster.inside(node, ["sleep", "infinity"], cwd=cluster.disk)) for node in cluster.nodes
        }  # fmt: skip
        for node in cluster.nodes:
            cluster.until(
                partial(self._holds, node), limit_s=_LIMIT_S, what=f"the disk of node {node} is held"
            )

    def _holds(self, node: int) -> bool:
        """Whether the holder is where the node's disk is, and no more where this process is."""
        disks = [
            Path(f"/proc/{pid}/ns/mnt").stat().st_ino
            for pid in (self._holders[node].pid, self.cluster.nodes[node].pid)
        ]
        return disks[0] == disks[1]

    def disk(self, node: int, path: Path | str) -> Path:
        """A path of a node's disk, as this process sees it."""
        return Path(f"/proc/{self._holders[node].pid}/root{path}")

    def train(self, node: int, body: dict[str, Any]) -> Front:
        """Types the command on a node, where its config and its output_dir are; gives it once some
        steps are made and a checkpoint is there.
        """
        path = self.cluster.disk / "train.yaml"
        self.disk(node, path).write_text(json.dumps(body))
        front = self.cluster.type("train", str(path), *_TWO, node=node)
        front.wait_until(
            lambda: 1.0 if len(front.messages("step")) > 3 else None, limit_s=_LIMIT_S, what="steps"
        )
        saved = self.disk(node, body["output_dir"]) / "checkpoints"
        self.cluster.until(
            lambda: any(saved.glob("step-????????")), limit_s=_LIMIT_S, what="a checkpoint is here"
        )
        return front

    def nothing_left(self, nodes: tuple[int, ...]) -> None:
        """Waits until neither a process nor a folder of a job is left."""
        ours = self.cluster.ours
        self.cluster.until(lambda: not ours(), limit_s=_NODES_END_S, what="no process of a job is left")
        for node in nodes:
            assert not list(self.disk(node, self.cluster.disk / "cache/unisono/ray").glob("*")), node

    def close(self) -> None:
        """Lets go of the disks."""
        for holder in self._holders.values():
            holder.kill()
            holder.wait()


@pytest.fixture
def whole(made: RayCluster) -> Iterator[Whole]:
    held = Whole(made)
    yield held
    held.close()
    for node in list(made.nodes):
        made.stop_node(node)
    made.start_nodes(0, 1, 2)


@pytest.fixture
def body(made: RayCluster, model_dir: Path, rows_file: Path) -> dict[str, Any]:
    """A config of a run that does not end by itself."""
    return config_of(made, model=model_dir, rows=rows_file, duration="40000 steps", optim={"lr": 1e-3, "schedule": "constant"}, grace="10 seconds")  # fmt: skip


def gcs(cluster: RayCluster) -> psutil.Process:
    """Ray's process that holds the cluster together."""
    return next(p for p in cluster.processes() if p.name() == "gcs_server")


def driver(front: Front) -> psutil.Process:
    """Our process that is connected to Ray."""
    children = psutil.Process(front.pid).children(recursive=True)
    return next(process for process in children if "unisono.jobs.launchers.ray_driver" in process.cmdline())


def lost_head(cluster: RayCluster, front: Front) -> None:
    """The verdict names Ray's head, and says what Ray's silence was."""
    (verdict,) = front.verdicts
    assert (verdict.cause, verdict.ranks, verdict.hosts) == (
        "node_unreachable",
        (),
        (cluster.ground.host(0),),
    )
    assert f"Ray's head ({cluster.ground.host(0)}, {cluster.address}) is lost" in verdict.summary
    assert any(item.where == f"Ray cluster {cluster.address}" for item in verdict.evidence)


def test_where_rays_head_is_gone_the_run_is_saved_and_ends(whole: Whole, body: dict[str, Any]) -> None:
    cluster = whole.cluster
    front = whole.train(1, body)
    cluster.stop_node(0)
    assert front.wait(limit_s=_ENDS_S) == 4, front.text()
    lost_head(cluster, front)
    out = whole.disk(1, body["output_dir"])
    result = json_of(out / "result.json")
    assert (result["exit_code"], result["verdict"]["cause"]) == (4, "node_unreachable")
    # What was trained until it was asked to end is saved, and here.
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert Path(result["checkpoint"]).name == f"step-{steps[-1]:08d}"
    assert (whole.disk(1, result["checkpoint"]) / "manifest.json").exists()
    whole.nothing_left((1, 2))


def test_loss_of_rays_head_is_the_verdict_though_it_takes_our_connection(
    whole: Whole, body: dict[str, Any]
) -> None:
    cluster = whole.cluster
    front = whole.train(0, body)
    gcs(cluster).kill()
    driver(front).send_signal(signal.SIGABRT)  # so Ray ends those that are connected to it, after a minute
    assert front.wait(limit_s=_ENDS_S) == 4, front.text()
    lost_head(cluster, front)
    result = json_of(whole.disk(0, body["output_dir"]) / "result.json")
    assert (result["exit_code"], result["verdict"]["cause"]) == (4, "node_unreachable")
    assert (whole.disk(0, result["checkpoint"]) / "manifest.json").exists()
    whole.nothing_left((1, 2))
