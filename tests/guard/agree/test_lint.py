"""Suspicious settings and versions with known faults: what is said, and that ordinary ones are left
alone.

Run: pytest tests/guard/agree/test_lint.py
"""

import pytest

from tests.guard.agree.making import changed, device, gpu_node, node, nodes
from unisono.base.causes import CATALOGUE
from unisono.base.causes.variables import VARIABLES, find_variable
from unisono.guard.agree.compare import compare_nodes
from unisono.guard.agree.environment_rules import LINTS, compared, need_of, unknown_names
from unisono.guard.agree.reports import Interface
from unisono.guard.agree.rules import NEED_MEANING, NETWORK_RULES, NODE_RULES, PREPARED_RULES, RANK_RULES
from unisono.guard.agree.version_rules import KNOWN_BAD, VERSION_RULES, essential, release_of

TABLES = [*NODE_RULES.values(), *RANK_RULES.values(), *NETWORK_RULES.values(), *PREPARED_RULES.values()]


@pytest.mark.parametrize("rule", TABLES, ids=lambda rule: rule.id)
def test_a_rule_leads_to_a_cause_that_can_be_found_before_the_start(rule: object) -> None:
    assert rule.cause in CATALOGUE  # type: ignore[attr-defined]
    assert "before" in CATALOGUE[rule.cause].when  # type: ignore[attr-defined]
    assert rule.need in NEED_MEANING  # type: ignore[attr-defined]


def test_ids_of_checks_are_unique() -> None:
    assert len({rule.id for rule in TABLES}) == len(TABLES)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_every_variable_of_the_catalogue_has_its_need(variable: object) -> None:
    assert need_of(variable.name) in NEED_MEANING  # type: ignore[attr-defined]


def test_protocol_variables_are_compared_and_those_of_one_node_are_not() -> None:
    assert all(
        map(
            compared,
            ("NCCL_ALGO", "TORCH_DISTRIBUTED_DEBUG", "CUBLAS_WORKSPACE_CONFIG", "FSDP_OFFLOAD_PARAMS"),
        )
    )
    assert not any(
        map(
            compared,
            ("NCCL_DEBUG", "RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "NCCL_IB_HCA", "NCCL_NOPE", "HOME"),
        )
    )


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    assert unknown_names(["NCCL_DEBGU", "NCCL_ALGO", "HOME", "GLOO_SOCKET_IFNAMES"]) == {
        "NCCL_DEBGU": "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAMES": "GLOO_SOCKET_IFNAME",
    }
    agreement = compare_nodes(changed(nodes(), 1, variables={"NCCL_SOCKET_IFNAMES": "eth0"}))
    [verdict] = agreement.verdicts
    assert verdict.cause == "env_suspicious"
    assert (
        verdict.summary
        == "NCCL_SOCKET_IFNAMES on node 1 (b): unknown variable; did you mean NCCL_SOCKET_IFNAME?"
    )
    assert verdict.fix[0] == "`unisono explain NCCL_SOCKET_IFNAME`"


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "hang forever"),
        ("TORCH_NCCL_ENABLE_MONITORING", "0", "disables the monitor"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "conflicts with"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "deprecated name"),
        ("NCCL_TIMEOUT", "1800", "no effect"),
        ("NCCL_DEBUG", "INFO", "excessive output"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "twice as long"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "10", "healthy ranks are killed"),
        ("NCCL_P2P_DISABLE", "1", "slow"),
        ("NCCL_LAUNCH_MODE", "GROUP", "deprecated"),
        ("NCCL_ALGO", "Tree", "without ring"),
        ("CUDA_LAUNCH_BLOCKING", "1", "slow"),
        ("LD_PRELOAD", "/opt/libnccl.so.2", "a different NCCL"),
        ("MASTER_PORT", "80", "not a valid port"),
        ("MASTER_PORT", "40000", "ephemeral port range"),
        ("MASTER_ADDR", "localhost", "loopback"),
        ("CUDA_VISIBLE_DEVICES", "0,GPU-1", "mixed"),
    ],
)
def test_a_suspicious_setting_is_reported_with_what_to_do(name: str, value: str, part: str) -> None:
    reports = [gpu_node(rank, variables={name: value}) for rank in range(3)]
    agreement = compare_nodes(reports)
    assert agreement.agreed
    [verdict] = agreement.warnings
    assert verdict.cause == "env_suspicious"
    assert verdict.summary.startswith(f"{name}={value} on nodes 0 (a), 1 (b) and 2 (c): ")
    assert part in verdict.summary
    assert verdict.fix[0].startswith("on nodes 0 (a), 1 (b) and 2 (c): ")


def test_work_arounds_are_reported_only_where_they_cost_something() -> None:
    off = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1"}
    alone = [gpu_node(rank, 1, variables=off) for rank in range(3)]
    assert compare_nodes(alone).verdicts == []
    adapter = Interface(
        name="ib0", addresses=["10.9.0.1"], mtu=2044, up=True, loopback=False, kind="infiniband"
    )
    fast = [
        gpu_node(rank, 1, variables=off, interfaces=[*node(rank).interfaces, adapter]) for rank in range(3)
    ]
    assert [verdict.summary.partition("=")[0] for verdict in compare_nodes(fast).verdicts] == [
        "NCCL_IB_DISABLE"
    ]


