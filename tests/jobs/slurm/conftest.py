"""A cluster of two nodes, and jobs on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.network_namespaces import Ground, Namespaces, why_no_namespaces
from tests.jobs.slurm.harness import SlurmJob
from tests.jobs.slurm.slurm_cluster import Cluster, cluster, why_no_slurm


@pytest.fixture(scope="module")
def networks(ground: Ground) -> Namespaces:
    """Nodes with networks of their own."""
    if not isinstance(ground, Namespaces):
        pytest.skip(why_no_namespaces())
    if why_no_slurm():
        pytest.skip(why_no_slurm())
    return ground


@pytest.fixture(scope="module")
def slurm_of(networks: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two nodes, for all tests of a file."""
    with cluster(networks, tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def slurm(slurm_of: Cluster) -> Iterator[Cluster]:
    """The same, with no job and whole."""
    yield slurm_of
    slurm_of.mend()


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path, model_dir: Path, rows_file: Path, caches: Path) -> Iterator[SlurmJob]:
    """A job of two nodes; its commands are given on the first one."""
    folder = tmp_path / "job"
    folder.mkdir()
    made = SlurmJob(slurm, folder, model=model_dir, rows=rows_file, caches=caches)
    yield made
    slurm.cancel_all()
    made.close()
