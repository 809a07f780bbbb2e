"""The result of a job of several nodes is read back by its head, while the others wait for the end.

Run: pytest tests/jobs/nodes/test_read_back.py -m "long or not long"
"""

import signal
import time

import psutil
import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job

pytestmark = [pytest.mark.long, pytest.mark.ranks, pytest.mark.timeout(600)]
STOPPED_S = 15.0  # nodes count as lost after 8 s without a word


def test_a_long_read_back_on_the_head_keeps_the_other_node(pair: Job) -> None:
    head, other = pair.start_all()

    def readers() -> list[psutil.Process]:
        return [one for one in pair.processes() if {"unisono.task", "read_back"} <= set(one.cmdline())]

    pair.until(lambda: bool(readers()), what="reading back")
    for one in readers():
        one.send_signal(signal.SIGSTOP)
    until = time.monotonic() + STOPPED_S
    pair.until(lambda: time.monotonic() > until, what="the pause")
    assert head.exit_code is None
    assert other.exit_code is None
    for one in readers():
        one.send_signal(signal.SIGCONT)
    assert together([head, other]) == [0, 0], pair.transcript()
    assert head.result["outcome"] == "completed"
    assert not head.verdicts
    assert not other.verdicts
