"""Causes whose own words stand in the log: whoever says them knows what failed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from unisono.causes.catalogue import find_cause
from unisono.diagnose.event import Event
from unisono.diagnose.finding import Finding
from unisono.diagnose.rules.view import View, hosts_of, ranks_of

ALIKE = frozenset({
    "gated_model", "model_path_missing", "hub_unreachable", "flash_attn_missing", "missing_dependency", "version_mismatch", "no_cuda_build", "driver_too_old", "cuda_arch_unsupported",
    "bnb_no_gpu", "unused_parameters_ddp", "checkpoint_mismatch", "port_in_use", "rdzv_timeout", "dns_failure", "hostname_loopback", "preempted_sigterm",
    "ray_resources_unsatisfiable", "duplicate_gpu", "ib_unreachable", "p2p_blocked", "nccl_socket_iface", "nan_loss", "collective_mismatch", "checkpoint_not_shared",
})  # fmt: skip
"""What all ranks of a host share: no rank is to blame for it."""
ALL_TOGETHER = frozenset({"unused_parameters_ddp", "nan_loss", "collective_mismatch", "duplicate_gpu", "rdzv_timeout", "preempted_sigterm", "ib_unreachable", "p2p_blocked", "port_in_use"})  # fmt: skip
"""What is nobody's even where a single rank says it."""
HOSTS = frozenset({
    "nccl_socket_iface", "driver_too_old", "no_cuda_build", "cuda_arch_unsupported", "shm_too_small", "ulimit", "disk_full", "missing_dependency", "flash_attn_missing", "bnb_no_gpu",
    "model_path_missing", "gpu_fell_off", "ecc_error", "host_oom_killed", "checkpoint_not_shared", "corrupt_checkpoint", "hub_unreachable", "gated_model", "port_in_use", "version_mismatch", "cuda_oom",
})  # fmt: skip
"""What may be wrong with one host and not with the others."""
STRUCTURAL = frozenset({
    "rank_stalled", "rank_died_first", "user_code_error", "single_device_nccl", "device_unbound_barrier", "unequal_steps", "ray_worker_died", "host_oom_killed", "nan_loss", "preempted_sigterm",
    "nccl_socket_iface", "hostname_loopback", "collective_mismatch", "rdzv_timeout", "dns_failure", "ray_resources_unsatisfiable", "nproc_mismatch", "teardown_crash", "process_group_destroyed_twice",
})  # fmt: skip
"""Pointed to by words, but judged by rules of their own."""
SPEAKS_QUIETLY = frozenset({"driver_too_old", "cuda_arch_unsupported", "nan_loss"})
"""Causes that are told in a warning and are meant."""


@dataclass(frozen=True, slots=True)
class Owned:
    """A cause with the lines that say so."""

    cause: str
    events: tuple[Event, ...]
    quiet: bool


def find_owned(view: View) -> list[Finding]:
    """A finding for each cause that somebody names, that was not survived, and that no rule of its own judges."""
    causes = dict.fromkeys(event.cause for event in view.facts.events if event.cause)
    found = []
    for cause in causes:
        if cause in STRUCTURAL:
            continue
        said = said_of(view, cause)
        if said is not None:
            found.append(finding_of(view, said))
    return found


def said_of(view: View, cause: str) -> Owned | None:
    """The lines that name the cause and count; None: there are none, or all were survived."""
    events = [
        event
        for event in view.facts.events
        if event.cause == cause and event.kind in ("error", "death") and not view.is_victims(event) and not view.survived(event) and not view.is_reported(event)
    ]  # fmt: skip
    loud = [event for event in events if not view.is_quiet(event)]
    if loud:
        return Owned(cause, tuple(loud), quiet=False)
    return Owned(cause, tuple(events), quiet=cause not in SPEAKS_QUIETLY) if events else None


def finding_of(view: View, said: Owned, *, why: str = "") -> Finding:
    """The finding for lines that name their cause."""
    ranks = () if said.cause in ALIKE and not _alone(view, said) else culprits(view, said.events)
    hosts = _hosts(view, said, ranks)
    title = find_cause(said.cause)
    return Finding(
        cause=said.cause,
        why=why or _sentence(title.title if title else said.cause, ranks, hosts),
        evidence=said.events[:8],
        ranks=ranks,
        hosts=hosts,
        confidence=0.5 if said.quiet else 0.95,
        step=view.facts.step,
    )


def culprits(view: View, events: Iterable[Event]) -> tuple[int, ...]:
    """Whose lines these are; nobody where all ranks say the same, or where nobody can be told."""
    named = ranks_of(events)
    world = view.facts.world_size
    if not named:
        rank = view.table_rank()
        if rank is None:
            rank = _only_device_error(view)
        return (rank,) if rank is not None and view.distributed else ()
    if len(named) > 1 and world is not None and len(named) >= world:
        return ()
    if len(named) > 1:
        first = view.table_rank()
        return (first,) if first in named else named
    return named if world != 1 else ()


def _alone(view: View, said: Owned) -> bool:
    """Whether a single rank says so and others only suffered from it: then it is that rank's trouble, whatever it mostly is."""
    named = set(ranks_of(said.events))
    if len(named) != 1 or said.cause in ALL_TOGETHER:
        return False
    return any(event.rank not in (None, *named) for event in view.consequences)


def _only_device_error(view: View) -> int | None:
    """The one rank whose exception is an error of its device: assertions and the kernel's lines have no rank."""
    ranks = {
        event.rank
        for event in view.facts.of("device_assert", "launch_failure", "nccl_system_error")
        if event.rank is not None and "unhandled system error" not in event.text
    }
    return next(iter(ranks)) if len(ranks) == 1 else None


def _hosts(view: View, said: Owned, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """The host, where it can be one host's trouble and there are several."""
    if said.cause not in HOSTS or (len(view.facts.hosts) < 2 and (view.facts.nodes or 1) < 2):
        return ()
    hosts = hosts_of(said.events)
    return hosts if len(hosts) == 1 else ()


def _sentence(title: str, ranks: tuple[int, ...], hosts: tuple[str, ...]) -> str:
    who = ", ".join([*(f"rank {rank}" for rank in ranks), *(f"host {host}" for host in hosts)])
    return f"{who}: {title}" if who else title


Rule = Callable[[View], list[Finding]]
