"""Interfaces and names as this machine has them. Run: pytest tests/guard/facts"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.needs import need_namespaces
from unisono.guard.facts.network import KernelInterface, SystemNetwork, _interface, is_loopback, resolve


def test_the_loopback_interface_is_listed_with_its_address() -> None:
    found = {one.name: one for one in SystemNetwork().interfaces()}
    assert "127.0.0.1" in found["lo"].addresses
    assert (found["lo"].loopback, found["lo"].kind, found["lo"].up) == (True, "loopback", True)
    assert (found["lo"].mtu or 0) > 1000


def test_all_interfaces_of_the_system_are_listed() -> None:
    before = {name for _, name in socket.if_nameindex()}
    found = {one.name for one in SystemNetwork().interfaces()}
    after = {name for _, name in socket.if_nameindex()}  # others make and remove some meanwhile
    assert before & after <= found <= before | after


@pytest.mark.parametrize(
    ("name", "hardware", "made", "addresses", "kind"),
    [
        ("eth0", 1, "", [], "ethernet"), ("enp1s0f0", 1, "", ["10.0.0.1"], "ethernet"), ("bond0", 1, "bond", [], "ethernet"),
        ("eth0.7", 1, "vlan", [], "ethernet"), ("ib0", 32, "", ["10.1.0.1"], "infiniband"), ("ib0.8001", 32, "ipoib", [], "infiniband"),
        ("docker0", 1, "bridge", ["172.17.0.1"], "virtual"), ("br-1234", 1, "bridge", [], "virtual"), ("eth0", 1, "veth", ["10.0.0.2"], "ethernet"),
        ("veth12ab", 1, "veth", ["169.254.1.1"], "virtual"), ("calib0", 1, "veth", [], "virtual"), ("eth9", 1, "veth", [], "virtual"),
        ("wg0", 65534, "wireguard", ["10.9.0.1"], "virtual"), ("dummy0", 1, "dummy", [], "virtual"), ("x", 512, "", [], "unknown"),
    ],
)  # fmt: skip
def test_kinds_are_distinguished(
    name: str, hardware: int, made: str, addresses: list[str], kind: str
) -> None:
    link = KernelInterface(
        name, 1500, up=True, loopback=False, hardware=hardware, kind=made, addresses=addresses
    )
    assert _interface(link).kind == kind


def test_a_literal_address_needs_no_resolver() -> None:
    assert resolve("10.1.2.3") == ["10.1.2.3"]
    assert resolve("[::1]") == ["::1"]


def test_a_name_that_nobody_knows_resolves_to_nothing() -> None:
    assert resolve("no-such-host.invalid") == []
    assert resolve("a" * 300) == []
    assert resolve("") == []


def test_localhost_is_found_once_each() -> None:
    found = resolve("localhost")
    assert found
    assert all(is_loopback(address) for address in found)
    assert len(found) == len(set(found))


def test_a_resolver_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """getaddrinfo cannot be made to hang here without a name server of our own, so a slow one
    stands in its place.
    """
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_named: release.wait(30) and [])
    began = time.monotonic()
    assert resolve("slow.example", limit_s=0.2) == []
    assert time.monotonic() - began < 10
    release.set()


@given(st.integers(0, 2**24 - 1))
def test_all_of_127_is_loopback(low: int) -> None:
    assert is_loopback(f"127.{low >> 16}.{low >> 8 & 255}.{low & 255}")


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("::1", True),
        ("::ffff:127.0.1.1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("name", False),
    ],
)
def test_loopback_in_other_spellings(address: str, answer: bool) -> None:  # noqa: FBT001
    assert is_loopback(address) is answer


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"facts{os.getpid()}"
    need_namespaces(name)
    subprocess.run(["ip", "netns", "add", name], capture_output=True, check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True, capture_output=True)


def test_another_namespaces_interfaces_are_those_that_its_processes_see(namespace: str) -> None:
    for words in (
        "link add eth0 type veth peer name far0", "addr add 10.77.0.1/24 dev eth0", "addr add 10.77.0.2/24 dev eth0",
        "link set eth0 mtu 1400 up", "link set far0 up", "link add docker0 type bridge",
    ):  # fmt: skip
        subprocess.run(["ip", "-n", namespace, *words.split()], check=True, capture_output=True)
    # nsenter leaves /sys as it is: what it shows there are the other namespace's interfaces.
    program = (
        "from unisono.guard.facts.network import *\nfor one in SystemNetwork().interfaces(): print(one.name,"
        " one.mtu, one.up, one.kind, *one.addresses[:2])"
    )
    done = subprocess.run(
        ["nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "eth0 1400 True ethernet 10.77.0.1 10.77.0.2" in lines
    assert any(line.startswith("docker0 1500 False virtual") for line in lines)
    assert any(line.startswith("lo 65536 False loopback") for line in lines)
