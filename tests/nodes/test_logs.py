"""Logs of several nodes are in the order in which things happened, whatever their clocks say. Run: pytest tests/nodes/test_logs.py"""

import json
import time
from pathlib import Path

import pytest

import tests.nodes.skewed.sitecustomize as skewed
from tests.nodes.fronts import together
from tests.nodes.harness import Job
from unisono.rundir.merged_logs import LogLine, merged_logs

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

AHEAD_S = 300.0
SLACK_S = 10.0
"""Of the measured offset, and of the moments at which logs are looked at."""


def test_a_node_whose_clock_is_ahead_is_merged_by_the_heads_clock(pair: Job) -> None:
    """Every process of node 1 reads a clock that is five minutes ahead; the offset is measured when the node calls."""
    began = time.time()
    env = {"PYTHONPATH": str(Path(skewed.__file__).parent), "SKEW_S": str(AHEAD_S)}
    assert together([pair.start(0), pair.start(1, env=env)]) == [0, 0], pair.transcript()
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
