"""What goes wrong on a Ray cluster: ranks that stand still, lost nodes and drivers, want of memory,
other versions.

Run: pytest -m long tests/jobs/ray/test_faults.py. Three Ray nodes without a shared disk, the first of
which has no room for ranks.
"""

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import unisono
from tests.jobs.nodes.fronts import Front
from tests.jobs.ray.cluster import RayCluster, json_of
from tests.jobs.ray.memory import THRESHOLD, SmallMemory

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),  # a cluster may take long to come up on a loaded machine
]

Config = Callable[..., str]
_TWO = ("--launcher", "ray", "--nodes", "2", "--nproc", "1", "--no-first-checkpoint")
_ONE_WILL_DO = ("--launcher", "ray", "--nodes", "1:2", "--nproc", "1", "--no-first-checkpoint")
_LIMIT_S = 1000.0


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[[list[int]], RayCluster]) -> RayCluster:
    return cluster_of([0, 2, 2])


@pytest.fixture
def small(cluster: RayCluster) -> Iterator[Callable[[int], SmallMemory]]:
    """Has a node start again in a control group with little memory, where Ray's monitor looks
    often.
    """
    memory = SmallMemory()
    if memory.group is None:
        pytest.skip("needs control groups: none with a limit of memory can be made")
    shrunk = []

    def shrink(node: int) -> SmallMemory:
        shrunk.append(node)
        cluster.stop_node(node)
        settings = {"RAY_memory_usage_threshold": str(THRESHOLD), "RAY_memory_monitor_refresh_ms": "100"}
        cluster.start_nodes(node, before=memory.before(), **settings)
        return memory

    yield shrink
    memory.free()
    for node in shrunk:
        cluster.stop_node(node)
    memory.close()
    cluster.start_nodes(*shrunk)


@pytest.fixture(scope="module")
def other_python() -> str:
    """A python whose number differs from this one's only in its last part, so that it reads what is
    installed for this one.
    """
    mine = "python" + ".".join(map(str, sys.version_info[:2]))
    own = Path("~/.pyenv/versions").expanduser().glob("*/bin")
    for folder in (Path("/usr/bin"), Path("/usr/local/bin"), *own):
        if (folder / mine).exists():
            reported = subprocess.run(
                [folder / mine, "-V"], capture_output=True, text=True, check=True
            ).stdout
            if reported.strip() != f"Python {sys.version.split()[0]}":
                return str(folder / mine)
    pytest.skip(f"needs another {mine}")


def packages() -> str:
    """PYTHONPATH for a python without a virtual environment: what this one has installed."""
    return f"{Path(unisono.__file__).parents[2]}:{sysconfig.get_path('purelib')}"


def trains(front: Front, steps: int = 3) -> None:
    """Waits until so many steps were told."""
    front.wait_until(
        lambda: 1.0 if len(front.messages("step")) > steps else None, limit_s=_LIMIT_S, what="steps"
    )


def steps_once(cluster: RayCluster, config: str, last: int) -> None:
    """Every step is there once."""
    lines = (cluster.out_of(config) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, last + 1))


def test_a_stopped_rank_on_a_different_node_is_named(cluster: RayCluster, config: Config) -> None:
    front = cluster.type("train", config(cluster, duration="4000 steps", restarts=0), *_TWO)
    trains(front)
    cluster.ranks()[1].suspend()
    assert front.wait(limit_s=_LIMIT_S) == 4, front.text()
    (verdict,) = front.verdicts
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("rank_stopped", (1,), (cluster.ground.host(2),))
    cluster.nothing_left()


def test_lost_node_beside_the_heads_is_named_and_run_continues_without_it(
    cluster: RayCluster, config: Config
) -> None:
    path = config(cluster, duration="60 steps")
    front = cluster.type("train", path, *_ONE_WILL_DO)
    trains(front)
    cluster.raylet(2).kill()
    assert front.wait(limit_s=_LIMIT_S) == 0, front.text()
    assert front.verdicts[0].cause == "node_unreachable"
    assert front.verdicts[0].hosts == (cluster.ground.host(2),)
    assert len(front.result["restarts"]) == 1
    steps_once(cluster, path, 60)
    cluster.stop_node(2)
    cluster.nothing_left()
    cluster.start_nodes(2)


def test_without_a_node_that_is_needed_the_run_ends_with_a_checkpoint(
    cluster: RayCluster, config: Config
) -> None:
    path = config(cluster, duration="4000 steps", restarts=1)
    front = cluster.type("train", path, *_TWO, "--join-timeout", "20")
    trains(front)
    cluster.raylet(2).kill()
    assert front.wait(limit_s=_LIMIT_S) == 4, front.text()
    assert front.verdicts[0].cause == "node_unreachable"
    assert front.result["checkpoint"]
    cluster.stop_node(2)
    cluster.nothing_left()
    cluster.start_nodes(2)


