"""Jobs of one node with several ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Loopback


@pytest.fixture
def solo_of(tmp_path: Path, model_dir: Path, rows_file: Path, caches: Path) -> Iterator[Callable[[], Job]]:
    """A function that makes a job of one node."""
    jobs: list[Job] = []

    def make() -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(Loopback(), folder, model=model_dir, rows=rows_file, caches=caches, nodes=1))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def solo(solo_of: Callable[[], Job]) -> Job:
    """A job of one node."""
    return solo_of()
