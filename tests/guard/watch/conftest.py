"""Real ranks that do one deed each, and a front's view of them."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.local_ranks import LocalRanks
from unisono.guard.supervise.rank_monitor import RankMonitor
from unisono.guard.watch.views import Look, RankView

LIMIT_S = 60.0
_STANDIN = Path(__file__).parent / "standins" / "rank.py"
_CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=1 << 30, bfloat16=False)


@dataclass
class Watched:
    """Ranks and their signs."""

    local: LocalRanks
    signs: RankMonitor
    folder: Path

    def until(self, condition: Callable[[list[RankView]], bool]) -> list[RankView]:
        """The views that first fulfil a condition; they are taken ten times a second, as a front
        does.
        """
        limit = time.monotonic() + LIMIT_S
        while True:
            self.local.poll(0.02)
            views = self.signs.views(time.monotonic())
            if condition(views):
                return views
            assert time.monotonic() < limit, views
            time.sleep(0.08)

    def idle(self, seconds: float = 1.2) -> list[RankView]:
        """The views once all ranks have beaten, and none has for so long."""
        return self.until(
            lambda views: all(view.beat is not None and view.idle_s > seconds for view in views)
        )

    def look(self, *ranks: int) -> dict[int, Look]:
        """What a look at the ranks gives."""
        return self.look_until(lambda look: True, *ranks)

    def look_until(self, seen: Callable[[Look], bool], *ranks: int) -> dict[int, Look]:
        """The looks that first show this: a look ends after 1.5 s with what there is, which is less
        where the machine has much to do.
        """
        self.signs.look(ranks)
        found: dict[int, Look] = {}
        limit = time.monotonic() + LIMIT_S
        while len(found) < len(ranks):
            assert time.monotonic() < limit, found
            self.local.poll(0.01)
            self.signs.views(time.monotonic())
            looks = self.signs.looks()
            found |= {look.rank: look for look in looks if seen(look)}
            self.signs.look([look.rank for look in looks if not seen(look)])
        return found


def watch_deeds(folder: Path, deeds: Sequence[str], stack: contextlib.ExitStack) -> Watched:
    """Starts a rank for each deed. "stopped" works until somebody stops it."""
    os.mkfifo(folder / "fifo")
    plan = folder / "plan.json"
    deeds_of = {str(rank): {"stopped": "work"}.get(deed, deed) for rank, deed in enumerate(deeds)}
    plan.write_text(json.dumps({"deeds": deeds_of, "folder": str(folder)}))
    places = [
        RankPlace(rank=rank, node_rank=0, local_rank=rank, host="here", device=_CPU)
        for rank in range(len(deeds))
    ]
    environments = [
        dict(os.environ, RANK=str(rank), WORLD_SIZE=str(len(deeds)), OMP_NUM_THREADS="1", TORCH_FR_BUFFER_SIZE="64")
        for rank in range(len(deeds))
    ]  # fmt: skip
    programs = Programs(worker=(sys.executable, str(_STANDIN)))
    local = LocalRanks(places, RunDir(folder / "run"), plan, programs, environments)
    stack.enter_context(local)
    return Watched(local, stack.enter_context(contextlib.closing(RankMonitor(local, 0))), folder)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Starts ranks; see watch_deeds."""
    with contextlib.ExitStack() as stack:
        yield lambda *deeds: watch_deeds(tmp_path, deeds, stack)
