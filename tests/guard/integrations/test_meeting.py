"""The meeting of ranks over torch's store, with real processes.

Run: pytest tests/guard/integrations/test_meeting.py
"""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.ports import free_port
from unisono.base.errors import Disagreed
from unisono.guard.integrations.trainer_callback import DataFacts, TrainerFacts, find_world, meet

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def _rank(
    rank: int, size: int, port: int, rows: int, patience_s: float, absent: int | None, answers: Any
) -> None:
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=300), world_size=size, rank=rank
    )
    world = find_world()
    assert world is not None
    world.store.set_timeout(
        timedelta(seconds=patience_s)
    )  # as init_process_group(timeout=…) does; joining may take longer here
    answers.put((rank, "ready", ""))
    if absent == rank:
        signal.pause()
    facts = TrainerFacts(sharded=True, data=DataFacts(rows=rows, rows_digest="d"))
    began = time.monotonic()
    try:
        for _ in range(2):
            meet(world, facts, notify=lambda text: None)
        words, cause = "agreed", ""
    except Disagreed as error:
        words, cause = str(error), error.verdict.cause if error.verdict else ""
    answers.put((rank, words, cause, time.monotonic() - began))
    if words == "agreed":
        signal.pause()  # as in training: the first rank, which holds the store, stays until all have agreed


def _together(
    rows: list[int], *, patience_s: float = 120.0, absent: int | None = None
) -> dict[int, tuple[str, str, float]]:
    context = multiprocessing.get_context("forkserver")  # it imports torch once for all ranks
    context.set_forkserver_preload(["torch.distributed", __name__])
    answers: Any = context.Queue()
    port = free_port()
    started = [
        context.Process(target=_rank, args=(rank, len(rows), port, count, patience_s, absent, answers), daemon=True)
        for rank, count in enumerate(rows)
    ]  # fmt: skip
    for process in started:
        process.start()
    results: dict[int, tuple[str, str, float]] = {}
    try:
        while len(results) < len(rows) - (absent is not None):
            rank, *printed = answers.get(timeout=300)
            if printed[0] != "ready":
                results[rank] = (printed[0], printed[1], printed[2])
    finally:
        for process in started:
            process.kill()
            process.join()
    return results


def test_ranks_that_agree_continue_as_often_as_they_are_asked() -> None:
    assert {printed[0] for printed in _together([8, 8]).values()} == {"agreed"}


def test_same_words_reach_every_rank_though_the_holder_of_the_store_leaves() -> None:
    results = _together([8, 9, 8])
    assert len({printed[:2] for printed in results.values()}) == 1
    assert results[0][1] == "split_mismatch"
    assert "9 on rank 1" in results[0][0]


@pytest.mark.parametrize("absent", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_does_not_come_is_named_when_the_groups_patience_ends(absent: int) -> None:
    results = _together([8, 8, 8], patience_s=8.0, absent=absent)
    assert len(results) == 2
    for words, cause, waited_s in results.values():
        assert f"rank {absent} did not reach the first step within 8 s" in words
        assert cause == "rank_stalled"
        assert waited_s >= 7.9


def test_without_a_process_group_there_is_nobody_to_ask() -> None:
    assert find_world() is None
