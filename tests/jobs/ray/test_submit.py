"""`ray job submit -- unisono train …` on a real cluster with its dashboard.

Run: pytest -m long tests/jobs/ray/test_submit.py

Three Ray nodes without a shared disk; config and rows travel in the job's working directory alone.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.ray.cluster import RayCluster, config_of, json_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),  # a cluster may take long to come up on a loaded machine
]

_LIMIT_S = 1000.0


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[..., RayCluster]) -> RayCluster:
    return cluster_of([0, 2, 2], dashboard=True)


class Jobs:
    """A folder that is submitted from the first node, and Ray's own command for it."""

    def __init__(self, cluster: RayCluster, *, model: Path, rows: Path, **sections: object) -> None:
        self.cluster = cluster
        self.out = cluster.disk / f"out-{len(list(cluster.on_disk(0, cluster.disk).iterdir()))}"
        self.folder = cluster.disk / f"work-{self.out.name}"
        here = cluster.on_disk(0, self.folder)
        here.mkdir()
        (here / "rows.jsonl").write_text(rows.read_text())
        body = config_of(cluster, model=model, rows=Path("rows.jsonl")) | sections
        (here / "train.yaml").write_text(json.dumps(body))

    def ray(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Runs `ray job WORDS` on the first node."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "job", *words]
        address = f"http://{self.cluster.ground.address(0)}:8265"
        return subprocess.run(
            self.cluster.inside(0, command, cwd=self.folder), env=self.cluster.environment(RAY_ADDRESS=address), capture_output=True,
            text=True, check=False, timeout=_LIMIT_S,
        )  # fmt: skip

    def submit(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Submits the folder with the command that the page on Ray shows."""
        command = [sys.executable, "-m", "unisono", "train", "train.yaml", f"output_dir={self.out}"]
        return self.ray(
            "submit", "--working-dir", ".", *options, "--", *command, "--launcher", "ray", "--nodes", "2", "--nproc", "1", "--no-first-checkpoint"
        )  # fmt: skip

    @property
    def steps(self) -> list[int]:
        """Those of the run's metrics, where it was submitted."""
        path = self.cluster.on_disk(0, self.out) / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_submitted_folder_trains_on_other_nodes_and_is_whole_on_the_head(
    cluster: RayCluster, model_dir: Path, rows_file: Path
) -> None:
    jobs = Jobs(cluster, model=model_dir, rows=rows_file)
    done = jobs.submit()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "placed by Ray: node 0 on bob, node 1 on cyd" in done.stdout
    assert "completed: step 4" in done.stdout
    assert jobs.steps == [1, 2, 3, 4]
    result = json_of(cluster.on_disk(0, jobs.out) / "result.json")
    assert (result["outcome"], result["output_dir"]) == ("completed", str(jobs.out))
    cluster.nothing_left()


def test_a_job_that_is_stopped_saves_and_the_same_job_continues(
    cluster: RayCluster, model_dir: Path, rows_file: Path
) -> None:
    jobs = Jobs(
        cluster, model=model_dir, rows=rows_file, duration="200 steps", optim={"lr": 1e-3, "schedule": "constant"}
    )  # fmt: skip
    begun = jobs.submit("--no-wait", "--submission-id", "first")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    cluster.until(lambda: len(jobs.steps) > 3, limit_s=_LIMIT_S, what="steps")
    stopped = jobs.ray("stop", "first")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    cluster.nothing_left()
    result = json_of(cluster.on_disk(0, jobs.out) / "result.json")
    assert (result["outcome"], result["exit_code"]) == ("preempted", 75)
    assert Path(result["checkpoint"]).name == f"step-{result['step']:08d}"
    again = jobs.submit()
    assert again.returncode == 0, again.stdout + again.stderr
    assert jobs.steps == list(range(1, 201))
    cluster.nothing_left()
