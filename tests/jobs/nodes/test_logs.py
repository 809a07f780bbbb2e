"""Logs of several nodes are in the order in which things happened, whatever their clocks say.

Run: pytest tests/jobs/nodes/test_logs.py
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.jobs.nodes.skewed.sitecustomize as skewed
from tests.front_server import wait_for_rank_server
from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.session_server import start_server
from tests.shared_fork_server import SHARED
from unisono.guard.rundir.merged_logs import LogLine, merged_logs
from unisono.guard.supervise.child_process import child_environment

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

AHEAD_S = 300.0
SLACK_S = 10.0
"""Of the measured offset, and of the moments at which logs are looked at."""


@pytest.fixture
def ahead(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a node whose clock is ahead, with a server that forks its ranks and tasks: that
    of the session reads the right clock.
    """
    folder = str(Path(skewed.__file__).parent)
    paths = os.pathsep.join(path for path in (folder, os.environ.get("PYTHONPATH")) if path)
    clock = {"SKEW_S": str(AHEAD_S)}
    process, socket = start_server(tmp_path, child_environment(threads=1) | clock | {"PYTHONPATH": paths})
    try:
        wait_for_rank_server(str(socket))
        yield clock | {"PYTHONPATH": folder, SHARED: str(socket)}
    finally:
        process.kill()
        process.wait()


def test_a_node_whose_clock_is_ahead_is_merged_by_the_heads_clock(pair: Job, ahead: dict[str, str]) -> None:
    """Every process of node 1 reads a clock that is five minutes ahead; the offset is measured when
    the node calls.
    """
    began = time.time()
    assert together([pair.start(0), pair.start(1, env=ahead)]) == [0, 0], pair.transcript()
    ended = time.time()
    raw = [json.loads(line) for line in (pair.out / "events" / "rank-00001.jsonl").read_text().splitlines()]
    assert all(event["time"] > began + AHEAD_S - SLACK_S for event in raw), "its own files have its own time"
    lines = [line for line in merged_logs(pair.out) if line.time]
    assert {line.rank for line in lines} == {0, 1}
    assert all(began - SLACK_S < line.time < ended + SLACK_S for line in lines), lines
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    joins = [_first(lines, rank, "phase join") for rank in (0, 1)]
    assert abs(joins[0].time - joins[1].time) < SLACK_S, "they get the word at the same moment"


def _first(lines: list[LogLine], rank: int, words: str) -> LogLine:
    return next(line for line in lines if line.rank == rank and words in line.text)
