"""Whether all nodes prepared the same: rows as the model will see them, and the model's files as they were read."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Self

from unisono.agree.agreement import Agreement
from unisono.agree.finding import Scene, evidence_of
from unisono.agree.groups import partition
from unisono.agree.keys import Wording, judge_keys
from unisono.agree.naming import Who, name_all
from unisono.agree.report import NodeReport, Part
from unisono.agree.rule import Rule
from unisono.agree.rules import PREPARED_RULES
from unisono.agree.showing import show, show_digest
from unisono.plan import DataSummary, ModelFacts
from unisono.text import one_line

Said = Sequence[tuple[Who, "PreparedFacts"]]

_SCENE = Scene("agree.prepared")


class PreparedFacts(Part):
    """What preparing gave on one node. Paths stay at home: they may differ."""

    data_digest: str
    """Of the rows as the model sees them, their order, and the tokenizer."""
    rows: int
    sequences: int
    """Of one epoch."""
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
    """Of config.json and of the weights' names, shapes, sizes and contents."""

    @classmethod
    def of(cls, data: DataSummary, model: ModelFacts) -> Self:
        """From what the task `prepare` gives."""
        return cls(
            data_digest=data.digest, rows=data.train.rows, sequences=data.train.sequences, tokens=data.train.tokens,
            loss_tokens=data.train.loss_tokens, eval_rows=data.eval.rows if data.eval else 0, total_steps=data.total_steps,
            formats=tuple(data.formats), template=data.template, ledger=data.ledger, model_type=model.model_type,
            parameters=model.parameters, model_digest=model.digest,
        )  # fmt: skip


def compare_prepared(prepared: Mapping[int, PreparedFacts], reports: Sequence[NodeReport]) -> Agreement:
    """Compares what the nodes prepared, by node rank; `reports` say which host each is.

    The model comes first: another vocabulary gives other tokens.
    """
    hosts = {report.node_rank: report.host for report in reports}
    said = [(Who(rank, -1, hosts.get(rank, "?")), prepared[rank]) for rank in sorted(prepared)]
    absent = [Who(rank, -1, host) for rank, host in sorted(hosts.items()) if rank not in prepared]
    found = Agreement()
    if said:
        found = _judge(PREPARED_RULES["prepared.model"], said, _model).merged(_judge_rows(said))
    if absent:
        where = name_all(absent)
        text = f"{where} has prepared nothing"
        found = found.merged(Agreement.noted("prepared.rows", "unknown", text, where=where))
    return found


def _judge(rule: Rule, said: Said, read: Callable[[PreparedFacts], dict[str, Hashable]]) -> Agreement:
    order = list(read(said[0][1]))
    values = [(who, read(facts)) for who, facts in said]
    return judge_keys(rule, values, Wording(shown=_shown, order=order.index), scene=_SCENE)


def _judge_rows(said: Said) -> Agreement:
    """The content is what counts; where it differs, formats and templates may say why, though their words may hold paths."""
    same_rows = len({(facts.rows, tuple(sorted(facts.ledger.items()))) for _, facts in said}) == 1
    rule = PREPARED_RULES["prepared.tokens" if same_rows else "prepared.rows"]
    found = _judge(rule, said, _rows)
    if not found.fatal:
        return found
    verdict = found.fatal[0]
    reasons = partition((who, (*facts.formats, facts.template)) for who, facts in said)
    if len(reasons) > 1:
        more = evidence_of(reasons, _SCENE, lambda words: one_line("; ".join(words), limit=200))
        verdict = verdict.model_copy(update={"evidence": (*verdict.evidence, *more)})
    return Agreement.found(rule.id, verdict, where=found.checks[0].where)


def _model(facts: PreparedFacts) -> dict[str, Hashable]:
    return {"model": facts.model_type, "parameters": facts.parameters, "weights": facts.model_digest}


def _rows(facts: PreparedFacts) -> dict[str, Hashable]:
    return {
        "rows": facts.rows, "rows for evaluation": facts.eval_rows, "sequences": facts.sequences, "steps": facts.total_steps,
        "tokens": facts.tokens, "loss tokens": facts.loss_tokens, "content of the rows": facts.data_digest,
    }  # fmt: skip


def _shown(label: str, value: Hashable) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return (
        f"digest {show_digest(value)}"
        if label in ("weights", "content of the rows") and isinstance(value, str)
        else show(value)
    )
