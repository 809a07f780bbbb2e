"""What `unisono checkpoint ls` knows of each checkpoint, as values and as a table."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.checkpoint.manifest import Manifest
    from unisono.checkpoint.store import CheckpointStore


def open_run(run: Path) -> "tuple[CheckpointStore, bytes]":
    """The run's checkpoints, and the user's key.

    Raises:
        UsageError: if it is no run.
    """
    from unisono.checkpoint.manifest import user_key
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


def row_of(path: Path, *, key: bytes) -> dict[str, Any]:
    """A checkpoint as DESIGN A1 lists it, and more: writers (hosts whose ranks wrote files of it), foreign, read_again (since it was written)."""
    from unisono.checkpoint.manifest import MANIFEST
    from unisono.checkpoint.verified import last_verified
    from unisono.checkpoint.verify import inspect

    manifest, findings = inspect(path, key=key, contents=False)
    verified = last_verified(path.parent, path.name, manifest)
    complete = not any(finding.is_fatal for finding in findings)
    return {
        "step": int(path.name.removeprefix("step-")), "path": str(path),
        "bytes": manifest.total_bytes + (path / MANIFEST).stat().st_size if manifest else None,
        "created": manifest.created if manifest else None, "verified_at": verified.at if verified else None,
        "intact": complete and (verified is None or verified.intact), "holder": manifest.holder if manifest else None,
        "foreign": any(finding.kind == "foreign" for finding in findings), "writers": _writers(manifest),
        "read_again": verified.read_again if verified else False,
    }  # fmt: skip


def table(rows: list[dict[str, Any]], *, now: datetime | None = None) -> list[str]:
    """The rows in columns, under a line of titles.

    Args:
        rows: what row_of gave, with `best` and `for_ever`.
        now: the time of day, UTC.
    """
    from unisono.text import one_line
    from unisono.units import show_bytes

    now = now or datetime.now(UTC)
    cells = [("STEP", "SIZE", "AGE", "VERIFIED", "STATE", "KEPT", "HOST")]
    for row in rows:
        state = "intact" if row["intact"] else "DAMAGED"
        verified = _ago(row["verified_at"], now) if row["read_again"] else "as it was written"
        cells.append((
            str(row["step"]), "?" if row["bytes"] is None else show_bytes(row["bytes"]), _age(row["created"], now),
            verified if row["verified_at"] else "?", "foreign" if row["foreign"] and row["intact"] else state,
            _kept(row), one_line(row["holder"] or "?", limit=60),
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _writers(manifest: "Manifest | None") -> list[str]:
    """The hosts that wrote files of it. Wherever that was: all of them are with its holder."""
    return sorted({entry.host or manifest.holder for entry in manifest.files.values()}) if manifest else []


def _kept(row: dict[str, Any]) -> str:
    marks = [("best", row["best"]), ("for ever", row["for_ever"])]
    return ", ".join(name for name, is_so in marks if is_so)


def _ago(moment: str | None, now: datetime) -> str:
    return f"{_age(moment, now)} ago"


def _age(moment: str | None, now: datetime) -> str:
    """The time since an ISO time, roughly: `3 days`, `2 h 05 min`."""
    from unisono.units import show_seconds

    try:
        seconds = (now - datetime.fromisoformat(str(moment))).total_seconds()
    except (ValueError, TypeError):  # of a manifest that is damaged, or a time without a zone
        return "?"
    days = int(seconds // 86_400)
    if days >= 2:
        return f"{days} days"
    return show_seconds(max(0.0, seconds)) if seconds < 10 else show_seconds(round(seconds))
