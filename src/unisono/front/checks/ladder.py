"""The ladder: a real collective, and if it fails, the fewest settings with which it works; and the
parser of NCCL's log.

Pure.

Climbs from the current settings one step at a time until the collective works and is fast enough,
then drops each step that was not needed. Of NCCL's log (NCCL_DEBUG=INFO) the formats of 2.10 to
2.28 are known; lines of other programs are ignored.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.base.text import one_line, show_seconds
from unisono.front.checks.check import DoctorCheck, Finding, found

Settings = Mapping[str, str | None]
"""Variables of the child processes; None removes one."""

OWN = "{interface}"
"""Placeholder in a value: the interface on which other nodes reach a node; each node inserts its
own.
"""
SETTABLE = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "GLOO_DEVICE_TRANSPORT",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
)
"""Variables that a step may set."""
_FAMILIES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TP_SOCKET_")
_NEEDED = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
_INFO = re.compile(r"NCCL (?:INFO|WARN) (?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_CHANNEL = re.compile(
    r"^(?:Channel|Ring)"
    r" (?P<channel>\d+)(?:/\d+)?\s*:\s*(?P<source>\d+)(?:\[(?P<source_at>\w+)\])?"
    r"\s*->\s*(?P<target>\d+)(?:\[(?P<target_at>\w+)\])?"
    r"(?:\s*\[(?P<way>send|receive)\])?\s+via\s+(?P<transport>\S+(?: pointer)?)"
)
_INIT = re.compile(
    r"comm 0x\w+ rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+) .*?cudaDev (?P<cuda>\d+)(?: nvmlDev"
    r" (?P<nvml>\d+))? busId (?P<bus>\w+)"
)
_CHANNELS = re.compile(r"(\d+) coll channels")
_USING = re.compile(r"(?P<net>NET/\w+|Bootstrap) : Using (?P<what>.*)")
_NETWORK = re.compile(r"Using network (?P<name>\w+)")
_SET = re.compile(r"(?P<name>NCCL_\w+) set by environment to (?P<value>[^\s.]+(?:\.[^\s.]+)*)")
_TUNED = re.compile(
    r"(?P<what>[A-Z]\w+): (?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)",
)
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder.

    Attributes:
        layer: steps of one layer replace each other; steps of other layers stay in effect.
        settings: added to those of the other layers.
    """

    layer: str
    name: str
    settings: Settings
    cost: str = ""


def rungs(backend: str, *, interfaces: Sequence[str], set_by_hand: Sequence[str]) -> list[Rung]:
    """All steps after the current settings, in the order of trial.

    Args:
        backend: `nccl` or `gloo`.
        interfaces: to pin to, the most likely first; OWN for each node's own.
    """
    steps = []
    stripped = [name for name in set_by_hand if name.startswith(_FAMILIES) and name not in _NEEDED]
    if stripped:
        name = f"without the current settings ({', '.join(stripped[:4])}{' …' if len(stripped) > 4 else ''})"
        steps.append(Rung("own", name, dict.fromkeys(stripped), "nothing, if they were leftovers"))
    steps += [_pinned_to(backend, interface) for interface in interfaces]
    if backend == "nccl":
        return [*steps, *_NCCL]
    return [*steps, *_GLOO]


def _pinned_to(backend: str, interface: str) -> Rung:
    where = "each node's own interface" if interface == OWN else interface
    settings = {"GLOO_SOCKET_IFNAME": interface}
    if backend == "nccl":
        settings["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return Rung(
        "interface", f"interface pinned to {where}", settings, "nothing, if this is the right network"
    )


_NCCL = (
    Rung(
        "infiniband",
        "InfiniBand off",
        {"NCCL_IB_DISABLE": "1"},
        "nodes use sockets: at least ten times slower",
    ),
    Rung(
        "p2p",
        "peer access off",
        {"NCCL_P2P_DISABLE": "1"},
        "devices of a node use host memory: 2 to 20 times slower",
    ),
    Rung(
        "shm",
        "shared memory off",
        {"NCCL_SHM_DISABLE": "1"},
        "devices of a node use its network: even slower",
    ),
)
_GLOO = (
    Rung(
        "transport",
        "transport tcp",
        {"GLOO_DEVICE_TRANSPORT": "TCP"},
        "nothing: it is gloo's default on Linux",
    ),
    Rung(
        "transport",
        "transport uv",
        {"GLOO_DEVICE_TRANSPORT": "UV"},
        "some speed; most Linux builds lack it",
    ),
)


