"""The commands `unisono diagnose`: what ended a run, from its logs; `unisono logs`: the output of
its ranks; and `unisono explain`: the meaning of a cause or an environment variable.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.base.text import wrapped
from unisono.front.cli.output import output, terminal_width

if TYPE_CHECKING:
    from unisono.base.causes.variables import Variable
    from unisono.base.causes.verdict import Cause
    from unisono.guard.diagnosis.hypotheses import Ranking
    from unisono.guard.diagnosis.judge import DiagnosisResult

_WIDTH = 100  # of the timeline without a terminal


def diagnose(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|DIR...", help="Logs, or directories of logs; - is stdin.", show_default=False
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Also show other possible causes.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the ranks over time.")] = False,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask questions that distinguish the possible causes, one at a time.")
    ] = False,
    explain_missing: Annotated[
        bool, typer.Option("--explain-missing", help="Also show which log or command would decide, and why.")
    ] = False,
) -> None:
    """Read the logs of a failed run of any tool, or a bug report, and show the cause, the culprit,
    the evidence and the fix.
    """
    from unisono.front.cli.terminal import ReadingLine
    from unisono.guard.diagnosis.reading import diagnose_paths

    diagnosis = diagnose_paths(paths, reading=ReadingLine, on_refused=output().warn)
    _show(diagnosis, every=every, timeline=timeline, explain_missing=explain_missing)
    if ask:
        _ask(diagnosis)


def _show(diagnosis: "DiagnosisResult", *, every: bool, timeline: bool, explain_missing: bool) -> None:
    if output().json:
        _emit(diagnosis, every=every, timeline=timeline, explain_missing=explain_missing)
        return
    from unisono.guard.diagnosis.lines import redacted

    printer = output()
    for line in _lines(diagnosis, every=every):
        printer.result(redacted(line))
    for needed in _needed(diagnosis) if explain_missing else ():
        printer.result(redacted(f"NEEDED    {needed['what']}: {needed['why']}"))
    if timeline:
        printer.result("")
        for line in _drawn(diagnosis):
            printer.drawing(line)
    printer.notify(f"More on it: unisono explain {diagnosis.verdict.cause}")


def _lines(diagnosis: "DiagnosisResult", *, every: bool) -> Iterator[str]:
    if diagnosis.verdict.cause == "undetermined" and diagnosis.ranking.hypotheses:
        yield f"WHAT      no log line proves the cause; these fit, most likely first  [{diagnosis.verdict.cause}]"
        yield from ranking_lines(
            diagnosis.ranking, language=diagnosis.language, in_short=not diagnosis.language
        )
        if not diagnosis.language:
            yield from _seen_and_missing(diagnosis)
    else:
        yield from diagnosis.verdict.lines()
    for link in diagnosis.chain[1:]:
        yield f"THEN      {link.where}: {link.text}"
    if diagnosis.facts.earlier_runs:
        yield f"EARLIER   runs in the same logs: {', '.join(diagnosis.facts.earlier_runs)}"
    for number, verdict in enumerate(diagnosis.alternatives if every else (), 2):
        yield ""
        yield f"{number}. {verdict.confidence:.0%}"
        yield from verdict.lines()


def _seen_and_missing(diagnosis: "DiagnosisResult") -> Iterator[str]:
    """Of logs that prove nothing: the lines that come nearest, and what would tell more."""
    for item in diagnosis.verdict.evidence[:_NEAREST]:
        yield f"EVIDENCE  {item.where}: {item.text}"
    if diagnosis.missing:
        yield f"MISSING   {'; '.join(diagnosis.missing)}"


_NEAREST = 2
_SHOWN = 3
_QUOTED_CHARS = 90


def ranking_lines(ranking: "Ranking", *, language: str = "", in_short: bool = False) -> Iterator[str]:
    """The hypotheses with what speaks for them, and the questions that would tell them apart, for
    people: how to check it and all the rest of the first alone.

    Args:
        in_short: whether only the first one has a fix, since other lines follow.
    """
    from unisono.base.text import one_line

    for number, one in enumerate(ranking.hypotheses, 1):
        seen = dict.fromkeys(
            f'{item.where} "{one_line(item.text, limit=_QUOTED_CHARS)}"' for item in one.because
        )
        yield (
            f"  {number}  {one.cause:<26} {one.likelihood:<9}"
            f" {'; '.join(list(seen)[:_SHOWN]) or 'it is frequent'}"
        )
        if number == 1:
            for item in one.against[:1]:
                yield f'     against: {item.where} "{one_line(item.text, limit=_QUOTED_CHARS)}"'
            if one.check:
                yield f"     check: {'; '.join(one.check[:2])}"
        if one.fix and (number == 1 or not in_short):
            yield f"     if this: {one.fix[0]}"
        if number == 1 and one.fix_in_text:
            yield f"     the text: {'; '.join(one_line(fix, limit=_QUOTED_CHARS) for fix in one.fix_in_text[:2])}"
        elif number == 1 and one.fix_here:
            yield f"     with unisono: {one.fix_here[0]}"
    for number, question in enumerate(ranking.questions[: 1 if in_short else 2]):
        yield f"{'ASK' if not number else '':<10}{question.zh if language == 'zh' else question.en}"


def _ask(diagnosis: "DiagnosisResult") -> None:
    """Asks one question at a time, and ranks the causes again after each answer."""
    from unisono.base.errors import UsageError
    from unisono.guard.diagnosis.judge import with_answer
    from unisono.guard.diagnosis.lines import redacted
    from unisono.guard.diagnosis.report_terms import Feature

    printer = output()
    if not sys.stdin.isatty() or printer.json:
        raise UsageError.of(
            "--ask needs a terminal on stdin",
            where="--ask",
            fix="without it, the questions are printed after the hypotheses",
        )
    answered = set[str]()
    while questions := [one for one in diagnosis.ranking.questions if one.feature not in answered]:
        question = questions[0]
        answered.add(question.feature)
        answer = _answer(question.zh if diagnosis.language == "zh" else question.en)
        if answer == "stop":
            return
        if answer in ("yes", "no"):
            name = question.feature if answer == "yes" else f"not:{question.feature}"
            diagnosis = with_answer(
                diagnosis, Feature(name, "answer", f"{question.en} {answer}", "statement")
            )
            for line in ranking_lines(replace(diagnosis.ranking, questions=()), language=diagnosis.language):
                printer.result(redacted(line))


_ANSWERS = {
    "y": "yes",
    "yes": "yes",
    "是": "yes",
    "n": "no",
    "no": "no",
    "否": "no",
    "不": "no",
    "q": "stop",
    "quit": "stop",
}


def _answer(question: str) -> str:
    """yes, no, stop, or empty if it is not known."""
    try:
        text = input(f"{question} [y/n/?, q: quit] ")
    except (EOFError, KeyboardInterrupt):
        return "stop"
    return _ANSWERS.get(text.strip().lower(), "")


def _needed(diagnosis: "DiagnosisResult") -> list[dict[str, str]]:
    """What would decide between the possible causes, each with the reason; nothing is needed where
    lines prove the cause.
    """
    from unisono.base.causes import find_cause

    if diagnosis.is_proved:
        return []
    missing = ("the logs of all ranks, from their beginning",) if diagnosis.language else diagnosis.missing
    needed = [{"what": one, "why": "the rank that failed first has not been heard"} for one in missing]
    for one in diagnosis.ranking.hypotheses:
        cause = find_cause(one.cause)
        why = f"it shows whether it is {one.cause}" + (f" ({cause.title})" if cause else "")
        needed += [{"what": check, "why": why} for check in one.check[:1]]
    questions = (one.zh if diagnosis.language == "zh" else one.en for one in diagnosis.ranking.questions)
    return [*needed, *({"what": one, "why": "the answer changes which cause is first"} for one in questions)]


def _emit(diagnosis: "DiagnosisResult", *, every: bool, timeline: bool, explain_missing: bool) -> None:
    from unisono.guard.diagnosis.lines import redacted_json

    more = {"timeline": redacted_json(_drawn(diagnosis))} if timeline else {}
    if explain_missing:
        more["needed"] = redacted_json(_needed(diagnosis))
    output().emit({**diagnosis.to_json(every=every), **more})


def _drawn(diagnosis: "DiagnosisResult") -> list[str]:
    """The timeline in the width and colours of the terminal; plain without a terminal."""
    from unisono.guard.diagnosis.timeline import draw
    from unisono.guard.facts import read_environment

    seen = sys.stdout.isatty() and not output().json
    width = terminal_width(sys.stdout) if seen else 0
    first = (
        diagnosis.verdict.evidence[0].where
        if diagnosis.verdict.severity != "none" and diagnosis.verdict.evidence
        else ""
    )
    return draw(
        diagnosis.facts,
        first=first,
        ranks=diagnosis.verdict.ranks,
        width=width or _WIDTH,
        colour=seen and read_environment().colour,
    )


def logs(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.", show_default=False)] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing new lines until the run has ended.")
    ] = False,
) -> None:
    """Show the output, the events and the verdicts of all ranks, labelled, in order of time."""
    from unisono.guard.rundir.merged_logs import followed_logs, merged_logs

    printer = output()
    for line in (followed_logs if follow else merged_logs)(run, on_skip=printer.warn):
        if rank is not None and line.rank != rank:
            continue
        if printer.json:
            printer.emit(
                {
                    "time": line.time,
                    "host": line.host,
                    "rank": line.rank if line.rank >= 0 else None,
                    "source": line.source,
                    "text": line.text,
                    "signatures": line.signatures,
                }
            )
            continue
        clock = time.strftime("%H:%M:%S", time.localtime(line.time)) if line.time else "--:--:--"
        printer.quote(f"{clock} [{line.label}] {line.text}")


_WIDEST = 110


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="CAUSE|VARIABLE", help="E.g. nan_loss or NCCL_SOCKET_IFNAME; without it, all are listed."
        ),
    ] = None,
    symptom: Annotated[
        str | None,
        typer.Option(
            "--symptom",
            metavar="TEXT",
            help="Rank the causes that fit this description, in English or Chinese.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Describe a cause of failure or an environment variable: its meaning, signs and fix."""
    from unisono.base.causes import find_cause
    from unisono.base.causes.variables import find_variable
    from unisono.base.errors import UsageError

    if symptom is not None:
        _explain_symptom(symptom, name)
        return
    if name is None:
        _list_all()
        return
    cause, variable = find_cause(name.lower().replace("-", "_")), find_variable(name)
    if cause is not None:
        _show_entry({"kind": "cause", **asdict(cause), "drills": _drills(cause)}, cause_lines(cause))
    elif variable is not None:
        _show_entry({"kind": "variable", **asdict(variable), **_more(variable)}, variable_lines(variable))
    else:
        near = ", ".join(f"`unisono explain {entry}`" for entry in nearest_entries(name))
        raise UsageError.of(
            f"no cause and no variable is called {name}",
            fix=f"did you mean {near}?" if near else "`unisono explain` lists all of them",
        )


