"""The curves of a run in bounded memory, and their thinning: first, last, smallest, largest and NaN
of each stretch stay.

Pure.
"""

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TIME = "time_s"
"""A key of our own: seconds of training since step 1, the sum of step_time_s."""
_MOST_POINTS = 6_000
_MOST_KEYS = 100
_RECENT_LINES = 500
Point = tuple[float, float]


@dataclass
class Series:
    """One curve. NaN stands for values that are not finite, and for null."""

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: float, value: float) -> None:
        """Appends a point; where there are twice as many as are kept, they are thinned."""
        self.steps.append(step)
        self.values.append(value)
        if len(self.values) > 2 * _MOST_POINTS:
            chosen = thin(self.values, _MOST_POINTS)
            self.steps = array("d", [self.steps[index] for index in chosen])
            self.values = array("d", [self.values[index] for index in chosen])

    def points(self, most: int, first: float = -math.inf, last: float = math.inf) -> dict[str, list[Any]]:
        """At most so many points of a range of steps, as JSON; a point that is NaN is null."""
        low, high = _range_of(self.steps, first, last)
        values = self.values[low:high]
        steps = self.steps[low:high]
        chosen = thin(values, most)
        return {
            "steps": [_whole(steps[index]) for index in chosen],
            "values": [values[index] if math.isfinite(values[index]) else None for index in chosen],
        }


def _range_of(steps: Sequence[float], first: float, last: float) -> tuple[int, int]:
    """The indices of a range of steps, with one point beyond each end, so that lines reach the
    edge.
    """
    if first == -math.inf and last == math.inf:
        return 0, len(steps)
    inside = [index for index, step in enumerate(steps) if first <= step <= last]
    if not inside:
        return 0, 0
    return max(0, inside[0] - 1), min(len(steps), inside[-1] + 2)


def _whole(step: float) -> float | int:
    return int(step) if step.is_integer() else step


def thin(values: Sequence[float], most: int) -> Sequence[int]:
    """The indices of at most `most` values, in order."""
    count = len(values)
    if count <= most:
        return range(count)
    stretches = max(1, most // 5)
    chosen: list[int] = []
    for number in range(stretches):
        begin, end = count * number // stretches, count * (number + 1) // stretches
        chosen += sorted(_of_stretch(values[begin:end], begin))
    return chosen


def _of_stretch(part: Sequence[float], begin: int) -> set[int]:
    """The indices that stay of a stretch."""
    chosen = {begin, begin + len(part) - 1}
    finite = part
    if math.isnan(sum(part)):
        chosen.add(begin + next(index for index, value in enumerate(part) if math.isnan(value)))
        finite = [value for value in part if not math.isnan(value)]
    if finite:
        chosen |= {begin + part.index(min(finite)), begin + part.index(max(finite))}
    return chosen


class Curves:
    """All curves of a run.

    Attributes:
        generation: another number after lines were taken back.
        lines: number of lines taken in this generation.
        series: by key.
        last: the last value of each key, and its step.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all lines: the file was cut or replaced."""
        self.generation += 1
        self.lines = 0
        self.series: dict[str, Series] = {}
        self.last: dict[str, Point] = {}
        self._recent: deque[tuple[float, dict[str, object]]] = deque(maxlen=_RECENT_LINES)
        self._seconds = 0.0

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return int(max((step for step, _ in self.last.values()), default=0))

    def add(self, line: dict[str, Any]) -> None:
        """Takes a line of metrics.jsonl."""
        step = float(line.pop("step"))
        seconds = line.get("step_time_s")
        if type(seconds) is float and math.isfinite(seconds):
            self._seconds += seconds
            line[TIME] = self._seconds
        all_series, last = self.series, self.last
        for key, value in line.items():
            number = value if type(value) is float else _number(value)
            if number is None:
                continue
            if number - number != 0.0:  # NaN and infinities, the fastest way; there are millions of these
                number = math.nan
            series = all_series.get(key)
            if series is None:
                if len(all_series) >= _MOST_KEYS:
                    continue
                series = all_series[key] = Series()
            series.add(step, number)
            last[key] = (step, number)
        self.lines += 1
        self._recent.append((step, line))

    def since(self, lines: int) -> dict[str, dict[str, list[Any]]] | None:
        """The points of all lines after the first so many; None if they are no longer known one by
        one.
        """
        missing = self.lines - lines
        if missing < 0 or missing > len(self._recent):
            return None
        points: dict[str, dict[str, list[Any]]] = {}
        for step, line in list(self._recent)[len(self._recent) - missing :]:
            for key, value in line.items():
                number = _number(value)
                if number is None or key not in self.series:
                    continue
                of_key = points.setdefault(key, {"steps": [], "values": []})
                of_key["steps"].append(_whole(step))
                of_key["values"].append(number if math.isfinite(number) else None)
        return points

    def step_seconds(self) -> float | None:
        """The median duration of the latest steps."""
        recent = [line.get("step_time_s") for _, line in list(self._recent)[-200:]]
        times = sorted(value for value in recent if type(value) is float and math.isfinite(value))
        return times[len(times) // 2] if times else None


def _number(value: object) -> float | None:
    """A number as a float, NaN for null and infinities; None for anything that is not a number."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
