"""The command `unisono checkpoint verify`: reads checkpoints through, or repeats steps from one; and the rows that describe checkpoints."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.output import output

if TYPE_CHECKING:
    from unisono.checkpoint.model_manifest import ModelCheck
    from unisono.checkpoint.store import CheckpointStore
    from unisono.checkpoint.verify import Damage, Reading
    from unisono.errors import Problem
    from unisono.launch.replay import Replayed


def verify(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.", show_default=False)] = None,
    replay: Annotated[
        int | None,
        typer.Option(
            "--replay",
            min=1,
            max=1000,
            metavar="N",
            help="Also run N logged steps again, and compare the losses.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Read the checkpoints of a run, and its final adapter or model, completely, and report damage. The exit code is 7 if anything is damaged."""
    from unisono.errors import IntegrityError

    final = _check_final(run) if step is None else None
    readings = _read(run, step, may_be_none=final is not None)
    printer = output()
    if not printer.json:
        _print_readings(readings)
        _print_final(final)
    replayed = _replay(run, step, replay) if replay is not None else None
    problems = _problems(readings)
    if final is not None and not final.intact:
        problems += final.refusal(restore=_restore(run, readings)).problems
    if replayed is not None and not replayed.is_right:
        problems += replayed.error(str(run)).problems
    if printer.json:
        rows = [_row(reading) for reading in readings]
        more = {"replay": replayed.to_json()} if replayed is not None else {}
        printer.emit({"schema": 1, "checkpoints": rows, "final": _final_row(final), **more})
        raise typer.Exit(IntegrityError.exit_code if problems else 0)
    if replayed is not None and replayed.is_right:
        for line in replayed.lines():
            printer.result(line)
    if problems:
        raise IntegrityError(*problems)


def _check_final(run: Path) -> "ModelCheck | None":
    """Reads adapter/ or model/ of the run through; None without either."""
    from unisono.checkpoint.model_manifest import check_model
    from unisono.rundir import RunDir

    there = [place for place in (RunDir(run).adapter, RunDir(run).model) if place.is_dir()]
    return check_model(there[0]) if there else None


def _read(run: Path, step: int | None, *, may_be_none: bool) -> "list[Reading]":
    """Reads the checkpoint of a step, or all, and records the result."""
    from unisono.checkpoint.retention import record_verified
    from unisono.checkpoint.verify import read_through
    from unisono.errors import UsageError

    store, key = open_run(run)
    paths = [path for path in store.list() if step is None or path == store.path(step)]
    if not paths and not may_be_none:
        raise UsageError.of(
            "there is no checkpoint to verify" if step is None else f"there is no checkpoint of step {step}",
            where=str(store.root),
            fix=f"`unisono checkpoint ls {run}` lists the checkpoints that exist",
        )
    readings = [read_through(path, key=key) for path in paths]
    there = [
        reading for reading in readings if reading.path.exists()
    ]  # the run may have pruned one meanwhile
    record_verified(store.root, there)
    return there


def _replay(run: Path, step: int | None, steps: int) -> "Replayed":
    from unisono.cli.terminal import Progress
    from unisono.launch.replay import Replay
    from unisono.rundir import RunDir

    with Progress(output()) as progress:
        return Replay(RunDir(run), steps, step, progress.show).carry_out()


def _print_readings(readings: "list[Reading]") -> None:
    printer = output()
    for reading in readings:
        printer.result(f"{reading.path.name}  {'intact' if reading.intact else 'DAMAGED'}")
        for finding in reading.findings:
            if not finding.is_fatal:
                printer.result(f"               {finding}")


def _print_final(final: "ModelCheck | None") -> None:
    if final is None:
        return
    printer = output()
    state = (
        ("intact" if final.intact else "DAMAGED")
        if final.listed
        else "not verified: it was written without a list of digests"
    )
    printer.result(f"{final.path.name:<13}  {state}")
    for finding in final.findings:
        if not finding.is_fatal:
            printer.result(f"               {finding}")


def _final_row(final: "ModelCheck | None") -> dict[str, Any] | None:
    if final is None:
        return None
    return {
        "path": str(final.path),
        "listed": final.listed,
        "intact": final.intact if final.listed else None,
        "findings": [_finding(f) for f in final.findings],
    }