def merged_settings(layers: Mapping[str, Rung]) -> dict[str, str | None]:
    """Settings of all layers; later ones win."""
    settings: dict[str, str | None] = {}
    for rung in layers.values():
        settings |= rung.settings
    return settings


def export_lines(settings: Settings) -> list[str]:
    """Shell lines that make these settings."""
    unset = [name for name, value in settings.items() if value is None]
    lines = [f"unset {' '.join(unset)}"] if unset else []
    return lines + [f"export {name}={value}" for name, value in settings.items() if value is not None]


_WORTH_A_SETTING = 1.5  # a step that is not quicker than this is not worth a setting


@dataclass(frozen=True)
class AttemptOutcome:
    """Outcome of one collective.

    Attributes:
        text: result or error.
        bytes_per_second: of the large all-reduce; None: it did not complete.
        small_s: time of an all-reduce of one number; None: it did not complete.
    """

    ok: bool
    text: str
    bytes_per_second: float | None = None
    small_s: float | None = None
    rows: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes per second; 0 for a failure."""
        return (self.bytes_per_second or 0.0) if self.ok else 0.0


@dataclass(frozen=True)
class TriedSettings:
    """One attempt with its settings and outcome."""

    name: str
    settings: Settings
    outcome: AttemptOutcome


@dataclass(frozen=True)
class Climb:
    """All attempts and the choice.

    Attributes:
        tried: in order; the first one has the current settings.
        chosen: the attempt with the settings that are needed; the first one if the current settings
            suffice; None: nothing works.
        best: the fastest one.
        enough: bytes per second that are fast enough.
        costs: drawbacks of the steps that are needed.
    """

    tried: tuple[TriedSettings, ...]
    chosen: TriedSettings | None
    best: TriedSettings | None
    enough: float
    costs: tuple[str, ...] = field(default=())

    @property
    def as_it_is(self) -> AttemptOutcome:
        """Outcome of the first attempt."""
        return self.tried[0].outcome


Attempt = Callable[[Settings, str], AttemptOutcome]
"""Runs a collective with settings; the second argument is the step's name, for messages."""


def climb(steps: Sequence[Rung], attempt: Attempt, *, enough: float) -> Climb:
    """Tries steps until the collective works and is fast enough.

    Args:
        steps: after the current settings; steps of a layer replace each other, and if none helped
            the first one stays.
        attempt: never raises.
        enough: bytes per second that are fast enough.
    """
    way = _Attempts(attempt, enough)
    if way.try_(dict.fromkeys(()), "current settings").rate >= enough:
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
    """Only the steps that are needed: each one but the last is left out once, and stays out if that
    works.
    """
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
    """Nothing is fast enough: the fastest attempt, if it is worth a setting."""
    first, best = way.tried[0], max(way.tried, key=lambda one: one.outcome.rate)
    if not best.outcome.ok:
        return Climb(tuple(way.tried), None, None, way.enough)
    if best.outcome.rate < _WORTH_A_SETTING * first.outcome.rate:
        best = first
    costs = tuple(rung.cost for rung in steps if rung.settings.items() <= best.settings.items() and rung.cost)
    return Climb(tuple(way.tried), best, best, way.enough, costs)


class _Attempts:
    """Attempts so far."""

    def __init__(self, attempt: Attempt, enough: float) -> None:
        self._attempt = attempt
        self.enough = enough
        self.tried: list[TriedSettings] = []

    def try_(self, settings: Settings, name: str) -> AttemptOutcome:
        outcome = self._attempt(settings, name)
        self.tried.append(TriedSettings(name, settings, outcome))
        return outcome

    def made(self, layers: dict[str, Rung]) -> Climb:
        settings = merged_settings(layers)
        chosen = next(one for one in reversed(self.tried) if dict(one.settings) == settings)
        best = max(self.tried, key=lambda one: one.outcome.rate)
        costs = tuple(rung.cost for rung in layers.values() if rung.cost)
        return Climb(tuple(self.tried), chosen, best, self.enough, costs)


LADDER = DoctorCheck(
    "network.ladder",
    "a real collective, and the settings with which it works",
    "settings found by trial and error stay for years; the ladder finds the setting that is needed, and its"
    " cost",
    "With --ladder. Child processes run an all-reduce with the real backend, first with the current settings:"
    " one number, then 4 MiB (gloo) or 64 MiB (NCCL). If that fails, hangs or is very slow: without the"
    " current settings, interface pinned, InfiniBand off, peer access off, shared memory off (NCCL), or"
    " interface pinned to each candidate, transport tcp, transport uv (gloo), each with a deadline; then each"
    " step that was not needed is dropped. PASS: it works with the current settings. FAIL: it does not; the"
    " first settings that work are listed. Settings apply to the child processes only.",
    ("address_unreachable", "nccl_socket_iface", "ib_unreachable"),
)


