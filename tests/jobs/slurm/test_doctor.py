"""`unisono doctor --launcher slurm`, and `srun unisono doctor`.

A real Slurm on network namespaces; skipped with the reason where there is none.
"""

import json
import sys
from typing import Any

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.slurm.harness import SlurmJob

pytestmark = pytest.mark.timeout(1800)


def look(job: SlurmJob, *words: str) -> Front:
    """Types `unisono --json doctor …` on the first node, without a token."""
    return job.typed(sys.executable, "-m", "unisono", "--json", "doctor", *words)


def checks(front: Front) -> dict[str, list[dict[str, Any]]]:
    """The findings of node 0's answer, by check."""
    answer = next(line for line in front.text().splitlines() if line.startswith("{"))
    found: dict[str, list[dict[str, Any]]] = {}
    body = json.loads(answer)
    assert "checks" in body, front.text()
    for one in body["checks"]:
        found.setdefault(one["id"], []).append(one)
    return found


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("config", [[], ["c.yaml"]], ids=["the machines alone", "what a config needs"])
def test_the_nodes_of_a_step_look_together_and_their_table_comes_back(
    job: SlurmJob, config: list[str]
) -> None:
    front = look(job, *config, "--launcher", "slurm", "--nodes", "2", "--nproc", "1")
    assert front.wait() in (0, 6), front.text()  # 6: this machine may have something that a check blames
    found = checks(front)
    assert found["peers.agreement"][0]["status"] == "pass", front.text()
    places = {one["where"] for findings in found.values() for one in findings if one.get("where")}
    assert any("ada" in place and "bob" in place for place in places), places
    assert front.text().count('{"schema"') == 1, "node 1's own copy of the table is nobody's business"
    job.wait_gone()


@pytest.mark.long
@pytest.mark.ranks
def test_a_bare_srun_needs_no_flags(job: SlurmJob) -> None:
    """Every node prints the table; as lines, since srun breaks a long one, and puts pieces of
    another task's between.
    """
    front = job.typed("srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "unisono", "doctor")
    assert front.wait() in (0, 6), front.text()
    assert front.text().count("2 nodes have the same run") == 2, front.text()


@pytest.mark.slow
def test_bad_requests_and_bad_configs_are_refused_before_slurm_is_asked(
    job: SlurmJob,
) -> None:
    front = look(job, "--launcher", "slurm", "--nodes", "2", "--partition", "moon")
    assert front.wait() == 2, front.text()
    assert "unknown partition moon" in front.text()
    front = look(job, "c.yaml", "optim.lr=fast", "--launcher", "slurm", "--nodes", "2")
    assert front.wait() == 2, front.text()
    assert "optim.lr" in front.text()
    front = look(job, "--launcher", "slurm", "--node-rank", "1")
    assert front.wait() == 2, front.text()
    assert "remove --node-rank" in front.text()
