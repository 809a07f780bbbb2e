"""Nodes that differ in variables, versions or code. Run: pytest tests/jobs/nodes/test_environment.py"""

import shutil
from pathlib import Path

import pytest

import unisono
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.verdict_checks import refused

pytestmark = pytest.mark.ranks


@pytest.mark.fault("variable on one node only")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_ALGO", "Tree"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),  # on one rank alone it makes initialisation hang on all
        pytest.param("NCCL_PROTO", "LL", marks=pytest.mark.long),
        pytest.param("CUBLAS_WORKSPACE_CONFIG", ":4096:8", marks=pytest.mark.long),
    ],
)
def test_a_variable_that_one_node_has_alone_is_named_with_its_value(trio: Job, name: str, value: str) -> None:
    fronts = [trio.start(node, "--nproc", "1", env={name: value} if node == 1 else {}) for node in range(3)]
    verdict = refused(fronts, "env_mismatch", hosts=[fronts[1].host])
    assert name in verdict.summary
    assert value.lower() in verdict.summary.lower()  # where case does not matter, it is shown in one
    assert any(name in line for line in verdict.fix)


@pytest.mark.fault("NCCL_ALGO differs on two nodes")
def test_two_values_of_a_variable_on_two_nodes_blame_nobody(pair: Job) -> None:
    fronts = [
        pair.start(node, "--nproc", "1", env={"NCCL_ALGO": value})
        for node, value in enumerate(("Ring", "Tree"))
    ]
    verdict = refused(fronts, "env_mismatch", hosts=[])
    assert "ring" in verdict.summary.lower()
    assert "tree" in verdict.summary.lower()


def test_a_misspelt_name_is_answered_with_the_nearest_known_one(trio: Job) -> None:
    """NCCL itself ignores it in silence. It is a warning; another difference ends this job."""
    fronts = [
        trio.start(node, env={"NCCL_SOCKET_IFNAMES": "eth0", **({"NCCL_ALGO": "Tree"} if node == 2 else {})})
        for node in range(3)
    ]
    refused(fronts, "env_mismatch", hosts=[fronts[2].host])
    checks = [
        check for check in trio.read("agreement.json")["checks"] if "NCCL_SOCKET_IFNAMES" in check["text"]
    ]
    assert checks
    assert {check["status"] for check in checks} == {"warn"}
    assert "NCCL_SOCKET_IFNAME" in (checks[0]["fix"] + checks[0]["text"]).replace("NCCL_SOCKET_IFNAMES", "")


@pytest.mark.fault("other version on one node")
@pytest.mark.parametrize(
    ("package", "value"),
    [
        ("torch", "2.9.1"),
        ("unisono", "0.0.9"),
        pytest.param("transformers", "4.57.0", marks=pytest.mark.long),
        pytest.param("python", "3.10", marks=pytest.mark.long),
    ],
)
def test_a_different_version_on_one_node_is_named(trio: Job, package: str, value: str) -> None:
    fronts = [
        trio.start(node, answers={"packages": {package: value}} if node == 2 else None) for node in range(3)
    ]
    verdict = refused(fronts, "version_mismatch", hosts=[fronts[2].host])
    assert package in verdict.summary
    assert value in verdict.summary


@pytest.mark.fault("edited source file on one node")
def test_an_edited_source_file_on_one_node_is_named(trio: Job, tmp_path: Path) -> None:
    """Node 1 has a checkout of its own, in which a line was added."""
    shutil.copytree(Path(unisono.__file__).parent, tmp_path / "checkout" / "unisono")
    with (tmp_path / "checkout" / "unisono" / "trainer" / "training" / "loop.py").open("a") as file:
        file.write("# tried something\n")
    fronts = [
        trio.start(node, env={"PYTHONPATH": str(tmp_path / "checkout")} if node == 1 else None)
        for node in range(3)
    ]
    verdict = refused(fronts, "code_mismatch", hosts=[fronts[1].host])
    assert "loop" in str(verdict.to_json())