def _explain_symptom(text: str, name: str | None) -> None:
    """The causes that fit some words, as `unisono diagnose` ranks them for a report."""
    from unisono.base.errors import UsageError
    from unisono.guard.diagnosis.hypotheses import rank
    from unisono.guard.diagnosis.lines import redacted, redacted_json
    from unisono.guard.diagnosis.report_terms import find_features
    from unisono.guard.diagnosis.report_text import language_of, sentences_of

    if name is not None:
        raise UsageError.of(
            "a name and --symptom exclude each other", where=name, fix="pass only one of them"
        )
    language = language_of(text)
    features = find_features("symptom", sentences_of(text))
    if not features:
        raise UsageError.of(
            "nothing in these words is recognized",
            where=text,
            fix=(
                'describe what happens and when, in English or Chinese, e.g. "hangs after the model is'
                ' loaded, 2 nodes"'
            ),
        )
    ranking = rank(features, is_failure=True)
    body: dict[str, object] = {
        "kind": "symptom",
        "language": language,
        "hypotheses": [one.to_json() for one in ranking.hypotheses],
        "questions": [one.zh if language == "zh" else one.en for one in ranking.questions],
    }
    lines = list(ranking_lines(ranking, language=language)) or ["these words describe no failure"]
    redacted_lines = [redacted(line) for line in ("These causes fit, most likely first:", *lines)]
    _show_entry(redacted_json(body), redacted_lines)


