"""What this machine's packet filter lets in, as `nft` and `iptables` list it to root. Rules elsewhere on the way are not seen."""

import json
import subprocess
from dataclasses import dataclass
from typing import Any

_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Firewall:
    """The rules for packets that come in.

    Attributes:
        drops_rest: what no rule lets in is dropped.
        refusals: rules that drop or reject, as they are listed.
    """

    drops_rest: bool = False
    refusals: tuple[str, ...] = ()


def read_firewall() -> Firewall | None:
    """The rules; None where they cannot be listed: that needs root, and iptables or nft."""
    found = [one for one in (_iptables(), _nft()) if one is not None]
    if not found:
        return None
    refusals = dict.fromkeys(rule for one in found for rule in one.refusals)
    return Firewall(any(one.drops_rest for one in found), tuple(refusals))


def _iptables() -> Firewall | None:
    listed = _said("iptables", "-w", "1", "-S", "INPUT")
    if listed is None:
        return None
    lines = listed.splitlines()
    refusals = tuple(
        line for line in lines if line.startswith("-A") and ("-j DROP" in line or "-j REJECT" in line)
    )
    return Firewall("-P INPUT DROP" in lines or "-P INPUT REJECT" in lines, refusals)


def _nft() -> Firewall | None:
    """Of chains that see what comes in. iptables-nft's tables are left to iptables, whose words people know."""
    listed = _said("nft", "-j", "list", "ruleset")
    if listed is None:
        return None
    try:
        parts = json.loads(listed or "{}").get("nftables", [])
    except ValueError:
        return None
    chains = [part["chain"] for part in parts if part.get("chain", {}).get("hook") == "input"]
    own = [chain for chain in chains if chain.get("table") != "filter"]
    names = {(chain["family"], chain["table"], chain["name"]) for chain in own}
    refusals = [
        _rule_text(part["rule"]) for part in parts if "rule" in part and _refuses(part["rule"], names)
    ]
    return Firewall(any(chain.get("policy") == "drop" for chain in own), tuple(refusals))


def _refuses(rule: dict[str, Any], chains: set[tuple[str, str, str]]) -> bool:
    here = (rule.get("family"), rule.get("table"), rule.get("chain")) in chains
    return here and any("drop" in part or "reject" in part for part in rule.get("expr", []))


def _rule_text(rule: dict[str, Any]) -> str:
    return f"nft {rule['family']} {rule['table']} {rule['chain']} handle {rule.get('handle', '?')}: {json.dumps(rule.get('expr'))[:120]}"


def _said(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
