"""The shape of a job: what counts when, and what is refused with which command.

Run: pytest tests/jobs/runs/test_topology.py
"""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.errors import UsageError
from unisono.guard.facts import Machine
from unisono.guard.facts.machine import Gpu
from unisono.guard.places.placement import choose_devices, device_words, usable_accelerators
from unisono.guard.places.topology import (
    DEFAULT_PORT,
    Accelerators,
    Topology,
    TopologyRequest,
    TorchrunOptions,
    checked_host,
    parse_head,
    read_topology,
    with_torchrun_options,
)


def shape(variables: dict[str, str] | None = None, gpus: int = 0, **options: Any) -> Topology:
    return read_topology(TopologyRequest(**options), variables or {}, Accelerators(gpus))


def refused(variables: dict[str, str] | None = None, gpus: int = 0, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        shape(variables, gpus, **options)
    assert caught.value.exit_code == 2
    return "\n".join(caught.value.lines())


def test_default_is_one_node_with_a_rank_per_accelerator_or_one_on_the_cpu() -> None:
    assert (shape().nodes, shape().nproc, shape().nproc_declared) == (1, 1, False)
    eight = shape(gpus=8)
    assert (eight.nproc, eight.nproc_declared, eight.nproc_origin) == (8, False, "8 visible accelerators")


@pytest.mark.parametrize(
    ("variables", "options", "nproc", "declared", "origin"),
    [
        ({}, {"nproc": 2}, 2, True, "--nproc"),
        ({"NPROC_PER_NODE": "2"}, {}, 2, True, "NPROC_PER_NODE"),
        ({"NPROC_PER_NODE": "2"}, {"nproc": 3}, 3, True, "--nproc"),
        ({"NPROC_PER_NODE": "gpu"}, {}, 4, False, "4 visible accelerators"),
        ({}, {"devices": ("6", "7")}, 2, False, "--devices selects 2"),
        ({"LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3", "RANK": "1"}, {}, 4, False, "4 visible accelerators"),
    ],
)
def test_ranks_are_declared_by_the_flag_or_the_variable_and_else_inferred(
    variables: dict[str, str], options: dict[str, Any], nproc: int, declared: object, origin: str
) -> None:
    found = shape(variables, 4, **options)
    assert (found.nproc, found.nproc_declared, found.nproc_origin) == (nproc, declared, origin)


@given(
    nodes=st.sampled_from([None, "1", "2", "3"]),
    node_rank=st.sampled_from([None, 0, 1]),
    head=st.sampled_from([None, "a", "b:1234"]),
    nproc=st.sampled_from([None, 1, 2]),
    variables=st.fixed_dictionaries(
        {},
        optional={
            "NNODES": st.sampled_from(["1", "2"]),
            "NODE_RANK": st.sampled_from(["0", "1"]),
            "NPROC_PER_NODE": st.sampled_from(["1", "3"]),
            "MASTER_ADDR": st.just("m"),
            "MASTER_PORT": st.just("29500"),
            "RANK": st.sampled_from(["0", "5"]),
            "WORLD_SIZE": st.sampled_from(["1", "9"]),
            "LOCAL_RANK": st.just("4"),
        },
    ),
)
def test_explicit_beats_inferred_and_launchers_ranks_never_count(
    nodes: str | None,
    node_rank: int | None,
    head: str | None,
    nproc: int | None,
    variables: dict[str, str],
) -> None:
    options = TopologyRequest(nproc=nproc, nodes=nodes, node_rank=node_rank, head=head)
    try:
        found = read_topology(options, variables, Accelerators(0))
    except UsageError:
        return
    without = {
        name: value for name, value in variables.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    assert read_topology(options, without, Accelerators(0)) == found
    assert found.nodes == int(nodes or variables.get("NNODES") or 1)
    assert found.nproc == (nproc or int(variables.get("NPROC_PER_NODE", 1)))
    if found.nodes == 1:
        assert (found.node_rank, found.head_host) == (0, "")
        assert not {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} & set(found.used_variables)
    else:
        assert found.node_rank == (node_rank if node_rank is not None else int(variables["NODE_RANK"]))
        assert found.head_host == (head or "m")[:1]
    assert set(found.used_variables) <= set(variables)


def test_torchruns_variables_make_the_same_job_as_the_flags() -> None:
    variables = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"}
    by_variables = shape(variables | {"NPROC_PER_NODE": "2"})
    by_flags = shape(nodes="3", node_rank=2, head="10.0.0.1:29511", nproc=2)
    for name in ("nodes", "node_rank", "head_host", "head_port", "nproc", "nproc_declared"):
        assert getattr(by_variables, name) == getattr(by_flags, name)
    assert by_variables.origins == {
        "nodes": "NNODES", "node_rank": "NODE_RANK", "head": "MASTER_ADDR, MASTER_PORT", "nproc": "NPROC_PER_NODE",
    }  # fmt: skip
    assert set(by_variables.used_variables) == {*variables, "NPROC_PER_NODE"}


@pytest.mark.parametrize(
    ("text", "nodes", "enough"), [("3", 3, 3), ("2:3", 3, 2), ("3:3", 3, 3), ("1:3", 3, 1)]
)
def test_the_fewest_nodes_stand_before_the_colon(text: str, nodes: int, enough: int) -> None:
    for found in (
        shape(nodes=text, node_rank=nodes - 1, head="a"),
        shape({"NNODES": text, "NODE_RANK": str(nodes - 1), "MASTER_ADDR": "a"}),
        shape(nodes=text, hosts=tuple("bcd"[: nodes - 1])),
    ):
        assert (found.nodes, found.enough) == (nodes, enough)


def test_leftovers_of_one_node_do_not_count() -> None:
    found = shape({"NNODES": "1", "NODE_RANK": "3", "MASTER_ADDR": "-x", "MASTER_PORT": "no"})
    assert (found.nodes, found.node_rank, found.head_host) == (1, 0, "")


@pytest.mark.parametrize(
    ("variables", "options", "says"),
    [
        ({}, {"nodes": "3"}, "unisono train CONFIG --nodes 3 --node-rank R --head HOST:29577"),
        ({}, {"nodes": "3", "node_rank": 1}, "unisono train CONFIG --nodes 3 --node-rank 1 --head HOST:29577"),
        ({"NNODES": "2"}, {}, "NNODES=2"),
        ({}, {"nodes": "3", "node_rank": 3, "head": "a"}, "outside of 0 to 2"),
        ({}, {"nodes": "4:2", "node_rank": 0, "head": "a"}, "--nodes 2:4"),
        ({}, {"nodes": "0:2", "node_rank": 0, "head": "a"}, "at least 1"),
        ({}, {"nodes": "2:3:4", "node_rank": 0, "head": "a"}, "not a whole number"),
        ({}, {"nodes": "2:3"}, "unisono train CONFIG --nodes 3 --node-rank R"),
        ({}, {"hosts": ("b", "c"), "nodes": "1:2"}, "--nodes MIN:3"),
        ({}, {"nodes": "0"}, "at least 1"),
        ({"NNODES": "two"}, {}, "not a whole number"),
        ({"NPROC_PER_NODE": "many"}, {}, "NPROC_PER_NODE"),
        ({"NPROC_PER_NODE": "0"}, {}, "at least 1"),
        ({}, {"node_rank": 0}, "--nodes N"),
        ({}, {"head": "a"}, "--nodes N"),
        ({}, {"nodes": "1", "node_rank": 1}, "start at 0"),
        ({}, {"nodes": "2", "node_rank": 0, "head": "-oProxyCommand=x"}, "not a valid host name"),
        ({}, {"nodes": "2", "node_rank": 0, "head": "a:99999"}, "not a port"),
        ({}, {"nodes": "2", "node_rank": 0, "head": "a:http"}, "not a whole number"),
        ({}, {"hosts": ("a", "a")}, "twice"),
        ({}, {"hosts": ("a", "-x")}, "not a valid host name"),
        ({}, {"hosts": ("b", "c"), "nodes": "2"}, "contradict"),
        ({}, {"hosts": ("b", "c"), "node_rank": 1}, "omit --node-rank"),
        ({}, {"devices": ("0", "1"), "nproc": 3}, "--devices selects 2"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_refused_with_what_to_type(
    variables: dict[str, str], options: dict[str, Any], says: str
) -> None:
    assert says in refused(variables, 8, **options)


def test_more_ranks_than_accelerators_are_refused_but_not_on_a_cpu() -> None:
    assert "--nproc 2" in refused(gpus=2, nproc=4)
    assert shape(gpus=0, nproc=4).nproc == 4


def test_hosts_are_the_nodes_and_this_machine_stands_first_if_it_is_listed() -> None:
    def here(*hosts: str) -> Topology:
        return read_topology(
            TopologyRequest(hosts=hosts), {}, Accelerators(0), is_local=lambda host: host == "me"
        )

    assert (here("me", "b", "c").nodes, here("me", "b", "c").hosts) == (3, ("b", "c"))
    assert (here("b", "c").nodes, here("b", "c").hosts) == (3, ("b", "c"))
    assert (here("me").nodes, here("me").hosts) == (1, ())
    with pytest.raises(UsageError) as caught:
        here("b", "me", "c")
    assert "--hosts me,b,c" in "\n".join(caught.value.lines())


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a", "a", DEFAULT_PORT),
        ("a:1", "a", 1),
        ("10.0.0.1:29500", "10.0.0.1", 29500),
        ("[fe80::1]:29500", "fe80::1", 29500),
        ("[::1]", "::1", DEFAULT_PORT),
        ("fe80::1", "fe80::1", DEFAULT_PORT),
    ],
)
def test_a_head_is_a_host_and_perhaps_a_port(text: str, host: str, port: int) -> None:
    assert parse_head(text, "--head") == (host, port)


@given(st.text(max_size=12))
def test_a_host_never_begins_with_a_dash_or_holds_what_a_shell_reads(text: str) -> None:
    try:
        host = checked_host(text, "--head")
    except UsageError:
        return
    assert host
    assert host[0] != "-"
    assert not set(host) & set(" ;|&$`'\"<>(){}*?!\\\n\t\0/")


def gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index:04d}-aaaa", f"Big {index}", 80 * 10**9, 70 * 10**9, (9, 0))


TEN = Machine("box", 8, 10**10, "A CPU", cpu_bfloat16=False, gpus=[gpu(index) for index in range(10)])
NONE = dataclasses.replace(TEN, gpus=[], gpu_note="no NVIDIA driver")


def test_six_to_nine_of_ten_are_four_ranks_on_these_devices() -> None:
    words = device_words("6,7,8,9")
    usable = usable_accelerators(TEN, requested="auto", visible=None)
    found = read_topology(TopologyRequest(devices=words), {}, usable)
    assert (found.nproc, found.nproc_declared) == (4, False)
    chosen, _ = choose_devices(TEN, requested="auto", named=words, visible=None, nproc=found.nproc)
    assert [device.index for device in chosen] == [6, 7, 8, 9]


def test_visible_devices_count_and_are_chosen_in_their_order() -> None:
    usable = usable_accelerators(TEN, requested="auto", visible="3,1")
    assert usable.count == 2
    chosen, _ = choose_devices(TEN, requested="auto", named=(), visible="3,1", nproc=2)
    assert [device.index for device in chosen] == [3, 1]
    with pytest.raises(UsageError) as caught:
        read_topology(TopologyRequest(nproc=3), {}, usable)
    assert "CUDA_VISIBLE_DEVICES=3,1" in "\n".join(caught.value.lines())


@pytest.mark.parametrize("words", [("1", "1"), ("1", "GPU-0001-aaaa"), ("1", "11"), ("0", "3")])
def test_a_device_twice_hidden_or_unknown_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        choose_devices(TEN, requested="auto", named=words, visible="0,1", nproc=2)


def test_ranks_on_a_cpu_share_its_memory() -> None:
    chosen, _ = choose_devices(NONE, requested="auto", named=(), visible=None, nproc=4)
    assert [device.memory_bytes for device in chosen] == [10**10 // 4] * 4
    assert usable_accelerators(NONE, requested="auto", visible=None).note == "no NVIDIA driver"
    assert usable_accelerators(TEN, requested="cpu", visible=None).count == 0
    assert usable_accelerators(TEN, requested="auto", visible=None, torch_version="2.13.0+cpu").count == 0


def test_an_empty_place_in_a_list_is_refused() -> None:
    with pytest.raises(UsageError):
        device_words("0,,1")
    assert device_words(None) == ()


TORCHRUN: list[tuple[dict[str, Any], dict[str, Any], dict[str, str], tuple[int | None, str | None, str | None]]] = [
    ({}, {"nnodes": "2", "master_addr": "a", "master_port": 29500}, {}, (None, "2", "a:29500")),
    ({}, {"nnodes": "2:2", "rdzv_endpoint": "a:5", "nproc_per_node": "8"}, {}, (8, "2", "a:5")),
    ({}, {"nnodes": "2", "rdzv_endpoint": "[fe80::1]:5"}, {}, (None, "2", "[fe80::1]:5")),
    ({"nodes": "2", "head": "a:7"}, {"nnodes": "2", "master_addr": "a"}, {}, (None, "2", "a:7")),
    ({"nproc": 4}, {"nproc_per_node": "4"}, {"NPROC_PER_NODE": "4"}, (4, None, None)),
    ({}, {"nproc_per_node": "gpu"}, {"NPROC_PER_NODE": "auto"}, (None, None, None)),
    ({}, {"master_addr": "b"}, {"NNODES": "2", "MASTER_PORT": "6"}, (None, None, "b:6")),
    ({"hosts": ("a", "b")}, {"master_port": 6}, {"MASTER_ADDR": "a"}, (None, None, "a:6")),
    ({}, {"master_addr": "localhost", "master_port": 6, "nproc_per_node": "2"}, {}, (2, None, None)),
    ({}, {"nnodes": "1", "rdzv_endpoint": "localhost:0"}, {}, (None, "1", None)),
]  # fmt: skip


@pytest.mark.parametrize(("own", "given", "variables", "want"), TORCHRUN)
def test_torchruns_options_have_the_meaning_of_ours(
    own: dict[str, Any], given: dict[str, Any], variables: dict[str, str], want: tuple[Any, ...]
) -> None:
    found, notes = with_torchrun_options(TopologyRequest(**own), TorchrunOptions(**given), variables)
    assert (found.nproc, found.nodes, found.head) == want
    assert found.hosts == own.get("hosts", ())
    changed = want != (own.get("nproc"), own.get("nodes"), own.get("head"))
    assert any("are read as" in note for note in notes) == changed


@pytest.mark.parametrize(
    ("own", "given", "variables", "names"),
    [
        ({"nodes": "3"}, {"nnodes": "2"}, {}, ("--nodes 3", "--nnodes 2")),
        ({"nodes": "1:2"}, {"nnodes": "2"}, {}, ("--nodes 1:2", "--nnodes 2")),
        ({}, {"nnodes": "2"}, {"NNODES": "4"}, ("--nnodes 2", "NNODES 4")),
        ({"nproc": 2}, {"nproc_per_node": "gpu"}, {}, ("--nproc 2", "--nproc-per-node gpu")),
        ({}, {"nproc_per_node": "2"}, {"NPROC_PER_NODE": "8"}, ("--nproc-per-node 2", "NPROC_PER_NODE 8")),
        ({"nodes": "2", "head": "a"}, {"master_addr": "b"}, {}, ("--head a", "--master-addr b")),
        ({"nodes": "2", "head": "a:1"}, {"rdzv_endpoint": "a:2"}, {}, ("--head 1", "--rdzv-endpoint 2")),
        ({"nodes": "2"}, {"master_addr": "a", "master_port": 5}, {"MASTER_PORT": "6"}, ("--master-port 5", "MASTER_PORT 6")),
        ({}, {"nnodes": "1:4"}, {}, ("--nnodes 1:4", "elastic")),
        ({}, {"nnodes": "many"}, {}, ("--nnodes", "many")),
        ({}, {"nproc_per_node": "cpu"}, {}, ("--nproc-per-node cpu", "device")),
        ({}, {"nproc_per_node": "1025"}, {}, ("--nproc-per-node 1025", "1024")),
        ({"nodes": "2"}, {"rdzv_endpoint": "-x:1"}, {}, ("--rdzv-endpoint", "host name")),
    ],
)  # fmt: skip
def test_torchruns_options_that_contradict_are_refused_by_name(
    own: dict[str, Any], given: dict[str, Any], variables: dict[str, str], names: tuple[str, str]
) -> None:
    with pytest.raises(UsageError) as refused:
        with_torchrun_options(TopologyRequest(**own), TorchrunOptions(**given), variables)
    text = "\n".join(refused.value.lines())
    assert refused.value.exit_code == 2
    assert all(name in text for name in names), text
