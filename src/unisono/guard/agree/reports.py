"""What each node and each rank reports for the comparison, as plain values; and these values as
text in a verdict.

Secrets never enter.
"""

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from unisono.base.text import one_line
from unisono.guard.facts.limits import SystemLimits
from unisono.guard.facts.machine import Gpu
from unisono.guard.places.ranks import DeviceChoice

_MANY_NODES = 6  # more are written as ranges of numbers
_MANY_RANGES = 8
_LONGEST_HOST = 60


class Member(NamedTuple):
    """A node, or a rank of it. Members sort by node, then rank."""

    node_rank: int
    rank: int
    """-1: the whole node."""
    host: str

    @property
    def is_rank(self) -> bool:
        """Whether this is a rank, not a whole node."""
        return self.rank >= 0


def plain_host(host: str) -> str:
    """A host name for display: one line, of limited length."""
    return one_line(host, limit=_LONGEST_HOST) or "?"


def name_node(node_rank: int, host: str) -> str:
    """`node 1 (b)`."""
    return f"node {node_rank} ({plain_host(host)})"


def name_all(members: Iterable[Member]) -> str:
    """`node 1 (b)`, `nodes 0 (a) and 2 (c)`, `nodes 0–511 and 513–1023`, `rank 3, node 1 (b)`,
    `ranks 2 and 3, node 1 (b)`.
    """
    people = sorted(set(members))
    if not people:
        return "nobody"
    nodes = _name_nodes(sorted({(who.node_rank, who.host) for who in people}))
    if not people[0].is_rank:
        return nodes
    ranks = sorted({who.rank for who in people})
    return f"{number_list('rank', ranks)}, {nodes}"


def name_ranks(members: Iterable[Member]) -> str:
    """Ranks without hosts, `ranks 0 and 3`: for members that are all on one machine."""
    return number_list("rank", [who.rank for who in members])


def _name_nodes(nodes: Sequence[tuple[int, str]]) -> str:
    if len(nodes) > _MANY_NODES:
        return number_list("node", [rank for rank, _ in nodes])
    words = [f"{rank} ({plain_host(host)})" for rank, host in nodes]
    return f"{'node' if len(words) == 1 else 'nodes'} {enumerate_words(words)}"