@pytest.mark.parametrize(
    ("value", "cause"),
    [("0,9", "invalid_device_ordinal"), ("0,0", "duplicate_gpu"), ("1,0", None), ("GPU-a-0", None)],
)
def test_a_mask_that_cuda_cannot_read_is_refused(value: str, cause: str | None) -> None:
    reports = changed([gpu_node(rank) for rank in range(3)], 1, variables={"CUDA_VISIBLE_DEVICES": value})
    assert [verdict.cause for verdict in compare_nodes(reports).fatal] == ([cause] if cause else [])


def test_ordinary_settings_are_left_alone() -> None:
    ordinary = {
        "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "4", "MASTER_ADDR": "10.0.0.0",
        "MASTER_PORT": "29500", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_ALGO": "Ring,Tree", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/data/hf", "NCCL_IB_HCA": "mlx5_0", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }  # fmt: skip
    assert compare_nodes([gpu_node(rank, variables=ordinary) for rank in range(3)]).verdicts == []


def test_the_same_name_of_a_machine_for_nccl_on_two_hosts_is_refused() -> None:
    reports = [gpu_node(rank, variables={"NCCL_HOSTID": "one"}) for rank in range(3)]
    [verdict] = compare_nodes(reports).fatal
    assert verdict.cause == "p2p_blocked"


def test_lints_name_variables_that_are_known_or_old() -> None:
    assert [lint.name for lint in LINTS if find_variable(lint.name) is None] == []
    assert all(lint.fatal_cause in {"", *CATALOGUE} for lint in LINTS)


# Versions


@pytest.mark.parametrize(
    ("package", "version", "part"),
    [("torch", "2.13.0+cu126", "2.13.0"), ("python", "3.12.3", "3.12"), ("cuda", "12.6", "12"), ("unisono", "1.0+x", "1.0+x"), ("numpy", "2", None)],
)  # fmt: skip
def test_what_is_essential_of_a_version(package: str, version: str, part: str | None) -> None:
    assert essential(package, version) == part
    assert essential(package, None) is None
    assert (package in VERSION_RULES) == (part is not None)


def test_releases_are_compared_as_numbers() -> None:
    assert release_of("2.26.2+cuda12.2") == (2, 26, 2)
    assert release_of("2.9.0a0") < release_of("2.10")
    assert release_of("main") == ()


@pytest.mark.parametrize("entry", KNOWN_BAD, ids=lambda entry: f"{entry.package}-{entry.least_good}")
def test_a_known_fault_has_a_source_a_command_and_a_good_version(entry: object) -> None:
    assert entry.source.startswith("https://github.com/")  # type: ignore[attr-defined]
    assert entry.command  # type: ignore[attr-defined]
    good = release_of(entry.least_good)  # type: ignore[attr-defined]
    assert good >= entry.before  # type: ignore[attr-defined]
    assert not good or not entry.holds({entry.package: entry.least_good})  # type: ignore[attr-defined]


def test_known_faults_are_reported_with_minimum_good_version_and_source() -> None:
    versions = {**gpu_node(0).versions, "torch": "2.7.0+cu126", "nccl": "2.26.2"}
    agreement = compare_nodes([gpu_node(rank, versions=versions) for rank in range(3)])
    assert agreement.agreed
    torch, nccl = (verdict for verdict in agreement.warnings if verdict.cause == "version_known_bad")
    assert torch.summary.startswith("torch 2.7.0+cu126 on nodes 0 (a), 1 (b) and 2 (c): ")
    assert "the minimum good version is 2.7.1" in torch.fix
    assert nccl.fix[0].startswith("export NCCL_CUMEM_HOST_ENABLE=0")
    assert any("github.com/pytorch/pytorch/issues/152302" in line for line in nccl.fix)


def test_known_faults_that_do_not_concern_a_node_are_not_reported() -> None:
    versions = {**gpu_node(0).versions, "nccl": "2.26.2"}
    mended = [
        gpu_node(rank, versions=versions, variables={"NCCL_CUMEM_HOST_ENABLE": "0"}) for rank in range(3)
    ]
    assert compare_nodes(mended).verdicts == []
    on_cpu = nodes(versions={**node(0).versions, "nccl": "2.26.2", "torch": "2.7.0+cpu"})
    assert compare_nodes(on_cpu).verdicts == []
    t4 = [device(index, name="Tesla T4", gib=16) for index in range(2)]
    reported = compare_nodes(
        [gpu_node(0, nodes=1, chosen=t4, visible=None, physical=t4).model_copy(update={"visible": t4})]
    )
    assert [verdict.cause for verdict in reported.verdicts] == ["version_known_bad"]


def test_faults_of_foreign_programs_are_known_but_not_reported_to_own_runs() -> None:
    packages = {"ray": "2.40.0", "pytorch-lightning": "1.9.5", "llamafactory": "0.9.2"}
    assert {entry.package for entry in KNOWN_BAD if entry.holds(packages)} == set(packages)
    mended = {"ray": "2.60.0", "pytorch-lightning": "2.6.0", "llamafactory": "0.9.3"}
    assert not any(entry.holds(mended) for entry in KNOWN_BAD)
    assert compare_nodes(nodes(packages=packages)).verdicts == []
