"""A real network that is broken in one way at a time, as one node finds it.

Run, as root: pytest tests/front/checks/network/test_one_node.py
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.front.checks.doctor_process import doctor
from tests.front.checks.network.conftest import Inside
from tests.jobs.nodes.network_namespaces import Own
from tests.needs import lacking, program
from tests.ports import free_port


@pytest.mark.makes("network.interfaces", "pass")
@pytest.mark.makes("network.choice", "pass")
@pytest.mark.makes("network.names", "pass")
@pytest.mark.makes("network.port", "pass")
@pytest.mark.makes("network.firewall", "pass")
def test_all_is_well_in_a_whole_network(inside: Inside) -> None:
    found = inside.look()
    firewall = found.pop("network.firewall")
    assert {name: [one["status"] for one in findings] for name, findings in found.items()} == {
        name: ["pass"] for name in ("network.interfaces", "network.choice", "network.names", "network.port")
    }
    # Without a program that lists the rules, doctor does not know them, and says so.
    lists_rules = program("iptables") or program("nft")
    assert [one["status"] for one in firewall] == ["pass" if lists_rules else "unknown"]
    assert "gloo uses eth0" in found["network.choice"][0]["evidence"][0]


@pytest.mark.makes("network.interfaces", "fail")
def test_a_dead_link_is_named(inside: Inside) -> None:
    inside.networks.inside(0, "ip", "link", "set", "eth0", "down")
    (finding,) = inside.look()["network.interfaces"]
    assert (
        finding["status"],
        "no external interface is up" in finding["evidence"][0],
    ) == ("fail", True)
    assert any(line.startswith("eth0") and "down" in line for line in finding["evidence"])


@pytest.mark.makes("network.choice", "fail")
def test_a_wrong_interface_in_a_variable_is_named_with_the_right_one(inside: Inside) -> None:
    (finding,) = inside.look(env={"GLOO_SOCKET_IFNAME": "ens34"})["network.choice"]
    assert (finding["status"], finding["fix"][0]) == ("fail", "export GLOO_SOCKET_IFNAME=eth0")


@pytest.mark.makes("network.names", "fail")
def test_a_head_name_that_leads_to_itself_is_named(inside: Inside) -> None:
    hosts = inside.networks.hosts().replace(f"{inside.networks.address(0)} ada", "127.0.1.1 ada")
    (finding,) = inside.look(1, head="ada:29411", own=Own(hosts=hosts))["network.names"]
    assert finding["status"] == "fail"
    assert "the head's name ada resolves to 127.0.1.1: this machine itself" in finding["evidence"][0]


@pytest.mark.makes("network.firewall", "warn")
@pytest.mark.skipif(bool(lacking("iptables")), reason=lacking("iptables"))
def test_a_firewall_that_refuses_a_range_of_ports_is_shown(inside: Inside) -> None:
    inside.networks.drop(0, "-p", "tcp", "--dport", "32768:60999")
    (finding,) = inside.look()["network.firewall"]
    assert finding["status"] == "warn"
    assert "32768:60999" in finding["evidence"][1]


@pytest.mark.makes("network.port", "fail")
def test_a_port_that_a_different_program_has_is_named_with_the_program(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("", port)):
        seen = doctor(tmp_path, env={"MASTER_PORT": str(port)})
    assert seen.status("network.port") == "fail"
    assert "in use by a different program: pid" in seen.text("network.port")
    assert f"pid {os.getpid()}" in seen.text("network.port")


def test_holder_of_a_port_is_named_without_secrets_of_its_command_line(tmp_path: Path) -> None:
    secret = "plain-text-secret"
    code = (
        "import socket, sys; server = socket.create_server(('', 0)); print(server.getsockname()[1],"
        " flush=True); sys.stdin.read()"
    )
    script = tmp_path / "serve.py"
    script.write_text(code)
    with subprocess.Popen(
        [sys.executable, str(script), "--token", secret], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:  # fmt: skip
        assert server.stdout is not None
        seen = doctor(tmp_path, env={"MASTER_PORT": server.stdout.readline().strip()})
        server.communicate()
    assert f"pid {server.pid} ({Path(sys.executable).name} serve.py)" in seen.text("network.port")
    assert secret not in seen.out + seen.err


def test_one_machine_needs_no_network(inside: Inside) -> None:
    """Only loopback is there, as on a laptop in a train."""
    inside.networks.inside(0, "ip", "link", "set", "eth0", "down")
    found = inside.look(nodes=1)
    assert {one["status"] for findings in found.values() for one in findings} == {"pass"}
