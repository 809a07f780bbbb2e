"""Whether a run that died goes on by itself. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.causes import Verdict, find_cause


@dataclass(frozen=True, slots=True)
class Death:
    """How an earlier attempt ended, and how far it had come."""

    cause: str
    step: int


OF_ITS_NODE = frozenset({"gpu_fell_off", "ecc_error", "storage_unfit", "disk_full", "host_oom_killed"})
"""Causes that lie in one machine: without it the run can go on."""


def may_restart(
    verdict: Verdict, *, step: int, earlier: Sequence[Death], allowed: int, without_culprit: bool = False
) -> tuple[bool, str]:
    """Whether to start again, and why (not), in a few words.

    The same finding twice without progress is deterministic: it would come a third time, too. Progress is a step that
    no earlier attempt had reached; the steps from the last checkpoint up to the place of the fault are none.

    Args:
        verdict: what ended this attempt.
        step: the last step that it finished.
        earlier: the deaths before this one.
        allowed: the config's `restarts`.
        without_culprit: whether the node that it was about takes part no more. Then it helps whatever the cause is, and
            what it did before says nothing about the others.
    """
    cause = find_cause(verdict.cause)
    if not without_culprit and (cause is None or not cause.retry_helps):
        return False, "starting again would not help"
    again = not without_culprit and bool(earlier) and earlier[-1].cause == verdict.cause
    if again and step <= max(death.step for death in earlier):
        return False, f"the same finding twice without progress beyond step {step}: it is deterministic"
    if len(earlier) >= allowed:
        return False, f"restarts: {allowed} are used up" if allowed else "restarts: 0"
    return True, f"restart {len(earlier) + 1} of {allowed}"
