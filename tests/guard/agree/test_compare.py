"""The judgement of all nodes: properties that hold for any reports, and the words of the failures
that people report most.

Run: pytest tests/guard/agree/test_compare.py
"""

import random
import re
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.guard.agree.making import changed, device, gpu_node, interfaces, node, nodes
from unisono.base.causes import CATALOGUE, Verdict
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.compare import compare_nodes
from unisono.guard.agree.reports import FileDigest, NodeReport, OutputFacts
from unisono.guard.agree.rules import NODE_RULES
from unisono.guard.facts.limits import SystemLimits

# What one node may have otherwise, one thing at a time.
CHANGES: dict[str, Any] = {
    "nproc": 1,
    "nodes": 4,
    "config": {"optim.lr": 1e-5},
    "variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_ALGO": "Tree", "NCCL_DEBGU": "1", "GLOO_SOCKET_IFNAME": "^lo"},
    "nccl_files": {"NCCL_IB_DISABLE": "1"},
    "versions": {"torch": "2.12.1", "python": "3.11.2"},
    "environment_digest": "other",
    "code": {"unisono/trainer/training/loop.py": "x"},
    "data_files": [FileDigest(label="train[0]: rows.jsonl", bytes=1204, digest="x")],
    "tokenizer_files": [],
    "model_files": [FileDigest(label="model.safetensors", bytes=1, digest="y")],
    "device_kind": "cuda",
    "output": OutputFacts(path="/full", writable=False, trouble="read-only", shared=False, free_bytes=0),
    "limits": SystemLimits(cores=1, memory_bytes=1, shm_bytes=None, shm_free_bytes=None, open_files=64, locked_memory_bytes=1,
                     stack_bytes=None, processes=10),
    "host_addresses": ["127.0.1.1"],
    "interfaces": [],
    "clock_offset_s": 60.0,
    "files_note": "the disk does not answer",
    "address": "127.0.1.1",
    "visible_variable": "0",
}  # fmt: skip


def words_of(agreement: Agreement) -> list[str]:
    return [line for verdict in agreement.verdicts for line in verdict.lines()]


def only(agreement: Agreement) -> Verdict:
    [verdict] = agreement.fatal
    return verdict


def test_equal_healthy_nodes_agree_and_every_check_passes() -> None:
    for reports in (nodes(1), nodes(3), [gpu_node(rank) for rank in range(3)]):
        agreement = compare_nodes(reports)
        assert agreement.agreed
        assert agreement.verdicts == []
        assert [check for check in agreement.checks if check.status != "pass"] == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_equal_nodes_are_never_refused_for_what_they_have_in_common(data: st.DataObject) -> None:
    """Equal config, versions, code, files and harmless variables, whatever they are."""
    text = st.text(max_size=12)
    shared = {
        "config": data.draw(st.dictionaries(text, st.one_of(text, st.floats(), st.booleans(), st.none(), st.lists(text, max_size=2)), max_size=4)),
        "versions": data.draw(st.dictionaries(st.sampled_from(["torch", "python", "nccl", "foo"]), text, max_size=4)),
        "code": data.draw(st.dictionaries(text, text, max_size=3)),
        "variables": data.draw(st.dictionaries(st.sampled_from(["NCCL_ALGO", "NCCL_NOPE", "PYTHONHASHSEED", "TORCH_DISTRIBUTED_DEBUG"]), text, max_size=3)),
        "nproc": data.draw(st.integers(1, 9)),
        "data_files": [FileDigest(label=data.draw(text), bytes=1, digest=data.draw(text))],
    }  # fmt: skip
    assert compare_nodes(nodes(data.draw(st.integers(1, 4)), **shared)).fatal == []


@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=5, unique=True), st.integers(0, 4), st.randoms())
@settings(max_examples=80, deadline=None)
def test_order_changes_nothing_and_the_majority_is_never_blamed(
    keys: list[str], odd: int, rng: random.Random
) -> None:
    reports = changed(nodes(5), odd, **{key: CHANGES[key] for key in keys})
    agreement = compare_nodes(reports)
    shuffled = list(reports)
    rng.shuffle(shuffled)
    assert compare_nodes(shuffled).to_json() == agreement.to_json()
    for verdict in agreement.verdicts:
        assert set(verdict.hosts) <= {reports[odd].host}


