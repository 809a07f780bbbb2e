"""Parts of a checkpoint on their way to the head: who waits for whom, and for how long.

Run: pytest tests/jobs/runs/test_shard_transfer.py
"""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.guard.control.file_transfer import Content, Offer, OfferRefused
from unisono.jobs.remote_checkpoint.transfers import ShardArrivals

LIMIT_S = 30.0
STEP = "step-00000001.tmp-a"
FILE = "trainable.shard-00001-of-00002.safetensors"
OFFER = Offer(1, "b", 0, Content(1, "0" * 32), {"kind": "shard", "rank": 1, "temporary": STEP, "name": FILE})


class Placed:
    """What becomes of a part that is offered, in a thread as the transfer's."""

    def __init__(self, arrivals: ShardArrivals) -> None:
        self.path: Path | None = None
        self.why = ""
        self._arrivals = arrivals
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self.path = Path(*self._arrivals.place(OFFER))
        except OfferRefused as error:
            self.why = str(error)

    def waits(self) -> bool:
        self._thread.join(0.2)
        return self._thread.is_alive()

    def end(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def arrivals_in(folder: Path) -> ShardArrivals:
    plan: Any = SimpleNamespace(on_node=lambda _: [SimpleNamespace(rank=1)], world_size=2)
    return ShardArrivals(plan, folder)


def test_a_part_waits_for_rank_0_which_begins_late(tmp_path: Path) -> None:
    placed = Placed(arrivals_in(tmp_path))
    assert placed.waits()
    (tmp_path / STEP).mkdir()
    placed.end()
    assert placed.path == tmp_path / STEP / FILE


@pytest.mark.parametrize("end", ["given up", "closed"])
def test_part_waits_no_longer_if_rank_0_gave_up_or_the_start_is_over(tmp_path: Path, end: str) -> None:
    arrivals = arrivals_in(tmp_path)
    placed = Placed(arrivals)
    arrivals.given_up("step-00000001.tmp-b")
    assert placed.waits(), "another attempt at the same step was given up"
    arrivals.given_up(STEP) if end == "given up" else arrivals.close()
    placed.end()
    assert "rank 0 is not writing checkpoint step-00000001" in placed.why


def test_progress_of_arrivals_is_reported_now_and_then_and_only_if_any(
    tmp_path: Path,
) -> None:
    arrivals = arrivals_in(tmp_path)
    assert arrivals.moves() is None
    receiving: Any = SimpleNamespace(moved=1000.0)
    arrivals.watch(receiving)
    (tmp_path / STEP).mkdir()
    arrivals.place(OFFER)
    reported = []
    for second in range(60):
        receiving.moved = 1000.0 + min(second, 30)
        reported.append(arrivals.moves())
    moves = [message for message in reported if message is not None]
    assert 10 <= len(moves) <= 16, "half a minute of progress, told every other second"
    assert {(message["kind"], message["temporary"]) for message in moves} == {("shard_moves", STEP)}
    assert reported[-1] is None
