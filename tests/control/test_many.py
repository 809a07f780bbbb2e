"""Sixty-four nodes at once. Hundreds more: bench/agree_scale.py. Run: pytest tests/control/test_many.py"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from unisono.control.events import Joined, Left, Said

if TYPE_CHECKING:
    from subprocess import Popen

    from tests.control.conftest import Room

pytestmark = pytest.mark.ranks
NODES = 64


def test_all_report_and_all_have_the_last_word(room: "Room", line_of: Callable[["Popen[str]"], str]) -> None:
    head = room.head(nodes=NODES)
    others = room.process("nodes", head.address[1], 1, NODES - 1)
    assert {event.node_rank for event in room.hears(head, Joined, NODES - 1)} == set(range(1, NODES))
    assert {event.node_rank for event in room.hears(head, Said, NODES - 1)} == set(range(1, NODES))
    began = time.monotonic()
    head.settle({"kind": "ended", "text": "x" * 10_000})
    head.close(patience_s=20)
    assert time.monotonic() - began < 10
    assert all(left.clean for left in room.hears(head, Left, NODES - 1))
    assert line_of(others) == "here"
    assert line_of(others) == str(NODES - 1)
