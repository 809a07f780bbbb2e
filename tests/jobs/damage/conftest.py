"""Real runs whose checkpoints are damaged: two ranks with shards of all weights, and one with whole
files of an adapter.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import training_in
from tests.jobs.damage.damages import Specimen, another_run
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Loopback
from unisono.base.user_key import user_key
from unisono.guard.facts import read_environment

STEPS = 4
KEPT = {"every": "1 steps", "keep": 3}


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
        duration=f"{STEPS} steps", checkpoint=KEPT, parallel={"strategy": "fsdp"}, adapter=None,
        optim={"lr": 1e-3},
    )  # fmt: skip
    front = job.start(0, "--nproc", "2", topology=False)
    assert front.wait() == 0, front.text()
    key = user_key(folder / "caches" / "place0" / "settings" / "unisono")
    root = job.out / "checkpoints"
    other = another_run(root, folder / "other", key, random.Random(0))
    yield Trained(job, Specimen(root, other, key, job.read("plan.json")["run_id"]))
    job.close()


@pytest.fixture(scope="session")
def of_shards(trained: Trained) -> Specimen:
    """The checkpoints of that run."""
    return trained.specimen


@pytest.fixture(scope="session")
def of_adapter(model_dir: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Specimen:
    """The checkpoints of an adapter that one rank trained, here."""
    folder = tmp_path_factory.mktemp("damage")
    train = training_in(folder, model_dir=model_dir, rows_file=rows_file)
    run = train(duration=f"{STEPS} steps", checkpoint=KEPT)
    root = run.directory / "checkpoints"
    key = user_key(read_environment().settings_dir)
    return Specimen(root, another_run(root, folder / "other", key, random.Random(0)), key, run.plan.run_id)
