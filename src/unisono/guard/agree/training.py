"""Whether the nodes prepared the same data and model, and whether all ranks would train the same
thing.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.base.causes import Evidence
from unisono.base.text import one_line
from unisono.guard.agree.agreement import (
    Agreement,
    Stage,
    Wording,
    evidence_of,
    judge_keys,
    odd_first,
    odd_out,
    partition,
    violation,
)
from unisono.guard.agree.reports import (
    Member,
    NodeReport,
    RankReport,
    ReportPart,
    count,
    name_all,
    name_ranks,
    number_list,
    show,
    show_digest,
)
from unisono.guard.agree.rules import PREPARED_RULES, RANK_RULES, Rule

Prepared = Sequence[tuple[Member, "PreparedFacts"]]

_STAGE = Stage("agree.prepared")


class PreparedFacts(ReportPart):
    """Result of preparing data and model on one node. It has no paths, since they may differ."""

    data_digest: str
    """Digest of the rows as the model sees them, their order, and the tokenizer."""
    rows: int
    sequences: int
    """The number in one epoch."""
    tokens: int
    loss_tokens: int
    eval_rows: int = 0
    total_steps: int
    formats: tuple[str, ...] = ()
    template: str = ""
    ledger: dict[str, int]
    """Totals of the ledger: used, cut, split, dropped, bad, …"""
    model_type: str
    parameters: int
    model_digest: str
    """Digest of config.json and of the weights' names, shapes, sizes and contents."""


def compare_prepared(prepared: Mapping[int, PreparedFacts], reports: Sequence[NodeReport]) -> Agreement:
    """The checks of what the nodes prepared, by node rank; `reports` have the hosts.

    The model comes first: a different vocabulary gives different tokens.
    """
    hosts = {report.node_rank: report.host for report in reports}
    reported = [(Member(rank, -1, hosts.get(rank, "?")), prepared[rank]) for rank in sorted(prepared)]
    absent = [Member(rank, -1, host) for rank, host in sorted(hosts.items()) if rank not in prepared]
    agreement = Agreement()
    if reported:
        agreement = _judge_prepared(PREPARED_RULES["prepared.model"], reported, _model).merged(
            _judge_rows(reported)
        )
    if absent:
        where = name_all(absent)
        text = f"{where} did not prepare"
        agreement = agreement.merged(Agreement.noted("prepared.rows", "unknown", text, where=where))
    return agreement


def _judge_prepared(
    rule: Rule, reported: Prepared, read: Callable[[PreparedFacts], dict[str, Hashable]]
) -> Agreement:
    order = list(read(reported[0][1]))
    values = [(who, read(facts)) for who, facts in reported]
    return judge_keys(rule, values, Wording(shown=_shown_prepared, order=order.index), stage=_STAGE)


def _judge_rows(reported: Prepared) -> Agreement:
    """The check of the content; if it differs, formats and templates may explain why, though their
    text may have paths.
    """
    same_rows = len({(facts.rows, tuple(sorted(facts.ledger.items()))) for _, facts in reported}) == 1
    rule = PREPARED_RULES["prepared.tokens" if same_rows else "prepared.rows"]
    agreement = _judge_prepared(rule, reported, _rows)
    if not agreement.fatal:
        return agreement
    verdict = agreement.fatal[0]
    reasons = partition((who, (*facts.formats, facts.template)) for who, facts in reported)
    if len(reasons) > 1:
        more = evidence_of(reasons, _STAGE, lambda words: one_line("; ".join(words), limit=200))
        verdict = verdict.model_copy(update={"evidence": (*verdict.evidence, *more)})
    return Agreement.found(rule.id, verdict, where=agreement.checks[0].where)


def _model(facts: PreparedFacts) -> dict[str, Hashable]:
    return {"model": facts.model_type, "parameters": facts.parameters, "weights": facts.model_digest}


def _rows(facts: PreparedFacts) -> dict[str, Hashable]:
    return {
        "rows": facts.rows,
        "rows for evaluation": facts.eval_rows,
        "sequences": facts.sequences,
        "steps": facts.total_steps,
        "tokens": facts.tokens,
        "loss tokens": facts.loss_tokens,
        "content of the rows": facts.data_digest,
    }


