"""The harness itself: nodes are apart, and nothing of them stays.

Run: pytest tests/jobs/nodes/test_network_namespaces.py
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own


def _on(ground: Namespaces, node: int, *words: str, own: Own | None = None) -> str:
    return subprocess.check_output(ground.command(node, words, own or Own()), text=True).strip()


def test_nodes_have_names_addresses_and_mounts_of_their_own(networks: Namespaces, tmp_path: Path) -> None:
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    mine.mkdir()
    (mine / "file").write_text("mine")
    assert [_on(networks, node, "hostname") for node in range(2)] == ["ada", "bob"]
    assert networks.address(1) in _on(networks, 0, "getent", "hosts", "bob")
    assert _on(networks, 1, "ls", str(shared), own=Own(binds=[(mine, shared)])) == "file"
    assert _on(networks, 0, "ls", str(shared)) == ""
    assert os.uname().nodename not in ("ada", "bob")
    size = _on(
        networks, 0, "stat", "-f", "-c", "%b %S", "/dev/shm", own=Own(small=[(Path("/dev/shm"), 1 << 20)])
    )
    blocks, block = map(int, size.split())
    assert blocks * block == 1 << 20


@pytest.mark.ranks
@pytest.mark.long
def test_a_front_on_a_node_trains_and_nothing_of_it_stays(pair: Job) -> None:
    front = pair.start(1, topology=False)
    assert front.wait() == 0, front.text()
    assert len(pair.metrics()) == 4
    pair.wait_gone()