any_text = st.text(max_size=8)
any_number = st.one_of(st.none(), st.integers(-5, 2**40))
any_report = st.builds(
    lambda rank, changes: node(rank, **changes),
    st.integers(-1, 4),
    st.fixed_dictionaries(
        {},
        optional={
            "host": any_text,
            "address": st.one_of(any_text, st.sampled_from(["127.0.0.1", "::1", "10.0.0.1", "172.17.0.1"])),
            "nodes": st.integers(-1, 5),
            "nproc": st.integers(-1, 5),
            "nproc_declared": st.booleans(),
            "device_kind": st.sampled_from(["cpu", "cuda"]),
            "chosen": st.lists(st.integers(0, 3).map(device), max_size=3),
            "visible": st.lists(st.integers(0, 3).map(device), max_size=3),
            "physical": st.lists(st.integers(0, 3).map(device), max_size=3),
            "visible_variable": st.one_of(st.none(), any_text, st.sampled_from(["0,1", "-1", "0,0", "GPU-1,2", "9"])),
            "variables": st.dictionaries(
                st.one_of(any_text, st.sampled_from(["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_PORT", "NCCL_HOSTID"])),
                any_text,
                max_size=4,
            ),
            "versions": st.dictionaries(st.sampled_from(["torch", "nccl", "python"]), any_text, max_size=3),
            "environment_digest": any_text,
            "packages": st.dictionaries(any_text, any_text, max_size=3),
            "code": st.dictionaries(any_text, any_text, max_size=2),
            "config": st.dictionaries(any_text, st.one_of(any_text, st.floats(), st.lists(st.integers())), max_size=3),
            "data_files": st.lists(st.builds(FileDigest, label=any_text, bytes=st.integers(), digest=any_text), max_size=2),
            "model_files": st.just([]),
            "files_note": any_text,
            "output": st.builds(
                OutputFacts, path=any_text, writable=st.one_of(st.none(), st.booleans()), shared=st.one_of(st.none(), st.booleans()),
                free_bytes=any_number,
            ),
            "limits": st.builds(
                SystemLimits, cores=st.integers(0, 9), memory_bytes=st.integers(0, 2**40), shm_bytes=any_number, shm_free_bytes=any_number,
                open_files=any_number, locked_memory_bytes=any_number, stack_bytes=any_number, processes=any_number,
            ),
            "interfaces": st.lists(st.sampled_from(interfaces("10.0.0.1")), max_size=2),
            "host_addresses": st.lists(any_text, max_size=2),
            "head_addresses": st.lists(st.sampled_from(["127.0.1.1", "10.0.0.0"]), max_size=2),
            "clock_offset_s": st.one_of(st.none(), st.floats(-1e6, 1e6)),
        },
    ),
)  # fmt: skip


@given(st.lists(any_report, max_size=6))
@settings(max_examples=150, deadline=None)
def test_any_reports_are_judged_and_every_verdict_is_legal(reports: list[NodeReport]) -> None:
    agreement = compare_nodes(reports)
    assert agreement.checks
    hosts = {" ".join(report.host.split()) for report in reports}
    for verdict in agreement.verdicts:
        assert_legal(verdict)
        assert hosts or not verdict.hosts
        assert len(verdict.hosts) <= len(reports)
    assert agreement.agreed == (not any(check.status == "fail" for check in agreement.checks))
    assert len(agreement.with_status("warn")) == len(agreement.warnings)
    assert agreement.to_json() == compare_nodes(reports[::-1]).to_json()


_UNFILLED = re.compile(r"\{(choices|close|key|meant|name|rank|setting|value|where|who)\}")
"""Places of the rules' texts; a brace of another kind may be in what a report says."""


def assert_legal(verdict: Verdict) -> None:
    assert verdict.cause in CATALOGUE
    assert verdict.when in CATALOGUE[verdict.cause].when
    assert verdict.summary
    assert "\n" not in verdict.summary
    assert verdict.fix
    assert not _UNFILLED.search("".join(verdict.fix))
    assert len(verdict.evidence) < 100


