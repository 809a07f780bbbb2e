"""Networks that are broken between nodes which all reach the head.

Run, as root: pytest tests/jobs/nodes/test_network.py
"""

import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.jobs.nodes.verdict_checks import named, refused
from tests.needs import need

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def firewalls(networks: Namespaces) -> Namespaces:
    """Networks in which packets can be dropped."""
    need("iptables")
    return networks


def test_a_host_name_that_leads_to_itself_is_named(networks: Namespaces, pair: Job) -> None:
    """Many installers write 127.0.1.1 with the host's name into /etc/hosts.

    The learning rate ends this job.
    """
    pair.config(1, optim={"lr": 1e-5})
    there = networks.hosts().replace(f"{networks.address(1)} bob", "127.0.1.1 bob")
    head = ["--head", f"{networks.host(0)}:{pair.port}"]
    fronts = [pair.start(0, *head), pair.start(1, *head, own=Own(hosts=there))]
    refused(fronts, "config_mismatch")
    checks = pair.read("agreement.json")["checks"]
    (check,) = [check for check in checks if "127.0.1.1" in check["text"]]
    assert check["status"] in ("warn", "fail")
    assert fronts[1].host in check["text"] + check["where"]


def test_a_head_name_that_leads_the_head_to_itself_is_refused(networks: Namespaces, pair: Job) -> None:
    """Where the head's own name is 127.0.1.1 on its machine, nobody else could reach what it binds
    there.
    """
    here = networks.hosts().replace(f"{networks.address(0)} ada", "127.0.1.1 ada")
    head = ["--head", f"{networks.host(0)}:{pair.port}", "--join-timeout", "6"]
    fronts = [pair.start(0, *head, own=Own(hosts=here), json=True), pair.start(1, *head, json=True)]
    codes = together(fronts)
    if codes == [0, 0]:  # it took an address that others reach, and said so
        assert "127.0.1.1" in pair.transcript()
        return
    assert codes == [3, 3], pair.transcript()
    assert fronts[0].verdicts[-1].cause == "hostname_loopback", pair.transcript()
    assert "127.0.1.1" in fronts[0].text()


@pytest.mark.fault("ephemeral ports dropped at one node")
def test_closed_ephemeral_ports_between_two_nodes_are_named(firewalls: Namespaces, trio: Job) -> None:
    """The head's port is open; those on which ranks meet are not.

    It used to hang until the group's time-out.
    """
    firewalls.drop(2, "-p", "tcp", "--syn", "--dport", "32768:60999")
    fronts = trio.start_all()
    verdict = refused(fronts, "address_unreachable", hosts=[fronts[2].host])
    assert firewalls.address(2) in str(verdict.to_json())
    assert "timed out" in str(verdict.to_json())


@pytest.mark.fault("one-way link")
def test_way_open_in_one_direction_only_is_named_with_its_direction(firewalls: Namespaces, trio: Job) -> None:
    firewalls.drop(2, "-p", "tcp", "--syn", "-s", firewalls.address(1))
    fronts = trio.start_all()
    verdict = refused(fronts, "address_unreachable")
    text = str(verdict.to_json())
    assert fronts[1].label in verdict.summary
    assert fronts[2].label in verdict.summary
    assert verdict.summary.index(fronts[1].label) < verdict.summary.index(fronts[2].label), verdict.summary
    assert firewalls.address(2) in text


@pytest.mark.fault("packets above 1,400 bytes lost")
def test_packets_that_only_pass_while_they_are_small_are_named(firewalls: Namespaces, trio: Job) -> None:
    """Node 2's interface believes in 1,500 bytes, and on its way nothing above 1,400 passes."""
    for other in (0, 1):
        firewalls.drop(2, "-s", firewalls.address(other), "-m", "length", "--length", "1401:65535")
        firewalls.drop(other, "-s", firewalls.address(2), "-m", "length", "--length", "1401:65535")
    fronts = trio.start_all()
    verdict = refused(fronts, "mtu_blackhole", hosts=[fronts[2].host], within_s=60)
    assert any("mtu" in line for line in verdict.fix)


def test_a_smaller_mtu_that_is_known_everywhere_is_not_a_fault(networks: Namespaces, pair: Job) -> None:
    """Another MTU on one interface is a difference that TCP copes with; the learning rate ends this
    job.
    """
    networks.inside(1, "ip", "link", "set", "eth0", "mtu", "1400")
    pair.config(1, optim={"lr": 1e-5})
    verdict = refused(pair.start_all(), "config_mismatch")
    assert "mtu" not in verdict.summary


@pytest.mark.fault("cable cut while nodes join (--join-timeout 4)")
def test_a_cable_that_is_cut_while_nodes_join_leaves_nobody_waiting(networks: Namespaces, pair: Job) -> None:
    networks.inside(1, "ip", "link", "set", "eth0", "down")
    fronts = [pair.start(node, "--join-timeout", "4", json=True) for node in range(2)]
    assert together(fronts) == [3, 3], pair.transcript()
    assert named(fronts[:1]).verdict.cause == "node_missing"
    assert named(fronts[1:]).verdict.cause == "head_unreachable"
