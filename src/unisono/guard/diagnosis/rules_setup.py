"""How a run was set up: rendezvous, ranks of each node, network interfaces, versions, shared
storage, resources of Ray.
"""

import re
from collections import Counter, defaultdict
from dataclasses import replace

from unisono.guard.diagnosis.rules_hang import WAITED, first_collectives, missing_ranks
from unisono.guard.diagnosis.run_facts import (
    Hypothesis,
    LogEvent,
    RunFacts,
    Traceback,
    View,
    first_of_each,
    hosts_of,
)

_LOOPBACK = ("127.", "localhost", "::1")


def find_unequal_nodes(view: View) -> list[Hypothesis]:
    """Nodes that start different numbers of ranks, and a start that hung."""
    counts = _counts(view)
    if worlds := _worlds(view):
        return [_different_worlds(view, worlds)]
    if len(counts) < 2 or len({count for count, _ in counts.values()}) < 2 or not _start_failed(view):
        return []
    tally = Counter(count for count, _ in counts.values())
    usual = tally.most_common(1)[0][0] if len(tally) < len(counts) else max(tally)
    odd = [node for node, (count, _) in counts.items() if count != usual]
    lines = [counts[node][1] for node in sorted(counts, key=lambda node: node not in odd)]
    masked = list(view.facts.of("devices_set", "devices_unset"))
    many = len(counts) > 2 and len(odd) == 1
    host = next((event.who.host for node in odd if (event := counts[node][1]).who.host), None)
    listed = ", ".join(f"{node}: {count}" for node, (count, _) in counts.items())
    waits = first_of_each(view.facts.of("watchdog", "gloo_timeout", "clients_joined"), limit=2)
    return [
        Hypothesis(
            "nproc_mismatch",
            f"the nodes start different numbers of ranks ({listed})",
            (*lines[:6], *masked[:2], *waits),
            hosts=(host,) if many and host else (),
            confidence=0.9,
        )
    ]


def _worlds(view: View) -> dict[int, LogEvent]:
    """The world sizes for which launchers of one run prepared their ranks, each with a line; empty
    unless they differ and no step was made.
    """
    if view.facts.step or view.finishes:
        return {}
    for signature in ("lightning_member", "deepspeed_world"):
        worlds: dict[int, LogEvent] = {}
        places: dict[int, set[str]] = defaultdict(set)
        for event in view.facts.of(signature):
            if world := event.number("world"):
                worlds.setdefault(world, event)
                places[world].add(_node(view, event))
        apart = sum(len(nodes) for nodes in places.values()) == len(set().union(*places.values()))
        if len(worlds) > 1 and apart:
            return worlds
    return {}


def _different_worlds(view: View, worlds: dict[int, LogEvent]) -> Hypothesis:
    listed = ", ".join(f"{_node(view, event)}: {world}" for world, event in worlds.items())
    waits = first_of_each(view.facts.of(*WAITED, "clients_joined"), limit=2)
    return Hypothesis(
        "nproc_mismatch",
        f"the nodes start different numbers of ranks, each for a separate world ({listed})",
        (*worlds.values(), *waits),
        confidence=0.9,
    )


def find_unbound(view: View) -> list[Hypothesis]:
    """A barrier that guessed its device, and no collective ever ended."""
    warned = view.facts.of("barrier_guesses_device")
    waited = list(view.facts.of(*WAITED))
    if not warned or not waited or not first_collectives(view):
        return []
    if len(missing_ranks(view, {event.rank for event in waited if event.rank is not None})) == 1:
        return []  # all but one came: it is not the device, it is that rank
    return [
        Hypothesis(
            "device_unbound_barrier",
            "a barrier ran before devices were bound, and the first collective never ended",
            (*first_of_each(warned, limit=6), *first_of_each(waited, limit=2)),
            confidence=0.75,
        )
    ]


