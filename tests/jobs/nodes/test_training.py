"""Several nodes that agree, and train. Run: pytest tests/jobs/nodes/test_training.py"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.jobs.nodes.verdict_checks import refused

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_two_nodes_with_two_and_one_ranks_train_one_model(networks: Namespaces, pair: Job) -> None:
    """Unequal numbers that are declared run; the output_dir is not shared, and node 1 keeps copies
    of the result.
    """
    del networks
    disk = pair.home(1) / "disk"
    disk.mkdir()
    pair.out.mkdir()
    fronts = [
        pair.start(0, "--nproc", "2"),
        pair.start(1, "--nproc", "1", own=Own(binds=[(disk, pair.out)])),
    ]
    assert together(fronts) == [0, 0], pair.transcript()
    assert [line["step"] for line in pair.metrics()] == [1, 2, 3, 4]
    plan = pair.read("plan.json")
    assert (plan["world_size"], plan["strategy"]) == (3, "ddp")
    assert [(node["node_rank"], node["host"], node["nproc"]) for node in plan["nodes"]] == [
        (0, fronts[0].host, 2),
        (1, fronts[1].host, 1),
    ]
    assert [place["rank"] for place in plan["ranks"]] == [0, 1, 2]
    assert [node["shares_output"] for node in plan["nodes"]] == [True, False]
    agreement = pair.read("agreement.json")
    assert agreement["schema"] == 1
    assert len(agreement["nodes"]) == 2
    assert len(agreement["ranks"]) == 3
    assert {check["status"] for check in agreement["checks"]} <= {"pass", "warn", "unknown"}
    assert any("2" in check["text"] for check in agreement["checks"] if check["id"] == "nproc")
    assert json.loads((disk / "result.json").read_text())["outcome"] == "completed"
    assert not (disk / "metrics.jsonl").exists()
    assert not (disk / "verdict.json").exists()
    assert fronts[0].result["step"] == 4
    assert "completed" in fronts[1].text()
    pair.wait_gone()


def test_two_nodes_train_an_image_model(pair: Job, image_sections: dict[str, Any]) -> None:
    """A caption that differs is found before anything starts; then pictures, buckets and latents
    agree, and the first checkpoint is read back.
    """
    pair.config(**image_sections)
    pictures = Path(image_sections["data"]["train"])
    other = shutil.copytree(pictures, pair.folder / "other")
    (other / "1_tile" / "red-32x32.txt").write_text("a different caption")
    pair.config(1, data={"train": str(other)})
    refused(pair.start_all(), "data_mismatch")
    pair.config(1, data={"train": str(pictures)})
    fronts = pair.start_all(rehearse=True)
    assert together(fronts) == [0, 0], pair.transcript()
    assert [line["step"] for line in pair.metrics()] == [1, 2, 3, 4, 5, 6]
    assert (pair.out / "adapter" / "pytorch_lora_weights.safetensors").is_file()
    pair.wait_gone()


def test_a_clock_that_is_a_minute_off_is_a_warning(pair: Job) -> None:
    """The learning rate ends this job; the warning is told all the same."""
    pair.config(1, optim={"lr": 1e-5})
    fronts = [pair.start(0), pair.start(1, answers={"clock_offset_s": 60.0})]
    refused(fronts, "config_mismatch")
    (check,) = [check for check in pair.read("agreement.json")["checks"] if "clock" in check["id"]]
    assert check["status"] == "warn"
    assert fronts[1].host in check["text"] + check["where"]


@pytest.mark.long
def test_with_a_clock_that_is_a_minute_off_nothing_hangs(pair: Job) -> None:
    """torchrun's dynamic rendezvous takes such a node for dead; here no decision hangs on another
    machine's clock.
    """
    fronts = [pair.start(0), pair.start(1, answers={"clock_offset_s": 60.0})]
    assert together(fronts) == [0, 0], pair.transcript()
    for front in fronts:
        assert "clock of" in front.text() or "clocks of" in front.text(), front.text()


@pytest.mark.long
def test_torchruns_variables_do_what_the_flags_do(pair: Job) -> None:
    """As LLaMA-Factory's FORCE_TORCHRUN takes them: NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR,
    MASTER_PORT.
    """
    fronts = [
        pair.start(
            node, topology=False,
            env={"NNODES": "2", "NODE_RANK": str(node), "NPROC_PER_NODE": "1", "MASTER_ADDR": pair.ground.address(0),
                 "MASTER_PORT": str(pair.port)},
        )
        for node in range(2)
    ]  # fmt: skip
    assert together(fronts) == [0, 0], pair.transcript()
    plan = pair.read("plan.json")
    assert plan["world_size"] == 2
    assert all("NPROC_PER_NODE" in node["nproc_origin"] for node in plan["nodes"])
    assert "NNODES" in json.dumps(plan["origins"])


@pytest.mark.long
def test_four_nodes_train_what_one_rank_trains(job_of: Callable[[int], Job]) -> None:
    """The same losses, to rounding, whatever the number of nodes."""
    one, four = job_of(1), job_of(4)
    assert one.start(0, topology=False).wait() == 0, one.transcript()
    assert together(four.start_all()) == [0] * 4, four.transcript()
    alone = [line["loss"] for line in one.metrics()]
    losses = [line["loss"] for line in four.metrics()]
    assert losses == pytest.approx(alone, rel=1e-5)
