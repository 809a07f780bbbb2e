"""After a rank of this node was killed by SIGBUS: the file that was cut while ranks had it mapped into memory."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from unisono.causes import Evidence, find_cause
from unisono.files import open_plain, parse_json
from unisono.launch.outcome import Ending
from unisono.plan import RunPlan
from unisono.supervise.bounded_io import Hung, unless_stuck
from unisono.supervise.rank_supervisor import Attempt

_CAUSE = "storage_unfit"
_ARROW_END = b"ARROW1"
_MOST_HEADER_BYTES = 100 << 20


def with_cut_file(ending: Ending, attempt: Attempt, plan: RunPlan) -> Ending:
    """Names the storage where a file was cut; otherwise returns the ending unchanged. The kernel sends SIGBUS where a mapped page is gone."""
    culprit = attempt.decision.culprit if attempt.decision is not None else None
    known, verdict = find_cause(_CAUSE), ending.verdict
    if culprit is None or culprit.returncode != -signal.SIGBUS or verdict is None or known is None:
        return ending
    if plan.ranks[culprit.rank].node_rank != 0:
        return ending
    try:
        cut = unless_stuck(lambda: list(_cut_files(plan)))
    except (Hung, OSError):
        return ending
    if not cut:
        return ending
    path, why = cut[0]
    evidence = [Evidence(where=str(where), text=text) for where, text in cut]
    summary = f"{plan.ranks[culprit.rank].label} was killed by SIGBUS: {path} was cut while the ranks read it; {why}"
    fixes = (
        f"restore {path}, and keep other programs from writing to it while a run uses it",
        *known.remedy,
    )
    update = {"cause": _CAUSE, "summary": summary, "fix": fixes, "evidence": (*evidence, *verdict.evidence)}
    return replace(ending, verdict=verdict.model_copy(update=update), exit_code=known.exit_code)


def _cut_files(plan: RunPlan) -> Iterator[tuple[Path, str]]:
    """Files that ranks map, and what is missing of each that is shorter than it must be."""
    for path in sorted(Path(plan.model.directory).glob("*.safetensors")):
        least, size = _least_bytes(path), path.stat().st_size
        if size < least:
            yield path, f"it has {size:,} bytes, and its header requires {least:,}"
    for path in sorted(Path(plan.data.cache_dir).glob("*.arrow")):
        with open_plain(path) as file:
            file.seek(-min(len(_ARROW_END), os.fstat(file.fileno()).st_size), os.SEEK_END)
            if file.read() != _ARROW_END:
                yield path, f"it has {path.stat().st_size:,} bytes, and its end is missing"


def _least_bytes(path: Path) -> int:
    """The size of a safetensors file by its header."""
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER_BYTES:
            return 0
        try:
            header = parse_json(file.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):  # the header itself is cut
            return 8 + length
    return 8 + length + max(ends, default=0)