def find_single_device(view: View) -> list[Hypothesis]:
    """NCCL failed in a world of one."""
    errors = [
        event
        for event in view.facts.of("nccl_system_error", "nccl_warn", "nccl_no_interface", "nccl_error")
        if event.kind == "error" and not view.survived(event)
    ]
    if view.facts.world_size != 1 or not errors:
        return []
    alone = view.facts.of(
        "lightning_world", "lightning_member", "lightning_started", "world_size", "process_rank"
    )
    return [
        Hypothesis(
            "single_device_nccl",
            "a process group was created for a single device, and NCCL failed",
            (*alone[:4], *errors[:2]),
            confidence=0.85,
        )
    ]


def find_rendezvous(view: View) -> list[Hypothesis]:
    """Nodes that did not find each other: host names, loopback addresses, absent nodes."""
    names = [event for event in view.facts.pointing_to("dns_failure") if not view.survived(event)]
    loopback = [event for event in view.facts.pointing_to("hostname_loopback") if not view.survived(event)]
    waited = [event for event in view.facts.pointing_to("rdzv_timeout") if not view.survived(event)]
    hypotheses = []
    if loopback and _several_nodes(view, loopback):
        hypotheses.append(
            Hypothesis(
                "hostname_loopback",
                "a node's name resolves to its own loopback address, where the others cannot reach it",
                first_of_each(sorted(loopback, key=lambda e: "trying to connect" not in e.text)),
                confidence=0.85,
            )
        )
    if names and _is_final(view, names):
        hypotheses.append(
            Hypothesis(
                "dns_failure",
                "the name of the head node cannot be resolved",
                first_of_each(sorted(names, key=lambda e: "IPv6" in e.text)),
                confidence=0.85,
            )
        )
    if waited:
        waited.sort(
            key=lambda event: event.signature == "store_unreachable" and "RendezvousTimeout" in event.text
        )
        hypotheses.append(
            Hypothesis(
                "rdzv_timeout",
                "not all nodes joined in time",
                (*first_of_each(waited), *view.facts.of("connect_failed")[:2]),
                confidence=0.8,
                missing=("the logs of the other nodes",),
            )
        )
    return hypotheses


def _counts(view: View) -> dict[str, tuple[int, LogEvent]]:
    """How many ranks each node says that it starts, with the line."""
    counts: dict[str, tuple[int, LogEvent]] = {}
    for event in view.facts.of("lf_tasks", "deepspeed_nodes"):
        count = event.number("count")
        if count:
            counts[_node(view, event)] = (count, event)
    if len(counts) < 2:
        other: dict[str, tuple[int, LogEvent]] = {}
        for event in view.facts.of("nproc", "visible_count"):
            count = event.number("count")
            if count:
                other.setdefault(_node(view, event), (count, event))
        counts = other if len(other) > len(counts) else counts
    return counts


def _node(view: View, event: LogEvent) -> str:
    """The node of a line: its log, or the nearest statement of a node's number in it."""
    near = [
        one
        for one in view.facts.of("lf_nodes", "deepspeed_nodes", "node_rank")
        if one.source == event.source and abs(one.line - event.line) <= 3
    ]
    if near:
        return f"node {min(near, key=lambda one: abs(one.line - event.line)).number('node')}"
    above = [
        one for one in view.facts.of("launch_rank") if one.source == event.source and one.order < event.order
    ]
    if above:
        return f"node {above[-1].number('node')}"
    if event.who.node_rank is not None:
        return f"node {event.who.node_rank}"
    source = view.facts.sources.get(event.source)
    if source is not None and source.node_rank is not None:
        return f"node {source.node_rank}"
    return event.who.host or event.source


def _start_failed(view: View) -> bool:
    """Whether the run hung or broke before its first step."""
    signs = view.facts.of(
        *WAITED, "clients_joined", "rendezvous_timeout", "store_unreachable", "nccl_peer_gone", "peer_closed"
    )
    return bool(signs) and not view.facts.step


def _several_nodes(view: View, lines: list[LogEvent]) -> bool:
    """Whether more than one host takes part: then a loopback address is wrong."""
    if (view.facts.nodes or 1) > 1 or len(view.facts.hosts) > 1 or len(view.facts.sources) > 1:
        return True
    return any("127.0.1.1" in event.text or event.who.host for event in lines)