def _finding(finding: "Damage") -> dict[str, Any]:
    return {
        "file": finding.file,
        "what": finding.what,
        "kind": finding.kind,
        "tensors": list(finding.tensors),
    }


def _row(reading: "Reading") -> dict[str, Any]:
    return {
        "step": _step(reading.path),
        "path": str(reading.path),
        "intact": reading.intact,
        "foreign": reading.is_foreign,
        "findings": [_finding(f) for f in reading.findings],
    }


def _problems(readings: "list[Reading]") -> "list[Problem]":
    """All damage, each with its consequence for the run."""
    from unisono.errors import Problem

    good = [_step(reading.path) for reading in readings if reading.intact]
    if good:
        fix = f"nothing, if step {max(good)} is recent enough: the run resumes from it; otherwise restore the file from a copy"
    else:
        fix = "restore the file from a copy, or start from scratch with `unisono train … --fresh`"
    return [
        Problem(f"{reading.path.name}/{finding}", str(reading.path), "", fix)
        for reading in readings
        for finding in reading.findings
        if finding.is_fatal
    ]


def _restore(run: Path, readings: "list[Reading]") -> str:
    """How to restore a damaged final adapter or model."""
    good = [_step(reading.path) for reading in readings if reading.intact]
    if not good:
        return "copy the directory again"
    return f"`unisono export {run} OUT --step {max(good)}` writes the weights of that checkpoint"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def open_run(run: Path) -> "tuple[CheckpointStore, bytes]":
    """The run's checkpoints, and the user's key.

    Raises:
        UsageError: if it is not a run.
    """
    from unisono.checkpoint.manifest import user_key
    from unisono.checkpoint.store import CheckpointStore
    from unisono.errors import UsageError
    from unisono.facts import read_environment
    from unisono.rundir import RunDir

    files = RunDir(run)
    if not files.plan.exists() and not files.checkpoints.is_dir():
        raise UsageError.of(
            f"{run} is not a run",
            where="command line",
            why="there is no plan.json and no directory of checkpoints in it",
            fix="name the output_dir of a run, as in `unisono checkpoint ls runs/demo`",
        )
    key = user_key(read_environment().settings_dir)
    return CheckpointStore(files.checkpoints, key=key), key


def table(rows: list[dict[str, Any]], *, now: datetime | None = None) -> list[str]:
    """The rows in columns, under a line of titles.

    Args:
        rows: what row_of gave, with `best` and `for_ever`.
        now: the time of day, UTC.
    """
    from unisono.text import one_line, show_bytes

    now = now or datetime.now(UTC)
    cells = [("STEP", "SIZE", "AGE", "VERIFIED", "STATE", "KEPT", "HOST")]
    for row in rows:
        state = "intact" if row["intact"] else "DAMAGED"
        verified = _ago(row["verified_at"], now) if row["read_again"] else "when written"
        cells.append(
            (
                str(row["step"]),
                "?" if row["bytes"] is None else show_bytes(row["bytes"]),
                _age(row["created"], now),
                verified if row["verified_at"] else "?",
                "foreign" if row["foreign"] and row["intact"] else state,
                _kept(row),
                one_line(row["holder"] or "?", limit=60),
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _kept(row: dict[str, Any]) -> str:
    marks = [("best", row["best"]), ("permanent", row["for_ever"])]
    return ", ".join(name for name, is_so in marks if is_so)


def _ago(moment: str | None, now: datetime) -> str:
    return f"{_age(moment, now)} ago"


def _age(moment: str | None, now: datetime) -> str:
    """The time since an ISO time, roughly: `3 days`, `2 h 05 min`."""
    from unisono.text import show_seconds

    try:
        seconds = (now - datetime.fromisoformat(str(moment))).total_seconds()
    except (ValueError, TypeError):  # a damaged manifest, or a time without a zone
        return "?"
    days = int(seconds // 86_400)
    if days >= 2:
        return f"{days} days"
    return show_seconds(max(0.0, seconds)) if seconds < 10 else show_seconds(round(seconds))
