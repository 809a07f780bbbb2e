"""Nodes with disks of their own: every checkpoint ends whole at the head.

Run: pytest tests/jobs/nodes/test_no_shared_disk.py
"""

import signal
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces
from tests.jobs.nodes.own_disks import assert_whole_at_the_head, disk, start_apart
from unisono.trainer.checkpoint.retention import row_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_parts_of_three_nodes_end_whole_at_the_head_also_after_a_kill(
    networks: Namespaces, trio: Job, caches: Path
) -> None:
    del networks
    trio.config(parallel={"strategy": "fsdp"}, duration="16 steps", restarts=1)
    fronts = start_apart(trio, json=False)
    trio.waits_for_step(4)
    trio.ranks()[2].send_signal(signal.SIGKILL)
    assert together(fronts) == [0, 0, 0], trio.transcript()
    assert [line["step"] for line in trio.metrics()] == list(range(1, 17))
    hosts = [front.host for front in fronts]
    parts: dict[str, str] = {}
    for manifest in assert_whole_at_the_head(trio, caches, last=16):
        parts = {name: entry.host for name, entry in manifest.files.items() if ".shard-" in name}
        assert len(parts) in (0, 6), parts  # none: what was rescued after the kill is whole
        wrote = {name: hosts[int(name.split(".shard-")[1][:5])] for name in parts}
        rescued = dict.fromkeys(parts, hosts[0])  # from memory, after the kill: by the head
        assert parts in (wrote, rescued)
        row = row_of(trio.out / "checkpoints" / f"step-{manifest.step:08d}", key=b"")
        assert row["holder"] == hosts[0], "where the bytes are, whoever wrote them"
        assert row["writers"] == sorted({hosts[0], *parts.values()})
    assert parts, trio.transcript()
    screen = fronts[0].text()
    assert "do not see this output_dir: the complete checkpoints are here, on ada" in screen, screen
    assert "node 1 (bob), node 2 (cyd)" in screen
    trio.wait_gone()
    for node in (1, 2):  # where its time went is at the head, too
        name = f"timeline-{node:05d}.jsonl"
        own = (disk(trio, node) / "events" / name).read_bytes()
        assert own.count(b"\n") > 3
        assert (trio.out / "events" / name).read_bytes() == own
        assert not (disk(trio, node) / "events" / "timeline-00000.jsonl").exists()


@pytest.mark.long
def test_with_replicas_nothing_is_written_elsewhere(networks: Namespaces, pair: Job, caches: Path) -> None:
    del networks
    fronts = start_apart(pair, json=False)
    assert together(fronts) == [0, 0], pair.transcript()
    manifests = assert_whole_at_the_head(pair, caches, last=4)
    assert {entry.host for manifest in manifests for entry in manifest.files.values()} == {fronts[0].host}
    assert {manifest.holder for manifest in manifests} == {fronts[0].host}
    assert "node 1 (bob) does not see this output_dir" in fronts[0].text()
