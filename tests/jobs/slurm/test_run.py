"""`srun unisono run -- torchrun …`: the step says which node is which.

A real Slurm on network namespaces; skipped with the reason where there is none.
"""

import sys
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.slurm.harness import SlurmJob

pytestmark = [pytest.mark.long, pytest.mark.ranks, pytest.mark.timeout(1800)]

_PROGRAM = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
seen = torch.ones(1)
dist.all_reduce(seen)
print(f"world {int(seen)} node {os.environ['GROUP_RANK']}", flush=True)
dist.destroy_process_group()
"""


def typed(job: SlurmJob, *words: str) -> Front:
    (job.home(0) / "program.py").write_text(_PROGRAM)
    front = ["-m", "unisono", "run", "--output-dir", "guarded", "--", *words]
    return job.typed("srun", "-N2", "--ntasks-per-node=1", sys.executable, *front)


def test_a_step_needs_no_flags_and_no_token(job: SlurmJob) -> None:
    front = typed(job, str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "1", "program.py")
    assert front.wait() == 0, front.text()
    assert "world 2 node 0" in front.text()
    assert "world 2 node 1" in front.text()
    assert "SLURM_STEP_NUM_NODES of step" in front.text()
    job.wait_gone()
