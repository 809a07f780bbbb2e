"""A plan that came from the head, checked against what this node means itself, and with this node's own paths. Pure."""

from typing import Any

from pydantic import ValidationError

from unisono.causes import Evidence, Verdict, find_cause
from unisono.config import RunConfig
from unisono.config.schema import deciding_keys
from unisono.errors import Disagreed
from unisono.plan import DataSummary, DeviceChoice, ModelFacts, RunPlan
from unisono.text import validation_words

_PATHS = (
    ("model", "path"),
    ("model", "tokenizer"),
    ("data", "train"),
    ("data", "eval"),
    ("data", "template"),
)


def accept_plan(
    value: Any,
    *,
    own: RunConfig,
    node_rank: int,
    host: str,
    devices: list[DeviceChoice],
    prepared: dict[str, Any],
) -> RunPlan:
    """The plan as this node carries it out: decided by the head, with the config and the paths of this node.

    Args:
        value: the object that came.
        own: this node's config, its paths absolute.
        node_rank: which node this is.
        host: its name.
        devices: of its ranks, as it has reported them.
        prepared: what its own preparation gave.

    Raises:
        Disagreed: plan_mismatch, if the plan means another run than this node does, or gives it other work than it offered.
    """
    where = f"node {node_rank} ({host})"
    try:
        plan = RunPlan.model_validate(value)
    except ValidationError as error:
        raise _mismatch(where, host, "the head's plan cannot be read", validation_words(error)) from error
    for problem in _problems(plan, own=own, node_rank=node_rank, devices=devices, prepared=prepared):
        raise _mismatch(where, host, *problem)
    data = DataSummary.model_validate(prepared["data"])
    model = ModelFacts.model_validate(prepared["model"])
    return plan.model_copy(
        update={
            "config": own,
            "output_dir": own.output_dir,
            "data": plan.data.model_copy(update={"cache_dir": data.cache_dir}),
            "model": plan.model.model_copy(update={"directory": model.directory}),
        }
    )


def _problems(
    plan: RunPlan, *, own: RunConfig, node_rank: int, devices: list[DeviceChoice], prepared: dict[str, Any]
) -> list[tuple[str, str]]:
    """What is wrong with it, each with what shows it."""
    found = []
    theirs, ours = _without_paths(plan.config), _without_paths(own)
    if theirs != ours:
        odd = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        found.append(
            ("the head's plan has another config than this node", f"they differ in {', '.join(odd)}")
        )
    if plan.config.model.trust_remote_code and not own.model.trust_remote_code:
        found.append(
            (
                "the head's plan would run code that comes with the model",
                "model.trust_remote_code is off here",
            )
        )
    places = plan.on_node(node_rank)
    if [place.device.uuid for place in places] != [device.uuid for device in devices]:
        found.append(
            ("the head's plan gives this node other devices than it offered", f"{len(places)} ranks")
        )
    if [place.rank for place in plan.ranks] != list(range(plan.world_size)):
        found.append(("the head's plan does not number its ranks from 0", f"world_size {plan.world_size}"))
    for part in ("data", "model"):
        theirs_, ours_ = getattr(plan, part).digest, prepared[part]["digest"]
        if theirs_ != ours_:
            found.append(
                (f"the head's plan is about another {part}", f"digest {theirs_} there, {ours_} here")
            )
    return found


def _without_paths(config: RunConfig) -> dict[str, Any]:
    body = deciding_keys(config)
    for section, key in _PATHS:
        body[section].pop(key, None)
    return body


def _mismatch(where: str, host: str, what: str, why: str) -> Disagreed:
    known = find_cause("plan_mismatch")
    verdict = Verdict(
        cause="plan_mismatch",
        when="before",
        summary=f"{where}: {what}",
        hosts=(host,),
        phase="agree.plan",
        evidence=(Evidence(where=where, text=why),),
        fix=known.remedy if known else (),
    )
    return Disagreed.of(verdict.summary, where=where, why=why, fix="; ".join(verdict.fix), verdict=verdict)
