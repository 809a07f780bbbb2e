"""The first checkpoint of several ranks is tried whole.

Run: pytest tests/jobs/nproc/test_first_checkpoint.py
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import PACED, Job
from tests.jobs.nproc.saved_checkpoints import published
from tests.needs import small_disk
from unisono.trainer.checkpoint.manifest import MANIFEST

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LONG = "20000 steps"  # ended by the test, when it has seen what it waits for


def start(job: Job, *words: str, answers: dict[str, Any] = PACED, **named: Any) -> Front:
    rehearse = "--no-first-checkpoint" not in words
    return job.start(
        0, "--nproc", "2", *words, topology=False, json=False, rehearse=rehearse, answers=answers, **named
    )


def saved(job: Job) -> list[int]:
    """The steps of all checkpoints that rank 0 has told of."""
    lines = (job.out / "events" / "rank-00000.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "checkpoint"]


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.long)])
def test_first_checkpoint_and_its_copy_are_read_back_and_reported(solo: Job, strategy: str) -> None:
    """The line also reports what all checkpoints of the run will take."""
    storage = f"file://{solo.folder}/copies"
    solo.config(
        duration=LONG, checkpoint={"every": "500 steps", "keep": 1, "storage": storage}, parallel={"strategy": strategy}
    )  # fmt: skip
    front = start(solo)
    front.wait_for("rehearsal: checkpoint of ")
    front.wait_for("rehearsal: copy of ")
    printed = next(line for line in front.text().splitlines() if "rehearsal: checkpoint" in line)
    found = re.search(
        r"rehearsal: checkpoint of ([\d.]+ [kM]?B) in .* s \(.* s of it blocking\), read back and verified in .* s;"
        r" 40 more every 500 steps, at most 3 on disk: ([\d.]+ [kM]?B) of ([\d.]+ GB) free; .* s in all",
        printed,
    )
    assert found, printed
    place = f"{storage}/out/{solo.read('plan.json')['run_id']}/step-00000001"
    assert f", read back completely from {place} in " in front.text()
    os.kill(front.pid, signal.SIGTERM)
    assert front.wait() == 75, front.text()
    assert saved(solo)[0] == 1
    assert {"step-00000001", f"step-{saved(solo)[-1]:08d}"} <= set(published(solo)), (
        "nobody has read the last one yet"
    )
    assert solo.read("checkpoints/verified.json")["verified"]["step-00000001"]["intact"] is True


@pytest.mark.long
def test_continued_run_rehearses_only_if_its_ranks_are_laid_out_otherwise(solo: Job) -> None:
    solo.config(duration="2 steps")
    assert solo.start(0, topology=False).wait() == 0, solo.transcript()
    solo.config(duration="4 steps", checkpoint={"every": "100 steps"})
    assert start(solo, "--resume").wait() == 0, solo.transcript()
    solo.config(duration="6 steps")
    assert start(solo, "--resume").wait() == 0, solo.transcript()
    assert saved(solo) == [2, 3, 4, 6]


def size_of_one(job: Job) -> int:
    """Bytes of a checkpoint of such a run."""
    (newest, *_) = sorted(job.out.glob("checkpoints/step-*"), reverse=True)
    return sum(file.stat().st_size for file in newest.iterdir())


def test_checkpoints_that_cannot_all_fit_are_refused_after_the_first_one(
    solo_of: Callable[[], Job],
) -> None:
    """Without the first checkpoint, nothing is saved before its time."""
    without, job = solo_of(), solo_of()
    assert start(without, "--no-first-checkpoint").wait() == 0
    assert saved(without) == [2, 4]
    size = size_of_one(without)
    job.config(duration=LONG, checkpoint={"every": "500 steps", "keep": 3})
    with small_disk(job.out / "checkpoints", f"size={int(4.5 * size)}"):
        front = start(job)
        assert front.wait() == 6, front.text()
        text = front.text()
        assert job.metrics()[-1]["step"] < 500, "long before the disk is full"
        assert "the checkpoints of this run do not fit: up to 5 at the same time need" in text
        assert f"where: {job.out / 'checkpoints'}" in text
        assert "checkpoint.keep is 3, plus the one being written" in text
        assert "or set checkpoint.keep=2" in text
        result = job.read("result.json")
        assert (result["outcome"], result["exit_code"]) == ("unfit", 6)
        named = {key: result["verdict"][key] for key in ("cause", "when", "severity", "hosts", "step")}
        assert named == {
            "cause": "storage_unfit", "when": "during", "severity": "fatal", "hosts": [front.host], "step": 1,
        }  # fmt: skip
        assert job.read("verdict.json") == result["verdict"]
        assert "[storage_unfit]" in front.text("err")
        job.wait_gone()
        again = start(job, "checkpoint.keep=3")
        assert again.wait() == 6, "it is tried again where it has failed: " + again.text()
        job.wait_gone()
        job.config(duration="1 steps")
    assert "resumes from step 1" in text


def test_a_first_checkpoint_that_cannot_be_written_ends_the_run_at_once(solo: Job) -> None:
    solo.config(duration=LONG, checkpoint={"every": "500 steps"})
    with small_disk(solo.out / "checkpoints", f"size={64 << 10}"):
        front = start(solo)
        assert front.wait() == 6, front.text()
        solo.wait_gone()
    assert solo.metrics()[-1]["step"] < 500
    assert (
        "the first checkpoint could not be written: not enough space for checkpoint step-00000001"
        in front.text()
    )
    verdict = solo.read("result.json")["verdict"]
    assert (verdict["cause"], verdict["severity"], verdict["hosts"]) == ("disk_full", "fatal", [front.host])


FINDS_TESTS = {"PYTHONPATH": str(Path(__file__).parents[3])}
"""Not every task is forked by a process that has imported the tests: e.g. not with a variable that
the other tests do not set.
"""
FLIPS = PACED | {"task": [sys.executable, "-m", "tests.jobs.nproc.flips_a_byte"]}


@pytest.mark.parametrize(
    ("strategy", "file"),
    [
        ("fsdp", "trainable.shard-00001-of-00002.safetensors"),
        pytest.param("ddp", "trainable.safetensors", marks=pytest.mark.long),
    ],
    ids=["a shard", "a whole file"],
)
def test_a_checkpoint_that_comes_back_otherwise_ends_the_run_with_7(
    solo: Job, strategy: str, file: str
) -> None:
    solo.config(duration=LONG, checkpoint={"every": "500 steps"}, parallel={"strategy": strategy})
    front = start(solo, answers=FLIPS, env=FINDS_TESTS)
    assert front.wait() == 7, front.text()
    assert f"the first checkpoint differs when read back: {file}" in front.text()
    assert solo.metrics()[-1]["step"] < 500
    assert solo.read("result.json")["outcome"] == "corrupt"
    solo.wait_gone()


@pytest.mark.long  # without ranks it is in tests/jobs/runs/test_storage_trial.py
def test_copy_that_reads_back_differently_ends_with_7_and_does_not_count(
    solo: Job,
) -> None:
    """The disk of the storage flips a byte of the first copy."""
    storage = f"file://{solo.folder}/copies"
    solo.config(duration=LONG, checkpoint={"every": "500 steps", "storage": storage})
    front = start(solo, answers=FLIPS, env=FINDS_TESTS | {"FLIPS_ON": "read_back"})
    assert front.wait() == 7, front.text()
    place = f"{storage}/out/{solo.read('plan.json')['run_id']}/step-00000001"
    for words in (
        "the first copy differs when read back",
        f"where: {place}",
        "why:   ",
        "fix:   ",
    ):
        assert words in front.text("err")
    assert "training continues" not in front.text()
    result = solo.read("result.json")
    assert (result["outcome"], result["problems"][0]["where"]) == ("corrupt", place)
    solo.wait_gone()
    damaged = Path(place.removeprefix("file://"))
    assert not (damaged / MANIFEST).exists()

    solo.config(duration=f"{solo.metrics()[-1]['step'] + 3} steps")
    again = start(solo)
    assert again.wait() == 0, again.text()
    assert (damaged.parent / f"step-{solo.metrics()[-1]['step']:08d}" / MANIFEST).exists()
    if (damaged / MANIFEST).exists():  # no newer step was kept in memory, and it has been copied once more
        weights = "trainable.safetensors"
        mine = solo.out / "checkpoints" / damaged.name / weights
        assert (damaged / weights).read_bytes() == mine.read_bytes()


@pytest.mark.long  # without ranks it is in tests/jobs/runs/test_storage_trial.py
def test_a_first_copy_that_finds_no_room_ends_the_run_with_6(solo: Job) -> None:
    """Enough for what is tried before step 1, and not for a checkpoint."""
    copies = solo.folder / "copies"
    solo.config(duration=LONG, checkpoint={"every": "500 steps", "storage": f"file://{copies}"})
    with small_disk(copies, f"size={64 << 10}"):
        front = start(solo)
        assert front.wait() == 6, front.text()
        solo.wait_gone()
    assert "the first copy was not made: " in front.text("err")
    assert "No space left on device" in front.text("err")
    assert "[storage_unfit]" in front.text("err")
    assert solo.metrics()[-1]["step"] < 500
    verdict = solo.read("result.json")["verdict"]
    assert (verdict["cause"], verdict["hosts"], verdict["step"]) == ("storage_unfit", [front.host], 1)