def _is_final(view: View, names: list[LogEvent]) -> bool:
    """IPv6 alone is harmless; and a name that was found in the end was found."""
    other = [event for event in names if "IPv6" not in event.text]
    failed = view.facts.of(
        "store_unreachable"
    )  # it never got so far as to be refused: the name itself led nowhere
    return bool(other) or (
        bool(failed)
        and not view.facts.of("connect_failed")
        and any(_host_in(event.text) in failed[-1].text for event in names)
    )


def _host_in(text: str) -> str:
    """The name in `(name, port) cannot be retrieved`."""
    _, _, hosts = text.partition("addresses of (")
    return hosts.split(",")[0] or "?"


def tally(events: list[LogEvent]) -> dict[str, int]:
    """How many lines of each log."""
    numbers: dict[str, int] = defaultdict(int)
    for event in events:
        numbers[event.source] += 1
    return numbers


_LOCAL = re.compile(r"^(?:docker|virbr|veth|br-|lo\b|lo$|cni|flannel|cali|tunl|kube|vmnet|tailscale|utun)")


def find_interfaces(view: View) -> list[Hypothesis]:
    """NCCL took an interface that leads nowhere, on one host or on several."""
    none = [
        event
        for event in view.facts.of("nccl_no_interface")
        if "Using" not in event.text and not view.survived(event)
    ]
    if none:
        hosts = hosts_of(none)
        return [
            Hypothesis(
                "nccl_socket_iface",
                "NCCL found no network interface to use",
                first_of_each(none),
                hosts=hosts if len(hosts) == 1 else (),
                confidence=0.9,
            )
        ]
    far = [event for event in view.facts.of("gloo_unreachable") if not view.survived(event)]
    if far:
        return [
            Hypothesis(
                "nccl_socket_iface",
                "a rank announced the address of an interface that another host cannot reach",
                first_of_each(far),
                confidence=0.85,
            )
        ]
    used = view.facts.of("bootstrap")
    if not used or not _failed(view):
        return []
    by_host: dict[str, LogEvent] = {}
    for event in used:
        by_host.setdefault(event.who.host or event.source, event)
    wrong = {host: event for host, event in by_host.items() if _LOCAL.match(event.fields["interface"])}
    if not wrong or (len(by_host) == 1 and not _several(view)):
        return []
    bad = view.facts.of("nccl_connect")[:2]
    names = ", ".join(f"{host}: {event.fields['interface']}" for host, event in by_host.items())
    one = tuple(event.who.host for event in wrong.values() if event.who.host)
    return [
        Hypothesis(
            "nccl_socket_iface",
            f"NCCL uses an interface that does not lead to the other hosts ({names})",
            (*wrong.values(), *bad),
            hosts=one if len(one) == 1 else (),
            confidence=0.85,
        )
    ]


def find_versions(view: View) -> list[Hypothesis]:
    """Hosts with different NCCL."""
    by_host: dict[str, LogEvent] = {}
    for event in view.facts.of("nccl_version"):
        by_host.setdefault(event.who.host or event.source, event)
    versions = {event.fields["version"] for event in by_host.values()}
    if len(versions) < 2 or not (_failed(view) or view.facts.of("nccl_truncated")):
        return []
    listed = ", ".join(f"{host}: {event.fields['version']}" for host, event in by_host.items())
    return [
        Hypothesis(
            "version_mismatch",
            f"the hosts have different versions of NCCL ({listed})",
            (*by_host.values(), *view.facts.of("nccl_truncated")[:1]),
            confidence=0.9,
            facts={"package": "nccl"},
        )
    ]


def _failed(view: View) -> bool:
    return bool(
        view.facts.of(
            *WAITED,
            "nccl_connect",
            "nccl_system_error",
            "nccl_peer_gone",
            "peer_closed",
            "nccl_error",
            "nccl_warn",
        )
    )


def _several(view: View) -> bool:
    return (view.facts.nodes or 1) > 1 or len(view.facts.hosts) > 1 or len(view.facts.sources) > 1


