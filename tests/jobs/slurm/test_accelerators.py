"""A Slurm that gives out accelerators is asked for one a rank.

Run: pytest -m long tests/jobs/slurm/test_accelerators.py

A real Slurm on network namespaces, whose nodes are said to have accelerators; skipped with the
reason where there is none.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.network_namespaces import Namespaces
from tests.jobs.slurm.harness import SlurmJob
from tests.jobs.slurm.slurm_cluster import cluster


@pytest.fixture
def gives_gpus(
    networks: Namespaces, tmp_path: Path, model_dir: Path, rows_file: Path, caches: Path
) -> Iterator[SlurmJob]:
    """A job on a cluster that counts two accelerators on each node; there are none."""
    for name in ("slurm", "job"):
        (tmp_path / name).mkdir()
    with cluster(networks, tmp_path / "slurm", gpus=2) as slurm:
        job = SlurmJob(slurm, tmp_path / "job", model=model_dir, rows=rows_file, caches=caches)
        job.config(device="auto")
        yield job
        slurm.cancel_all()
        job.close()


@pytest.mark.long
def test_where_slurm_gives_out_accelerators_each_rank_asks_for_one(gives_gpus: SlurmJob) -> None:
    job = gives_gpus
    shown = job.type("--launcher", "slurm", "--nproc", "2", "--dry-run", json=False)
    assert shown.wait() == 0, shown.text()
    assert "#SBATCH --gpus-per-node=2" in shown.text("out").splitlines()
    shown = job.type("--launcher", "slurm", "--nproc", "2", "device=cpu", "--dry-run", json=False)
    assert shown.wait() == 0, shown.text()
    assert "gpus" not in shown.text("out")
    untold = job.type("--launcher", "slurm", "--dry-run", json=False)
    assert untold.wait() == 2, untold.text()
    assert "the number for each node is not given" in untold.text()
    many = job.type("--launcher", "slurm", "--nproc", "3", json=False)
    assert many.wait() == 2, many.text()
    assert "Slurm reports: " in many.text()
    job.type("--launcher", "slurm", "--nodes", "2", "--nproc", "2", env={"SBATCH_ACCOUNT": "physics"})
    job.until(lambda: bool(job.slurm.jobs()), what="a job is there")
    reported = job.slurm.run("scontrol", "show", "job", job.slurm.jobs()[0])
    assert "TresPerNode=gres:gpu:2" in reported
    assert "Account=physics" in reported, "what sbatch reads of its variables is not in our way"
