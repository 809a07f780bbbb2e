"""Versions that are known to be bad: what goes wrong, the least good version, the command, and where that is written."""

from unisono.agree.agreement import Agreement
from unisono.agree.counts import Members


def judge_known_bad(members: Members) -> Agreement:
    """Nothing is known yet."""
    return Agreement.noted("known_bad", "pass", f"no known faults on {len(members)} nodes")
