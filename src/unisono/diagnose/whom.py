"""The host of a finding: that of the rank it names, or the only one of several whose lines show it."""

from dataclasses import replace

from unisono.diagnose.event import Event
from unisono.diagnose.facts import RunFacts
from unisono.diagnose.finding import Finding
from unisono.diagnose.identity import split_prefix

_NOBODYS = frozenset({
    "healthy", "undetermined", "rdzv_timeout", "dns_failure", "hostname_loopback", "nproc_mismatch", "unequal_steps", "collective_mismatch", "device_unbound_barrier", "rank_stalled",
    "preempted_sigterm", "unused_parameters_ddp", "nan_loss", "port_in_use", "ib_unreachable", "p2p_blocked", "duplicate_gpu", "process_group_destroyed_twice", "teardown_crash",
    "single_device_nccl", "ray_resources_unsatisfiable",
})  # fmt: skip
"""What no host is to blame for because its log tells of it: whoever writes is the one who waited."""
_WORDS_CHARS = 60
_NAMELESS = frozenset({"localhost", "127.0.0.1", None})
"""What every host is called."""
_MACHINES = frozenset({"gpu_fell_off", "ecc_error", "host_oom_killed", "driver_too_old", "shm_too_small", "ulimit"})  # fmt: skip
"""What is a machine's: its name helps even where no other one is known."""


def with_host(finding: Finding, facts: RunFacts) -> Finding:
    """The finding with its host, where it names none and there is one to name."""
    if finding.hosts or finding.cause in ("healthy", "undetermined"):
        return finding
    known = facts.ranks.get(finding.ranks[0]) if len(finding.ranks) == 1 else None
    if known and known.host and known.host not in _NAMELESS:
        return replace(finding, hosts=(known.host,))
    if (finding.ranks and finding.cause not in _MACHINES) or finding.cause in _NOBODYS:
        return finding
    cited = [event for event in finding.evidence if event.kind in ("error", "death", "fact")]
    said = {(event.signature, _words(event)) for event in cited}
    kinds = {event.signature for event in cited}
    alike = [
        event
        for event in facts.events
        if event.signature in kinds and (event.signature, _words(event)) in said
    ]
    shown = {
        event.who.host for event in (*cited, *alike)
    }  # evidence is cut short: others may have said the same
    told = any(event.who.pid is not None for event in finding.evidence)  # Ray says where the process was
    several = len(facts.hosts) > 1 or (facts.nodes or 1) > 1 or finding.cause in _MACHINES or told
    host = next(iter(shown)) if len(shown) == 1 and not shown & _NAMELESS else None
    return replace(finding, hosts=(host,)) if host and several else finding


def _words(event: Event) -> str:
    return split_prefix(event.text)[1][:_WORDS_CHARS]
