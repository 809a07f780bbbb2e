"""A real run of two ranks whose checkpoints are damaged."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.damage.damages import Specimen, another_run
from tests.nodes.ground import Loopback
from tests.nodes.harness import Job
from unisono.checkpoint.signing import user_key

STEPS = 4


@dataclass(frozen=True)
class Trained:
    """A run that has ended, which further runs may be copies of; and its checkpoints."""

    job: Job
    specimen: Specimen


@pytest.fixture(scope="session")
def trained(model_dir: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """FSDP2 on two ranks, so that there are shards where the run writes any."""
    folder = tmp_path_factory.mktemp("damage")
    job = Job(Loopback(), folder, model=model_dir, rows=rows_file, caches=folder / "caches", nodes=1)
    job.config(
        duration=f"{STEPS} steps", checkpoint={"every": "1 steps", "keep": 3}, parallel={"strategy": "fsdp"}, adapter=None,
        optim={"lr": 1e-3},
    )  # fmt: skip
    front = job.start(0, "--nproc", "2", topology=False)
    assert front.wait() == 0, front.text()
    key = user_key(folder / "caches" / "place0" / "settings" / "unisono")
    root = job.out / "checkpoints"
    other = another_run(root, folder / "other", key, random.Random(0))
    yield Trained(job, Specimen(root, other, key, job.read("plan.json")["run_id"]))
    job.close()
