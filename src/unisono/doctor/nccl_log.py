"""Parser of NCCL's log (NCCL_DEBUG=INFO): transport between each pair of ranks, rings and trees, algorithm and protocol. Pure.

Formats of 2.10 to 2.28 are known. Lines of other programs are ignored.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from unisono.text import one_line

_INFO = re.compile(r"NCCL (?:INFO|WARN) (?P<text>.*)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_CHANNEL = re.compile(
    r"^(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)?\s*:\s*(?P<source>\d+)(?:\[(?P<source_at>\w+)\])?\s*->\s*(?P<target>\d+)(?:\[(?P<target_at>\w+)\])?"
    r"(?:\s*\[(?P<way>send|receive)\])?\s+via\s+(?P<transport>\S+(?: pointer)?)"
)
_INIT = re.compile(
    r"comm 0x\w+ rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+) .*?cudaDev (?P<cuda>\d+)(?: nvmlDev (?P<nvml>\d+))? busId (?P<bus>\w+)"
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
        ways = {pair: Counter(found.values()) for pair, found in sorted(self._ways.items())}
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
        found = self._ways.setdefault((source, target), {})
        found[
            matched["channel"],
            matched["way"] or "",
        ] = matched["transport"]
        if (matched["channel"], "send") in found and (matched["channel"], "receive") in found:
            del found[matched["channel"], "receive"]
        for rank, place in ((source, matched["source_at"]), (target, matched["target_at"])):
            if place is not None:
                self._devices.setdefault(rank, place)

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
            f"{'rings connected' if log.rings else 'rings NOT connected'}, {'trees connected' if log.trees else 'no trees'}"
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
