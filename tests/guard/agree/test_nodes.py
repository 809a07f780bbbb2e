"""What is said of one thing that differs between nodes: cause, culprit, both values, and the line
to type.

Run: pytest tests/guard/agree/test_nodes.py
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.guard.agree.making import GIB, changed, device, gpu_node, interfaces, node, nodes
from unisono.base.causes import Verdict
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.compare import compare_nodes
from unisono.guard.agree.reports import Check, FileDigest, Interface, NodeReport, OutputFacts
from unisono.guard.facts.limits import SystemLimits


def only(reports: list[NodeReport]) -> Verdict:
    [verdict] = compare_nodes(reports).fatal
    return verdict


def warning(reports: list[NodeReport], cause: str) -> Verdict:
    agreement = compare_nodes(reports)
    assert agreement.agreed
    [verdict] = [verdict for verdict in agreement.warnings if verdict.cause == cause]
    return verdict


def check(agreement: Agreement, check_id: str, status: str) -> Check:
    [found] = [one for one in agreement.checks if (one.id, one.status) == (check_id, status)]
    return found


# Ranks per node


def test_unequal_numbers_of_ranks_that_are_all_declared_run_with_a_line() -> None:
    """The line of the check says which node has how many ranks."""
    printed: dict[str, Any] = {"nproc_declared": True, "nproc_origin": "--nproc"}
    agreement = compare_nodes([node(0, nodes=2, **printed), node(1, nodes=2, nproc=1, **printed)])
    assert agreement.agreed
    text = check(agreement, "nproc", "pass").text
    assert text == "different, as declared on every node: 2 ranks on node 0 (a), 1 rank on node 1 (b)"


def test_of_two_nodes_the_one_that_inferred_is_odd() -> None:
    verdict = only([node(0, nodes=2, nproc_declared=True, nproc_origin="--nproc"), node(1, nodes=2, nproc=1)])
    assert verdict.summary == "node 1 (b) would start 1 rank, node 0 (a) would start 2"
    assert verdict.hosts == ("b",)
    assert verdict.fix == ("pass --nproc 2 on every node",)


def test_two_numbers_that_were_both_inferred_blame_nobody() -> None:
    verdict = only([node(0, nodes=2), node(1, nodes=2, nproc=1)])
    assert verdict.summary == "node 0 (a) would start 2 ranks, node 1 (b) would start 1"
    assert verdict.hosts == ()


def test_neither_lone_declared_number_nor_inferred_majority_is_blamed() -> None:
    verdict = only([node(0, nproc=1, nproc_declared=True, nproc_origin="--nproc"), node(1), node(2)])
    assert verdict.hosts == ()
    assert "nodes 1 (b) and 2 (c) too, if different numbers are intended" in verdict.fix[0]


def test_a_node_that_lacks_the_mask_of_the_others_is_asked_to_set_it() -> None:
    verdict = only([gpu_node(0, 8, visible="0,1"), gpu_node(1, 8), gpu_node(2, 8, visible="0,1")])
    assert verdict.hosts == ("b",)
    assert verdict.fix[0].startswith("set CUDA_VISIBLE_DEVICES on b as on the other nodes, or pass --nproc 2")


# Numbers of nodes


def test_a_different_number_of_nodes_is_named() -> None:
    verdict = only(changed(nodes(), 2, nodes=2))
    assert (verdict.cause, verdict.hosts) == ("world_mismatch", ("c",))
    assert verdict.summary == "--nodes: 2 on node 2 (c), 3 on nodes 0 (a) and 1 (b)"
    assert verdict.fix[0] == "pass --nodes 3 on every node"


def test_a_node_rank_beyond_the_last_is_reported_which_is_free() -> None:
    verdict = only([node(0, nodes=2), node(2, nodes=2)])
    assert (verdict.cause, verdict.hosts) == ("world_mismatch", ("c",))
    assert "--node-rank 1" in verdict.fix[0]


def test_two_reports_of_one_number_and_a_process_reporting_twice_are_found() -> None:
    assert (
        compare_nodes([node(0), node(1), node(1, "x", address="10.9.9.9")]).fatal[0].cause == "node_duplicate"
    )
    twice = node(1, "a", pid=4000, address=node(0).address)
    assert (
        compare_nodes([node(0, nodes=2), twice.model_copy(update={"nodes": 2})]).fatal[0].cause
        == "node_duplicate"
    )


def test_nodes_that_are_not_here_are_unknown() -> None:
    assert "node 1 absent" in check(compare_nodes([node(0, nodes=2)]), "nodes", "unknown").text


# Devices


def test_a_node_that_fell_back_to_the_cpu_is_the_odd_one_even_of_two() -> None:
    verdict = only(
        [
            gpu_node(0, 2, nodes=2),
            node(1, nodes=2, device_note="no NVIDIA driver", versions=gpu_node(0).versions),
        ]
    )
    assert (verdict.cause, verdict.hosts) == ("device_mismatch", ("b",))
    assert verdict.evidence[0].text == "no NVIDIA driver"


def test_two_ranks_on_one_device_of_a_node_are_named_with_the_device() -> None:
    both = [device(0, host="b"), device(0, host="b")]
    verdict = only([gpu_node(0), gpu_node(1, chosen=both), gpu_node(2)])
    assert (verdict.cause, verdict.hosts) == ("duplicate_gpu", ("b",))
    assert verdict.summary == "node 1 (b) would put 2 ranks on one device (0: NVIDIA H100)"
    assert "GPU-b-0" in verdict.evidence[0].text


def test_one_device_under_two_host_names_is_found() -> None:
    same = [device(0, host="a"), device(1, host="a")]
    reports = changed(
        [gpu_node(0, nodes=2), gpu_node(1, nodes=2)], 1, chosen=same, visible=same, physical=same
    )
    verdict = only(reports)
    assert (verdict.cause, verdict.hosts) == ("duplicate_gpu", ("a", "b"))
    assert "one machine with several names" in verdict.summary


def test_invisible_chosen_device_and_more_ranks_than_devices_are_refused() -> None:
    hidden = only([gpu_node(0), gpu_node(1, chosen=[device(0, host="b"), device(7, host="b")]), gpu_node(2)])
    assert (hidden.cause, hidden.hosts) == ("invalid_device_ordinal", ("b",))
    few = only([gpu_node(0), gpu_node(1, chosen=[device(0, host="b")]), gpu_node(2)])
    assert few.summary == "node 1 (b): 2 ranks and 1 device (2 visible, 2 physical)"


def test_devices_of_a_different_type_and_devices_in_use_are_warnings() -> None:
    other = [device(index, host="b", name="Tesla T4", gib=16) for index in range(2)]
    found = warning([gpu_node(0), gpu_node(1, chosen=other), gpu_node(2)], "device_mismatch")
    assert (
        "Tesla T4 with 16 GiB on node 1 (b), NVIDIA H100 with 80 GiB on nodes 0 (a) and 2 (c)"
        in found.summary
    )
    used = [device(0, host="b"), device(1, host="b").model_copy(update={"memory_free_bytes": 4 * GIB})]
    stale = warning([gpu_node(0), gpu_node(1, chosen=used), gpu_node(2)], "stale_process")
    assert stale.summary == "node 1 (b): only 4 GiB of 80 GiB free on device 1: NVIDIA H100"


def test_devices_without_a_uuid_are_unknown_not_unique() -> None:
    nameless = [device(index, host="b").model_copy(update={"uuid": ""}) for index in range(2)]
    assert (
        check(
            compare_nodes([gpu_node(0), gpu_node(1, chosen=nameless), gpu_node(2)]),
            "device.unique",
            "unknown",
        ).where
        == "node 1 (b)"
    )


# Environment


@pytest.mark.parametrize(
    ("change", "summary", "fix"),
    [
        ({"variables": {"NCCL_ALGO": "Tree"}}, "NCCL_ALGO: Tree on node 1 (b), not set on nodes 0 (a) and 2 (c)", "on node 1 (b): `unset NCCL_ALGO`"),
        ({"nccl_files": {"NCCL_IB_DISABLE": "1"}}, "NCCL_IB_DISABLE: 1 (in nccl.conf) on node 1 (b), not set on nodes 0 (a) and 2 (c)",
         "on node 1 (b): check /etc/nccl.conf and ~/.nccl.conf: NCCL_IB_DISABLE must be equal on all nodes, or not set"),
    ],
)  # fmt: skip
def test_a_variable_of_one_node_alone_is_named_with_where_it_stands(
    change: Any, summary: str, fix: str
) -> None:
    verdict = only(changed(nodes(), 1, **change))
    assert (verdict.cause, verdict.hosts, verdict.summary) == ("env_mismatch", ("b",), summary)
    assert verdict.fix[0] == fix


def test_variable_one_node_lacks_is_exported_with_the_value_of_the_others() -> None:
    verdict = only(changed(nodes(variables={"NCCL_ALGO": "Ring,Tree x"}), 1, variables={}))
    assert verdict.fix[0] == "on node 1 (b): `export NCCL_ALGO='Ring,Tree x'`"


def test_the_environment_beats_the_file_and_defaults_equal_nothing() -> None:
    reports = changed(nodes(), 0, nccl_files={"NCCL_IB_DISABLE": "1"}, variables={"NCCL_IB_DISABLE": "0"})
    reports = changed(reports, 2, variables={"TORCH_DISTRIBUTED_DEBUG": "off"})
    assert compare_nodes(reports).agreed


def test_variables_that_are_free_or_compared_elsewhere_do_not_matter() -> None:
    free = {
        "NCCL_DEBUG": "WARN",
        "MASTER_ADDR": "b",
        "RANK": "3",
        "WORLD_SIZE": "9",
        "WANDB_MODE": "offline",
        "HOME": "/x",
    }
    assert compare_nodes(changed(nodes(), 1, variables=free)).verdicts == []


def test_what_is_measured_otherwise_only_warns() -> None:
    verdict = warning(changed(nodes(), 1, variables={"PYTHONHASHSEED": "1"}), "env_mismatch")
    assert verdict.hosts == ("b",)
    assert "compared by digest" in verdict.summary


# Versions, packages, code, config, files


@pytest.mark.parametrize(
    ("name", "version", "fatal", "fix"),
    [
        ("torch", "2.12.1+cpu", True, "on node 1 (b): `pip install torch==2.13.0`"),
        ("torch", "2.13.0", False, "on node 1 (b): `pip install torch==2.13.0+cpu`"),
        ("python", "3.11.9", True, "on node 1 (b): recreate the environment with Python 3.12"),
        ("python", "3.12.1", False, "on node 1 (b): recreate the environment with Python 3.12.3"),
        ("unisono", "0.4.1", True, "on node 1 (b): `pip install unisono==0.4.0`"),
        ("transformers", "5.2.0", True, "on node 1 (b): `pip install transformers==5.1.0`"),
        ("numpy", "1.0", False, "on node 1 (b): `pip uninstall numpy`, or install it everywhere"),
    ],
)
def test_versions_are_refused_or_reported_by_the_policy(
    name: str, version: str, *, fatal: bool, fix: str
) -> None:
    agreement = compare_nodes(changed(nodes(), 1, versions={**node(0).versions, name: version}))
    [verdict] = agreement.verdicts
    assert (verdict.cause, verdict.severity == "fatal", verdict.hosts) == ("version_mismatch", fatal, ("b",))
    assert verdict.fix[0] == fix


def test_nccl_and_cuda_matter_between_accelerators_only() -> None:
    versions = {**gpu_node(0).versions, "nccl": "2.29.3"}
    verdict = only([gpu_node(0), gpu_node(1, versions=versions), gpu_node(2)])
    assert verdict.summary == "nccl: 2.29.3 on node 1 (b), 2.28.3 on nodes 0 (a) and 2 (c)"
    assert (
        compare_nodes(
            changed(nodes(), 1, versions={**node(0).versions, "nccl": "1", "cuda": "11.8"})
        ).verdicts
        == []
    )


def test_packages_that_differ_are_listed_as_a_warning() -> None:
    verdict = warning(
        changed(nodes(), 1, packages={"numpy": "1.9", "x": "1"}, environment_digest="o"), "version_mismatch"
    )
    assert (
        verdict.summary
        == "numpy: 1.9 on node 1 (b), 2.1.0 on nodes 0 (a) and 2 (c); and 1 more difference (other packages)"
    )


def test_source_files_that_differ_are_named() -> None:
    verdict = only(
        changed(nodes(), 1, code={"unisono/trainer/training/loop.py": "abc", "unisono/extra.py": "d"})
    )
    assert (verdict.cause, verdict.hosts) == ("code_mismatch", ("b",))
    assert "unisono/extra.py" in verdict.summary
    assert any("unisono/trainer/training/loop.py: digest abc" in item.text for item in verdict.evidence)


def test_a_tie_in_the_config_shows_both_and_lets_one_choose() -> None:
    verdict = only([node(0, nodes=2, config={"optim.lr": 1e-4}), node(1, nodes=2, config={"optim.lr": 1e-5})])
    assert verdict.summary == "optim.lr: 1e-4 on node 0 (a), 1e-5 on node 1 (b)"
    assert verdict.hosts == ()
    assert verdict.fix[0] == "pass the same value on every node: `optim.lr=1e-4` or `optim.lr=1e-5`"


def test_a_switch_and_a_number_are_not_the_same_value() -> None:
    assert only(changed(nodes(config={"x": True}), 1, config={"x": 1})).cause == "config_mismatch"
    assert compare_nodes(changed(nodes(config={"x": 1}), 1, config={"x": 1.0})).agreed


@pytest.mark.parametrize(
    ("field", "cause"),
    [
        ("data_files", "data_mismatch"),
        ("tokenizer_files", "tokenizer_files_mismatch"),
        ("model_files", "weights_mismatch"),
    ],
)
def test_files_are_named_with_both_sizes_and_digests(field: str, cause: str) -> None:
    label = getattr(node(0), field)[0].label
    verdict = only(changed(nodes(), 1, **{field: [FileDigest(label=label, bytes=1, digest="abc")]}))
    assert (verdict.cause, verdict.hosts) == (cause, ("b",))
    assert verdict.summary.startswith(f"{label}: 1 byte, digest abc on node 1 (b); ")
    gone = only(changed(nodes(), 1, **{field: []}))
    assert gone.summary.startswith(f"{label}: missing on node 1 (b); ")


def test_files_that_could_not_be_digested_are_unknown_never_equal() -> None:
    agreement = compare_nodes(changed(nodes(), 1, data_files=[], files_note="the hub does not answer"))
    assert check(agreement, "files.data", "unknown").where == "node 1 (b)"
    assert check(agreement, "files.data", "pass").text == "1 file, the same everywhere"
    blind = compare_nodes(nodes(data_files=[], files_note="no xxhash"))
    assert [one.status for one in blind.checks if one.id == "files.data"] == ["unknown"]


# Addresses and interfaces


def test_a_loopback_address_among_real_ones_is_the_odd_one_even_of_two() -> None:
    reports = [node(0, nodes=2), node(1, nodes=2, address="127.0.1.1", host_addresses=["127.0.1.1"])]
    verdict = only(reports)
    assert (verdict.cause, verdict.hosts) == ("hostname_loopback", ("b",))
    assert "127.0.1.1" in verdict.summary


def test_several_nodes_on_one_machine_may_all_be_on_loopback() -> None:
    reports = [
        node(rank, address=f"127.0.0.{rank + 1}", host_addresses=["127.0.1.1"], head_addresses=["127.0.0.1"])
        for rank in range(3)
    ]
    assert compare_nodes(reports).verdicts == []


def test_name_leading_to_its_own_node_is_reported_and_the_heads_refused() -> None:
    own = warning(changed(nodes(), 1, host_addresses=["127.0.1.1"]), "hostname_loopback")
    assert "127.0.1.1" in own.summary
    assert own.hosts == ("b",)
    head = only(changed(nodes(), 1, head_addresses=["127.0.1.1"]))
    assert (head.cause, head.hosts) == ("hostname_loopback", ("b",))


def test_the_bridge_of_containers_is_not_an_address_of_a_node() -> None:
    bridge = [
        Interface(name="docker0", addresses=["172.17.0.1"], mtu=1500, up=True, loopback=False, kind="virtual")
    ]
    reports = [node(0), *(node(rank, address="172.17.0.1", interfaces=bridge) for rank in (1, 2))]
    verdict = only(reports)
    assert (verdict.cause, verdict.hosts) == ("address_unreachable", ("b", "c"))
    assert "docker0" in verdict.summary


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("^lo", "gloo accepts exact names"),
        ("=eth0", "gloo accepts exact names"),
        ("ens34", "interface ens34 does not exist"),
        ("eth", "interface eth does not exist; did you mean eth0?"),
        ("lo", "lo does not connect to other nodes"),
    ],
)
def test_gloo_s_interface_must_be_an_exact_name_that_leads_out(value: str, text: str) -> None:
    verdict = only(changed(nodes(), 1, variables={"GLOO_SOCKET_IFNAME": value}))
    assert (verdict.cause, verdict.hosts) == ("address_unreachable", ("b",))
    assert text in verdict.summary
    assert verdict.fix == ("on node 1 (b): `export GLOO_SOCKET_IFNAME=eth0`, or `unset GLOO_SOCKET_IFNAME`",)


@pytest.mark.parametrize(
    ("value", "right"),
    [("eth", True), ("=eth0", True), ("eth0,ib", True), ("^docker,lo", True), ("^lo", True), ("ens34", False), ("=eth", False),
     ("lo", False), ("^eth", False)],
)  # fmt: skip
def test_nccl_s_interface_is_read_as_nccl_reads_it(value: str, *, right: bool) -> None:
    reports = [gpu_node(0), gpu_node(1, variables={"NCCL_SOCKET_IFNAME": value}), gpu_node(2)]
    assert [verdict.cause for verdict in compare_nodes(reports).fatal] == (
        [] if right else ["nccl_socket_iface"]
    )


def test_nccl_interface_has_no_effect_on_cpu_and_loopback_fits_one_machine() -> None:
    assert compare_nodes(changed(nodes(), 1, variables={"NCCL_SOCKET_IFNAME": "ens34"})).agreed
    alone = [node(rank, address="127.0.0.1", variables={"GLOO_SOCKET_IFNAME": "lo"}) for rank in range(3)]
    assert compare_nodes(alone).fatal == []


def test_interface_that_is_down_or_in_a_different_network_is_reported() -> None:
    down = [
        *interfaces("10.0.0.1"),
        Interface(name="eth1", addresses=["192.168.7.2"], mtu=1500, up=False, loopback=False),
    ]
    verdict = only(changed(nodes(), 1, interfaces=down, variables={"GLOO_SOCKET_IFNAME": "eth1"}))
    assert "eth1 is down" in verdict.summary
    up = [down[0], down[1], down[2].model_copy(update={"up": True})]
    agreement = compare_nodes(changed(nodes(), 1, interfaces=up, variables={"GLOO_SOCKET_IFNAME": "eth1"}))
    assert agreement.agreed
    assert "has 192.168.7.2, but the nodes reach each other on 10.0.0.1" in agreement.warnings[0].summary


def test_interfaces_that_cannot_be_listed_are_unknown() -> None:
    reports = changed(nodes(), 1, interfaces=[], variables={"GLOO_SOCKET_IFNAME": "eth0"})
    check(compare_nodes(reports), "interfaces", "unknown")


def test_a_different_mtu_is_a_warning() -> None:
    jumbo = [one.model_copy(update={"mtu": 9000}) for one in interfaces("10.0.0.1")]
    assert warning(changed(nodes(), 1, interfaces=jumbo), "mtu_blackhole").hosts == ("b",)


# Storage, limits, clocks


def test_a_place_that_cannot_be_written_is_named_with_the_reason() -> None:
    output = OutputFacts(
        path="/x", writable=False, trouble="Read-only file system", shared=False, free_bytes=None
    )
    [verdict] = compare_nodes(changed(nodes(), 1, output=output)).fatal
    assert (verdict.cause, verdict.hosts) == ("storage_unfit", ("b",))
    assert verdict.summary == "node 1 (b): output_dir /x cannot be written: Read-only file system"
    untried = output.model_copy(update={"writable": None, "trouble": "it hangs"})
    agreement = compare_nodes(changed(nodes(), 1, output=untried))
    check(agreement, "storage.write", "unknown").text.endswith("it hangs")


def test_too_little_room_is_refused_where_the_run_is_written() -> None:
    small = node(0).output.model_copy(update={"free_bytes": GIB})
    reserved = {"disk_bytes": 2 * GIB}
    verdict = compare_nodes(changed(nodes(), 0, output=small, reserved=reserved)).fatal[0]
    assert verdict.summary == "node 0 (a): output_dir runs/x has 1 GiB free, and 2 GiB are reserved"
    apart = small.model_copy(update={"shared": False})
    assert compare_nodes(changed(nodes(), 1, output=apart, reserved=reserved)).agreed


def test_unshared_storage_is_a_warning_that_reports_who_holds_what() -> None:
    apart = node(0).output.model_copy(update={"shared": False})
    everywhere = [node(0), *(node(rank, output=apart) for rank in (1, 2))]
    verdict = warning(everywhere, "storage_not_shared")
    assert verdict.hosts == ()
    assert "node 0 (a) stores the run" in verdict.summary
    mixed = warning([node(0), node(1, output=apart), node(2)], "storage_not_shared")
    assert mixed.hosts == ("b",)
    assert "unlike on node 2 (c)" in mixed.summary
    unseen = apart.model_copy(update={"shared": None})
    check(compare_nodes(changed(nodes(), 1, output=unseen)), "storage.shared", "unknown")


def limits(**changes: Any) -> SystemLimits:
    return replace(node(0).limits, **changes)


def test_limits_are_refused_or_reported() -> None:
    few = only(changed(nodes(), 1, limits=limits(open_files=64)))
    assert (few.cause, few.summary) == ("ulimit", "node 1 (b): only 64 open files per process (ulimit -n)")
    assert warning(changed(nodes(), 1, limits=limits(open_files=1024)), "ulimit").hosts == ("b",)
    assert (
        warning(changed(nodes(), 1, limits=limits(cores=1)), "straggler").summary
        == "node 1 (b): 2 ranks on 1 core"
    )
    assert (
        warning(changed(nodes(), 1, threads=64), "straggler").summary
        == "node 1 (b): 2 × 64 threads on 8 cores"
    )
    warning(changed(nodes(), 1, reserved={"memory_bytes": 99 * GIB}), "host_oom_killed")
    warning(changed(nodes(), 1, limits=limits(processes=100)), "ulimit")


def test_small_shared_memory_is_refused_if_nccl_needs_it_else_reported() -> None:
    tiny = limits(shm_bytes=32 * 2**20, shm_free_bytes=32 * 2**20)
    verdict = only([gpu_node(0), gpu_node(1, limits=tiny), gpu_node(2)])
    assert (verdict.cause, verdict.summary) == ("shm_too_small", "node 1 (b): /dev/shm has 32 MiB")
    warning(changed(nodes(), 1, limits=tiny), "shm_too_small")
    docker = limits(shm_bytes=64 * 2**20, shm_free_bytes=64 * 2**20)
    warning([gpu_node(0), gpu_node(1, limits=docker), gpu_node(2)], "shm_too_small")
    unseen = limits(shm_bytes=None)
    check(compare_nodes(changed(nodes(), 1, limits=unseen)), "shm", "unknown")


def test_what_is_left_to_the_system_is_reported() -> None:
    reserved = {"memory_bytes": 2 * GIB, "disk_bytes": 3 * GIB, "shm_bytes": 0, "cores": 1}
    agreement = compare_nodes(nodes(reserved=reserved))
    assert (
        check(agreement, "memory", "pass").text
        == "2 GiB of memory, 1 core reserved for the system on each node"
    )
    assert "3 GiB are reserved for the system" in check(agreement, "storage.write", "pass").text


def test_a_clock_that_is_off_is_a_warning_and_never_more() -> None:
    verdict = warning(changed(nodes(), 1, clock_offset_s=60.0), "clock_skew")
    assert verdict.summary == "the clock of node 1 (b) is 60.0 s ahead of the others"
    head_off = [node(rank, clock_offset_s=0.0 if rank == 0 else 60.0) for rank in range(3)]
    assert warning(head_off, "clock_skew").summary == "the clock of node 0 (a) is 60.0 s behind the others"
    pair = [node(0, nodes=2), node(1, nodes=2, clock_offset_s=-60.0)]
    assert warning(pair, "clock_skew").hosts == ()
    assert compare_nodes(changed(nodes(), 1, clock_offset_s=1.9)).verdicts == []
    assert (
        check(compare_nodes(changed(nodes(), 1, clock_offset_s=None)), "clock", "unknown").where
        == "node 1 (b)"
    )
