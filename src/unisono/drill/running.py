"""Carries out one drill: a real run, the fault, what was said, what is left."""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from unisono.drill.drills import Drill
from unisono.drill.ground import Ground
from unisono.drill.judging import End, History, Row, Told, is_named, judge, skipped, told_by
from unisono.drill.leftovers import Traces
from unisono.drill.stream import Front
from unisono.facts import read_environment
from unisono.supervise.child_process import child_environment

_START_S = 180.0
_BEGIN_STEP = 20  # from then on something may be done from outside
_EFFECT_S = 120.0
_LATE_S = 10.0  # beyond its limit, to see how late a name comes
_POLL_S = 0.02
_ROWS = 48
_TINY: dict[str, Any] = {
    "model": {"path": "builtin:tiny", "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8}, "optim": {"lr": 1e-3},
    "batch": {"global": 6}, "checkpoint": {"every": "100000 steps"}, "device": "cpu", "restarts": 0,
}  # fmt: skip

Tell = Callable[[str], None]


@dataclass
class Carrying:
    """A drill that is carried out.

    Attributes:
        drill: which.
        folder: of its own; gone afterwards.
        caches: what drills share: prepared data, a key.
        ground: where it happens.
        tell: is told what happens.
        fronts: of the run, by node.
    """

    drill: Drill
    folder: Path
    caches: Path
    ground: Ground
    tell: Tell
    fronts: list[Front] = field(default_factory=list)

    def run(self) -> History:
        """To the end of the run, by itself or by us."""
        for name in ("work", "marks", "tmp"):
            (self.folder / name).mkdir()
        traces = Traces(self.folder / "work", self.folder / "tmp")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.ground)
            self.ground.prepare(self.folder)
            self._start(stack)
            effect = self._wait_for_effect()
            traces.note()
            if effect is not None:
                if self.drill.want:
                    self.tell("waiting for its name")
                    self._wait_until(self._is_named, effect + self.drill.limit_s + _LATE_S)
                self.tell("waiting for the end")
                self._wait_until(self._has_ended, effect + self.drill.end_s)
            ends = self._ends()
            left = traces.left_behind()
            return History(
                self._moment() or effect, self._told(), ends, [self.ground.host(node) for node in range(self.ground.nodes)],
left, "\n".join(self._trouble()),
            )  # fmt: skip

    def _start(self, stack: contextlib.ExitStack) -> None:
        self.tell("starting")
        rows = self.folder / "rows.jsonl"
        rows.write_text("".join(json.dumps(_row(number)) + "\n" for number in range(_ROWS)))
        config = {
            **_TINY, **self.drill.config, "data": {"train": str(rows), "max_length": 64}, "output_dir": str(self.ground.output_dir())
        }  # fmt: skip
        config["checkpoint"] = {**_TINY["checkpoint"], **self.drill.config.get("checkpoint", {})}
        (self.folder / "config.yaml").write_text(json.dumps(config))
        for node in range(self.ground.nodes):
            request = self.folder / f"request-{node}.json"
            request.write_text(json.dumps(self._request(node)))
            words = [sys.executable, "-m", "unisono.drill.front", str(request)]
            front = Front(
                self.ground.words(node, words), node=node, cwd=self.folder / "work", environment=self._environment()
            )  # fmt: skip
            self.fronts.append(stack.enter_context(front))
        self.ground.started([front.pid for front in self.fronts])

    def _request(self, node: int) -> dict[str, Any]:
        faults = dict(self.drill.faults) | {"marks": str(self.folder / "marks")}
        if "starve" in faults:
            faults["starve"] = {**faults["starve"], "fifo": str(self._fifo())}
        return {
            "config_path": str(self.folder / "config.yaml"), "nproc": self.drill.nproc, "faults": faults, "parent": os.getpid(),
            "clock_jump_s": self.drill.clock_jump_s, **self.ground.request(node),
        }  # fmt: skip

    def _fifo(self) -> Path:
        path = self.folder / "fifo"
        os.mkfifo(path, 0o600)
        return path

    def _environment(self) -> dict[str, str]:
        own = {
            "TMPDIR": str(self.folder / "tmp"), "XDG_CACHE_HOME": str(self.caches), "XDG_CONFIG_HOME": str(self.caches),
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "torch"),
        }  # fmt: skip
        return child_environment(threads=1, without=read_environment().leftovers) | own

    def _wait_for_effect(self) -> float | None:
        """The moment from which seconds are counted, after doing what is to be done from outside."""
        if not self._wait_until(lambda: self._step() > 0, time.monotonic() + _START_S):
            return None
        self.tell("training")
        if not self.drill.faults:
            if not self._wait_until(lambda: self._step() >= _BEGIN_STEP, time.monotonic() + _EFFECT_S):
                return None
            moment = time.monotonic()
            self.ground.strike()
            return moment
        if not self._wait_until(lambda: self._moment() is not None, time.monotonic() + _EFFECT_S):
            return None
        self.ground.strike()
        return self._moment()

    def _wait_until(self, seen: Callable[[], bool], limit: float) -> bool:
        """Waits for something, for as long as a front lives; whether it was seen."""
        while not seen():
            if time.monotonic() > limit or self._has_ended():
                return seen()
            time.sleep(_POLL_S)
        return True

    def _step(self) -> int:
        steps = [
            int(line.message["step"]) for line in self.fronts[0].lines if line.message.get("kind") == "step"
        ]
        return steps[-1] if steps else 0

    def _moment(self) -> float | None:
        """When a rank said that it was struck."""
        for path in (self.folder / "marks").iterdir():
            text = path.read_text()
            if text.endswith("\n"):
                return int(text) / 1e9
        return None

    def _has_ended(self) -> bool:
        return all([front.has_ended() for front in self.fronts])  # noqa: C419 - each is asked

    def _is_named(self) -> bool:
        hosts = [self.ground.host(node) for node in range(self.ground.nodes)]
        return is_named(self.drill, self._told(), hosts)

    def _told(self) -> list[Told]:
        found = [
            told_by(line.message, at=line.at, node=front.node, words=self.drill.words)
            for front in self.fronts
            for line in front.lines
        ]
        return sorted((told for told in found if told is not None), key=lambda told: told.at)

    def _trouble(self) -> Iterator[str]:
        """What the fronts were refused for, and what they wrote where nothing is expected."""
        for front in self.fronts:
            for line in front.lines:
                if line.message.get("kind") == "result":
                    yield from (str(problem["what"]) for problem in line.message.get("problems") or [])
            yield from front.errors

    def _ends(self) -> list[End]:
        """How the fronts ended; those that have not are ended now."""
        late = [front for front in self.fronts if not front.has_ended()]
        for front in late:
            front.kill()
        return [
            End(front.ended_at or 0.0, front.returncode or 0, by_drill=front in late) for front in self.fronts
        ]


def carry_out(drills: Sequence[Drill], tell: Callable[[Drill, str], None]) -> Iterator[Row]:
    """Carries out one after the other; gives the row of each."""
    with tempfile.TemporaryDirectory(prefix="unisono-drill-caches-") as caches:
        for drill in drills:
            yield _one(drill, Path(caches), partial(tell, drill))


def _one(drill: Drill, caches: Path, tell: Tell) -> Row:
    ground = drill.ground()
    why_not = ground.why_not()
    if why_not:
        return skipped(drill, why_not)
    with tempfile.TemporaryDirectory(prefix="unisono-drill-", ignore_cleanup_errors=True) as folder:
        return judge(drill, Carrying(drill, Path(folder), caches, ground, tell).run())


def _row(number: int) -> dict[str, str]:
    """Rows of different lengths."""
    return {
        "prompt": f"count to {number % 7 + 2}",
        "completion": " ".join(map(str, range(1, number % 7 + 3))),
    }
