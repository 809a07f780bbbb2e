"""`unisono checkpoint`: list, verify, export and prune the checkpoints of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.export import export
from unisono.cli.output import output

if TYPE_CHECKING:
    from unisono.checkpoint.store import CheckpointStore
    from unisono.checkpoint.trouble import Damage
    from unisono.rundir import RunDir

app = typer.Typer(help="Lists, verifies, exports and prunes the checkpoints of a run.", rich_markup_mode=None)
app.command("export", epilog="For example: unisono checkpoint export runs/demo out --step 200")(export)

Run = Annotated[Path, typer.Argument(help="a run's directory", show_default=False)]


@app.command("ls", epilog="For example: unisono checkpoint ls runs/demo")
def list_(run: Run) -> None:
    """Lists the checkpoints of a run, oldest first; reads manifests and sizes, not the tensors."""
    from unisono.checkpoint.manifest import MANIFEST
    from unisono.checkpoint.record import last_verified
    from unisono.checkpoint.verify import inspect

    store, key = _open(run)
    rows: list[dict[str, Any]] = []
    for path in store.list():
        manifest, findings = inspect(path, key=key, contents=False)
        verified = last_verified(store.root, path.name, manifest)
        complete = not any(finding.is_fatal for finding in findings)
        rows.append({
            "step": _step(path), "path": str(path),
            "bytes": manifest.total_bytes + (path / MANIFEST).stat().st_size if manifest else None,
            "created": manifest.created if manifest else None, "verified_at": verified.at if verified else None,
            "intact": complete and (verified is None or verified.intact), "holder": manifest.holder if manifest else None,
            "foreign": any(finding.kind == "foreign" for finding in findings),
        })  # fmt: skip
    speak = output()
    if speak.json:
        speak.emit({"schema": 1, "checkpoints": rows})
    elif not rows:
        speak.result(f"no checkpoints yet in {store.root}")
    else:
        for line in _table(rows):
            speak.result(line)


@app.command("verify", epilog="For example: unisono checkpoint verify runs/demo")
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.", show_default=False)] = None,
) -> None:
    """Reads the checkpoints of a run through, and says what is damaged. Ends with 7 if anything is."""
    from unisono.checkpoint.record import note_verified
    from unisono.checkpoint.verify import read_through
    from unisono.errors import UsageError

    store, key = _open(run)
    paths = [path for path in store.list() if step is None or path == store.path(step)]
    if not paths:
        raise UsageError.of(
            "there is no checkpoint to verify" if step is None else f"there is no checkpoint of step {step}",
            where=str(store.root), fix=f"`unisono checkpoint ls {run}` lists those that are there",
        )  # fmt: skip
    readings = [read_through(path, key=key) for path in paths]
    readings = [
        reading for reading in readings if reading.path.exists()
    ]  # its run may have pruned one meanwhile
    note_verified(store.root, readings)
    _tell_verified(
        {reading.path: reading.findings for reading in readings},
        {reading.path: reading.intact for reading in readings},
    )


def _tell_verified(findings: "dict[Path, list[Damage]]", intact: dict[Path, bool]) -> None:
    """Says what was found in each checkpoint; ends with 7 if one is damaged."""
    from unisono.errors import IntegrityError, Problem

    speak = output()
    if speak.json:
        rows = [
            {
                "step": _step(path), "path": str(path), "intact": intact[path],
                "foreign": any(finding.kind == "foreign" for finding in of_path),
                "findings": [{"file": f.file, "what": f.what, "kind": f.kind} for f in of_path],
            }
            for path, of_path in findings.items()
        ]  # fmt: skip
        speak.emit({"schema": 1, "checkpoints": rows})
        raise typer.Exit(0 if all(intact.values()) else IntegrityError.exit_code)
    for path, of_path in findings.items():
        speak.result(f"{path.name}  {'intact' if intact[path] else 'DAMAGED'}")
        for finding in of_path:
            if not finding.is_fatal:
                speak.result(f"               {finding}")
    problems = [
        Problem(f"{path.name}/{finding}", str(path), "", _what_then(intact))
        for path, of_path in findings.items() for finding in of_path if finding.is_fatal
    ]  # fmt: skip
    if problems:
        raise IntegrityError(*problems)


def _what_then(intact: dict[Path, bool]) -> str:
    good = [_step(path) for path, is_so in intact.items() if is_so]
    if good:
        return f"nothing, if step {max(good)} will do: the run goes on from it; else restore the file from a copy"
    return "restore the file from a copy, or start anew with `unisono train … --fresh`"


@app.command("prune", epilog="For example: unisono checkpoint prune runs/demo --keep 1")
def prune(
    run: Run,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many of the newest stay; without it: as the config says.", show_default=False
        ),
    ] = None,
) -> None:
    """Deletes old checkpoints and what dead writers left; the newest intact ones and the best stay."""
    from unisono.errors import UsageError
    from unisono.rundir import RunDir
    from unisono.rundir.lock import read_holder

    store, _ = _open(run)
    files = RunDir(run)
    holder = read_holder(files.lock)
    if holder is not None:
        raise UsageError.of(
            f"the run is going on: {holder}", where=str(files.lock), why="it prunes its checkpoints itself",
            fix="wait until it has ended",
        )  # fmt: skip
    section = _checkpoint_section(files)
    protect = _best_steps(store, files) if section.get("best") else set()
    swept = store.sweep()
    deleted = store.prune(keep if keep is not None else int(section.get("keep", 3)), protect=protect)
    kept = store.list()
    speak = output()
    if speak.json:
        speak.emit(
            {
                "schema": 1,
                "deleted": list(map(str, deleted)),
                "kept": list(map(str, kept)),
                "swept": list(map(str, swept)),
            }
        )
        return
    for path in deleted:
        speak.result(f"deleted {path.name}")
    for path in swept:
        speak.result(f"removed {path.name}, which a dead writer had left")
    speak.result(
        f"{len(kept)} checkpoint{'s' * (len(kept) != 1)} stay{'s' * (len(kept) == 1)} in {store.root}"
    )


def _open(run: Path) -> "tuple[CheckpointStore, bytes]":
    """The run's checkpoints, and the user's key."""
    from unisono.checkpoint.signing import user_key
    from unisono.checkpoint.store import CheckpointStore
    from unisono.errors import UsageError
    from unisono.facts import read_environment
    from unisono.rundir import RunDir

    files = RunDir(run)
    if not files.plan.exists() and not files.checkpoints.is_dir():
        raise UsageError.of(
            f"{run} is no run", where="command line", why="there is no plan.json and no directory of checkpoints in it",
            fix="name the output_dir of a run, as in `unisono checkpoint ls runs/demo`",
        )  # fmt: skip
    key = user_key(read_environment().settings_dir)
    return CheckpointStore(files.checkpoints, key=key), key


def _checkpoint_section(files: "RunDir") -> dict[str, Any]:
    """The section `checkpoint` of the run's config, or nothing where it cannot be read."""
    from unisono.files import read_json

    try:
        section = read_json(files.plan)["config"]["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return section if isinstance(section, dict) else {}


def _best_steps(store: "CheckpointStore", files: "RunDir") -> set[int]:
    """The step of the lowest eval_loss among those that have a checkpoint."""
    from unisono.rundir.metrics import iterate_metrics

    there = {_step(path) for path in store.list()}
    measured = [
        (line["eval_loss"], line["step"])
        for line in iterate_metrics(files.metrics)
        if isinstance(line.get("eval_loss"), float) and line["step"] in there
    ]
    return {min(measured)[1]} if measured else set()


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in columns."""
    from unisono.text import one_line
    from unisono.units import show_bytes

    cells = [("STEP", "SIZE", "CREATED (UTC)", "VERIFIED (UTC)", "STATE", "HOST")]
    for row in rows:
        state = "intact" if row["intact"] else "DAMAGED"
        cells.append((
            str(row["step"]), "?" if row["bytes"] is None else show_bytes(row["bytes"]), _clock(row["created"]),
            _clock(row["verified_at"]), "foreign" if row["foreign"] and row["intact"] else state,
            one_line(row["holder"] or "?", limit=60),
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _clock(moment: str | None) -> str:
    """`2026-01-31 12:34:56` of an ISO time."""
    return moment[:19].replace("T", " ") if moment else "?"
