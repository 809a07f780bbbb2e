"""The ladder over real nodes whose network is broken in one way.

Run, as root: pytest tests/front/checks/ladder/test_nodes.py
"""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces
from tests.needs import lacking

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(lacking("iptables")), reason=lacking("iptables")),
]


@pytest.fixture
def two_networks(networks: Namespaces) -> Iterator[Namespaces]:
    """Nodes 0 and 1 have a cable between them, eth1, beside the common network."""
    a, b = networks.name(0), networks.name(1)
    subprocess.run(
        ["ip", "link", "add", "eth1", "netns", a, "type", "veth", "peer", "name", "eth1", "netns", b],
        check=True,
    )
    for node in range(2):
        networks.inside(node, "ip", "addr", "add", f"10.232.7.{node + 1}/24", "dev", "eth1")
        networks.inside(node, "ip", "link", "set", "eth1", "up")
    end = time.monotonic() + 10  # the kernel reports an interface as up a moment after its cable is
    while any("state UP" not in networks.inside(node, "ip", "link", "show", "eth1") for node in range(2)):
        assert time.monotonic() < end, "eth1 does not come up"
        time.sleep(0.02)
    yield networks
    networks.inside(0, "ip", "link", "del", "eth1")


def climbed(job: Job, *words: str, config: bool = False) -> tuple[list[Front], dict[str, Any]]:
    before = dict(os.environ)
    words = ("--ladder", *words)
    fronts = [job.start(node, *words, command="doctor", config=config, json=True) for node in range(2)]
    together(fronts)
    reported = [json.loads(front.text("out"))["checks"] for front in fronts]
    assert reported[0] == reported[1], job.transcript()
    (finding,) = [one for one in reported[0] if one["id"] == "network.ladder"]
    assert dict(os.environ) == before
    job.wait_gone()
    return fronts, finding


def test_what_works_is_left_alone(pair: Job) -> None:
    fronts, finding = climbed(pair)
    very_slow = (
        "no setting makes it faster" in finding["evidence"][0]
    )  # on a machine whose cores are all in use
    assert finding["status"] == "pass" or very_slow, finding
    assert not [line for line in finding["fix"] if line.startswith(("export ", "unset "))]
    assert [front.exit_code for front in fronts] == [0, 0]


def test_around_a_blocked_range_of_ports_the_other_network_is_found(
    two_networks: Namespaces, pair: Job
) -> None:
    for node in range(2):
        two_networks.drop(node, "-i", "eth0", "-p", "tcp", "--syn", "--dport", "32768:60999")
    fronts, finding = climbed(pair)
    assert finding["status"] == "fail", pair.transcript()
    assert finding["fix"] == ["export GLOO_SOCKET_IFNAME=eth1"]
    assert [front.exit_code for front in fronts] == [6, 6]


def test_around_a_hole_for_large_packets_the_other_network_is_found(
    two_networks: Namespaces, pair: Job
) -> None:
    """Small messages pass, so that only the large sum hangs."""
    for node in range(2):
        two_networks.drop(node, "-i", "eth0", "-p", "tcp", "-m", "length", "--length", "1400:65535")
    _, finding = climbed(pair, "--debug-comm")
    assert finding["fix"] == ["export GLOO_SOCKET_IFNAME=eth1"], pair.transcript()
    for rank in (0, 1):
        kept = sorted((pair.folder / f"node{rank}").glob(f"runs/doctor-*/*/rank-{rank:05d}.log"))
        assert [path.parent.name for path in kept][-1] == "03-interface-pinned-to-eth1", kept
        assert len({path.parent.parent.name for path in kept}) == 1
        assert kept[0].stat().st_size > 0
    assert "the large all-reduce did not complete" in "\n".join(finding["evidence"])


def test_blocking_the_only_network_is_reported_as_nothing_works(networks: Namespaces, pair: Job) -> None:
    """And one node, whose runs are elsewhere, cannot write down what its libraries say."""
    for node in range(2):
        networks.drop(node, "-i", "eth0", "-p", "tcp", "--syn", "--dport", "32768:60999")
    (pair.home(1) / "runs").write_text("a file")
    _, finding = climbed(pair, "--debug-comm", config=True)
    assert "nothing works" in finding["evidence"][0]
    assert "logs of the libraries: runs/doctor-" in finding["evidence"][-1]
    assert "; on node 1 they are not kept: runs/doctor-" in finding["evidence"][-1], finding
