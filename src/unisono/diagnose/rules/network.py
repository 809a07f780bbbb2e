"""What differs between hosts: interfaces, NCCL's versions."""

import re
from typing import TYPE_CHECKING

from unisono.diagnose.finding import Finding
from unisono.diagnose.rules.hang import WAITED
from unisono.diagnose.rules.view import View, first_of_each, hosts_of

if TYPE_CHECKING:
    from unisono.diagnose.event import Event

_LOCAL = re.compile(r"^(?:docker|virbr|veth|br-|lo\b|lo$|cni|flannel|cali|tunl|kube|vmnet|tailscale|utun)")


def find_interfaces(view: View) -> list[Finding]:
    """NCCL took an interface that leads nowhere, on one host or on several."""
    none = [event for event in view.facts.of("nccl_no_interface") if "Using" not in event.text and not view.survived(event)]  # fmt: skip
    if none:
        hosts = hosts_of(none)
        return [Finding("nccl_socket_iface", "NCCL found no network interface to use", first_of_each(none), hosts=hosts if len(hosts) == 1 else (), confidence=0.9)]  # fmt: skip
    used = view.facts.of("bootstrap")
    if not used or not _failed(view):
        return []
    by_host: dict[str, Event] = {}
    for event in used:
        by_host.setdefault(event.who.host or event.source, event)
    wrong = {host: event for host, event in by_host.items() if _LOCAL.match(event.fields["interface"])}
    if not wrong or (len(by_host) == 1 and not _several(view)):
        return []
    bad = view.facts.of("nccl_connect")[:2]
    names = ", ".join(f"{host}: {event.fields['interface']}" for host, event in by_host.items())
    one = tuple(event.who.host for event in wrong.values() if event.who.host)
    return [Finding("nccl_socket_iface", f"NCCL uses an interface that does not lead to the other hosts ({names})", (*wrong.values(), *bad), hosts=one if len(one) == 1 else (), confidence=0.85)]  # fmt: skip


def find_versions(view: View) -> list[Finding]:
    """Hosts with different NCCL."""
    by_host: dict[str, Event] = {}
    for event in view.facts.of("nccl_version"):
        by_host.setdefault(event.who.host or event.source, event)
    versions = {event.fields["version"] for event in by_host.values()}
    if len(versions) < 2 or not (_failed(view) or view.facts.of("nccl_truncated")):
        return []
    told = ", ".join(f"{host}: {event.fields['version']}" for host, event in by_host.items())
    return [Finding("version_mismatch", f"the hosts have different versions of NCCL ({told})", (*by_host.values(), *view.facts.of("nccl_truncated")[:1]), confidence=0.9, facts={"package": "nccl"})]  # fmt: skip


def _failed(view: View) -> bool:
    return bool(view.facts.of(*WAITED, "nccl_connect", "nccl_system_error", "nccl_peer_gone", "peer_closed", "nccl_error", "nccl_warn"))  # fmt: skip


def _several(view: View) -> bool:
    return (view.facts.nodes or 1) > 1 or len(view.facts.hosts) > 1 or len(view.facts.sources) > 1