def ladder_finding(climb: Climb, *, interface: str = "") -> Finding:
    """The ladder's finding.

    Args:
        climb: all attempts.
    """
    rows = [_attempt_row(one) for one in climb.tried]
    first = climb.as_it_is
    transports = next((one.outcome.rows for one in climb.tried if one.outcome.rows), ())
    if climb.chosen is None:
        text = f"nothing works: {first.text}"
        fix = ["the cause is below these settings: see network.*, devices.* and system.shm above"]
        return found(LADDER, "fail", text, *rows, *transports, fix=fix)
    if climb.chosen is climb.tried[0]:
        if first.rate >= climb.enough:
            return found(
                LADDER,
                "pass",
                f"works with the current settings: {_speed_text(climb.chosen)}",
                *rows,
                *transports,
            )
        text = (
            f"works with the current settings but is very slow ({_speed_text(climb.chosen)};"
            f" {climb.enough / 1e6:,.0f} MB/s is normal); no setting makes it faster"
        )
        return found(
            LADDER,
            "warn",
            text,
            *rows,
            *transports,
            fix=["see network.*: speed of the link, and its other users"],
        )
    lines = [line.replace(OWN, interface or "INTERFACE") for line in export_lines(climb.chosen.settings)]
    how = "fails" if not first.ok else f"is very slow ({first.rate / 1e6:,.1f} MB/s)"
    text = (
        f"with the current settings it {how}: {first.text}; works with: {climb.chosen.name}"
        f" ({_speed_text(climb.chosen)}{_against_best(climb)})"
    )
    costs = [f"cost: {cost}" for cost in climb.costs]
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
    """How to record the reason for a setting in the plan; nothing if settings are only removed."""
    names = [name for name, value in chosen.settings.items() if value is not None]
    if not names:
        return []
    reasons = " ".join(f"--reason {name}='WHY'" for name in names)
    return [f"record why it is set: `unisono train … {reasons}` keeps the reason in the plan"]


def _speed_text(tried: TriedSettings) -> str:
    small = (
        f", one number in {tried.outcome.small_s * 1000:.1f} ms" if tried.outcome.small_s is not None else ""
    )
    return f"{tried.outcome.rate / 1e6:,.0f} MB/s{small}"


def _against_best(climb: Climb) -> str:
    assert climb.chosen is not None
    if climb.best is None or climb.best is climb.chosen or not climb.chosen.outcome.rate:
        return ""
    return f", {climb.chosen.outcome.rate / climb.best.outcome.rate:.0%} of the fastest attempt"


def _attempt_row(tried: TriedSettings) -> str:
    outcome = tried.outcome
    if outcome.ok:
        return f"{tried.name}: {_speed_text(tried)}"
    passed = (
        f"; one number took {show_seconds(outcome.small_s)}, the large all-reduce did not complete"
        if outcome.small_s is not None
        else ""
    )
    return f"{tried.name}: {outcome.text}{passed}"


@dataclass(frozen=True, slots=True)
class TunedCollective:
    """NCCL's choice for a collective of one size (with TUNING in NCCL_DEBUG_SUBSYS)."""

    collective: str
    n_bytes: int
    algorithm: str
    protocol: str


@dataclass(frozen=True)
class NcclLog:
    """Content of the log.

    Attributes:
        ranks: number of ranks; 0: unknown.
        devices: device of each rank, as physical index or bus address.
        ways: transports of each pair of ranks, with the number of channels.
        rings: whether all rings were connected.
        network: `IB`, `Socket` or a plug-in's name; empty: not needed or unknown.
        interfaces: of the bootstrap and the network, as NCCL writes them.
    """

    version: str = ""
    ranks: int = 0
    devices: dict[int, str] = field(default_factory=dict)
    ways: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    channels: int = 0
    rings: bool = False
    trees: bool = False
    network: str = ""
    interfaces: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    tuned: tuple[TunedCollective, ...] = ()
    warnings: tuple[str, ...] = ()


def read_nccl_log(lines: Iterable[str]) -> NcclLog:
    """The content of all ranks' lines, in any order."""
    reader = _LogReader()
    for line in lines:
        matched = _INFO.search(line)
        version = _VERSION.search(line)
        if version:
            reader.version = version[1]
        if matched:
            reader.take(one_line(matched["text"]), warns="NCCL WARN" in line)
    return reader.made()


