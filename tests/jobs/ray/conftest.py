"""Ray clusters for tests; one serves a whole module."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.network_namespaces import Namespaces, why_no_namespaces
from tests.jobs.ray.cluster import RayCluster, config_of

Cluster = Callable[..., RayCluster]
Typed = Callable[..., str]


@pytest.fixture(scope="module")
def cluster_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Makes a cluster with so many CPUs on each node, perhaps with a dashboard; it is ended with
    the module.
    """
    if why_no_namespaces():
        pytest.skip(why_no_namespaces())
    pytest.importorskip("ray")
    made: list[tuple[RayCluster | None, Namespaces]] = []

    def make(cpus: list[int], *, dashboard: bool = False) -> RayCluster:
        ground = Namespaces(len(cpus), tmp_path_factory.mktemp("ground"))
        made.append((None, ground))
        cluster = RayCluster(ground, tmp_path_factory.mktemp("ray"), cpus=cpus, dashboard=dashboard)
        made[-1] = (cluster, ground)
        return cluster

    yield make
    for cluster, ground in made:
        if cluster is not None:
            cluster.close()
        ground.close()


@pytest.fixture
def config(model_dir: Path, rows_file: Path) -> Callable[..., str]:
    """Writes a config onto the disk where commands are typed; gives its path.

    Each call has an output_dir of its own.
    """
    count = 0

    def write(cluster: RayCluster, **sections: Any) -> str:
        nonlocal count
        count += 1
        out = cluster.on_disk(0, cluster.disk) / "made"
        out.mkdir(exist_ok=True)
        number = len(list(out.iterdir()))
        body = config_of(cluster, model=model_dir, rows=rows_file)
        body |= {"output_dir": str(cluster.disk / f"out{number}"), **sections}
        (out / f"c{number}.yaml").write_text(json.dumps(body))
        return str(cluster.disk / f"made/c{number}.yaml")

    return write
