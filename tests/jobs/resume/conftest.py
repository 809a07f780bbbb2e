"""Runs of several ranks that are killed and go on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Ground, Loopback
from tests.jobs.resume.killed_runs import Layout, Undisturbed, undisturbed

JobOf = Callable[[int], Job]
_Make = Callable[[Path, int], Job]
Reference = Callable[[Layout, int], Undisturbed]


@pytest.fixture(scope="session")
def ready(ground: Ground, model_dir: Path, rows_file: Path, caches: Path) -> _Make:
    """A function that makes a job of so many nodes in a folder."""

    def make(folder: Path, nodes: int) -> Job:
        folder.mkdir()
        place = ground if nodes > 1 else Loopback()
        return Job(place, folder, model=model_dir, rows=rows_file, caches=caches, nodes=nodes)

    return make


@pytest.fixture
def job_of(ready: _Make, tmp_path: Path) -> Iterator[JobOf]:
    """A function that makes a job of so many nodes; what it started is ended with the test."""
    jobs: list[Job] = []

    def make(nodes: int) -> Job:
        jobs.append(ready(tmp_path / f"job{len(jobs)}", nodes))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def reference(ready: _Make, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A function that gives the undisturbed run of a layout and so many steps; it is made once."""
    known: dict[tuple[Layout, int], Undisturbed] = {}

    def give(layout: Layout, steps: int) -> Undisturbed:
        key = (layout, steps)
        if key not in known:
            job = ready(tmp_path_factory.mktemp("undisturbed") / "job", layout.nodes)
            try:
                known[key] = undisturbed(job, layout, steps=steps)
            finally:
                job.close()
        return known[key]

    return give
