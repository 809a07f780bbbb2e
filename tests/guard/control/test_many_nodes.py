"""Sixty-four nodes at once.

Hundreds more: bench/agree_scale.py. Run: pytest tests/guard/control/test_many_nodes.py
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unisono.guard.control.connection import Joined, Left, NodeMessage

if TYPE_CHECKING:
    from subprocess import Popen

    from tests.guard.control.conftest import Room

pytestmark = pytest.mark.ranks
NODES = 64
BENCH = Path(__file__).parents[3] / "bench" / "agree_scale.py"


def test_all_report_and_all_have_the_last_message(
    room: "Room", line_of: Callable[["Popen[str]"], str]
) -> None:
    head = room.head(nodes=NODES)
    others = room.process("nodes", head.address[1], 1, NODES - 1)
    assert {event.node_rank for event in room.hears(head, Joined, NODES - 1)} == set(range(1, NODES))
    assert {event.node_rank for event in room.hears(head, NodeMessage, NODES - 1)} == set(range(1, NODES))
    began = time.monotonic()
    head.send_last({"kind": "ended", "text": "x" * 10_000})
    head.close(patience_s=20)
    assert time.monotonic() - began < 10
    assert all(left.clean for left in room.hears(head, Left, NODES - 1))
    assert line_of(others) == "here"
    assert line_of(others) == str(NODES - 1)


@pytest.mark.slow
def test_the_measurement_of_hundreds_works_with_sixty_four() -> None:
    """Real reports, compared; one case that differs and one node that never comes, each told to all
    in the same words.
    """
    command = [sys.executable, str(BENCH), "--nodes", str(NODES), "--repeat", "1", "--out", "-"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = {result["case"]: result for result in json.loads(output)["results"]}
    assert found["equal"]["verdict"] is found["at_once"]["verdict"] is None
    assert found["differs"]["verdict"].startswith(
        "NCCL_IB_DISABLE: 1 on node 7 (node0007), not set on nodes "
    )
    assert found["never_comes"]["verdict"].startswith("node 63 has never connected")
    assert all(result["seconds"] < 10 for result in found.values())
