"""A path that does not answer on one node of several, while a checkpoint is written.

Run: pytest tests/jobs/nodes/test_hung_paths.py
"""

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import Front, together
from tests.jobs.nodes.hanging_paths import hanging
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own
from tests.jobs.nproc.disks import on_a_device
from tests.jobs.nproc.saved_checkpoints import newer, published

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.long]

MIB = 1 << 20


def configure(job: Job, duration: str = "5000 steps") -> None:
    job.config(
        duration=duration, restarts=0, checkpoint={"every": "5 steps", "keep": 2}, parallel={"strategy": "fsdp"}
    )  # fmt: skip


def line_with(front: Front, words: str) -> str:
    return next(line.text for line in front.lines if words in line.text)


@pytest.mark.fault("the shared storage of the checkpoints does not answer on one node of several")
@pytest.mark.parametrize("node", [0, 1])
def test_hung_shared_path_of_one_node_is_named_and_costs_only_checkpoints(
    networks: Namespaces, pair: Job, mounts: ExitStack, node: int
) -> None:
    del networks
    configure(pair)
    fronts = pair.start_all(json=False)
    newer(pair, "")
    mounts.enter_context(hanging(fronts[node], pair.out / "checkpoints"))
    began = time.monotonic()
    named = fronts[0].wait_for("no progress for", limit_s=60)
    assert named - began < 30
    text = line_with(fronts[0], "no progress for")
    assert f"rank {node}, {fronts[node].label}" in text, text
    reached = pair.metrics()[-1]["step"]
    pair.waits_for_step(reached + 20)
    kept = published(pair)
    mounts.close()
    newer(pair, kept[-1])
    fronts[0].signal(signal.SIGTERM)
    assert together(fronts, limit_s=90) == [75, 75], pair.transcript()
    pair.wait_gone()


@pytest.mark.fault(
    "the shared storage of the checkpoints does not answer on one node, and the run is to stop"
)
def test_hung_shared_path_of_one_node_lets_all_nodes_end_in_grace_time(
    networks: Namespaces, pair: Job, mounts: ExitStack
) -> None:
    del networks
    configure(pair)
    fronts = pair.start_all(json=False)
    newer(pair, "")
    mounts.enter_context(hanging(fronts[1], pair.out / "checkpoints"))
    fronts[0].wait_for("no progress for", limit_s=60)
    fronts[1].signal(signal.SIGTERM)
    assert together(fronts, limit_s=200) == [75, 75], pair.transcript()
    mounts.close()
    pair.wait_gone()


@pytest.mark.fault("the whole output_dir of the head, or of another node, does not answer")
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_whose_own_output_dir_hangs_is_named_on_all_and_all_end(
    networks: Namespaces, pair: Job, mounts: ExitStack, tmp_path: Path, node: int
) -> None:
    """Each node has a disk of its own.

    Without the head's no step can be kept, and without the other's no checkpoint.
    """
    del networks
    configure(pair, "5000 steps" if node == 0 else "40 steps")
    disk = mounts.enter_context(on_a_device(tmp_path / f"disk{node}", tmp_path / "image", size=256 * MIB))
    (tmp_path / f"disk{1 - node}").mkdir()
    own = [Own(binds=[(tmp_path / f"disk{number}", pair.out)]) for number in (0, 1)]
    pair.out.mkdir(exist_ok=True)
    fronts = [pair.start(number, own=own[number], json=False) for number in (0, 1)]
    head = tmp_path / "disk0" / "checkpoints"
    pair.until(lambda: any(".tmp-" not in path.name for path in head.glob("step-*")), what="a checkpoint")
    disk.hang()
    fronts[0].wait_for(f"rank {node}, {fronts[node].label}: ", limit_s=100)
    assert together(fronts, limit_s=250) == ([6, 6] if node == 0 else [0, 0]), pair.transcript()
    if node == 0:
        for front in fronts:
            assert "error: writing metrics.jsonl has made no progress for" in front.text("err")
            assert f"where: rank 0, {fronts[0].label}: {pair.out}" in front.text("err")
    else:
        assert "cannot be written" in fronts[1].text("err"), "its own copies of how the run ended"
    disk.answer()
    pair.wait_gone()
