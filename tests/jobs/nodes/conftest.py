"""Several nodes on this machine, and a job on them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Ground, Namespaces, why_no_namespaces


@pytest.fixture
def networks(ground: Ground) -> Iterator[Namespaces]:
    """Nodes whose networks can be broken; whole again after the test."""
    if not isinstance(ground, Namespaces):
        pytest.skip(why_no_namespaces())
    yield ground
    ground.open()


@pytest.fixture
def job_of(
    ground: Ground, tmp_path: Path, model_dir: Path, rows_file: Path, caches: Path
) -> Iterator[Callable[[int], Job]]:
    """A function that makes a job of so many nodes; what it started is ended with the test."""
    jobs: list[Job] = []

    def make(nodes: int) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(ground, folder, model=model_dir, rows=rows_file, caches=caches, nodes=nodes))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def pair(job_of: Callable[[int], Job]) -> Job:
    """A job of two nodes."""
    return job_of(2)


@pytest.fixture
def mounts(pair: Job) -> Iterator[ExitStack]:
    """Where disks of the pair are mounted; they answer again before the job is ended."""
    with ExitStack() as stack:
        yield stack
    pair.close()


@pytest.fixture
def trio(job_of: Callable[[int], Job]) -> Job:
    """A job of three nodes, in which one can be odd."""
    return job_of(3)
