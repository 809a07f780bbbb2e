"""The verdict on a failed reward.

Apart from `calls`, which each process of rewards loads: the types of verdicts take longer to load
than all of it.
"""

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.causes.verdict import OwnRunOnly
from unisono.trainer.objectives.rewards.calls import RewardFailure

_MOST_QUOTED = 1_000  # characters of a failure


def verdict_on(failure: RewardFailure, *ranks: int, what: str = "reward") -> Verdict:
    """The verdict that ends a run, or an evaluation, whose reward failed.

    Args:
        failure: of a reward whose `on_error` is `error`.
        ranks: whose reward it is; an evaluation has none.
        what: has failed, reward or environment.
    """
    cause = "reward_timeout" if failure.kind == "timeout" else "reward_error"
    entry = find_cause(cause)
    row = f" on {failure.row}" if failure.row else ""  # none: a process could not be replaced
    remedy = entry.remedy if entry is not None else ()
    return Verdict(
        cause=cause,
        when="during",
        summary=f"the {what} {failure.function} failed{row}: {failure.text}"[:_MOST_QUOTED],
        ranks=ranks,
        phase="reward",
        evidence=(Evidence(where=failure.where or failure.function, text=failure.text[:_MOST_QUOTED]),),
        fix=remedy if ranks else tuple(line for line in remedy if not isinstance(line, OwnRunOnly)),
    )
