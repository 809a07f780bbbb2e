"""A front that srun has started: which node it is, where the head is, and the secret that the step's fronts share."""

import hashlib
import hmac

from unisono.causes import Evidence
from unisono.checkpoint.manifest import user_key
from unisono.errors import UnfitError
from unisono.facts import Environment
from unisono.facts.network import NetworkProbe, is_loopback
from unisono.facts.slurm import SlurmStep, hosts_of, node_states
from unisono.plan.topology import HOST_PATTERN, Placed

_PORTS = range(20_000, 32_000)
"""Below those that systems give to whoever connects; two jobs on a node have two ports."""
_EVIDENCE_S = 2.0  # a verdict does not wait longer for what Slurm says of the nodes
MAKE_ONE = 'UNISONO_TOKEN=$(python3 -c "import secrets; print(secrets.token_urlsafe(32))")'
"""In front of `srun`, which hands its environment to all tasks; no command line shows it."""


def placed_by_slurm(step: SlurmStep | None, network: NetworkProbe) -> Placed | None:
    """Where this front is among those of its step; None where it is alone, or in no step."""
    if step is None or step.nodes == 1 or step.tasks != step.nodes:
        return None
    hosts = hosts_of(step.nodelist)
    if len(hosts) != step.nodes or not HOST_PATTERN.fullmatch(hosts[0]):
        return None
    port = _PORTS[(int(step.job) * 7 + int(step.step)) % len(_PORTS)]
    host, origin = hosts[0], "the first of SLURM_STEP_NODELIST"
    found = network.resolve(host)
    if not found or all(is_loopback(address) for address in found):
        address = _address_of(host)  # a node's name is Slurm's own, and need not be one of the network's
        if address and address != host:
            host, origin = address, f"NodeAddr of {hosts[0]}, {origin}"
    origins = {
        "nodes": f"SLURM_STEP_NUM_NODES of step {step.name}",
        "node_rank": "SLURM_NODEID",
        "head": f"{origin}; the port is the job's",
    }
    return Placed(step.nodes, step.node, host, port, origins)


def token_of_step(environment: Environment) -> str | None:
    """A secret that fronts of one user in one step have in common where they share a home folder; None outside of a step.

    It is made of the user's own key and the step's name, so nothing is written, passed or left behind.
    """
    step = environment.slurm_step
    if step is None or step.nodes == 1:
        return None
    try:
        key = user_key(environment.settings_dir)
    except UnfitError:  # the folder cannot be written: a token is asked for, as on nodes without a scheduler
        return None
    text = f"unisono, token of Slurm step {step.name}, restart {step.restart}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def token_hint(environment: Environment) -> str:
    """What to do where nodes have no key in common; empty outside of a step."""
    if environment.slurm_step is None:
        return ""
    return f"without UNISONO_TOKEN the step's nodes take it from {environment.settings_dir}, which is not the same on all: {MAKE_ONE} srun …"


def step_evidence(step: SlurmStep) -> tuple[Evidence, ...]:
    """What a verdict on a job in a Slurm step cites: the step, its nodes, and those that Slurm has taken out of service."""
    hosts = hosts_of(step.nodelist)
    again = f", requeued {step.restart} times" if step.restart else ""
    cited = [
        Evidence(
            where=f"Slurm job {step.job}, step {step.name}",
            text=f"nodes {','.join(hosts) or step.nodelist}{again}",
        )
    ]
    for node in node_states(step.nodelist, limit_s=_EVIDENCE_S):
        if not node.usable:
            number = f"node {hosts.index(node.name)} " if node.name in hosts else ""
            cited.append(
                Evidence(
                    where=f"Slurm node {node.name}",
                    text=f"{number}({node.name}) is {node.told.partition(' is ')[2]}",
                )
            )
    return tuple(cited)


def _address_of(node: str) -> str:
    """NodeAddr as the controller has it; empty if it does not say."""
    address = next((state.address for state in node_states(node)), "")
    return address if HOST_PATTERN.fullmatch(address) else ""
