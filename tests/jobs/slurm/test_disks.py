"""Slurm nodes with disks of their own. Run: pytest -m long tests/jobs/slurm/test_disks.py

A real Slurm on network namespaces; skipped with the reason where there is none.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.jobs.slurm.harness import SlurmJob
from tests.jobs.slurm.slurm_cluster import cluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.ranks,
    pytest.mark.timeout(1800),
]  # a cluster may take long to come up on a loaded machine
TWO = ("--launcher", "slurm", "--nodes", "2", "--nproc", "1")


@pytest.fixture
def apart(
    networks: Namespaces, tmp_path: Path, model_dir: Path, rows_file: Path, caches: Path
) -> Iterator[SlurmJob]:
    """A job whose second node sees another folder where the first one has its output_dir's parent,
    and rows of its own.
    """
    mine, other = tmp_path / "runs", tmp_path / "runs-of-bob"
    rows = tmp_path / "rows.jsonl"
    for folder in (mine, other, tmp_path / "slurm", tmp_path / "job"):
        folder.mkdir()
    rows.write_text(rows_file.read_text())
    (tmp_path / "rows-of-bob.jsonl").write_text(rows.read_text())
    own = [Own(), Own(binds=[(other, mine), (tmp_path / "rows-of-bob.jsonl", rows)])]
    with cluster(networks, tmp_path / "slurm", own=own) as slurm:
        job = SlurmJob(slurm, tmp_path / "job", model=model_dir, rows=rows, caches=caches)
        job.out = mine / "out"
        job.config(output_dir=str(job.out))
        yield job
        slurm.cancel_all()
        job.close()


def test_without_a_shared_disk_everything_ends_whole_on_the_first_node(
    apart: SlurmJob, tmp_path: Path
) -> None:
    apart.config(parallel={"strategy": "fsdp"})
    front = apart.type(*TWO, json=False)
    assert front.wait(limit_s=1000) == 0, front.text()
    assert [line["step"] for line in apart.metrics()] == [1, 2, 3, 4]
    assert {path.name for path in (apart.out / "checkpoints").glob("step-*")} == {
        "step-00000002",
        "step-00000004",
    }
    assert (apart.out / "adapter" / "adapter_model.safetensors").exists()
    assert [node["shares_output"] for node in apart.read("plan.json")["nodes"]] == [True, False]
    assert not (tmp_path / "runs-of-bob" / "out" / "checkpoints").exists()


def test_nodes_that_disagree_are_refused_and_nothing_is_trained(apart: SlurmJob, tmp_path: Path) -> None:
    changed = tmp_path / "rows-of-bob.jsonl"
    changed.write_text(changed.read_text().replace("cat", "dog", 1))
    front = apart.type(*TWO)
    assert front.wait(limit_s=1000) == 3, front.text()
    (verdict,) = front.verdicts
    assert verdict.cause == "data_mismatch"
    assert "node 1 (bob)" in verdict.summary
    assert not (apart.out / "metrics.jsonl").exists()