_MISSING = re.compile(
    r"No such file or directory|FileNotFoundError|not a valid checkpoint|does not exist|not found"
)
_CHECKPOINT = re.compile(
    r"checkpoint|ckpt|global_step|iter_\d|\.metadata|\.distcp|optimizer(?:_\d|\.|\b)|trainer_state|\bstep[-_]?\d",
    re.IGNORECASE,
)


def find_unshared(view: View) -> list[Hypothesis]:
    """All ranks of one host miss a part of a checkpoint that those of the others found."""
    missed = [trace for trace in view.tracebacks if _misses(trace) and not view.survived(trace.event)]
    if not missed:
        return []
    places = {_place(trace) for trace in missed}
    others = {
        event.who.host or event.source for event in view.facts.events if event.rank is not None
    } - places
    ranks = {trace.event.rank for trace in missed if trace.event.rank is not None}
    if len(places) != 1 or not others or len(ranks) < 2:
        return []
    host = missed[0].event.who.host
    where = host or missed[0].event.source
    return [
        Hypothesis(
            "checkpoint_not_shared",
            f"the ranks of {where} lack a part of the checkpoint that the other hosts found",
            tuple(trace.event for trace in missed[:4]),
            hosts=(host,) if host else (),
            confidence=0.85,
        )
    ]


def _misses(trace: Traceback) -> bool:
    text = f"{trace.type}: {trace.message[:600]}"
    return bool(_MISSING.search(text) and _CHECKPOINT.search(trace.message[:600]))


def _place(trace: Traceback) -> str:
    return trace.event.who.host or trace.event.source


def find_ray_resources(view: View) -> list[Hypothesis]:
    """More was asked for than there is, and the workers never started."""
    lines = view.facts.pointing_to("ray_resources_unsatisfiable")
    if not lines:
        return []
    last = lines[-1]
    started = [
        event
        for event in view.facts.of("ray_member", "ray_rank", "ray_started", "bar", "step", "log_row")
        if event.source == last.source and event.order > last.order
    ]
    if started:
        return []
    requests = view.facts.of("ray_asked")
    return [
        Hypothesis(
            "ray_resources_unsatisfiable",
            "the cluster does not have the requested resources",
            (*first_of_each(lines), *requests[:1]),
            confidence=0.9,
        )
    ]


def find_unscheduled(view: View) -> list[Hypothesis]:
    """A pod was not placed, and nothing says that it was later."""
    started = {event.source: event.order for event in view.facts.of("pod_started")}
    lines = [
        event
        for event in view.facts.pointing_to("pod_not_scheduled")
        if event.order > started.get(event.source, -1) and not view.survived(event)
    ]
    if not lines:
        return []
    why = "a pod of the job was not started"
    return [Hypothesis("pod_not_scheduled", why, first_of_each(lines), confidence=0.9)]


def find_hccl(view: View) -> list[Hypothesis]:
    """A collective of Ascend NPUs failed, and no rank reports anything else."""
    lines = [event for event in view.facts.pointing_to("hccl_error") if not view.survived(event)]
    others = [
        trace for trace in view.tracebacks if "HCCL" not in trace.event.text and not view.is_victim(trace)
    ]
    if not lines or others:
        return []
    return [
        Hypothesis(
            "hccl_error",
            "HCCL reports an error, and no rank a different one",
            first_of_each(lines),
            confidence=0.85,
        )
    ]


_ON_A_DRIVE = re.compile(r"[A-Za-z]:\\")
"""The beginning of a path of Windows."""


def without_nccl(finding: Hypothesis, facts: RunFacts, *, on_windows: bool) -> Hypothesis:
    """A finding that torch has no NCCL, which on Windows is no fault of the installation."""
    lacks_nccl = any("NCCL built in" in event.text for event in finding.evidence)
    frames = (trace.frame or trace.user_file for trace in facts.tracebacks)
    if not lacks_nccl or not (on_windows or any(map(_ON_A_DRIVE.match, frames))):
        return finding
    why = "torch has no NCCL, as always on Windows"
    return replace(finding, cause="nccl_missing_on_windows", why=why, ranks=(), hosts=())