def number_list(noun: str, numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `nodes 0–511 and 513–1023`; after a few ranges `and 12 more`."""
    ordered = sorted(set(numbers))
    ranges = _ranges(ordered)
    words = [_range_text(first, last) for first, last in ranges[:_MANY_RANGES]]
    left = sum(last - first + 1 for first, last in ranges[_MANY_RANGES:])
    if left:
        words.append(f"{left} more")
    return f"{noun if len(ordered) == 1 else noun + 's'} {enumerate_words(words)}"


def _ranges(ordered: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return [
        part
        for first, last in ranges
        for part in ([(first, last)] if last != first + 1 else [(first, first), (last, last)])
    ]


def _range_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def enumerate_words(words: Sequence[str], *, at_most: int = 0) -> str:
    """`a`, `a and b`, `a, b and c`; with `at_most` the rest is `and 3 more`."""
    shown = list(words)
    if at_most and len(shown) > at_most:
        shown = [*shown[:at_most], f"{len(shown) - at_most} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `2 ranks`, `1,024 nodes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def culprit_hosts(members: Iterable[Member]) -> tuple[str, ...]:
    """The members' hosts, each once, in node order."""
    return tuple(dict.fromkeys(plain_host(who.host) for who in sorted(set(members))))


def culprit_ranks(members: Iterable[Member]) -> tuple[int, ...]:
    """The members' ranks, in order; empty for whole nodes."""
    return tuple(sorted({who.rank for who in members if who.is_rank}))


_LONGEST = 80
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PROXY|_KEY$", re.IGNORECASE)


def freeze(value: Any) -> Hashable:
    """A hashable equivalent: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # nan is not even equal to itself
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping):
        return ("map", tuple(sorted((str(key), freeze(item)) for key, item in value.items())))
    if isinstance(value, list | tuple):
        return ("list", tuple(freeze(item) for item in value))
    return repr(value)


def show(value: Any) -> str:
    """`value` for people: `1e-4`, `not set`, `"two words"`, cut where it is long."""
    match value:
        case None:
            text = "not set"
        case bool():
            text = str(value).lower()
        case float():
            text = show_float(value)
        case str():
            text = value if value and not value.isspace() else json.dumps(value)
        case ("bool", bool() as flag):
            text = str(flag).lower()
        case ("list", tuple() as items):
            text = f"[{', '.join(show(item) for item in items)}]"
        case ("map", tuple() as items):
            text = "{" + ", ".join(f"{key}: {show(item)}" for key, item in items) + "}"
        case int():
            text = str(value)
        case _:
            text = repr(value)
    return one_line(text, limit=_LONGEST)


def show_float(value: float) -> str:
    """The shortest spelling that reads back as the same number: 0.001, 1e-4, 2.5e-5."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e6:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    mantissa = str(digits[0]) + ("." + "".join(map(str, digits[1:])) if len(digits) > 1 else "")
    return f"{'-' if sign else ''}{mantissa}e{exponent + len(digits) - 1}"


def show_setting(name: str, value: str | None) -> str:
    """`NCCL_ALGO=Ring`, `NCCL_ALGO not set`; for a variable that may hold a secret only that it is
    set.
    """
    if value is None:
        return f"{name} not set"
    return f"{name} (set)" if holds_secret(name) else f"{name}={show_value(name, value)}"


def show_value(name: str, value: str | None) -> str:
    """The value of an environment variable, hidden if it may be a secret."""
    if value is not None and holds_secret(name):
        return "(set)"
    return show(value)


def holds_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    return bool(_SECRET.search(name)) and name not in {"TOKENIZERS_PARALLELISM", "NO_PROXY", "no_proxy"}


def show_digest(digest: str) -> str:
    """The first characters of a digest, enough to compare two by eye."""
    return one_line(digest, limit=16) or "none"


def show_bytes(amount: int) -> str:
    """`64 MiB`, `1.5 GiB`: a size of memory or disk space in binary units, as limits use them."""
    size = float(amount)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if size == int(size) or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class ReportPart(BaseModel):
    """A frozen value.

    Reports are sent between machines, so an unknown field is rejected like any other difference.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_json(self) -> dict[str, object]:
        """A JSON object."""
        return self.model_dump(mode="json")


class Interface(ReportPart):
    """A network interface."""

    name: str
    addresses: list[str]
    mtu: int | None
    up: bool
    loopback: bool
    speed_mbit: int | None = None
    kind: Literal["ethernet", "infiniband", "loopback", "virtual", "unknown"] = "unknown"


class Device(ReportPart):
    """An accelerator as the driver lists it; `index` is the physical index."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_free_bytes: int
    bus_id: str = ""
    numa_node: int | None = None


def reported_device(gpu: Gpu) -> Device:
    """A device as a node reports it."""
    return Device(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        memory_free_bytes=gpu.memory_free_bytes,
        bus_id=gpu.bus_id,
        numa_node=gpu.numa_node,
    )


class FileDigest(ReportPart):
    """A file that the run reads. `label` identifies it without its path: `train[0]: rows.jsonl`."""

    label: str
    bytes: int
    digest: str


class OutputFacts(ReportPart):
    """The output_dir as seen by a node."""

    path: str
    writable: bool | None
    """None: not tested."""
    trouble: str = ""
    """Why it is not writable, or could not be tested."""
    shared: bool | None
    """Whether the head's nonce was found in it; None: not checked."""
    free_bytes: int | None
    file_system: str = ""


class NodeReport(ReportPart):
    """Facts that one node's front collects before anything imports torch."""

    node_rank: int
    host: str
    address: str
    """The address from which it reached the head, and at which others reach it."""
    pid: int
    nodes: int
    """Number of nodes that it was started with."""
    nproc: int
    """Ranks that it would start (nproc_per_node)."""
    nproc_declared: bool
    """Whether it was set by --nproc or NPROC_PER_NODE; otherwise it was inferred."""
    nproc_origin: str
    """Origin of the number, for people: `--nproc`, `NPROC_PER_NODE`, `8 visible accelerators`."""
    device_kind: Literal["cpu", "cuda"]
    chosen: list[Device]
    """Devices that its ranks would use, by local rank; empty on CPU."""
    places: list[DeviceChoice] = []
    """Device of each of its ranks, by local rank: the plan uses it unchanged."""
    threads: int = 1
    """Threads that each of its ranks may use."""
    threads_origin: str = ""
    visible: list[Device]
    physical: list[Device]
    visible_variable: str | None
    """CUDA_VISIBLE_DEVICES, or None where it is not set."""
    device_note: str = ""
    """Why there are none, or why they could not be listed."""
    variables: dict[str, str]
    """Environment variables that must be equal, valid or known (causes.variables), with their
    values.
    """
    nccl_files: dict[str, str] = {}
    """Variables set in /etc/nccl.conf and ~/.nccl.conf."""
    versions: dict[str, str]
    """Versions that results and wire formats depend on: python, torch, cuda, nccl, driver,
    transformers, peft, unisono, …
    """
    environment_digest: str
    packages: dict[str, str]
    """All installed distributions."""
    code: dict[str, str]
    """Digest of each source file of unisono, by module path, and of remote code that the run loads
    (trust_remote_code).
    """
    config: dict[str, object]
    """The resolved config without paths, flat: `optim.lr` → 0.0002."""
    data_files: list[FileDigest]
    tokenizer_files: list[FileDigest]
    model_files: list[FileDigest]
    """config.json, weights, generation_config.json."""
    files_note: str = ""
    """Why files could not be hashed; such files are unknown, never equal."""
    output: OutputFacts
    limits: SystemLimits
    interfaces: list[Interface]
    host_addresses: list[str]
    """Addresses that its own host name resolves to; empty: none."""
    head_addresses: list[str]
    """Addresses that the head's name resolves to on this node."""
    clock_offset_s: float | None
    """Wall clock minus the head's; None: not measured."""
    probe_ports: list[int] = []
    """Ports on `address` that accept connections of the dial matrix; chosen by binding."""
    reserved: dict[str, int] = {}
    """Resources that the plan reserves for the system on this node: memory_bytes, disk_bytes,
    shm_bytes, cores.
    """


def settings_of(report: NodeReport) -> dict[str, str]:
    """The settings that NCCL, torch and other libraries read: NCCL's files, overridden by the
    environment.
    """
    return {**report.nccl_files, **report.variables}


class DialReport(ReportPart):
    """Result of one connection attempt from one node to another."""

    source: int
    """node_rank of the node that connected."""
    target: int
    address: str
    port: int
    outcome: Literal["ok", "refused", "timed_out", "unreachable", "stranger", "stalled"]
    """stranger: a different program answered; stalled: small messages passed, a larger one did not
    return.
    """
    largest_bytes: int
    """Size of the largest message that returned complete."""
    tried_bytes: list[int]
    rtt_s: float | None
    note: str = ""


class RankReport(ReportPart):
    """Facts of one rank when data and model are ready, before its first collective."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    pid: int
    device_kind: Literal["cpu", "cuda"]
    device_uuid: str | None
    """UUID of the device that is bound."""
    rows: int | None = None
    """Number of rows, before packing."""
    sequences: int
    """The number in one epoch."""
    rows_digest: str
    """Digest of the row ids in table order."""
    order_digest: str
    """Digest of the sequence indices of the first steps, before they are distributed over the
    ranks.
    """
    first_difference: list[str] = []
    """Row ids of the first sequences in that order, shown if orders differ."""
    total_steps: int
    tokens: int
    """The number in one epoch."""
    loss_tokens: int
    parameters_digest: str
    """Digest of names, shapes and dtypes of the trained parameters, in order."""
    trainable_parameters: int
    trained_values_digest: str
    """Digest of the initial values of the trained parameters."""
    frozen_values_digest: str
    odd_tensors: dict[str, str] = {}
    """Digest of each of a bounded number of frozen tensors, so that a difference can be located."""
    tokenizer_digest: str
    """Digest of the tokens of a fixed text, and of the vocabulary."""
    dtype: str
    strategy: str
    seed: int
    threads: int
    resume_step: int
    torch_version: str
    collective_backend: str
    """gloo or nccl."""
    store_port: int | None = None
    """Rank 0: port of torch's store."""


Status = Literal["pass", "warn", "fail", "unknown"]


class Check(ReportPart):
    """Result of one check, for agreement.json and the screen."""

    id: str
    """`nproc`, `config`, `env`, `versions`, `network.dial`, …"""
    status: Status
    text: str
    """The result, one line."""
    where: str = ""
    fix: str = ""
