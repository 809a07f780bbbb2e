"""The digest by which two configs are the same run (DESIGN A3)."""

import hashlib
import json
from typing import Any

from unisono.config.schema import RunConfig

# A run may be moved, prolonged, watched or restarted differently and is still the same run.
_NOT_THE_RUN = {"output_dir", "duration", "restarts", "grace", "reasons", "track", "parallel", "watch"}


def what_decides(config: RunConfig) -> dict[str, Any]:
    """The part of a config that decides what is learnt: all but output_dir, duration, restarts, grace, reasons, track, parallel and watch."""
    return config.model_dump(mode="json", by_alias=True, exclude=_NOT_THE_RUN)


def config_digest(config: RunConfig) -> str:
    """A hex digest of what decides."""
    return hashlib.sha256(json.dumps(what_decides(config), sort_keys=True).encode()).hexdigest()[:32]
