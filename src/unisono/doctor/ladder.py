"""The ladder: a real collective, and if it fails, the fewest settings with which it works. Pure.

Climbs from the current settings one step at a time until the collective works and is fast enough, then drops each step
that was not needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.doctor.check import Check, Finding, found
from unisono.text import show_seconds

Settings = Mapping[str, str | None]
"""Variables for the children alone; None takes one away."""

OWN = "{interface}"
"""In a value: the interface on which a node is reached by the others; each node puts in its own."""
SETTABLE = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
)
"""What a step may set."""
_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TP_SOCKET_")
_NEEDED = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step.

    Attributes:
        layer: steps of one layer take each other's place; those of others stay below.
        name: for people.
        settings: what it lays over the rest.
        cost: what one pays for it.
    """

    layer: str
    name: str
    settings: Settings
    cost: str = ""


def rungs(backend: str, *, interfaces: Sequence[str], set_by_hand: Sequence[str]) -> list[Rung]:
    """All steps after the settings as they are, in the order in which they are tried.

    Args:
        backend: `nccl` or `gloo`.
        interfaces: to pin to, the likeliest first; OWN for each node's own.
        set_by_hand: variables about communication that are set now.
    """
    found = []
    stripped = [name for name in set_by_hand if name.startswith(_FAMILIES) and name not in _NEEDED]
    if stripped:
        name = f"without what is set now ({', '.join(stripped[:4])}{' …' if len(stripped) > 4 else ''})"
        found.append(Rung("own", name, dict.fromkeys(stripped), "nothing, if it was left over"))
    found += [_pinned_to(backend, interface) for interface in interfaces]
    if backend == "nccl":
        return [*found, *_NCCL]
    return [*found, *_GLOO]


