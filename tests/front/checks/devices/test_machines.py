"""What is said of machines that are not here, by recorded answers of NVML.

Run: pytest tests/front/checks/devices/test_machines.py
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.front.checks.replay import details_from, details_of, recorded
from unisono.front.checks.check import Finding
from unisono.front.checks.device_checks import DeviceContext, judge_devices
from unisono.guard.facts.machine import DevicesDetails, Processors
from unisono.guard.facts.nvidia import NO_ANSWER

AMD = Processors("EPYC", "amd", 2, 64, 64, 64, {0: 32, 1: 32}, (0, 1), "avx512")


def scene(
    machine: str | DevicesDetails, chosen: tuple[int, ...], *, vendor: str = "amd", **more: Any
) -> DeviceContext:
    details = details_of(machine) if isinstance(machine, str) else machine
    fit = {"torch": "2.8.0+cu128", "torch_cuda": "12.4", "settings": {}}
    visible = tuple(device.index for device in details.devices)
    return DeviceContext(details, visible, chosen, replace(AMD, vendor=vendor), **{**fit, **more})


def finding(of: DeviceContext, name: str) -> Finding:
    return next(one for one in judge_devices(of) if one.id == f"devices.{name}")


@pytest.mark.makes("devices.seen", "pass")
@pytest.mark.makes("devices.links", "pass")
@pytest.mark.makes("devices.memory", "pass")
@pytest.mark.makes("devices.health", "pass")
def test_all_is_well_on_eight_h100_with_nvswitch() -> None:
    findings = judge_devices(scene("h100_nvswitch_8", tuple(range(8))))
    assert [one.status for one in findings] == ["pass"] * len(findings)
    links = finding(scene("h100_nvswitch_8", tuple(range(8))), "links")
    assert links.evidence[0] == "expected between all pairs: NVLink (NV18)"
    assert "0  –     NV18  NV18" in links.evidence[2]


def test_all_is_well_on_the_one_h100_that_was_recorded() -> None:
    """The only answers here that a driver gave; the kernel's log has lines of the driver that are
    no errors.
    """
    assert not recorded("h100_1")["composed"]
    machine = scene("h100_1", (0,), torch_cuda="13.0", torch="2.11.0")
    findings = judge_devices(machine)
    assert [one.status for one in findings] == ["pass"] * len(findings), findings
    assert "NVIDIA H100 80GB HBM3" in finding(machine, "seen").evidence[2]
    assert "driver 580.159.04 (CUDA up to 13.0)" in str(finding(machine, "driver"))


def test_table_shows_each_devices_name_for_a_rank_and_the_hidden_ones() -> None:
    rows = finding(replace(scene("l20_two_sockets_10", (6, 7, 8, 9)), visible=(6, 7, 8, 9)), "seen").evidence
    assert rows[0] == "10 physical, 4 visible, 4 for this node's ranks"
    assert rows[2].startswith("hidden   0      GPU-00000000  0000:16:00.0  0")
    assert rows[8].startswith("cuda:0   6      GPU-00000006  0000:a8:00.0  1")


@pytest.mark.makes("devices.selection", "pass")
def test_the_last_four_of_ten_on_one_socket_are_a_good_choice() -> None:
    found = finding(scene("l20_two_sockets_10", (6, 7, 8, 9), vendor="intel"), "selection")
    assert found.status == "pass"
    assert "rank 0 → 6" in found.evidence[0]


@pytest.mark.makes("devices.selection", "warn")
def test_a_choice_across_sockets_is_judged_and_a_better_one_is_written_out() -> None:
    found = finding(scene("l20_two_sockets_10", (3, 4, 5, 6), vendor="intel"), "selection")
    assert found.status == "warn"
    assert "across NUMA nodes: node 0: 3, 4; node 1: 5, 6" in found.evidence
    assert "on one NUMA node" in found.evidence[0]
    assert found.fix[0] in (
        "export CUDA_VISIBLE_DEVICES=1,2,3,4",
        "export CUDA_VISIBLE_DEVICES=0,2,3,4",
        "export CUDA_VISIBLE_DEVICES=5,6,7,8",
    )


def test_gaps_in_indices_are_only_noted_when_all_pairs_are_equal() -> None:
    found = finding(scene("h100_nvswitch_8", (0, 1, 3)), "selection")
    assert found.status == "pass"
    assert "the indices are not contiguous: 0, 1, 3" in found.evidence
    assert "0,1,2 would be a little better: contiguous" in found.evidence[0]


@pytest.mark.makes("devices.memory", "fail")
def test_mixed_types_and_other_peoples_memory_are_named_and_left_out() -> None:
    found = finding(scene("mixed_4", (1, 2)), "selection")
    assert found.status == "warn"
    assert "device 2: 31 GB of 42.9 GB are in use: pid 4242 of ann (python train.py) 30 GB" in found.evidence
    assert any("types differ" in line and "Tesla T4: 1" in line for line in found.evidence)
    assert found.fix[0] == "export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,3"
    held = finding(scene("mixed_4", (1, 2)), "memory")
    assert (held.status, held.fix) == ("fail", ("ask its owner, or end it: kill 4242",))
    assert finding(scene("mixed_4", (0, 3)), "memory").status == "pass"


def test_devices_smaller_or_older_than_the_chosen_ones_are_never_proposed() -> None:
    """Both T4 would be free and well; a run that was made for an A100 has no room on them."""
    body = recorded("mixed_4")
    body["devices"][0], body["devices"][3] = body["devices"][1], body["devices"][1]
    found = finding(scene(details_from(body), (2,)), "selection")
    assert (found.status, found.fix) == ("pass", ()), found
    assert "no better selection" in found.evidence[0]


def test_in_a_job_of_slurm_only_its_own_devices_are_proposed() -> None:
    mine = replace(scene("l20_two_sockets_10", (3, 5), vendor="intel"), visible=(3, 5))
    assert finding(mine, "selection").status == "warn", "others are better, and nobody has forbidden them"
    assert all("--devices" not in line for line in finding(mine, "selection").fix), (
        "they are not visible here"
    )
    found = finding(replace(mine, allotted=True), "selection")
    assert (found.status, found.fix) == ("pass", ())
    seven = replace(mine, visible=(3, 5, 7), allotted=True)
    assert finding(seven, "selection").fix == ("export CUDA_VISIBLE_DEVICES=5,7", "or --devices 5,7")


def test_shared_memory_is_expected_between_devices_without_peer_access() -> None:
    """No other choice of devices would be better."""
    machine = scene("a10g_4", (0, 1, 2, 3))
    assert "shared memory of the host (PHB, no peer access" in finding(machine, "links").evidence[0]
    assert finding(machine, "selection").status == "pass"


@pytest.mark.parametrize(
    "settings", [{"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_LEVEL": "LOC"}, {"NCCL_P2P_LEVEL": "0"}]
)
def test_leftover_setting_that_costs_nvlink_is_named_with_its_unset_line(
    settings: dict[str, str],
) -> None:
    found = finding(scene("h100_nvswitch_8", (0, 1), settings=settings), "links")
    name = next(iter(settings))
    assert (found.status, found.fix) == ("warn", (f"unset {name}",))
    assert f"0–1 could use NV18, but settings prevent it: NV18 is beyond {name}=" in found.evidence[0]


def test_a_setting_that_takes_nothing_away_is_not_a_problem() -> None:
    assert finding(scene("a10g_4", (0, 1), settings={"NCCL_P2P_DISABLE": "1"}), "links").status == "pass"


@pytest.mark.makes("devices.links", "fail")
def test_nvlink_without_peer_access_is_a_fault() -> None:
    body = recorded("h100_nvswitch_8")
    body["pairs"]["nvmlDeviceGetP2PStatus"]["0"][2][5] = 4
    found = finding(scene(details_from(body), tuple(range(8))), "links")
    assert found.status == "fail"
    assert "NVLink without peer access between 2 and 5" in found.evidence[0]
    assert finding(scene(details_from(body), (0, 1, 2, 3)), "links").status == "pass"


def test_acs_on_a_switch_is_named_only_if_two_chosen_devices_share_it() -> None:
    """Such a switch sends everything between the two up to the host."""
    body = recorded("l20_two_sockets_10")
    body["beside"]["redirecting"] = {"0000:16:00.0": ["0000:15:00.0"], "0000:27:00.0": ["0000:26:00.0"]}
    found = finding(scene(details_from(body), (0, 1), vendor="intel"), "links")
    assert found.status == "warn"
    assert "ACS is on in 0000:15:00.0, 0000:26:00.0" in found.evidence[0]
    assert "setpci -s $b ECAP_ACS+0x6.w=0000" in found.fix[1]
    for chosen in ((2, 3), (0, 5)):  # another switch; no switch in common, so all goes over the host anyway
        assert finding(scene(details_from(body), chosen, vendor="intel"), "links").status == "pass"


@pytest.mark.makes("devices.health", "fail")
def test_memory_errors_xids_heat_and_lost_links_are_named_with_remedies() -> None:
    found = finding(scene("h100_errors_8", (0, 1)), "health")
    text = "\n".join(found.evidence)
    assert found.status == "fail"
    assert "device 1: 3 uncorrectable ECC errors since the driver was loaded" in text
    assert "device 1: Xid 48, an uncorrectable memory error, 1 h 30 min ago" in text
    assert "device 2: its clock is throttled by the hardware" in text
    assert "device 5: 2 of 18 NVLinks are down" in text
    assert found.fix[0].startswith("nvidia-smi --gpu-reset -i 1")


def test_errors_of_devices_that_are_not_used_are_a_warning() -> None:
    assert finding(scene("h100_errors_8", (3, 4)), "health").status == "warn"


def test_a_sick_device_is_not_proposed() -> None:
    found = finding(scene("h100_errors_8", (0, 1)), "selection")
    assert found.status == "warn"
    assert "1" not in found.fix[0].rpartition("=")[2].split(",")


def test_an_xid_of_last_week_is_not_a_news() -> None:
    body = recorded("h100_nvswitch_8")
    body["beside"]["kernel_log"] = [
        ["NVRM: Xid (PCI:0000:2a:00): 79, GPU has fallen off the bus.", 7 * 86400.0]
    ]
    assert finding(scene(details_from(body), (0, 1)), "health").status == "pass"
    body["beside"]["kernel_log"][0][1] = 60.0
    assert finding(scene(details_from(body), (0, 1)), "health").status == "fail"


def test_a_fabric_that_is_not_ready_is_named_before_cuda_reports_802() -> None:
    found = finding(scene("h100_fabric_8", (0, 1)), "health")
    assert found.status == "fail"
    assert "the NVSwitch fabric is not ready: in progress" in found.evidence[0]
    assert "nvidia-fabricmanager" in found.fix[0]


@pytest.mark.makes("devices.seen", "fail")
def test_device_that_has_fallen_off_is_distinguished_from_a_hidden_one() -> None:
    body = recorded("a10g_4")
    body["devices"].pop()  # as in a container that was given three of four: the bus shows all of them
    found = finding(scene(details_from(body), (0, 1)), "seen")
    assert found.status == "pass"
    assert "on the bus, but not assigned to this container or job: 0000:1e:00.0" in found.evidence
    body["beside"]["kernel_log"] = [["NVRM: Xid (PCI:0000:1e:00): 79, GPU has fallen off the bus.", 60.0]]
    found = finding(scene(details_from(body), (0, 1)), "seen")
    assert found.status == "fail"
    assert "no response from 0000:1e:00.0" in found.evidence[0]


def test_a_device_that_the_driver_lists_and_cannot_reach_is_named() -> None:
    body = recorded("a10g_4")
    body["devices"][2] = {"lost": "GPU is lost"}
    found = finding(scene(details_from(body), (0, 1)), "seen")
    assert found.status == "fail"
    assert "no response from device 2: GPU is lost" in found.evidence[0]


@pytest.mark.parametrize(
    ("machine", "cuda", "status", "words"),
    [
        ("h100_nvswitch_8", "12.4", "pass", "driver 550.90.07"),
        ("h100_nvswitch_8", "12.8", "pass", "the major version is equal"),
        ("a10g_4", "13.0", "fail", "the driver is too old"),
        ("h100_nvswitch_8", "11.7", "fail", "needs CUDA 11.8 or newer"),
        ("h100_nvswitch_8", None, "warn", "built without CUDA"),
    ],
)
@pytest.mark.makes("devices.driver", "pass")
@pytest.mark.makes("devices.driver", "fail")
def test_driver_cuda_and_torch_are_held_together(
    machine: str, cuda: str | None, status: str, words: str
) -> None:
    found = finding(scene(machine, (0,), torch_cuda=cuda), "driver")
    assert found.status == status
    assert words in found.evidence[0]
    assert bool(found.fix) == (status != "pass")


def test_a_device_that_cuda_13_has_dropped_is_named() -> None:
    body = recorded("a10g_4")
    body["system"]["nvmlSystemGetCudaDriverVersion"] = 13000
    body["devices"][0]["nvmlDeviceGetCudaComputeCapability"] = [7, 0]
    found = finding(scene(details_from(body), (0,), torch_cuda="13.0"), "driver")
    assert (found.status, "is too old for CUDA 13.0" in found.evidence[0]) == ("fail", True)


@pytest.mark.makes("devices.mig", "fail")
@pytest.mark.makes("devices.mig", "pass")
def test_slices_are_named_by_their_uuid_and_refused_for_several_ranks() -> None:
    assert finding(scene("a100_mig_2", (0, 1)), "mig").status == "fail"
    alone = finding(scene("a100_mig_2", (0,)), "mig")
    assert (alone.status, alone.fix) == ("warn", ("export CUDA_VISIBLE_DEVICES=MIG-0f5a",))
    assert finding(scene("a100_mig_2", (1,)), "mig").status == "pass", (
        "its neighbour is sliced, and it is not"
    )
    assert finding(scene("a10g_4", (0,)), "mig").status == "pass"


def test_hardware_without_its_python_package_is_unknown_with_the_pip_line() -> None:
    note = "1 NVIDIA devices are on the bus, and nvidia-ml-py is not installed"
    found = judge_devices(scene(DevicesDetails(on_bus=("0000:07:00.0",), note=note), ()))
    assert [(one.id, one.status, one.fix) for one in found] == [
        ("devices.seen", "unknown", ("pip install nvidia-ml-py",))
    ]


def test_a_driver_that_is_slow_is_unknown_and_no_failure() -> None:
    details = DevicesDetails(on_bus=("0000:07:00.0",), note=f"{NO_ANSWER} 30 s")
    [found] = judge_devices(scene(details, ()))
    assert (found.status, "nvidia-smi -pm 1" in found.fix[0]) == ("unknown", True)


def test_nobody_is_told_to_end_a_process_known_only_by_its_host_pid() -> None:
    """The driver tells the host's numbers; in a container no user is known for them."""
    body = recorded("mixed_4")
    body["beside"]["processes"] = {}
    found = finding(scene(details_from(body), (2,)), "memory")
    assert (found.status, found.fix) == ("fail", ("`nvidia-smi` on the host shows the process",))


def test_driver_that_does_not_answer_fails_and_absent_hardware_passes() -> None:
    body = recorded("a10g_4") | {"refuses": "Driver/library version mismatch"}
    found = judge_devices(scene(details_from(body), ()))
    assert [(one.status, "version mismatch" in one.evidence[0]) for one in found] == [("fail", True)]
    body["beside"]["on_bus"] = []
    assert [(one.status, one.evidence) for one in judge_devices(scene(details_from(body), ()))] == [
        ("pass", ("no NVIDIA hardware; ranks run on the CPU",))
    ]
