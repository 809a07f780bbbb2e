"""A front started by srun: its node rank, the head's address, and the token shared by the fronts of its step."""

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
"""Below the usual ephemeral ports; two jobs on one node use different ports."""
_EVIDENCE_S = 2.0  # a verdict does not wait longer for Slurm's node states
MAKE_ONE = 'UNISONO_TOKEN=$(python3 -c "import secrets; print(secrets.token_urlsafe(32))")'
"""A prefix for `srun`, which passes its environment to all tasks; the token is in no command line."""


def placed_by_slurm(step: SlurmStep | None, network: NetworkProbe) -> Placed | None:
    """The place of this front in its step; None if it is alone, or outside a step."""
    if step is None or step.nodes == 1 or step.tasks != step.nodes:
        return None
    hosts = hosts_of(step.nodelist)
    if len(hosts) != step.nodes or not HOST_PATTERN.fullmatch(hosts[0]):
        return None
    port = _PORTS[(int(step.job) * 7 + int(step.step)) % len(_PORTS)]
    host, origin = hosts[0], "the first of SLURM_STEP_NODELIST"
    found = network.resolve(host)
    if not found or all(is_loopback(address) for address in found):
        address = _address_of(host)  # Slurm's node names may not resolve in the network
        if address and address != host:
            host, origin = address, f"NodeAddr of {hosts[0]}, {origin}"
    origins = {
        "nodes": f"SLURM_STEP_NUM_NODES of step {step.name}",
        "node_rank": "SLURM_NODEID",
        "head": f"{origin}; the port is the job's",
    }
    return Placed(step.nodes, step.node, host, port, origins)


def token_of_step(environment: Environment) -> str | None:
    """The token of a user's fronts in one step, if they share a home folder; None outside a step.

    It is derived from the user's key and the step's name, so nothing is written or transmitted.
    """
    step = environment.slurm_step
    if step is None or step.nodes == 1:
        return None
    try:
        key = user_key(environment.settings_dir)
    except UnfitError:  # the folder is not writable: a token is required, as on nodes without a scheduler
        return None
    text = f"unisono, token of Slurm step {step.name}, restart {step.restart}"
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def token_hint(environment: Environment) -> str:
    """A hint for nodes without a common key; empty outside a step."""
    if environment.slurm_step is None:
        return ""
    return f"without UNISONO_TOKEN the step's nodes derive the token from {environment.settings_dir}, which differs between nodes: {MAKE_ONE} srun …"


def step_evidence(step: SlurmStep) -> tuple[Evidence, ...]:
    """Evidence for a verdict on a job in a Slurm step: the step, its nodes, and the nodes that Slurm reports as unusable."""
    hosts = hosts_of(step.nodelist)
    requeued = f", requeued {step.restart} times" if step.restart else ""
    evidence = [
        Evidence(
            where=f"Slurm job {step.job}, step {step.name}",
            text=f"nodes {','.join(hosts) or step.nodelist}{requeued}",
        )
    ]
    for node in node_states(step.nodelist, limit_s=_EVIDENCE_S):
        if not node.usable:
            number = f"node {hosts.index(node.name)} " if node.name in hosts else ""
            evidence.append(
                Evidence(
                    where=f"Slurm node {node.name}",
                    text=f"{number}({node.name}) is {node.told.partition(' is ')[2]}",
                )
            )
    return tuple(evidence)


def _address_of(node: str) -> str:
    """A node's NodeAddr from the controller; empty if unknown."""
    address = next((state.address for state in node_states(node)), "")
    return address if HOST_PATTERN.fullmatch(address) else ""
