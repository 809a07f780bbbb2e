"""The commands `unisono diagnose`: what ended a run, from its logs; and `unisono logs`: the logs of all ranks, merged by time."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.output import output, terminal_width

if TYPE_CHECKING:
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
) -> None:
    """Reads the logs of a failed run, of any tool, and reports the cause, the culprit, the evidence and the fix."""
    from unisono.diagnose.own_runs import diagnose_run, is_run, log_files

    root = Path(paths[0])
    if len(paths) == 1 and is_run(root):
        found = diagnose_run(root, lambda: _of_logs(log_files(root)))
    else:
        found = _of_logs(paths)
    _show(found, every=every, timeline=timeline)


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
    return diagnose_logs(read.scanned, read.recordings)


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
    yield from found.verdict.lines()
    for link in found.chain[1:]:
        yield f"THEN      {link.where}: {link.text}"
    if found.facts.earlier_runs:
        yield f"EARLIER   runs in the same logs: {', '.join(found.facts.earlier_runs)}"
    for number, verdict in enumerate(found.alternatives if every else (), 2):
        yield ""
        yield f"{number}. {verdict.confidence:.0%}"
        yield from verdict.lines()


def _emit(found: "Diagnosis", *, every: bool, timeline: bool) -> None:
    from unisono.diagnose.lines import redacted_json

    body = found.verdict.to_json()
    body["chain"] = [link.model_dump() for link in found.chain]
    body["missing"] = list(found.missing)
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