def _shown_prepared(label: str, value: Hashable) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return (
        f"digest {show_digest(value)}"
        if label in ("weights", "content of the rows") and isinstance(value, str)
        else show(value)
    )


_SHOWN_ROWS = 4

RankMembers = Sequence[tuple[Member, RankReport]]


@dataclass(frozen=True, slots=True)
class ComparedValues:
    """The values that one rule compares, by label. An empty digest was not computed."""

    rule: str
    read: Callable[[RankReport], Mapping[str, Hashable]]
    good: str


def _split(report: RankReport) -> dict[str, Hashable]:
    rows = {} if report.rows is None else {"rows": report.rows}
    return {
        **rows,
        "sequences": report.sequences,
        "steps": report.total_steps,
        "tokens": report.tokens,
        "loss tokens": report.loss_tokens,
        "row ids": report.rows_digest,
        "order of rows": report.order_digest,
    }


COMPARED: tuple[ComparedValues, ...] = (
    ComparedValues("ranks.device_kind", lambda r: {"device": r.device_kind}, "one kind"),
    ComparedValues("ranks.torch", lambda r: {"torch": r.torch_version.partition("+")[0]}, "one version"),
    ComparedValues(
        "ranks.plan",
        lambda r: {"strategy": r.strategy, "dtype": r.dtype, "seed": r.seed, "backend": r.collective_backend},
        "strategy, dtype, seed and backend are the same",
    ),
    ComparedValues("ranks.resume", lambda r: {"resumed step": r.resume_step}, "one step"),
    ComparedValues(
        "ranks.tokenizer", lambda r: {"tokenizer": r.tokenizer_digest}, "the same text gives the same tokens"
    ),
    ComparedValues("ranks.split", _split, "the same rows, in the same order, in the same number of steps"),
    ComparedValues(
        "ranks.trained",
        lambda r: {"trained parameters": r.trainable_parameters, "names and shapes": r.parameters_digest},
        "the same names and shapes",
    ),
    ComparedValues("ranks.frozen", lambda r: {"frozen weights": r.frozen_values_digest}, "the same values"),
    ComparedValues("ranks.initial", lambda r: {"initial values": r.trained_values_digest}, "the same values"),
    ComparedValues("ranks.threads", lambda r: {"threads": r.threads}, "the same number"),
)
"""In order: a different tokenizer gives different rows, a different plan a different order."""


def compare_ranks(reports: Sequence[RankReport], *, world_size: int) -> Agreement:
    """All checks of the ranks, and a verdict for each violation, the decisive one first.

    Args:
        reports: one of each rank, in any order.
    """
    members = _in_order(reports)
    if not members:
        return Agreement.noted(
            "ranks.complete", "unknown", f"none of {count(world_size, 'rank')} has reported"
        )
    stage = Stage(
        "agree.ranks", name_all if len({who.node_rank for who, _ in members}) > 1 else _one_node(members)
    )
    agreement = Agreement().merged(
        _judge_complete(members, world_size, stage),
        _judge_world(members, world_size, stage),
        _judge_places(members, stage),
        _judge_devices(members, stage),
    )
    return agreement.merged(*(_judge(compared, members, stage) for compared in COMPARED))


def _in_order(reports: Sequence[RankReport]) -> RankMembers:
    unique = len({report.rank for report in reports}) == len(reports)
    ordered = sorted(reports, key=lambda report: (report.rank, "" if unique else report.model_dump_json()))
    return [(Member(report.node_rank, max(0, report.rank), report.host), report) for report in ordered]


def _one_node(members: RankMembers) -> Callable[[Iterable[Member]], str]:
    """On one node rank numbers suffice, unless ranks have different hosts."""
    return name_ranks if len({who.host for who, _ in members}) == 1 else name_all