def test_a_masked_device_on_one_node_is_named_with_what_each_sees() -> None:
    """Failure 1 of those that people report: CUDA_VISIBLE_DEVICES is set on one node only."""
    verdict = only(compare_nodes([gpu_node(0), gpu_node(1, visible="0"), gpu_node(2)]))
    assert verdict.cause == "nproc_mismatch"
    assert verdict.summary == "node 1 (b) would start 1 rank, nodes 0 (a) and 2 (c) would start 2"
    assert verdict.hosts == ("b",)
    assert verdict.phase == "agree.nodes"
    assert verdict.evidence[0].where == "node 1 (b)"
    assert (
        verdict.evidence[0].text
        == "CUDA_VISIBLE_DEVICES=0 (set), nproc_per_node 1 inferred, 1 of 2 devices visible"
    )
    assert verdict.evidence[1].where == "nodes 0 (a) and 2 (c)"
    assert (
        verdict.evidence[1].text
        == "CUDA_VISIBLE_DEVICES not set, nproc_per_node 2 inferred, 2 of 2 devices visible"
    )
    assert verdict.fix == ("unset CUDA_VISIBLE_DEVICES on b, or pass --nproc 2 on every node",)


def test_a_debugging_variable_on_one_node_is_named() -> None:
    """Failure 2: initialisation would hang to its time-out without a word about the variable."""
    reports = changed(nodes(), 1, variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    agreement = compare_nodes(reports)
    verdict = only(agreement)
    assert verdict.cause == "env_mismatch"
    assert (
        verdict.summary == "TORCH_DISTRIBUTED_DEBUG: DETAIL on node 1 (b), not set on nodes 0 (a) and 2 (c)"
    )
    assert verdict.hosts == ("b",)
    assert "unset TORCH_DISTRIBUTED_DEBUG" in " ".join(verdict.fix)
    [check] = [check for check in agreement.checks if check.id == "env"]
    assert (check.status, check.where) == ("fail", "node 1 (b)")


def test_the_first_verdict_is_the_reason_and_the_rest_are_kept() -> None:
    reports = changed(
        nodes(), 2, nproc=1, variables={"NCCL_ALGO": "Ring"}, versions={**node(0).versions, "torch": "2.12.0"},
        code={"unisono/trainer/training/loop.py": "x"}, config={"optim.lr": 1e-5},
    )  # fmt: skip
    assert [verdict.cause for verdict in compare_nodes(reports).fatal] == [
        "nproc_mismatch", "env_mismatch", "version_mismatch", "code_mismatch", "config_mismatch",
    ]  # fmt: skip


def test_differing_node_of_1024_is_named_and_the_rest_are_a_range() -> None:
    reports = changed(nodes(1024), 512, nproc=1)
    verdict = only(compare_nodes(reports))
    assert verdict.summary == "node 512 (n512) would start 1 rank, nodes 0–511 and 513–1023 would start 2"
    assert verdict.hosts == ("n512",)


def test_1024_nodes_with_300_packages_and_100_files_are_compared_quickly() -> None:
    """0.4 s on two busy cores; five times that is allowed."""
    packages = {f"package-{number}": f"1.{number}.0" for number in range(300)}
    code = {f"unisono/module{number}.py": f"{number:032x}" for number in range(100)}
    reports = [
        NodeReport.model_validate_json(
            node(rank, nodes=1024, packages=dict(packages), code=dict(code)).model_dump_json()
        )
        for rank in range(1024)
    ]
    reports[700] = reports[700].model_copy(
        update={"packages": {**packages, "package-7": "2.0"}, "environment_digest": "other"}
    )
    began = time.process_time()
    agreement = compare_nodes(reports)
    assert time.process_time() - began < 2.1
    assert [verdict.hosts for verdict in agreement.verdicts] == [("n700",)]


def test_checks_come_in_the_order_of_the_table() -> None:
    checks = [check.id for check in compare_nodes([gpu_node(rank) for rank in range(3)]).checks]
    assert checks == list(NODE_RULES)


def test_no_report_at_all_is_unknown_not_agreed_upon() -> None:
    [check] = compare_nodes([]).checks
    assert check.status == "unknown"


def test_agreement_json_counts_and_lists_what_is_unknown() -> None:
    reports = changed(nodes(), 1, clock_offset_s=None, code={}, files_note="no hub", data_files=[])
    value: dict[str, Any] = compare_nodes(reports).to_json()
    assert value["agreed"] is True
    unknown = {check["id"]: check["text"] for check in value["checks"] if check["status"] == "unknown"}
    assert set(unknown) == {"clock", "code", "files.data"}
    assert value["counts"]["unknown"] == 3
    assert unknown["files.data"] == "data files: not known on node 1 (b): no hub"


def test_words_are_the_same_for_any_order_of_evidence() -> None:
    reports = changed(nodes(), 1, config={"optim.lr": 1e-5})
    assert words_of(compare_nodes(reports)) == words_of(compare_nodes(reports[::-1]))
