"""verified.json: when each checkpoint was last read through, and what came of it. For `checkpoint ls`; nothing trusts it."""

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import Manifest
from unisono.files import read_json, write_json

VERIFIED = "verified.json"


@dataclass(frozen=True, slots=True)
class Verified:
    """A checkpoint was read through: when (UTC, ISO 8601), and whether it was intact."""

    at: str
    intact: bool


def note_verified(root: Path, manifests: dict[str, Manifest | None], *, intact: dict[str, bool]) -> None:
    """Writes down that the checkpoints were read through now.

    Args:
        root: the directory of checkpoints.
        manifests: by the checkpoint's name; None where it cannot be read.
        intact: by the checkpoint's name.
    """
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    entries = _entries(root) | {
        name: {"checksum": manifest.checksum if manifest else None, "at": now, "intact": intact[name]}
        for name, manifest in manifests.items()
    }
    there = {name: entry for name, entry in entries.items() if (root / name).is_dir()}
    with contextlib.suppress(OSError):  # somebody else's run, or a full disk: the finding itself was told
        write_json(root / VERIFIED, {"schema": 1, "verified": there}, mode=0o600)


def last_verified(root: Path, name: str, manifest: Manifest | None) -> Verified | None:
    """When the checkpoint was last read through, after it was written if never since; None if nobody knows."""
    entry = _entries(root).get(name)
    if isinstance(entry, dict) and entry.get("checksum") == (manifest.checksum if manifest else None):
        return Verified(str(entry.get("at")), bool(entry.get("intact")))
    return Verified(manifest.created, intact=True) if manifest else None


def _entries(root: Path) -> dict[str, Any]:
    try:
        value = read_json(root / VERIFIED)
    except (OSError, ValueError):
        return {}
    entries = value.get("verified") if isinstance(value, dict) and value.get("schema") == 1 else None
    return entries if isinstance(entries, dict) else {}
