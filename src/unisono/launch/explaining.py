"""A verdict on a lost node, with what whoever started the fronts knows of it."""

from dataclasses import replace

from unisono.causes import find_cause
from unisono.launch.attempt import Attempt
from unisono.launch.outcome import Ending
from unisono.launch.witness import Witness
from unisono.plan import RunPlan


def with_witness(ending: Ending, attempt: Attempt, plan: RunPlan, witness: Witness | None) -> Ending:
    """The ending, whose verdict on a lost node says why it is gone, where a witness knows; else as it is.

    The head sees a connection that closes, and a memory monitor that ends a node's front leaves no other trace.
    """
    loss = attempt.decision.loss if attempt.decision is not None else None
    if witness is None or loss is None or loss.lost_head or ending.verdict is None:
        return ending
    told = witness.of_lost(loss.node_rank)
    if told is None:
        return ending
    known, waited_s = told
    own = ending.verdict
    ours = {"evidence": (*known.evidence, *own.evidence), "fix": tuple(dict.fromkeys((*known.fix, *own.fix)))}
    if known.cause == own.cause:
        return replace(ending, verdict=own.model_copy(update=ours))
    cause = find_cause(known.cause)
    verdict = known.model_copy(
        update={
            "ranks": tuple(place.rank for place in plan.on_node(loss.node_rank)), "hosts": own.hosts, "fix": known.fix,
            "evidence": ours["evidence"], "step": attempt.step or None,
            "named_after_s": own.named_after_s + waited_s if own.named_after_s is not None else None,
        }
    )  # fmt: skip
    return replace(ending, verdict=verdict, exit_code=cause.exit_code if cause else ending.exit_code)
