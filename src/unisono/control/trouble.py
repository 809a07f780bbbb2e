"""The words for what keeps a front from the channel: errors with a verdict, exit code 3."""

from unisono.causes import Evidence, Verdict, find_cause
from unisono.control.frames import PROTOCOL
from unisono.errors import Disagreed
from unisono.text import one_line


def node(node_rank: int, host: str) -> str:
    """How a node is written: `node 1 (b)`."""
    return f"node {node_rank} ({one_line(host, limit=255)})"


def disagreed(
    cause: str, summary: str, *, where: str = "", why: str = "", fix: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
) -> Disagreed:  # fmt: skip
    """An error and its verdict in one.

    Args:
        cause: its id in the catalogue.
        summary: what is wrong, one line, with the values seen.
        where: at which address.
        why: what was observed.
        fix: what to do; the catalogue's remedy where it is empty.
        hosts: culprits.
    """
    entry = find_cause(cause)
    assert entry is not None, cause
    fix = fix or entry.remedy
    evidence = (Evidence(where=one_line(where), text=one_line(why)),) if why else ()
    verdict = Verdict(
        cause=cause,
        when="before",
        summary=summary,
        hosts=hosts,
        phase="agree.call",
        evidence=evidence,
        fix=fix,
    )
    return Disagreed.of(one_line(summary), where=where, why=why, fix=fix[0], verdict=verdict)


def unreachable(me: str, address: str, why: str, waited_s: float) -> Disagreed:
    """The head does not answer."""
    host, _, port = address.rpartition(":")
    return disagreed(
        "head_unreachable", f"{me} cannot reach the head at {address}: {why}", where=address,
        why=f"tried for {waited_s:.0f} s",
        fix=(
            f"see whether node 0 runs and listens there; from this node: nc -vz {host} {port}",
            "refused: start the head first; no answer: open the firewall, or give an address that both nodes share",
        ),
    )  # fmt: skip


def nameless(me: str, host: str, why: str, waited_s: float) -> Disagreed:
    """The head's name has no address here."""
    return disagreed(
        "dns_failure", f"{me} does not know the head's name `{host}`: {why}", where=host,
        why=f"asked the resolver for {waited_s:.0f} s",
        fix=(f"give an IP address: --head IP:PORT; `getent hosts {host}` must answer on this node",
             "or add the name to DNS or /etc/hosts of every node"),
    )  # fmt: skip


def stranger(me: str, address: str, why: str) -> Disagreed:
    """Something answers at the head's address, and it is not the head."""
    port = address.rpartition(":")[2]
    return disagreed(
        "port_in_use", f"{me} called the head at {address}, and what answers there {why}", where=address, why=why,
        fix=(f"on the head's machine: `ss -ltnp 'sport = :{port}'` shows who has the port",
             "start all nodes with another port: --head HOST:PORT"),
    )  # fmt: skip


def other_protocol(me: str, address: str, version: int) -> Disagreed:
    """The head is of another release."""
    return disagreed(
        "version_mismatch",
        f"the head at {address} speaks version {version} of the control protocol, {me} speaks {PROTOCOL}",
        where=address, fix=("install the same version of unisono on all nodes",),
    )  # fmt: skip


def wrong_token(me: str, host: str, address: str) -> Disagreed:
    """The proofs do not fit."""
    return disagreed(
        "token_rejected", f"{me} and the head at {address} do not have the same token", where=address, hosts=(host,),
        fix=("give the same token to all nodes: --token-file FILE, or UNISONO_TOKEN",
             "if it is the same: an earlier start of the job still listens there; end it"),
    )  # fmt: skip


_CAUSE_OF = {
    "duplicate": "node_duplicate",
    "stale": "stale_process",
    "misfit": "world_mismatch",
    "left_out": "node_missing",
}
_FIX_OF = {
    "duplicate": ("give each node its own rank: --node-rank 0, 1, 2 …", "if the holder is left over, end it by its pid"),
    "stale": ("end this process and start the command again",),
    "left_out": ("when the job has ended, start it again on all nodes: it goes on from its newest checkpoint",),
    "misfit": ("give the same --nodes to all nodes, and each its own --node-rank from 0",),
}  # fmt: skip


def refused(me: str, host: str, address: str, *, kind: str, text: str) -> Disagreed:
    """The head knows the token and says no. `text` goes on from the node's name."""
    summary = f"{me} {one_line(text, limit=400)}"
    cause = _CAUSE_OF.get(kind, "head_unreachable")
    return disagreed(
        cause,
        summary,
        where=address,
        why=f"the head refused: {kind}",
        fix=_FIX_OF.get(kind, ()),
        hosts=(host,),
    )