def test_a_killed_driver_is_reported_and_the_same_command_continues(
    cluster: RayCluster, config: Config
) -> None:
    path = config(cluster, duration="40 steps")
    front = cluster.type("train", path, *_TWO)
    saved = cluster.out_of(path) / "checkpoints"
    cluster.until(lambda: any(saved.glob("step-????????")), limit_s=_LIMIT_S, what="a checkpoint is here")
    driver = next(
        p
        for p in psutil.Process(front.pid).children(recursive=True)
        if "unisono.jobs.launchers.ray_driver" in p.cmdline()
    )
    driver.kill()
    assert front.wait(limit_s=_LIMIT_S) == 5, front.text()
    assert "the process that is connected to Ray ended: killed by SIGKILL" in front.text("err")
    cluster.nothing_left()
    again = cluster.type("train", path, *_TWO)
    assert again.wait(limit_s=_LIMIT_S) == 0, again.text()
    assert again.messages("plan")[0]["resume"]["step"] > 0
    steps_once(cluster, path, 40)


_LONGER_THAN_IT_TAKES = (  # Ray's monitor needs seconds, and 200 steps six of them on a quiet machine
    "1000 steps"
)


def test_rays_memory_monitor_on_the_heads_node_is_named_and_run_continues(
    cluster: RayCluster, config: Config, small: Callable[[int], SmallMemory]
) -> None:
    memory = small(1)
    path = config(cluster, duration=_LONGER_THAN_IT_TAKES)
    front = cluster.type("train", path, *_ONE_WILL_DO)
    trains(front)
    memory.fill()
    front.wait_until(lambda: 1.0 if front.verdicts else None, limit_s=_LIMIT_S, what="a verdict")
    memory.free()
    assert front.wait(limit_s=_LIMIT_S) == 0, front.text()
    verdict = front.verdicts[0]
    assert (verdict.cause, verdict.hosts) == ("host_oom_killed", (cluster.ground.host(1),)), front.text()
    assert any("memory" in item.text and item.where.startswith("Ray") for item in verdict.evidence)
    assert len(front.result["restarts"]) == 1
    steps_once(cluster, path, 1000)
    cluster.nothing_left()


def test_rays_memory_monitor_on_another_node_is_named_and_run_continues(
    cluster: RayCluster, config: Config, small: Callable[[int], SmallMemory]
) -> None:
    """The head sees a connection that closes; why, Ray says to the driver a moment later."""
    memory = small(2)
    path = config(cluster, duration=_LONGER_THAN_IT_TAKES)
    front = cluster.type("train", path, *_ONE_WILL_DO)
    trains(front)
    memory.fill()
    assert front.wait(limit_s=_LIMIT_S) == 0, front.text()
    verdict = front.verdicts[0]
    host = cluster.ground.host(2)
    assert (verdict.cause, verdict.ranks, verdict.hosts) == ("host_oom_killed", (1,), (host,)), front.text()
    assert f"node 1 ({host}) is lost: Ray's memory monitor" in verdict.summary
    cited = {item.where: item.text for item in verdict.evidence}
    assert "memory" in cited[f"Ray, on node 1 ({host})"]
    assert f"node 1 ({host})" in cited["the control channel"]
    assert json_of(next((cluster.out_of(path) / "verdicts").glob("*.json")))["cause"] == "host_oom_killed"
    assert [m["code"] for m in front.messages("warning") if m["code"] == "host_oom_killed"] == []
    assert len(front.result["restarts"]) == 1
    steps_once(cluster, path, 1000)
    cluster.nothing_left()


def test_driver_with_another_ray_or_python_is_refused_with_both_versions(
    cluster: RayCluster, config: Config, other_python: str
) -> None:
    front = cluster.type(
        "train", config(cluster), *_TWO, PYTHONPATH=f"{cluster.other_ray('2.59.1')}:{packages()}"
    )
    assert front.wait(limit_s=_LIMIT_S) == 2, front.text()
    printed = front.text("err")
    assert "the version of Ray or Python differs from the cluster's" in printed
    assert re.search(r"Ray: (?!2\.59\.1).* Ray: 2\.59\.1", printed)
    front = cluster.type("train", config(cluster), *_TWO, python=other_python, PYTHONPATH=packages())
    assert front.wait(limit_s=_LIMIT_S) == 2, front.text()
    printed = front.text("err")
    assert "the version of Ray or Python differs from the cluster's" in printed
    assert f"Python: {sys.version.split()[0]}" in printed
    cluster.nothing_left()


def test_a_node_with_a_different_python_is_named_where_ray_lets_it_in(
    cluster: RayCluster, config: Config, other_python: str
) -> None:
    cluster.stop_node(2)
    cluster.start_nodes(
        2, python=other_python, PYTHONPATH=packages(), RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL="minor"
    )
    front = cluster.type("train", config(cluster), *_TWO)
    assert front.wait(limit_s=_LIMIT_S) == 3, front.text()
    (verdict,) = front.verdicts
    assert (verdict.cause, verdict.hosts) == ("version_mismatch", (cluster.ground.host(2),))
    assert sys.version.split()[0] in verdict.summary
    cluster.nothing_left()
    cluster.stop_node(2)
    cluster.start_nodes(2)


def test_a_node_with_a_different_ray_is_not_let_in(cluster: RayCluster) -> None:
    """So the places of a job have one Ray, and only who types the command can have another."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}"]
    done = subprocess.run(
        cluster.inside(2, words, cwd=cluster.disk), env=cluster.environment(PYTHONPATH=str(cluster.other_ray("2.58.0"))),
        capture_output=True, text=True, check=False, timeout=_LIMIT_S,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Version mismatch" in done.stderr + done.stdout
