"""The disk of one node that is full, read-only or silent.

Run: pytest tests/jobs/nodes/test_storage_trouble.py
"""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.jobs.nproc.disks import Disk, in_memory, on_a_device

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MIB = 1 << 20


def start(job: Job, small: Path) -> list[Front]:
    """Two sharded ranks on nodes with disks of their own; the second one's checkpoints are on a
    disk for themselves.
    """
    job.config(
        duration="5000 steps", restarts=0, checkpoint={"every": "5 steps", "keep": 2}, parallel={"strategy": "fsdp"}
    )  # fmt: skip
    disk = job.home(1) / "disk"
    (disk / "checkpoints").mkdir(parents=True)
    job.out.mkdir(exist_ok=True)
    own = Own(binds=[(disk, job.out), (small, job.out / "checkpoints")])
    return [job.start(0, json=False), job.start(1, own=own)]


def published(job: Job) -> list[str]:
    folder = job.out / "checkpoints"
    return sorted(path.name for path in folder.glob("step-*") if ".tmp-" not in path.name)


def newer(job: Job, than: str) -> None:
    """Waits until there is a newer checkpoint in the head's directory."""
    job.until(lambda: any(name > than for name in published(job)), what=f"a checkpoint after {than}")


def full(disk: Disk) -> Callable[[], None]:
    disk.fill(leave=20_000)
    return disk.make_room


def read_only(disk: Disk) -> Callable[[], None]:
    disk.read_only(on=True)
    return lambda: disk.read_only(on=False)


def silent(disk: Disk) -> Callable[[], None]:
    disk.hang()
    return disk.answer


@pytest.mark.long
@pytest.mark.fault(
    "the disk of one node is full, read-only, or does not answer while a checkpoint is written"
)
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (full, "not enough space for checkpoint"),
        (read_only, "Read-only file system"),
        (silent, "no progress for"),
    ],
    ids=["full", "read-only", "silent"],
)
def test_trouble_with_one_nodes_disk_names_its_rank_and_training_continues(
    networks: Namespaces, pair: Job, mounts: ExitStack, tmp_path: Path, harm: Callable[[Disk], Callable[[], None]], words: str
) -> None:  # fmt: skip
    del networks
    small = tmp_path / "small"
    disk = mounts.enter_context(
        on_a_device(small, tmp_path / "image", size=32 * MIB)
        if harm is silent
        else in_memory(small, size=2 * MIB)
    )
    fronts = start(pair, small)
    newer(pair, "")
    mend = harm(disk)
    fronts[0].wait_for(words)
    text = next(line.text for line in fronts[0].lines if words in line.text)
    assert "rank 1" in text, text
    reached = pair.metrics()[-1]["step"]
    pair.waits_for_step(reached + 10)
    kept = published(pair)
    assert kept
    mend()
    newer(pair, kept[-1])
    fronts[0].signal(signal.SIGTERM)
    assert together(fronts, limit_s=60) == [75, 75], pair.transcript()
    pair.wait_gone(limit_s=10)
    result = pair.read("result.json")
    assert result["checkpoint"].endswith(f"step-{result['step']:08d}"), pair.transcript()
    assert not list((pair.out / "checkpoints").glob("*.tmp-*"))
    assert not list(small.glob("*.tmp-*"))