def _pinned_to(backend: str, interface: str) -> Rung:
    where = "each node's own interface" if interface == OWN else interface
    settings = {"GLOO_SOCKET_IFNAME": interface}
    if backend == "nccl":
        settings["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return Rung("interface", f"interface pinned to {where}", settings, "nothing, if it is the right network")


_NCCL = (
    Rung(
        "infiniband",
        "InfiniBand off",
        {"NCCL_IB_DISABLE": "1"},
        "nodes talk over sockets: ten times slower or more",
    ),
    Rung(
        "p2p",
        "peer access off",
        {"NCCL_P2P_DISABLE": "1"},
        "devices of a node talk through its memory: 2 to 20 times slower",
    ),
    Rung(
        "shm",
        "shared memory off",
        {"NCCL_SHM_DISABLE": "1"},
        "devices of a node talk over its network: slower again",
    ),
)
_GLOO = (
    Rung(
        "transport",
        "transport tcp",
        {"GLOO_DEVICE_TRANSPORT": "TCP"},
        "nothing: it is gloo's own choice on Linux",
    ),
    Rung(
        "transport",
        "transport uv",
        {"GLOO_DEVICE_TRANSPORT": "UV"},
        "some speed; most builds for Linux have none",
    ),
)


def merged_settings(layers: Mapping[str, Rung]) -> dict[str, str | None]:
    """The settings of all layers together; later ones win."""
    found: dict[str, str | None] = {}
    for rung in layers.values():
        found |= rung.settings
    return found


def export_lines(settings: Settings) -> list[str]:
    """What a person types to have these settings."""
    unset = [name for name, value in settings.items() if value is None]
    lines = [f"unset {' '.join(unset)}"] if unset else []
    return lines + [f"export {name}={value}" for name, value in settings.items() if value is not None]


_WORTH_A_SETTING = 1.5  # a step that is not quicker than this is not worth a setting


@dataclass(frozen=True)
class AttemptOutcome:
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
class TriedSettings:
    """One attempt."""

    name: str
    settings: Settings
    outcome: AttemptOutcome


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

    tried: tuple[TriedSettings, ...]
    chosen: TriedSettings | None
    best: TriedSettings | None
    enough: float
    costs: tuple[str, ...] = field(default=())

    @property
    def as_it_is(self) -> AttemptOutcome:
        """Of the first attempt."""
        return self.tried[0].outcome


Attempt = Callable[[Settings, str], AttemptOutcome]
"""Runs a collective under settings; the second is the step's name, for people."""


def climb(steps: Sequence[Rung], attempt: Attempt, *, enough: float) -> Climb:
    """Tries until something works.

    Args:
        steps: after the settings as they are; steps of a layer take each other's place, and where none of them helped the first stays.
        attempt: never raises.
        enough: bytes per second below which it crawls.
    """
    way = _Attempts(attempt, enough)
    if way.try_(dict.fromkeys(()), "the settings as they are").rate >= enough:
        return way.made({})
    layers: dict[str, Rung] = {}
    firsts: dict[str, Rung] = {}
    for rung in steps:
        layers |= {name: first for name, first in firsts.items() if name != rung.layer}
        layers.pop(rung.layer, None)
        layers[rung.layer] = rung
        firsts.setdefault(rung.layer, rung)
        if way.try_(merged_settings(layers), rung.name).rate >= enough:
            return way.made(_without_unneeded(layers, way))
    return _fastest(way, steps)


def _without_unneeded(layers: dict[str, Rung], way: "_Attempts") -> dict[str, Rung]:
    """Only the steps that are needed: each but the last is left out once, and stays out if it works so."""
    kept = dict(layers)
    for name in list(layers)[:-1]:
        fewer = {layer: rung for layer, rung in kept.items() if layer != name}
        if (
            way.try_(merged_settings(fewer), f"{kept[list(kept)[-1]].name}, without: {kept[name].name}").rate
            >= way.enough
        ):
            kept = fewer
    return kept


def _fastest(way: "_Attempts", steps: Sequence[Rung]) -> Climb:
    """Nothing is quick: the quickest, if that is worth a setting."""
    first, best = way.tried[0], max(way.tried, key=lambda one: one.outcome.rate)
    if not best.outcome.ok:
        return Climb(tuple(way.tried), None, None, way.enough)
    if best.outcome.rate < _WORTH_A_SETTING * first.outcome.rate:
        best = first
    costs = tuple(rung.cost for rung in steps if rung.settings.items() <= best.settings.items() and rung.cost)
    return Climb(tuple(way.tried), best, best, way.enough, costs)


class _Attempts:
    """What has been tried."""

    def __init__(self, attempt: Attempt, enough: float) -> None:
        self._attempt = attempt
        self.enough = enough
        self.tried: list[TriedSettings] = []

    def try_(self, settings: Settings, name: str) -> AttemptOutcome:
        outcome = self._attempt(settings, name)
        self.tried.append(TriedSettings(name, settings, outcome))
        return outcome

    def made(self, layers: dict[str, Rung]) -> Climb:
        wanted = merged_settings(layers)
        chosen = next(one for one in reversed(self.tried) if dict(one.settings) == wanted)
        best = max(self.tried, key=lambda one: one.outcome.rate)
        costs = tuple(rung.cost for rung in layers.values() if rung.cost)
        return Climb(tuple(self.tried), chosen, best, self.enough, costs)


LADDER = Check(
    "network.ladder",
    "A real collective, and the settings with which it works",
    "settings tried by hand in an emergency stay for years; one step at a time shows which one is needed, and its cost",
    "With --ladder. Child processes run an all-reduce with the real backend, first with the current settings: one number, then 4 MiB (gloo) or 64 MiB (NCCL). If that"
    " fails, hangs or crawls: without what is set, interface pinned, InfiniBand off, peer access off, shared memory off (NCCL), or interface"
    " pinned to each candidate, transport tcp, transport uv (gloo), each with a deadline; then each step that was not needed is left out. PASS: it works as it is. FAIL: it"
    " does not; the first settings that work are written out. Settings live in the children alone.",
    ("address_unreachable", "nccl_socket_iface", "ib_unreachable"),
)


def ladder_finding(climb: Climb, *, interface: str = "") -> Finding:
    """One finding.

    Args:
        climb: the way.
        interface: what OWN stands for on this node.
    """
    rows = [_attempt_row(one) for one in climb.tried]
    first = climb.as_it_is
    transports = next((one.outcome.rows for one in climb.tried if one.outcome.rows), ())
    if climb.chosen is None:
        text = f"nothing works: {first.text}"
        fix = [
            "what all attempts have in common is below the settings: look at network.*, devices.* and system.shm above"
        ]
        return found(LADDER, "fail", text, *rows, *transports, fix=fix)
    if climb.chosen is climb.tried[0]:
        if first.rate >= climb.enough:
            return found(LADDER, "pass", f"works as it is: {_speed_text(climb.chosen)}", *rows, *transports)
        text = f"works as it is and crawls ({_speed_text(climb.chosen)}; {climb.enough / 1e6:,.0f} MB/s would be usual); no setting makes it quicker"
        return found(
            LADDER,
            "warn",
            text,
            *rows,
            *transports,
            fix=["look at network.*: speed of the link, and who else uses it"],
        )
    lines = [line.replace(OWN, interface or "INTERFACE") for line in export_lines(climb.chosen.settings)]
    how = "fails" if not first.ok else f"crawls ({first.rate / 1e6:,.1f} MB/s)"
    text = f"as it is it {how}: {first.text}; it works with: {climb.chosen.name} ({_speed_text(climb.chosen)}{_against_best(climb)})"
    costs = [f"it costs {cost}" for cost in climb.costs]
    return found(
        LADDER,
        "fail" if not first.ok else "warn",
        text,
        *costs,
        *_reason_hint(climb.chosen),
        *rows,
        *transports,
        fix=lines,
    )


def _reason_hint(chosen: TriedSettings) -> list[str]:
    """How a setting that somebody now makes by hand gets its reason into the plan; nothing where only something is taken away."""
    names = [name for name, value in chosen.settings.items() if value is not None]
    if not names:
        return []
    reasons = " ".join(f"--reason {name}='WHY'" for name in names)
    return [f"set by hand it stays for years: `unisono train … {reasons}` keeps in the plan why"]


def _speed_text(tried: TriedSettings) -> str:
    small = (
        f", one number in {tried.outcome.small_s * 1000:.1f} ms" if tried.outcome.small_s is not None else ""
    )
    return f"{tried.outcome.rate / 1e6:,.0f} MB/s{small}"


def _against_best(climb: Climb) -> str:
    assert climb.chosen is not None
    if climb.best is None or climb.best is climb.chosen or not climb.chosen.outcome.rate:
        return ""
    return f", {climb.chosen.outcome.rate / climb.best.outcome.rate:.0%} of the best seen"


def _attempt_row(tried: TriedSettings) -> str:
    outcome = tried.outcome
    if outcome.ok:
        return f"{tried.name}: {_speed_text(tried)}"
    passed = (
        f"; one number took {show_seconds(outcome.small_s)}, the large sum did not come back"
        if outcome.small_s is not None
        else ""
    )
    return f"{tried.name}: {outcome.text}{passed}"
