"""What is said of networks, by plain facts.

Run: pytest tests/front/checks/network/test_network_rules.py
"""

from pathlib import Path

import pytest

from unisono.front.checks.network_rules import (
    gloo_choice,
    judge_choice,
    judge_firewall,
    judge_infiniband,
    judge_interfaces,
    judge_names,
    nccl_choice,
)
from unisono.guard.agree.reports import Interface
from unisono.guard.facts.network import Firewall, InfinibandPort, read_infiniband

LO = Interface(name="lo", addresses=["127.0.0.1", "::1"], mtu=65536, up=True, loopback=True, kind="loopback")
DOCKER = Interface(
    name="docker0", addresses=["172.17.0.1"], mtu=1500, up=True, loopback=False, kind="virtual"
)
ETH = Interface(
    name="eth0", addresses=["10.0.0.5"], mtu=1500, up=True, loopback=False, kind="ethernet", speed_mbit=25000
)
FAST = Interface(name="ens8", addresses=["10.1.0.5"], mtu=9000, up=True, loopback=False, kind="ethernet")
IB = Interface(name="ib0", addresses=["10.2.0.5"], mtu=2044, up=True, loopback=False, kind="infiniband")
DOWN = Interface(name="eth1", addresses=["10.0.1.5"], mtu=1500, up=False, loopback=False, kind="ethernet")
ALL = [LO, DOCKER, ETH, DOWN]


@pytest.mark.parametrize(
    ("interfaces", "value", "taken"),
    [
        ([LO, DOCKER, ETH, IB], "", "ib0"),
        ([LO, DOCKER, ETH], "", "eth0"),
        ([LO, DOCKER], "", "docker0"),
        ([LO], "", "lo"),
        ([LO, ETH, FAST], "ens", "ens8"),
        ([LO, ETH, FAST], "^eth,lo", "ens8"),
        ([LO, ETH, FAST], "=ens", None),
        ([LO, ETH, FAST], "=ens8", "ens8"),
        ([LO, ETH, DOWN], "eth1", None),
    ],
)
def test_nccl_takes_what_its_own_order_reports(
    interfaces: list[Interface], value: str, taken: str | None
) -> None:
    found = nccl_choice(interfaces, {"NCCL_SOCKET_IFNAME": value} if value else {}).interface
    assert (found.name if found else None) == taken


@pytest.mark.parametrize(
    ("value", "own", "taken"),
    [
        ("", ["10.0.0.5"], "eth0"),
        ("", ["127.0.1.1"], "lo"),
        ("", [], "lo"),
        ("docker0,eth0", [], "docker0"),
        ("eth", [], None),
        ("^lo", [], None),
        ("eth1", [], None),
    ],
)
def test_gloo_takes_exact_names_or_the_host_names_address(
    value: str, own: list[str], taken: str | None
) -> None:
    found = gloo_choice(ALL, {"GLOO_SOCKET_IFNAME": value} if value else {}, own).interface
    assert (found.name if found else None) == taken


def choice(
    settings: dict[str, str],
    *,
    several: bool = True,
    cuda: bool = False,
    own: tuple[str, ...] = ("10.0.0.5",),
) -> tuple[str, str, tuple[str, ...]]:
    (found,) = judge_choice(ALL, settings, own_addresses=own, several=several, cuda=cuda, address="10.0.0.5")
    return found.status, found.evidence[0], found.fix


def test_a_name_that_is_not_here_fails_on_one_machine_too() -> None:
    status, text, fix = choice({"GLOO_SOCKET_IFNAME": "ens34"}, several=False)
    assert (status, "gloo finds no interface: GLOO_SOCKET_IFNAME=ens34" in text) == ("fail", True)
    assert fix == ("export GLOO_SOCKET_IFNAME=eth0", "unset GLOO_SOCKET_IFNAME")


def test_down_interface_is_distinguished_from_a_missing_one() -> None:
    assert "eth1 is down or has no address" in choice({"GLOO_SOCKET_IFNAME": "eth1"})[1]
    assert "did you mean docker0?" in choice({"GLOO_SOCKET_IFNAME": "dokcer0"})[1]


