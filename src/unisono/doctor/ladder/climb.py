"""Climbs: the settings as they are, then one step at a time until a collective works and is quick enough; then without each step that was not needed. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.doctor.ladder.rungs import Rung, Settings, laid

_WORTH = 1.5  # a step that is not quicker than this is not worth a setting


@dataclass(frozen=True)
class Outcome:
    """What came of one collective.

    Attributes:
        ok: it came to an end, and the sums were right.
        text: what was found, or went wrong.
        bytes_per_second: of the large one; None: it did not come to an end.
        small_s: of one number; None: that did not either.
        rows: which transports were taken, where NCCL tells.
    """

    ok: bool
    text: str
    bytes_per_second: float | None = None
    small_s: float | None = None
    rows: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """0 where there is none."""
        return (self.bytes_per_second or 0.0) if self.ok else 0.0


@dataclass(frozen=True)
class Tried:
    """One attempt."""

    name: str
    settings: Settings
    outcome: Outcome


@dataclass(frozen=True)
class Climb:
    """The whole way.

    Attributes:
        tried: in order; the first is the settings as they are.
        chosen: the settings that are needed; empty: those that are there will do; None: nothing works.
        best: the quickest of all.
        enough: bytes per second that count as quick.
        costs: of the steps that are needed, in words.
    """

    tried: tuple[Tried, ...]
    chosen: Tried | None
    best: Tried | None
    enough: float
    costs: tuple[str, ...] = field(default=())

    @property
    def as_it_is(self) -> Outcome:
        """Of the first attempt."""
        return self.tried[0].outcome


Attempt = Callable[[Settings, str], Outcome]
"""Runs a collective under settings; the second is the step's name, for people."""


def climb(steps: Sequence[Rung], attempt: Attempt, *, enough: float) -> Climb:
    """Tries until something works.

    Args:
        steps: after the settings as they are; steps of a layer take each other's place, and where none of them helped the first stays.
        attempt: never raises.
        enough: bytes per second below which it crawls.
    """
    way = _Way(attempt, enough)
    if way.try_(dict.fromkeys(()), "the settings as they are").rate >= enough:
        return way.made({})
    layers: dict[str, Rung] = {}
    firsts: dict[str, Rung] = {}
    for rung in steps:
        layers |= {name: first for name, first in firsts.items() if name != rung.layer}
        layers.pop(rung.layer, None)
        layers[rung.layer] = rung
        firsts.setdefault(rung.layer, rung)
        if way.try_(laid(layers), rung.name).rate >= enough:
            return way.made(_reduced(layers, way))
    return _best_of(way, steps)


def _reduced(layers: dict[str, Rung], way: "_Way") -> dict[str, Rung]:
    """Only the steps that are needed: each but the last is left out once, and stays out if it works so."""
    kept = dict(layers)
    for name in list(layers)[:-1]:
        fewer = {layer: rung for layer, rung in kept.items() if layer != name}
        if (
            way.try_(laid(fewer), f"{kept[list(kept)[-1]].name}, without: {kept[name].name}").rate
            >= way.enough
        ):
            kept = fewer
    return kept


def _best_of(way: "_Way", steps: Sequence[Rung]) -> Climb:
    """Nothing is quick: the quickest, if that is worth a setting."""
    first, best = way.tried[0], max(way.tried, key=lambda one: one.outcome.rate)
    if not best.outcome.ok:
        return Climb(tuple(way.tried), None, None, way.enough)
    if best.outcome.rate < _WORTH * first.outcome.rate:
        best = first
    costs = tuple(rung.cost for rung in steps if rung.settings.items() <= best.settings.items() and rung.cost)
    return Climb(tuple(way.tried), best, best, way.enough, costs)


class _Way:
    """What has been tried."""

    def __init__(self, attempt: Attempt, enough: float) -> None:
        self._attempt = attempt
        self.enough = enough
        self.tried: list[Tried] = []

    def try_(self, settings: Settings, name: str) -> Outcome:
        outcome = self._attempt(settings, name)
        self.tried.append(Tried(name, settings, outcome))
        return outcome

    def made(self, layers: dict[str, Rung]) -> Climb:
        wanted = laid(layers)
        chosen = next(one for one in reversed(self.tried) if dict(one.settings) == wanted)
        best = max(self.tried, key=lambda one: one.outcome.rate)
        costs = tuple(rung.cost for rung in layers.values() if rung.cost)
        return Climb(tuple(self.tried), chosen, best, self.enough, costs)
