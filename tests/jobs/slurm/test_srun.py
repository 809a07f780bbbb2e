"""Inside an allocation `srun unisono train CONFIG` needs no flags.

Run: pytest tests/jobs/slurm/test_srun.py

A real Slurm on network namespaces; skipped with the reason where there is none.
"""

import pytest

from tests.jobs.slurm.harness import SlurmJob

pytestmark = pytest.mark.timeout(1800)  # a cluster may take long to come up on a loaded machine


@pytest.mark.long
@pytest.mark.ranks
def test_srun_on_two_nodes_needs_no_flags_and_no_token(job: SlurmJob) -> None:
    front = job.srun()
    assert front.wait() == 0, front.text()
    plan = job.read("plan.json")
    assert [(node["node_rank"], node["host"]) for node in plan["nodes"]] == [(0, "ada"), (1, "bob")]
    assert plan["world_size"] == 2
    assert plan["origins"]["nodes"].startswith("SLURM_STEP_NUM_NODES of step ")
    assert plan["origins"]["node_rank"] == "SLURM_NODEID"
    assert plan["origins"]["head"].startswith("the first of SLURM_STEP_NODELIST")
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4]


@pytest.mark.slow
def test_more_tasks_than_nodes_are_refused_with_the_right_command(job: SlurmJob) -> None:
    front = job.srun(tasks=("-N2", "-n4"))
    assert front.wait() == 2, front.text()
    assert "as one of 4 tasks on 2 nodes" in front.text()
    assert "srun --ntasks-per-node=1 unisono train c.yaml --nproc 2" in front.text()
    assert not job.out.exists()


@pytest.mark.long
def test_nodes_without_a_key_in_common_are_reported_how_to_share_a_secret(job: SlurmJob) -> None:
    own_home = 'export XDG_CONFIG_HOME=$PWD/home-$SLURM_NODEID; exec "$@"'
    front = job.type(
        before=["srun", "-N2", "--ntasks-per-node=1", "bash", "-c", own_home, "bash"], json=False
    )
    assert front.wait() == 3, front.text()
    assert "[token_rejected]" in front.text() or "token" in front.text()
    assert "UNISONO_TOKEN=$(python3 -c" in front.text()