def cause_lines(cause: "Cause") -> list[str]:
    """The entry as paragraphs: a heading, then lines; list items are indented by two spaces."""
    lines = [f"{cause.id}: {cause.title}", "", cause.meaning, "", "Signs:"]
    lines += [f"  - {item}" for item in cause.telltales]
    if cause.neighbours:
        lines += [
            "",
            "Similar causes:",
            *(f"  - {other}: {difference}" for other, difference in cause.neighbours),
        ]
    lines += ["", "Fix:", *(f"  {number}. {item}" for number, item in enumerate(cause.remedy, 1))]
    from unisono.base.causes.verdict import EXIT_CODES

    retry = "Retrying can help." if cause.retry_helps else "Retrying alone does not help."
    lines += [
        "",
        (
            f"Exit code {cause.exit_code} ({EXIT_CODES[cause.exit_code]}). {retry} Found"
            f" {' and '.join(cause.when)} a run."
        ),
    ]
    drills = _drills(cause)
    if drills:
        lines += ["", "To try it on this machine:", *(f"  unisono drill {fault}" for fault in drills)]
    return lines


def _drills(cause: "Cause") -> list[str]:
    """The drills that expect this cause first."""
    from unisono.front.drill.drills import DRILLS

    return [drill.fault for drill in DRILLS if drill.want[:1] == (cause.id,)]


