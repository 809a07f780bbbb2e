"""Speed between real nodes, and who is slow.

Run, as root: pytest tests/front/checks/network/test_node_speed.py
"""

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def speed(front: Front) -> dict[str, object]:
    (finding,) = [one for one in json.loads(front.text("out"))["checks"] if one["id"] == "peers.speed"]
    return finding


def shaped(networks: Namespaces, node: int, *towards: int) -> None:
    """What a node sends to some others is held to 24 Mbit/s."""
    lines = [
        "qdisc add dev eth0 root handle 1: htb default 10",
        "class add dev eth0 parent 1: classid 1:10 htb rate 10gbit",
    ]
    lines.append("class add dev eth0 parent 1: classid 1:20 htb rate 24mbit")
    lines += [
        f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {networks.address(other)}/32 flowid 1:20"
        for other in towards
    ]
    for line in lines:
        done = tc(networks, node, line)
        if done.returncode != 0:
            pytest.skip(f"needs queues in the kernel: {done.stderr.strip()}")


def tc(networks: Namespaces, node: int, line: str) -> "subprocess.CompletedProcess[str]":
    words = ["ip", "netns", "exec", networks.name(node), "tc", *line.split()]
    return subprocess.run(words, check=False, capture_output=True, text=True)


@pytest.fixture
def queues(networks: Namespaces) -> Iterator[Namespaces]:
    """Networks whose queues are taken away afterwards."""
    yield networks
    for node in range(networks.nodes):
        tc(networks, node, "qdisc del dev eth0 root")


@pytest.mark.long
@pytest.mark.makes("peers.speed", "pass")
def test_two_nodes_measure_each_other(pair: Job) -> None:
    fronts = [pair.start(node, command="doctor", config=False, json=True) for node in range(2)]
    assert together(fronts) == [0, 0], pair.transcript()
    found = speed(fronts[1])
    assert found == speed(fronts[0])
    assert found["status"] == "pass", found
    assert "MB/s there" in str(found["evidence"])


@pytest.mark.long
@pytest.mark.makes("peers.speed", "warn")
def test_a_slow_node_is_named_and_not_its_partners(queues: Namespaces, trio: Job) -> None:
    shaped(queues, 2, 0, 1)
    fronts = [trio.start(node, command="doctor", config=False, json=True) for node in range(3)]
    together(fronts)
    found = speed(fronts[0])
    assert found["status"] == "warn", trio.transcript()
    assert f"{fronts[2].label} is slow with every partner" in str(found["evidence"])


@pytest.mark.long
def test_a_slow_link_is_named_and_neither_of_its_ends(queues: Namespaces, trio: Job) -> None:
    shaped(queues, 2, 1)
    fronts = [trio.start(node, command="doctor", config=False, json=True) for node in range(3)]
    together(fronts)
    found = speed(fronts[0])
    assert found["status"] == "warn", trio.transcript()
    assert f"the link between {fronts[1].label} and {fronts[2].label} is slow" in str(found["evidence"])