def test_loopback_and_bridges_fail_only_where_there_are_several_machines() -> None:
    for name in ("lo", "docker0"):
        assert choice({"GLOO_SOCKET_IFNAME": name})[0] == "fail"
        assert choice({"GLOO_SOCKET_IFNAME": name}, several=False)[0] == "pass"


def test_host_name_on_loopback_warns_since_only_other_programs_use_it() -> None:
    status, text, _ = choice({}, own=("127.0.1.1",))
    assert (status, "other programs need the variable" in text) == ("warn", True)


def test_nccl_counts_only_where_there_are_accelerators() -> None:
    assert choice({"NCCL_SOCKET_IFNAME": "ens34"})[0] == "pass"
    assert choice({"NCCL_SOCKET_IFNAME": "ens34"}, cuda=True)[0] == "fail"


def test_several_nodes_need_an_interface_that_leads_out() -> None:
    assert judge_interfaces([LO, DOCKER], several=True).status == "fail"
    assert judge_interfaces([LO, DOCKER], several=False).status == "pass"
    assert judge_interfaces([LO, ETH, FAST], several=True).status == "warn"
    assert judge_interfaces([], several=True).status == "unknown"


def test_names_that_lead_back_or_nowhere_are_named() -> None:
    def judged(own: list[str], head: list[str], **more: bool) -> str:
        return judge_names("bob", own, 0.01, head="ada", head_addresses=head, several=True, **more).status

    assert judged(["10.0.0.5"], ["10.0.0.1"]) == "pass"
    assert judged(["127.0.1.1"], ["10.0.0.1"]) == "warn"
    assert judged(["10.0.0.5"], []) == "fail"
    assert judged(["10.0.0.5"], ["127.0.1.1"], is_head=False) == "fail"
    assert judge_names("bob", ["10.0.0.5"], 5.0, several=False).status == "warn"


def adapter(
    folder: Path,
    name: str,
    *,
    state: str = "4: ACTIVE",
    physical: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
) -> None:
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in (
        ("state", state),
        ("phys_state", physical),
        ("rate", rate),
        ("link_layer", "InfiniBand"),
    ):
        (port / file).write_text(text + "\n")


@pytest.mark.makes("network.infiniband", "pass")
def test_ports_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0")
    ports = read_infiniband(tmp_path)
    assert ports == (InfinibandPort("mlx5_0", 1, "ACTIVE", "LinkUp", 400.0, "InfiniBand"),)
    assert judge_infiniband(ports, {})[0].status == "pass"
    assert judge_infiniband(read_infiniband(tmp_path / "none"), {}) == []


@pytest.mark.makes("network.infiniband", "warn")
def test_ports_that_are_down_unused_or_uneven_are_named(tmp_path: Path) -> None:
    adapter(tmp_path, "mlx5_0")
    adapter(tmp_path, "mlx5_1", state="2: INIT")
    (found,) = judge_infiniband(read_infiniband(tmp_path), {})
    assert "mlx5_1:1 is INIT" in found.evidence[0]
    assert "subnet manager" in found.fix[0]
    ports = (InfinibandPort("mlx5_0", 1, "ACTIVE", "LinkUp", 400.0, "InfiniBand"),)
    assert judge_infiniband(ports, {"NCCL_IB_DISABLE": "1"})[0].fix == ("unset NCCL_IB_DISABLE",)
    assert judge_infiniband(ports, {"NCCL_IB_HCA": "=mlx5_7"})[0].status == "warn"
    assert judge_infiniband(ports, {"NCCL_IB_HCA": "^mlx5_7"})[0].status == "pass"
    assert judge_infiniband(ports, {"NCCL_IB_HCA": "mlx5_0:1"})[0].status == "pass"
    slow = InfinibandPort("mlx5_1", 1, "ACTIVE", "LinkUp", 100.0, "InfiniBand")
    assert judge_infiniband((*ports, slow), {})[0].fix == (
        "use ports of one rate: export NCCL_IB_HCA='=mlx5_0'",  # without = mlx5_01 is meant, too
    )


def test_a_firewall_counts_where_there_are_several_nodes() -> None:
    assert judge_firewall(None, several=False) == []
    assert judge_firewall(None, several=True)[0].status == "unknown"
    assert judge_firewall(Firewall(), several=True)[0].status == "pass"
    assert judge_firewall(Firewall(drops_rest=True), several=True)[0].status == "warn"