def variable_lines(variable: "Variable") -> list[str]:
    """The entry of an environment variable as lines."""
    from unisono.base.causes.variables import ADVICE, GROUP_MEANING, VALUES

    lines = [f"{variable.name}: {variable.meaning}", "", f"{variable.name} {GROUP_MEANING[variable.group]}."]
    takes, advice = VALUES.get(variable.name), ADVICE.get(variable.name)
    if takes:
        lines += ["", f"Values: {takes.text}. With any other value {takes.otherwise}."]
    if advice:
        lines += ["", f"What it costs: {advice.costs}.", f"When it is right: {advice.right}."]
    if variable.suspicious:
        lines += ["", f"Suspicious: {variable.suspicious}"]
    if variable.causes:
        lines += ["", f"Related causes: {', '.join(variable.causes)}"]
    return lines


def _more(variable: "Variable") -> dict[str, object]:
    """Further facts on the variable as JSON; null for none."""
    from unisono.base.causes.variables import ADVICE, VALUES

    takes, advice = VALUES.get(variable.name), ADVICE.get(variable.name)
    return {
        "values": takes.text if takes else None,
        "costs": advice.costs if advice else None,
        "right": advice.right if advice else None,
    }


def _show_entry(value: dict[str, object], lines: list[str]) -> None:
    printer = output()
    if printer.json:
        printer.emit({"schema": 1, **value})
        return
    width = min(terminal_width(sys.stdout), _WIDEST)
    for line in lines:
        printer.result(wrapped(line, width, hanging=0))


def _list_all() -> None:
    from unisono.base.causes import CATALOGUE
    from unisono.base.causes.variables import VARIABLES

    causes = [{"id": cause.id, "title": cause.title} for cause in CATALOGUE.values()]
    variables = [{"name": variable.name, "meaning": variable.meaning} for variable in VARIABLES]
    lines = [
        "Causes",
        *(f"  {cause.id:<30} {cause.title}" for cause in CATALOGUE.values()),
        "",
        "Environment variables",
    ]
    lines += [f"  {variable.name:<42} {variable.meaning}" for variable in VARIABLES]
    _show_entry({"kind": "list", "causes": causes, "variables": variables}, lines)


_SUGGESTED, _MISSPELLED = 3, 0.8


def nearest_entries(name: str) -> list[str]:
    """Up to three causes and variables that a name may mean.

    It may be misspelled; else it is a word of their names, or a symptom (`oom`, `nan`,
    `显存不足`), or
    a word of their titles; else it is only a little like a name.
    """
    from unisono.base.causes import CATALOGUE
    from unisono.base.causes.variables import VARIABLES
    from unisono.base.text import nearest
    from unisono.guard.diagnosis.hypotheses import rank
    from unisono.guard.diagnosis.report_terms import find_features
    from unisono.guard.diagnosis.report_text import sentences_of

    by_lower = {variable.name.lower(): variable.name for variable in VARIABLES} | {
        id_: id_ for id_ in CATALOGUE
    }
    word = name.lower().replace("-", "_").replace(" ", "_")
    misspelled = nearest(word, list(by_lower), alike=_MISSPELLED)
    if misspelled:
        return [by_lower[misspelled]]
    features = find_features("symptom", sentences_of(name))
    ranked = rank(features, is_failure=True).hypotheses if features else ()
    entries = [entry for lower, entry in by_lower.items() if f"_{word}_" in f"_{lower}_"]
    entries += [one.cause for one in ranked if one.cause in CATALOGUE]
    entries += [cause.id for cause in CATALOGUE.values() if name.lower() in cause.title.lower().split()]
    if not entries:
        entries = [by_lower[close] for close in [nearest(word, list(by_lower))] if close]
    return sorted(dict.fromkeys(entries), key=lambda entry: entry not in CATALOGUE)[:_SUGGESTED]
