"""Nodes whose devices do not fit each other.

The devices are recorded answers. Run: pytest tests/jobs/nodes/test_devices.py
"""

from importlib.metadata import version
from typing import Any

import pytest

from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.verdict_checks import refused

pytestmark = pytest.mark.ranks


def gpus(
    *indices: int, name: str = "NVIDIA A100-SXM4-80GB", memory: int = 80 << 30, node: int = 0
) -> dict[str, Any]:
    """An answer: these devices, each with a UUID of its own, and a torch that could use them."""
    return {
        "packages": {"torch": f"{version('torch').partition('+')[0]}+cu128"},
        "gpus": [
            {"index": index, "uuid": f"GPU-{node:04d}{index:04d}-0000-0000-0000-000000000000", "name": name,
             "memory_bytes": memory, "memory_free_bytes": memory - (1 << 30), "capability": [8, 0]}
            for index in indices
        ],
    }  # fmt: skip


EIGHT = range(8)


@pytest.mark.fault("CUDA_VISIBLE_DEVICES set on one of three nodes")
def test_devices_hidden_on_one_node_alone_are_named(trio: Job) -> None:
    """Seed 0: CUDA_VISIBLE_DEVICES on some nodes only; the run used to hang in its first
    collective.
    """
    trio.config(device="auto")
    fronts = [
        trio.start(
            node, answers=gpus(*EIGHT, node=node), env={"CUDA_VISIBLE_DEVICES": "0,1"} if node == 1 else {}
        )
        for node in range(3)
    ]
    verdict = refused(fronts, "nproc_mismatch", hosts=[fronts[1].host])
    assert fronts[1].label in verdict.summary
    assert "8" in verdict.summary
    assert "2" in verdict.summary
    assert any("CUDA_VISIBLE_DEVICES" in item.text for item in verdict.evidence)
    assert any("CUDA_VISIBLE_DEVICES" in line for line in verdict.fix)


@pytest.mark.fault("8 visible devices here, 2 there, both inferred")
def test_eight_devices_here_and_two_there_are_refused(pair: Job) -> None:
    """Both numbers are inferred, so nobody is blamed, and both are shown."""
    pair.config(device="auto")
    fronts = [pair.start(0, answers=gpus(*EIGHT)), pair.start(1, answers=gpus(0, 1, node=1))]
    verdict = refused(fronts, "nproc_mismatch", hosts=[])
    for front in fronts:
        assert front.label in verdict.summary


@pytest.mark.fault("--nproc 2 here, 8 inferred there")
def test_the_node_that_inferred_is_the_odd_one(pair: Job) -> None:
    pair.config(device="auto")
    fronts = [
        pair.start(0, "--nproc", "2", answers=gpus(*EIGHT)),
        pair.start(1, answers=gpus(*EIGHT, node=1)),
    ]
    verdict = refused(fronts, "nproc_mismatch", hosts=[fronts[1].host])
    assert any("--nproc" in line for line in verdict.fix)


@pytest.mark.fault("two ranks on one UUID")
def test_two_ranks_on_one_device_are_refused(pair: Job) -> None:
    pair.config(device="auto")
    twice = gpus(0, 1, node=1)
    twice["gpus"][1]["uuid"] = twice["gpus"][0]["uuid"]
    fronts = [pair.start(0, answers=gpus(0, 1)), pair.start(1, answers=twice)]
    verdict = refused(fronts, "duplicate_gpu", hosts=[fronts[1].host])
    assert twice["gpus"][0]["uuid"] in str(verdict.to_json())


@pytest.mark.fault("devices on two nodes, none on the third")
def test_devices_here_and_none_there_are_refused(trio: Job) -> None:
    trio.config(device="auto")
    fronts = [
        trio.start(node, "--nproc", "1", answers=gpus() if node == 2 else gpus(0, node=node))
        for node in range(3)
    ]
    refused(fronts, "device_mismatch", hosts=[fronts[2].host])


def test_devices_of_a_different_type_are_reported(trio: Job) -> None:
    """The smallest sets the limit for all, the slowest the pace: a warning.

    The learning rate ends this job.
    """
    trio.config(device="auto")
    trio.config(0, optim={"lr": 2e-2})
    small = gpus(0, 1, name="Tesla T4", memory=16 << 30, node=2)
    fronts = [trio.start(node, answers=small if node == 2 else gpus(0, 1, node=node)) for node in range(3)]
    refused(fronts, "config_mismatch", hosts=[fronts[0].host])
    (check,) = [check for check in trio.read("agreement.json")["checks"] if check["id"] == "device.alike"]
    assert check["status"] == "warn"
    assert fronts[2].label in check["where"]
    assert "Tesla T4" in check["text"]
    assert "A100" in check["text"]


def test_six_to_nine_of_ten_devices_are_what_is_meant(pair: Job) -> None:
    """Other indices on each node are no difference: each names its own.

    That it differs in the learning rate ends it.
    """
    pair.config(device="auto")
    pair.config(1, optim={"lr": 2e-2})
    fronts = [
        pair.start(0, "--devices", "6,7,8,9", answers=gpus(*range(10))),
        pair.start(1, "--devices", "0,1,2,3", answers=gpus(*range(10), node=1)),
    ]
    verdict = refused(fronts, "config_mismatch")
    assert "nproc" not in verdict.summary
    agreement = pair.read("agreement.json")
    chosen = [[device["index"] for device in node["chosen"]] for node in agreement["nodes"]]
    assert chosen == [[6, 7, 8, 9], [0, 1, 2, 3]]
