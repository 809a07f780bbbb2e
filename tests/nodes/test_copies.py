"""checkpoint.storage concerns all nodes, and only the head reaches for it. Run: pytest tests/nodes/test_copies.py"""

import contextlib
import shutil
import time

import psutil
import pytest

from tests.nodes.fronts import together
from tests.nodes.ground import Ground
from tests.nodes.harness import Job
from tests.nodes.words import refused

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_a_storage_that_refuses_ends_every_node_before_step_1_with_the_same_words(
    ground: Ground, pair: Job
) -> None:
    del ground
    pair.config(checkpoint={"storage": "file:///proc/nowhere"})
    fronts = pair.start_all()
    verdict = refused(fronts, "node_refused", hosts=[fronts[0].host], within_s=90)
    assert verdict.summary == f"{fronts[0].label} refused: file:///proc/nowhere/out cannot be written"
    assert "FileNotFoundError" in verdict.evidence[0].text
    assert any("check the URL" in fix for fix in verdict.fix)
    assert not (pair.out / "metrics.jsonl").exists()


@pytest.mark.long
def test_a_fetch_that_takes_longer_than_the_join_timeout_is_waited_for_with_a_line(
    ground: Ground, pair: Job
) -> None:
    """The child that fetches is stopped for so long."""
    del ground
    copies = pair.folder / "copies"
    copies.mkdir()
    pair.config(duration="2 steps", checkpoint={"storage": f"file://{copies}"})
    assert together(pair.start_all()) == [0, 0], pair.told()
    run_id = pair.read("plan.json")["run_id"]
    shutil.rmtree(pair.out)
    pair.config(duration="4 steps")
    fronts = pair.start_all("--resume", "--join-timeout", "15", json=False)
    line = f"{fronts[0].label} is fetching step 2 of run {run_id} from file://{copies}/out ("
    fronts[0].wait_for(line)
    pair.until(lambda: bool(reaching(pair)), what="a child fetches")
    (child,) = reaching(pair)
    child.suspend()
    stopped = time.monotonic()
    fronts[1].wait_for(line)
    pair.until(lambda: time.monotonic() - stopped > 16, what="the join timeout is over")
    assert [front.exit_code for front in fronts] == [None, None], pair.told()
    child.resume()
    assert together(fronts) == [0, 0], pair.told()
    assert f"step 2 of run {run_id} is back from" in fronts[1].text()
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
