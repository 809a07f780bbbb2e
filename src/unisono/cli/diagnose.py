"""The commands `unisono diagnose`: what ended a run, from its logs; and `unisono logs`: the logs of all ranks, merged by time."""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.output import output, terminal_width

if TYPE_CHECKING:
    from unisono.diagnose.hypotheses import Ranking
    from unisono.diagnose.judge import Diagnosis

_WIDTH = 100  # of the timeline without a terminal


def diagnose(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|DIR...", help="logs, directories of logs; - is stdin", show_default=False
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Also show other possible causes.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the ranks over time.")] = False,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask what would tell possible causes apart, one question at a time.")
    ] = False,
) -> None:
    """Reads logs of a failed run, of any tool, or a person's report of it, and shows the cause, the culprit, the evidence and the fix."""
    from unisono.diagnose.own_runs import diagnose_run, is_run, log_files

    root = Path(paths[0])
    if len(paths) == 1 and is_run(root):
        found = diagnose_run(root, lambda: _of_logs(log_files(root)))
    else:
        found = _of_logs(paths)
    _show(found, every=every, timeline=timeline)
    if ask:
        _ask(found)


def _of_logs(paths: list[str]) -> "Diagnosis":
    from unisono.cli.progress import ReadingLine
    from unisono.diagnose.reading import diagnose_logs, find_sources, read_all
    from unisono.errors import UsageError
    from unisono.text import plain

    printer = output()
    try:
        sources = find_sources(paths)
    except FileNotFoundError as error:
        raise UsageError.of(
            f"{error} does not exist", where=str(error), fix="give a log, or a directory with logs"
        ) from None
    line = ReadingLine(sum(source.size for source in sources))
    try:
        read = read_all(sources, on_read=line.show)
    finally:
        line.close()
    for refused in read.refused:
        printer.warn(f"not read: {plain(refused)}")
    if paths and not read.scanned and not read.recordings:
        raise UsageError.of(
            "there is no log that can be read",
            where=" ".join(paths),
            fix="give a log, or a directory with logs",
        )
    for report in read.reports:
        if report.language == "other":
            printer.warn(
                f"{plain(report.name)}: a language that diagnose does not know: only English and Chinese words and log lines were read"
            )
    return diagnose_logs(read.scanned, read.recordings, read.reports)


def _show(found: "Diagnosis", *, every: bool, timeline: bool) -> None:
    if output().json:
        _emit(found, every=every, timeline=timeline)
        return
    from unisono.diagnose.lines import redacted

    printer = output()
    for line in _lines(found, every=every):
        printer.result(redacted(line))
    if timeline:
        printer.result("")
        for line in _drawn(found):  # contains labels only, and colours
            printer.verbatim(line)
    printer.notify(f"More on it: unisono explain {found.verdict.cause}")


def _lines(found: "Diagnosis", *, every: bool) -> Iterator[str]:
    if found.verdict.cause == "undetermined" and found.ranking.hypotheses:
        yield f"WHAT      no log line proves the cause; these fit, most likely first  [{found.verdict.cause}]"
        yield from ranking_lines(found.ranking, language=found.language)
        if not found.language:
            yield from found.verdict.lines()[1:]
    else:
        yield from found.verdict.lines()
    for link in found.chain[1:]:
        yield f"THEN      {link.where}: {link.text}"
    if found.facts.earlier_runs:
        yield f"EARLIER   runs in the same logs: {', '.join(found.facts.earlier_runs)}"
    for number, verdict in enumerate(found.alternatives if every else (), 2):
        yield ""
        yield f"{number}. {verdict.confidence:.0%}"
        yield from verdict.lines()


_SHOWN = 3
_QUOTED_CHARS = 90


