"""What comes of the first checkpoint concerns all nodes.

Run: pytest tests/jobs/nodes/test_first_checkpoint.py
"""

import os
import signal

import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_first_checkpoint_beyond_the_heads_disk_ends_every_node_with_6(
    networks: Namespaces, pair: Job
) -> None:
    del networks
    pair.config(duration="2000 steps", checkpoint={"every": "500 steps"})
    (pair.out / "checkpoints").mkdir(parents=True)
    small = Own(small=[(pair.out / "checkpoints", 64 << 10)])
    fronts = [pair.start(0, own=small, rehearse=True, json=False), pair.start(1, rehearse=True, json=False)]
    assert together(fronts) == [6, 6], pair.transcript()
    for front in fronts:
        assert (
            "the first checkpoint could not be written: not enough space for checkpoint step-00000001"
            in front.text()
        )
    assert pair.metrics()[-1]["step"] < 500
    pair.wait_gone()


@pytest.mark.long  # on one node it is in tests/nproc
def test_checkpoints_that_cannot_all_fit_give_every_node_the_same_verdict(
    networks: Namespaces, pair: Job
) -> None:
    """It is the head's disk that is too small for them."""
    del networks
    pair.config(
        duration="2000 steps", checkpoint={"every": "20 steps", "keep": 99}, parallel={"strategy": "ddp"}
    )
    (pair.out / "checkpoints").mkdir(parents=True)
    small = Own(small=[(pair.out / "checkpoints", 2 << 20)])
    fronts = [pair.start(0, own=small, rehearse=True, json=False), pair.start(1, rehearse=True, json=False)]
    assert together(fronts) == [6, 6], pair.transcript()
    for front in fronts:
        assert "the checkpoints of this run do not fit: up to 101 at the same time need" in front.text(
            "err"
        ), front.text()
        assert "[storage_unfit]" in front.text("err")
    verdict = pair.read("result.json")["verdict"]
    assert (verdict["cause"], verdict["hosts"], verdict["ranks"]) == ("storage_unfit", [fronts[0].host], [])
    pair.wait_gone()


@pytest.mark.long  # on one node it is in tests/nproc
def test_the_head_reports_what_all_checkpoints_will_take(networks: Namespaces, pair: Job) -> None:
    del networks
    pair.config(duration="2000 steps", checkpoint={"every": "500 steps"}, parallel={"strategy": "fsdp"})
    fronts = [pair.start(node, rehearse=True, json=False) for node in (0, 1)]
    fronts[0].wait_for("rehearsal: checkpoint of ")
    os.kill(fronts[1].pid, signal.SIGTERM)
    assert together(fronts) == [75, 75], pair.transcript()
    pair.wait_gone()
