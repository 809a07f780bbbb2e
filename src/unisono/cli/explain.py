"""`unisono explain`: the meaning of a cause or an environment variable."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.output import output, terminal_width
from unisono.text import wrapped

if TYPE_CHECKING:
    from unisono.causes.variables import Variable
    from unisono.causes.verdict import Cause

_WIDEST = 110


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="CAUSE|VARIABLE", help="e.g. nan_loss or NCCL_SOCKET_IFNAME; without it: the list"
        ),
    ] = None,
    symptom: Annotated[
        str | None,
        typer.Option(
            "--symptom",
            metavar="TEXT",
            help="Which causes fit these words, in English or Chinese.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Describes a cause or an environment variable: meaning, signs and fix."""
    from unisono.causes.catalogue import find_cause
    from unisono.causes.variables import find_variable
    from unisono.errors import UsageError

    if symptom is not None:
        _explain_symptom(symptom, name)
        return
    if name is None:
        _list_all()
        return
    cause, variable = find_cause(name.lower().replace("-", "_")), find_variable(name)
    if cause is not None:
        _show({"kind": "cause", **asdict(cause), "drills": _drills(cause)}, cause_lines(cause))
    elif variable is not None:
        _show({"kind": "variable", **asdict(variable), **_more(variable)}, variable_lines(variable))
    else:
        near = _nearest(name)
        raise UsageError.of(
            f"no cause and no variable is called {name}",
            fix=f"did you mean `unisono explain {near}`?" if near else "`unisono explain` lists all of them",
        )


def _explain_symptom(text: str, name: str | None) -> None:
    """The causes that fit some words, as `unisono diagnose` ranks them for a report."""
    from unisono.cli.diagnose import ranking_lines
    from unisono.diagnose.hypotheses import rank
    from unisono.diagnose.lines import redacted, redacted_json
    from unisono.diagnose.report_terms import find_features
    from unisono.diagnose.report_text import language_of, sentences_of
    from unisono.errors import UsageError

    if name is not None:
        raise UsageError.of("a name and --symptom exclude each other", where=name, fix="give one of them")
    language = language_of(text)
    features = find_features("symptom", sentences_of(text))
    if not features:
        raise UsageError.of(
            "these words are not known here",
            where=text,
            fix='say what happens and when, in English or Chinese, e.g. "hangs after the model is loaded, 2 nodes"',
        )
    ranking = rank(features, is_failure=True)
    body: dict[str, object] = {
        "kind": "symptom",
        "language": language,
        "hypotheses": [one.to_json() for one in ranking.hypotheses],
        "questions": [one.zh if language == "zh" else one.en for one in ranking.questions],
    }
    lines = list(ranking_lines(ranking, language=language)) or ["no failure in these words"]
    redacted_lines = [redacted(line) for line in ("These causes fit, most likely first:", *lines)]
    _show(redacted_json(body), redacted_lines)


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
    from unisono.causes.verdict import EXIT_CODES

    retry = "can help" if cause.retry_helps else "does not help by itself"
    lines += [
        "",
        f"Exit code {cause.exit_code} ({EXIT_CODES[cause.exit_code]}). A retry {retry}. Found {' and '.join(cause.when)} a run.",
    ]
    drills = _drills(cause)
    if drills:
        lines += ["", "To try it on this machine:", *(f"  unisono drill {fault}" for fault in drills)]
    return lines


def _drills(cause: "Cause") -> list[str]:
    """The drills that expect this cause first."""
    from unisono.drill.drills import DRILLS

    return [drill.fault for drill in DRILLS if drill.want[:1] == (cause.id,)]


def variable_lines(variable: "Variable") -> list[str]:
    """The entry of an environment variable as lines."""
    from unisono.causes.variables import ADVICE, GROUP_MEANING, VALUES

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
    from unisono.causes.variables import ADVICE, VALUES

    takes, advice = VALUES.get(variable.name), ADVICE.get(variable.name)
    return {
        "values": takes.text if takes else None,
        "costs": advice.costs if advice else None,
        "right": advice.right if advice else None,
    }


def _show(value: dict[str, object], lines: list[str]) -> None:
    printer = output()
    if printer.json:
        printer.emit({"schema": 1, **value})
        return
    width = min(terminal_width(sys.stdout), _WIDEST)
    for line in lines:
        printer.result(wrapped(line, width, hanging=0))


def _list_all() -> None:
    from unisono.causes.catalogue import ALL_CAUSES
    from unisono.causes.variables import VARIABLES

    causes = [{"id": cause.id, "title": cause.title} for cause in ALL_CAUSES]
    variables = [{"name": variable.name, "meaning": variable.meaning} for variable in VARIABLES]
    lines = [
        "Causes",
        *(f"  {cause.id:<30} {cause.title}" for cause in ALL_CAUSES),
        "",
        "Environment variables",
    ]
    lines += [f"  {variable.name:<42} {variable.meaning}" for variable in VARIABLES]
    _show({"kind": "list", "causes": causes, "variables": variables}, lines)


def _nearest(name: str) -> str | None:
    from unisono.causes.catalogue import CATALOGUE
    from unisono.causes.variables import VARIABLES
    from unisono.text import nearest

    by_lower = {variable.name.lower(): variable.name for variable in VARIABLES} | {
        id_: id_ for id_ in CATALOGUE
    }
    close = nearest(name.lower().replace("-", "_"), list(by_lower))
    return by_lower[close] if close else None