class _LogReader:
    """Collects the content line by line."""

    def __init__(self) -> None:
        self.version = ""
        self._ranks = 0
        self._devices: dict[int, str] = {}
        self._ways: dict[tuple[int, int], dict[tuple[str, str], str]] = {}
        self._channels = 0
        self._rings = self._trees = False
        self._network = ""
        self._interfaces: dict[str, str] = {}
        self._settings: dict[str, str] = {}
        self._tuned: dict[tuple[str, int], TunedCollective] = {}
        self._warnings: dict[str, None] = {}

    def take(self, text: str, *, warns: bool) -> None:
        if warns:
            self._warnings[text] = None
        for pattern, use in (
            (_CHANNEL, self._channel),
            (_INIT, self._init),
            (_USING, self._using),
            (_NETWORK, self._net),
            (_SET, self._set),
            (_TUNED, self._tune),
            (_CHANNELS, self._count),
        ):
            matched = pattern.search(text)
            if matched:
                use(matched)
                return
        self._rings |= text.startswith("Connected all rings")
        self._trees |= text.startswith("Connected all trees")

    def made(self) -> NcclLog:
        ways = {pair: Counter(channels.values()) for pair, channels in sorted(self._ways.items())}
        return NcclLog(
            self.version,
            self._ranks,
            dict(sorted(self._devices.items())),
            ways,
            self._channels,
            self._rings,
            self._trees,
            self._network,
            self._interfaces,
            self._settings,
            tuple(self._tuned.values()),
            tuple(self._warnings),
        )

    def _channel(self, matched: "re.Match[str]") -> None:
        """Over a network both ends log a channel: each direction is counted once."""
        source, target = int(matched["source"]), int(matched["target"])
        channels = self._ways.setdefault((source, target), {})
        channels[
            matched["channel"],
            matched["way"] or "",
        ] = matched["transport"]
        if (matched["channel"], "send") in channels and (matched["channel"], "receive") in channels:
            del channels[matched["channel"], "receive"]
        for rank, device in ((source, matched["source_at"]), (target, matched["target_at"])):
            if device is not None:
                self._devices.setdefault(rank, device)

    def _init(self, matched: "re.Match[str]") -> None:
        self._ranks = int(matched["ranks"])
        self._devices[int(matched["rank"])] = matched["nvml"] or matched["bus"]

    def _using(self, matched: "re.Match[str]") -> None:
        self._interfaces[matched["net"]] = matched["what"].strip()

    def _net(self, matched: "re.Match[str]") -> None:
        self._network = matched["name"]

    def _set(self, matched: "re.Match[str]") -> None:
        self._settings[matched["name"]] = matched["value"]

    def _count(self, matched: "re.Match[str]") -> None:
        self._channels = int(matched[1])

    def _tune(self, matched: "re.Match[str]") -> None:
        tuned = TunedCollective(
            matched["what"],
            int(matched["bytes"]),
            _named(matched["algo"], _ALGORITHMS),
            _named(matched["proto"], _PROTOCOLS),
        )
        self._tuned[tuned.collective, tuned.n_bytes] = tuned


def _named(word: str, names: tuple[str, ...]) -> str:
    """The name of an algorithm or protocol: older versions write numbers, newer ones capitals."""
    if word.isdecimal():
        return names[int(word)] if int(word) < len(names) else word
    return next((name for name in names if name.upper() == word.replace("_", "").upper()), word)


def nccl_rows(log: NcclLog) -> list[str]:
    """Table rows: pairs by transport, then network, rings and trees, algorithms."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for pair, transports in log.ways.items():
        words = ", ".join(f"{transport} × {count}" for transport, count in sorted(transports.items()))
        groups.setdefault(words, []).append(pair)
    rows = [f"{_pairs(pairs)}: {words}" for words, pairs in groups.items()]
    if log.network:
        rows.append(
            f"network: {log.network}" + "".join(f"; {name} {what}" for name, what in log.interfaces.items())
        )
    if log.ways:
        rows.append(
            f"{'rings connected' if log.rings else 'rings NOT connected'},"
            f" {'trees connected' if log.trees else 'no trees'}"
            + (f", {log.channels} channels" if log.channels else "")
        )
    rows += [
        f"{one.collective} of {one.n_bytes:,} bytes: {one.algorithm}, {one.protocol}" for one in log.tuned[:6]
    ]
    rows += [f"NCCL warns: {one_line(text, limit=200)}" for text in log.warnings[:4]]
    return rows


def _pairs(pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}→{b}" for a, b in pairs[:8])
    return shown + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")