def _judge_complete(members: RankMembers, world_size: int, stage: Stage) -> Agreement:
    rule = RANK_RULES["ranks.complete"]
    ranks = [report.rank for _, report in members]
    missing = [rank for rank in range(min(world_size, max(ranks) + 2 + len(ranks))) if rank not in set(ranks)]
    duplicates = [
        group for group in partition((who, report.rank) for who, report in members) if len(group.members) > 1
    ]
    outside = [who for who, report in members if not 0 <= report.rank < world_size]
    if duplicates:
        people = duplicates[0].members
        processes = [report for _, report in members if report.rank == duplicates[0].value][:6]
        text = f"rank {duplicates[0].value} has reported {len(people)} times: " + ", ".join(
            f"pid {report.pid} on {one_line(report.host)}" for report in processes
        )
    elif outside:
        people = tuple(outside)
        text = f"{stage.name(outside)} in a world of {world_size:,}"
    elif missing:
        people = ()
        text = (
            f"{number_list('rank', missing)} of {world_size:,} {'has' if len(missing) == 1 else 'have'} not"
            " reported"
        )
    else:
        return Agreement.noted(rule.id, "pass", f"all {world_size:,}, each once")
    return violation(rule, text, stage=stage, people=people, fix=rule.remedy)


def _judge_world(members: RankMembers, world_size: int, stage: Stage) -> Agreement:
    """Every rank has the plan's world size."""
    rule = RANK_RULES["ranks.world"]
    groups = partition((who, report.world_size) for who, report in members)
    wrong = sorted(who for group in groups if group.value != world_size for who in group.members)
    if not wrong:
        return Agreement.noted(rule.id, "pass", f"{world_size:,} for every rank, as planned")
    believed = next(group.value for group in groups if group.value != world_size)
    culprits = wrong if 2 * len(wrong) <= len(members) else []
    fix = [line.replace("{who}", stage.name(wrong)) for line in rule.remedy]
    return violation(
        rule,
        f"world size: {believed:,} on {stage.name(wrong)}, and {world_size:,} in the plan",
        stage=stage,
        people=culprits,
        evidence=[
            Evidence(where=stage.name(group.members), text=f"WORLD_SIZE {group.value}")
            for group in groups[:6]
        ],
        fix=fix,
        where=wrong,
    )


def _judge_places(members: RankMembers, stage: Stage) -> Agreement:
    """Ranks of one node have different local ranks."""
    rule = RANK_RULES["ranks.place"]
    taken = partition((who, (report.node_rank, report.local_rank)) for who, report in members)
    duplicates = [group for group in taken if len({who.rank for who in group.members}) > 1]
    if not duplicates:
        return Agreement.noted(rule.id, "pass", "each has its own local rank")
    people = duplicates[0].members
    text = f"{stage.name(people)} have the same local rank {duplicates[0].value[1]}"
    return violation(rule, text, stage=stage, people=people, fix=rule.remedy)


def _judge_devices(members: RankMembers, stage: Stage) -> Agreement:
    """No device is bound by two ranks."""
    rule = RANK_RULES["ranks.device"]
    bound = [(who, report.device_uuid) for who, report in members if report.device_kind == "cuda"]
    if not bound:
        return Agreement.noted(rule.id, "pass", "ranks run on CPU")
    without_uuid = [who for who, uuid in bound if not uuid]
    duplicates = [
        group for group in partition((who, uuid) for who, uuid in bound if uuid) if len(group.members) > 1
    ]
    if duplicates:
        people = sorted(who for group in duplicates for who in group.members)
        text = (
            f"{stage.name(duplicates[0].members)} are bound to the same device"
            f" {one_line(duplicates[0].value or '')}"
        )
        places = dict(members)
        evidence = [
            Evidence(
                where=stage.name([who]),
                text=(
                    f"local rank {places[who].local_rank}, pid {places[who].pid}, device"
                    f" {one_line(places[who].device_uuid or '')}"
                ),
            )
            for who in people[:8]
        ]
        return violation(rule, text, stage=stage, people=people, evidence=evidence, fix=rule.remedy)
    if without_uuid:
        return Agreement.noted(
            rule.id,
            "unknown",
            f"no UUID for the device of {stage.name(without_uuid)}",
            where=stage.name(without_uuid),
        )
    return Agreement.noted(rule.id, "pass", f"{count(len(bound), 'rank')}, each on its own device")


