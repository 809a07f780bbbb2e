"""What agreement's rules say of one node alone, as findings: doctor has the same knowledge, not a copy of it."""

from collections.abc import Mapping, Sequence

from unisono.agree.agreement import Agreement
from unisono.agree.display import name_node
from unisono.agree.reports import Check as Judged
from unisono.agree.reports import NodeReport
from unisono.causes import Verdict
from unisono.doctor.check import Check, Finding


def as_findings(agreement: Agreement, report: NodeReport, checks: Mapping[str, Check]) -> list[Finding]:
    """The judgement of this node, without its name: on this machine there is no other.

    Args:
        agreement: of rules on this node's report alone.
        report: its report.
        checks: doctor's check for each rule's id; what is not in it is left out.
    """
    verdicts = {verdict.summary: verdict for verdict in agreement.verdicts}
    me = name_node(report.node_rank, report.host)
    wrong = {judged.id for judged in agreement.with_status("warn", "fail")}
    return [
        _finding(checks[judged.id], judged, verdicts.get(judged.text), me)
        for judged in agreement.checks
        if judged.id in checks and not (judged.status == "pass" and judged.id in wrong)
    ]


def _finding(check: Check, judged: Judged, verdict: Verdict | None, me: str) -> Finding:
    lines: Sequence[str] = verdict.fix if verdict is not None else [judged.fix] if judged.fix else []
    return Finding(
        check.id, judged.status, (_plain(judged.text, me),), tuple(_plain(line, me) for line in lines)
    )


def _plain(text: str, me: str) -> str:
    """`node 0 (a): 1 file` as `1 file`."""
    text = text.replace(f" on {me}: ", ": ").removeprefix(f"on {me}: ")
    for said in (f"{me}: ", f" on {me}"):
        text = text.replace(said, "")
    return text.replace(f"of {me}", "here").replace(me, "this machine").strip()
