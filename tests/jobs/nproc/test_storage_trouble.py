"""Disks that are full, read-only or silent while ranks train.

Run: pytest tests/jobs/nproc/test_storage_trouble.py
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import PACED, Job
from tests.jobs.nproc.disks import in_memory, on_a_device
from tests.jobs.nproc.saved_checkpoints import newer, published

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MIB = 1 << 20
WORLDS = [
    pytest.param((1, "auto"), id="one rank", marks=pytest.mark.long),
    pytest.param((2, "ddp"), id="ddp", marks=pytest.mark.long),
    pytest.param((2, "fsdp"), id="fsdp"),
]
CHEAPEST = [
    pytest.param((1, "auto"), id="one rank"),
    pytest.param((2, "ddp"), id="ddp", marks=pytest.mark.long),
    pytest.param((2, "fsdp"), id="fsdp", marks=pytest.mark.long),
]


@pytest.fixture
def mounts(solo: Job) -> Iterator[ExitStack]:
    """Where disks are mounted; they answer again before the job is ended."""
    with ExitStack() as stack:
        yield stack
    solo.close()


def start(job: Job, world: tuple[int, str], **sections: object) -> Front:
    nproc, strategy = world
    defaults = {"duration": "5000 steps", "checkpoint": {"every": "5 steps", "keep": 2}, "restarts": 0}
    job.config(parallel={"strategy": strategy}, **{**defaults, **sections})
    return job.start(0, "--nproc", str(nproc), topology=False, json=False, answers=PACED)


def stopped(job: Job, front: Front) -> None:
    """Ends the run, and sees that the state after its last step was saved and nothing lies
    around.
    """
    front.signal(signal.SIGTERM)
    assert front.wait(limit_s=60) == 75, front.text()
    job.wait_gone(limit_s=10)
    result = job.read("result.json")
    assert result["checkpoint"].endswith(f"step-{result['step']:08d}"), front.text()
    left = [path.name for path in (job.out / "checkpoints").iterdir()]
    assert not [name for name in left if ".tmp-" in name or name.startswith(".trash")]


def _verdicts(solo: Job) -> list[dict[str, Any]]:
    """Of the checkpoints that failed; a rank writes its events beside the training, a moment after
    it has told its front.
    """
    logs = (solo.out / "events").glob("rank-*.jsonl")
    lines = [
        line for log in logs for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")
    ]
    warned = [json.loads(line) for line in lines]
    return [message["verdict"] for message in warned if message.get("code") == "checkpoint_failed"]


@pytest.mark.fault("the disk is full while a checkpoint is written")
@pytest.mark.parametrize("world", WORLDS)
def test_a_full_disk_costs_the_new_checkpoint_and_nothing_else(
    solo: Job, mounts: ExitStack, world: tuple[int, str]
) -> None:
    disk = mounts.enter_context(in_memory(solo.out / "checkpoints", size=2 * MIB))
    front = start(solo, world)
    newer(solo, "")
    message = "not enough space for checkpoint"

    def refused() -> bool:
        disk.fill(leave=40_000)  # again where a checkpoint that was just written let an old one go
        return any(message in line.text for line in front.lines)

    solo.until(refused, what=message)
    text = next(line.text for line in front.lines if "not enough space for checkpoint" in line.text)
    assert "bytes) missing" in text
    assert "free" in text
    solo.until(lambda: bool(_verdicts(solo)), what="the warning, with its verdict, in the events of a rank")
    named = _verdicts(solo)
    assert {(verdict["cause"], verdict["severity"]) for verdict in named} == {("disk_full", "warning")}
    kept = published(solo)
    assert kept
    disk.make_room()
    newer(solo, kept[-1])
    stopped(solo, front)


@pytest.mark.fault("a run is stopped whose disk never had room for a checkpoint")
@pytest.mark.parametrize(
    "world", [(1, "auto"), pytest.param((2, "fsdp"), marks=pytest.mark.long)], ids=["one rank", "fsdp"]
)
def test_stopped_run_that_saved_nothing_has_the_full_disk_as_its_verdict(
    solo: Job, mounts: ExitStack, world: tuple[int, str]
) -> None:
    disk = mounts.enter_context(in_memory(solo.out / "checkpoints", size=2 * MIB))
    disk.fill(leave=0)
    front = start(solo, world)
    front.wait_for("not enough space for checkpoint")
    front.signal(signal.SIGTERM)
    assert front.wait(limit_s=60) == 6, front.text()
    result = solo.read("result.json")
    assert (result["outcome"], result["verdict"]["cause"]) == ("unfit", "disk_full"), front.text()
    assert result["verdict"]["hosts"] == [front.host]
    assert not result["verdict"]["ranks"]
    assert solo.read("verdict.json")["cause"] == "disk_full"
    assert "[disk_full]" in front.text("err")


@pytest.mark.long
@pytest.mark.parametrize("world", [(1, "auto"), (2, "fsdp")], ids=["one rank", "fsdp"])
def test_run_without_room_for_checkpoints_still_ends_with_its_weights(
    solo: Job, mounts: ExitStack, world: tuple[int, str]
) -> None:
    disk = mounts.enter_context(in_memory(solo.out / "checkpoints", size=2 * MIB))
    front = start(solo, world, duration="60 steps")
    newer(solo, "")
    disk.fill(leave=20_000)
    assert front.wait(limit_s=90) == 0, front.text()
    assert (solo.out / "adapter" / "adapter_model.safetensors").exists()
    assert published(solo)
    assert solo.read("result.json")["step"] == 60
    assert solo.read("result.json")["checkpoint"] != str(solo.out / "checkpoints" / "step-00000060")


@pytest.mark.long
def test_run_whose_weights_do_not_fit_continues_after_making_room(solo: Job, mounts: ExitStack) -> None:
    disk = mounts.enter_context(in_memory(solo.out, size=4 * MIB))
    front = start(solo, (1, "auto"), duration="60 steps")
    newer(solo, "")
    disk.fill(leave=0)
    assert front.wait(limit_s=90) == 6, front.text()
    assert "the result cannot be written" in front.text("err")
    assert "[disk_full]" in front.text("err")
    disk.make_room()
    again = start(solo, (1, "auto"), duration="60 steps")
    assert again.wait() == 0, again.text()
    assert [line["step"] for line in solo.metrics()] == list(range(1, 61))


@pytest.mark.fault("the storage turns read-only while a checkpoint is written")
@pytest.mark.parametrize("world", CHEAPEST)
def test_directory_that_turns_read_only_costs_only_the_new_checkpoint(
    solo: Job, mounts: ExitStack, world: tuple[int, str]
) -> None:
    disk = mounts.enter_context(in_memory(solo.out / "checkpoints", size=8 * MIB))
    front = start(solo, world)
    newer(solo, "")
    disk.read_only(on=True)
    front.wait_for("Read-only file system")
    kept = published(solo)
    disk.read_only(on=False)
    newer(solo, kept[-1])
    stopped(solo, front)


@pytest.mark.fault("the storage of the checkpoints does not answer")
@pytest.mark.parametrize("world", WORLDS)
def test_storage_that_hangs_is_named_and_training_continues(
    solo: Job, mounts: ExitStack, world: tuple[int, str], tmp_path: Path
) -> None:
    disk = mounts.enter_context(on_a_device(solo.out / "checkpoints", tmp_path / "image", size=32 * MIB))
    front = start(solo, world)
    newer(solo, "")
    disk.hang()
    began = time.monotonic()
    named = front.wait_for("has made no progress", limit_s=60)
    assert named - began < 30
    text = next(line.text for line in front.lines if "has made no progress" in line.text)
    assert str(solo.out / "checkpoints") in text
    assert "state D" in text
    reached = solo.metrics()[-1]["step"]
    solo.waits_for_step(reached + 20)
    kept = published(solo)
    disk.answer()
    newer(solo, kept[-1])
    stopped(solo, front)


@pytest.mark.long
@pytest.mark.parametrize("world", [(1, "auto"), (2, "fsdp")], ids=["one rank", "fsdp"])
def test_a_rank_that_not_even_sigkill_ends_is_not_waited_for(
    solo: Job, mounts: ExitStack, world: tuple[int, str], tmp_path: Path
) -> None:
    """The run comes to its end while a save hangs: the weights go elsewhere, the process cannot
    end, and the front leaves.
    """
    disk = mounts.enter_context(on_a_device(solo.out / "checkpoints", tmp_path / "image", size=32 * MIB))
    front = start(solo, world, duration="40 steps")
    newer(solo, "")
    disk.hang()
    assert front.wait(limit_s=120) == 0, front.text()
    assert "has made no progress" in front.text("err")
    assert "was killed and has not ended" in front.text("err")
    assert (solo.out / "adapter" / "adapter_model.safetensors").exists()
    assert solo.processes(), "the rank still waits"
    disk.answer()
    solo.wait_gone(limit_s=20)


@pytest.mark.fault("the whole output_dir does not answer")
@pytest.mark.parametrize("world", CHEAPEST)
def test_run_that_can_keep_no_step_ends_with_a_reason_and_continues_later(
    solo: Job, mounts: ExitStack, world: tuple[int, str], tmp_path: Path
) -> None:
    """Nobody waits for ever: the ranks, their front, and the shell that waits for it."""
    disk = mounts.enter_context(on_a_device(solo.out, tmp_path / "image", size=256 * MIB))
    solo.config(track=["tensorboard"], data={"eval": 0.1}, eval={"every": "1 step", "samples": 0})
    front = start(solo, world)
    newer(solo, "")
    disk.hang()
    began = time.monotonic()
    named = front.wait_for("has made no progress", limit_s=60)
    assert named - began < 40
    assert front.wait(limit_s=90) == 6, front.text()
    assert front.ended is not None
    assert front.ended - began < 60
    reported = front.text("err")
    assert "writing metrics.jsonl has made no progress" in reported, reported
    assert str(solo.out / "metrics.jsonl") in reported
    assert "the storage does not answer" in reported
    assert "Traceback" not in reported
    print(front.text(), front.ended - began, named - began)
    disk.answer()
    solo.wait_gone(limit_s=20)
    reached = solo.metrics()[-1]["step"]
    again = start(solo, world)
    solo.waits_for_step(reached + 10)
    stopped(solo, again)
    assert [line["step"] for line in solo.metrics()] == list(range(1, solo.metrics()[-1]["step"] + 1))


@pytest.mark.parametrize("which", ["weights", "tokens"])
def test_a_mapped_file_that_is_cut_is_named_and_the_storage_blamed(solo: Job, which: str) -> None:
    front = start(solo, (1, "auto"), batch={"global": 8})
    solo.waits_for_step(3)
    folder = solo.model if which == "weights" else Path(solo.read("plan.json")["data"]["cache_dir"])
    path = folder / ("model.safetensors" if which == "weights" else "tokens.arrow")
    whole = path.read_bytes()
    os.truncate(path, 0)
    try:
        code = front.wait(limit_s=240)
    finally:
        path.write_bytes(whole)
    assert code == 6, front.text()
    verdict = solo.read("verdict.json")
    assert (code, verdict["cause"]) == (6, "storage_unfit"), front.text()
    assert f"was killed by SIGBUS: {path} was cut while the ranks read it" in verdict["summary"]