def _judge(compared: ComparedValues, members: RankMembers, stage: Stage) -> Agreement:
    rule = RANK_RULES[compared.rule]
    values = [(who, compared.read(report)) for who, report in members]
    missing_labels = sorted(
        {label for _, reported in values for label, value in reported.items() if value == ""}
    )
    silent = [who for who, reported in values if any(reported.get(label) == "" for label in missing_labels)]
    compared_values = [
        (who, {label: value for label, value in reported.items() if label not in missing_labels})
        for who, reported in values
    ]
    missing = Agreement()
    if missing_labels:
        text = f"{', '.join(missing_labels)}: no digest was made by {stage.name(silent)}"
        missing = Agreement.noted(rule.id, "unknown", text, where=stage.name(silent))
    if not any(reported for _, reported in compared_values):
        return missing
    order = list(compared_values[0][1]) + [label for _, reported in compared_values for label in reported]
    agreement = judge_keys(
        rule,
        compared_values,
        Wording(shown=_shown, typed=_shown, order=order.index, good=compared.good),
        stage=stage,
    )
    return _with_details(agreement, members, stage).merged(missing)


def _shown(label: str, value: Hashable) -> str:
    if isinstance(value, bool) or not isinstance(value, int):
        digest = label not in ("device", "torch", "strategy", "dtype", "backend")
        return f"digest {show_digest(value)}" if digest and isinstance(value, str) else show(value)
    return str(value) if label == "seed" else f"{value:,}"


def _with_details(agreement: Agreement, members: RankMembers, stage: Stage) -> Agreement:
    """Adds what digests do not show: the first rows and tensors that differ."""
    verdict = next(iter(agreement.fatal), None)
    if verdict is None:
        return agreement
    more: list[Evidence] = []
    if verdict.cause == "split_mismatch":
        more = _first_rows(members, stage)
    elif verdict.cause == "weights_mismatch" and verdict.summary.startswith("frozen weights"):
        tensor = _differing_tensor(members, stage)
        if tensor:
            verdict = verdict.model_copy(update={"summary": f"{verdict.summary}; first in {tensor[0]}"})
            more = tensor[1]
    verdict = verdict.model_copy(update={"evidence": (*verdict.evidence, *more)})
    return Agreement.found(agreement.checks[0].id, verdict, where=agreement.checks[0].where)


def _first_rows(members: RankMembers, stage: Stage) -> list[Evidence]:
    """Rows around the first position where two ranks would read different rows."""
    groups = partition(
        (who, tuple(report.first_difference)) for who, report in members if report.first_difference
    )
    if len(groups) < 2:
        return []
    lists = [group.value for group in groups]
    position = next(
        (i for i in range(min(map(len, lists))) if len({one[i] for one in lists}) > 1), min(map(len, lists))
    )
    shown = slice(position, position + _SHOWN_ROWS)
    return [
        Evidence(
            where=stage.name(group.members),
            text=(
                f"from position {position}:"
                f" {', '.join(one_line(row, limit=40) for row in group.value[shown]) or 'no more rows'}"
            ),
        )
        for group in groups[:4]
    ]


def _differing_tensor(members: RankMembers, stage: Stage) -> tuple[str, list[Evidence]] | None:
    """The first tensor whose digest is not the same everywhere, among those that all ranks
    digested.
    """
    tables = [report.odd_tensors for _, report in members]
    common = set(tables[0]).intersection(*tables[1:])
    for name in (name for name in tables[0] if name in common):
        groups = partition((who, report.odd_tensors[name]) for who, report in members)
        if len(groups) > 1:
            shown = one_line(name, limit=120)
            texts = {group.value: f"{shown}: digest {show_digest(group.value)}" for group in groups}
            return shown, evidence_of(odd_first(groups, odd_out(groups)), stage, texts.__getitem__)
    return None