def ranking_lines(ranking: "Ranking", *, language: str = "") -> Iterator[str]:
    """The hypotheses with what speaks for them, and the questions that would tell them apart, for people."""
    from unisono.text import one_line

    for number, one in enumerate(ranking.hypotheses, 1):
        seen = dict.fromkeys(
            f'{item.where} "{one_line(item.text, limit=_QUOTED_CHARS)}"' for item in one.because
        )
        yield f"  {number}  {one.cause:<26} {one.likelihood:<9} {'; '.join(list(seen)[:_SHOWN]) or 'it is frequent'}"
        for item in one.against[:1]:
            yield f'     against: {item.where} "{one_line(item.text, limit=_QUOTED_CHARS)}"'
        if one.check:
            yield f"     check: {'; '.join(one.check[:2])}"
        if one.fix:
            yield f"     if this: {one.fix[0]}"
        if one.fix_here:
            yield f"     with unisono: {one.fix_here[0]}"
    if ranking.unlikely:
        yield f"  unlikely: {'; '.join(f'{cause} ({why})' for cause, why in ranking.unlikely)}"
    if ranking.ruled_out:
        yield f"  ruled out: {', '.join(ranking.ruled_out)} (no such line in a complete log)"
    for number, question in enumerate(ranking.questions):
        yield f"{'ASK' if not number else '':<10}{question.zh if language == 'zh' else question.en}"


def _ask(found: "Diagnosis") -> None:
    """Asks one question at a time, and ranks the causes again after each answer."""
    from unisono.diagnose.judge import with_answer
    from unisono.diagnose.lines import redacted
    from unisono.diagnose.report_terms import Feature
    from unisono.errors import UsageError

    printer = output()
    if not sys.stdin.isatty() or printer.json:
        raise UsageError.of(
            "--ask needs a terminal on stdin",
            where="--ask",
            fix="without it, the questions are printed after the hypotheses",
        )
    answered = set[str]()
    while questions := [one for one in found.ranking.questions if one.feature not in answered]:
        question = questions[0]
        answered.add(question.feature)
        answer = _answer(question.zh if found.language == "zh" else question.en)
        if answer == "stop":
            return
        if answer in ("yes", "no"):
            name = question.feature if answer == "yes" else f"not:{question.feature}"
            found = with_answer(found, Feature(name, "answer", f"{question.en} {answer}", "statement"))
            for line in ranking_lines(replace(found.ranking, questions=()), language=found.language):
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


def _emit(found: "Diagnosis", *, every: bool, timeline: bool) -> None:
    from unisono.diagnose.lines import redacted_json

    body = found.verdict.to_json()
    body["chain"] = [link.model_dump() for link in found.chain]
    body["missing"] = list(found.missing)
    body["hypotheses"] = [one.to_json() for one in found.ranking.hypotheses]
    body["questions"] = [one.zh if found.language == "zh" else one.en for one in found.ranking.questions]
    body["ruled_out"] = list(found.ranking.ruled_out)
    body["earlier_runs"] = list(found.facts.earlier_runs)
    if every:
        body["alternatives"] = [verdict.to_json() for verdict in found.alternatives]
    if timeline:
        body["timeline"] = _drawn(found)
    output().emit(redacted_json(body))


def _drawn(found: "Diagnosis") -> list[str]:
    """The timeline in the width and colours of the terminal; plain without a terminal."""
    from unisono.diagnose.timeline import draw
    from unisono.facts import read_environment

    seen = sys.stdout.isatty() and not output().json
    width = terminal_width(sys.stdout) if seen else 0
    first = (
        found.verdict.evidence[0].where if found.verdict.severity != "none" and found.verdict.evidence else ""
    )
    return draw(
        found.facts,
        first=first,
        ranks=found.verdict.ranks,
        width=width or _WIDTH,
        colour=seen and read_environment().colour,
    )


def logs(
    run: Annotated[Path, typer.Argument(help="a run's directory", show_default=False)],
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.", show_default=False)] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep showing new lines until the run has ended.")
    ] = False,
) -> None:
    """Shows the output and events of all ranks and the verdicts, labelled, merged by the head's clock."""
    from unisono.rundir.merged_logs import followed_logs, merged_logs
    from unisono.text import plain

    printer = output()
    for line in (followed_logs if follow else merged_logs)(
        run, on_skip=lambda text: printer.warn(plain(text))
    ):
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
        printer.result(f"{clock} [{plain(line.label)}] {plain(line.text)}")
