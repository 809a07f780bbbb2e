"""checkpoint.storage concerns all nodes, and only the head reaches for it.

Run: pytest tests/jobs/nodes/test_copies.py
"""

import contextlib
import shutil
import time
from pathlib import Path

import psutil
import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Ground, Namespaces
from tests.jobs.nodes.own_disks import assert_whole_at_the_head, disk, start_apart, store_in
from tests.jobs.nodes.verdict_checks import refused
from tests.shared_fork_server import SHARED
from unisono.trainer.checkpoint.manifest import MANIFEST, Manifest

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_refusing_storage_ends_every_node_before_step_1_in_the_same_words(ground: Ground, pair: Job) -> None:
    del ground
    pair.config(checkpoint={"storage": "file:///proc/nowhere"})
    fronts = pair.start_all()
    verdict = refused(fronts, "node_refused", hosts=[fronts[0].host], within_s=90)
    assert verdict.summary == f"{fronts[0].label} refused: file:///proc/nowhere/out cannot be written"
    assert "FileNotFoundError" in verdict.evidence[0].text
    assert any("name a directory in which you may create files" in fix for fix in verdict.fix)
    assert not (pair.out / "metrics.jsonl").exists()


@pytest.mark.long
def test_fetch_longer_than_the_join_timeout_is_waited_for_with_a_line(ground: Ground, pair: Job) -> None:
    """The child that fetches is stopped for so long; it starts by itself, since a forked one would
    be done before it is found.
    """
    del ground
    copies = pair.folder / "copies"
    copies.mkdir()
    pair.config(duration="2 steps", checkpoint={"storage": f"file://{copies}"})
    assert together(pair.start_all()) == [0, 0], pair.transcript()
    run_id = pair.read("plan.json")["run_id"]
    shutil.rmtree(pair.out)
    pair.config(duration="4 steps")
    alone = {SHARED: ""}
    fronts = pair.start_all("--resume", "--join-timeout", "15", json=False, env=alone)
    line = f"{fronts[0].label} is downloading step 2 of run {run_id} from file://{copies}/out ("
    fronts[0].wait_for(line)
    pair.until(lambda: bool(reaching(pair)), what="a child fetches")
    (child,) = reaching(pair)
    child.suspend()
    stopped = time.monotonic()
    fronts[1].wait_for(line)
    pair.until(lambda: time.monotonic() - stopped > 16, what="the join timeout is over")
    assert [front.exit_code for front in fronts] == [None, None], pair.transcript()
    child.resume()
    assert together(fronts) == [0, 0], pair.transcript()
    assert f"step 2 of run {run_id} is downloaded from" in fronts[1].text()
    assert pair.read("plan.json")["resume"]["step"] == 2
    assert [line["step"] for line in pair.metrics()] == [1, 2, 3, 4]


def reaching(job: Job) -> list[psutil.Process]:
    """The living children that talk to the storage."""
    found = []
    for process in job.processes():
        with contextlib.suppress(psutil.Error, OSError):
            if "unisono.task" in (words := process.cmdline()) and "storage" in words:
                found.append(process)
    return found


@pytest.mark.long
def test_parts_from_own_disks_end_whole_at_the_head_and_in_the_storage(
    networks: Namespaces, trio: Job, caches: Path
) -> None:
    """FSDP2: what two nodes stream to the head goes from there to a storage that only the head has,
    and comes back to a head whose disk is lost.
    """
    del networks
    copies = trio.folder / "copies"
    trio.config(
        parallel={"strategy": "fsdp"},
        duration="6 steps",
        checkpoint={"keep": 9, "storage": f"file://{copies}"},
    )
    fronts = start_apart(trio, json=False, rehearse=True, hidden=copies)
    assert together(fronts) == [0, 0, 0], trio.transcript()
    manifests = assert_whole_at_the_head(trio, caches, last=6)
    assert all(sum(".shard-" in name for name in manifest.files) == 6 for manifest in manifests)
    there = copied(trio, copies, caches)
    assert there[-1].step == 6, trio.transcript()
    assert {one.step for one in there} <= {one.step for one in manifests}
    assert all(one in manifests for one in there), "the same manifests, with who wrote what"
    assert f"step-00000006 is in file://{copies}/out/" in fronts[0].text()

    shutil.rmtree(trio.out)
    trio.config(duration="8 steps")
    fronts = start_apart(trio, "--resume", json=False, hidden=copies)
    assert together(fronts) == [0, 0, 0], trio.transcript()
    assert trio.read("plan.json")["resume"]["step"] == 6
    assert [line["step"] for line in trio.metrics()] == list(range(1, 9))
    assert_whole_at_the_head(trio, caches, last=8)
    assert copied(trio, copies, caches)[-1].step == 8
    assert not any(list(disk(trio, node, "hidden").iterdir()) for node in (1, 2)), (
        "only the head reaches for it"
    )
    trio.wait_gone()


def copied(job: Job, copies: Path, caches: Path) -> list[Manifest]:
    """The copies that count, oldest first; each is whole."""
    store = store_in(copies / "out" / job.read("plan.json")["run_id"], caches)
    there = [path for path in store.list() if (path / MANIFEST).exists()]
    assert not any(store.verify(path) for path in there)
    return [Manifest.from_bytes((path / MANIFEST).read_bytes()) for path in there]
