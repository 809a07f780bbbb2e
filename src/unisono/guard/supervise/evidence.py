"""Evidence of a verdict: stacks, the flight recorder, the end of the log and the rows of a rank,
kept as files in the run's directory.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from unisono.base.causes import Evidence, Verdict
from unisono.base.errors import UnisonoError
from unisono.base.files import make_private_dir, open_plain, write_json, write_text
from unisono.base.text import plain, redact
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.task_process import run_request
from unisono.guard.supervise.task_requests import RowsRequest
from unisono.guard.watch import PHASES, phase_named
from unisono.guard.watch.rank_dumps import shortened
from unisono.guard.watch.views import Look

LOG_LINES = 20
MESSAGE_BYTES = 1 << 20
_STACKS_CHARS = 128 << 10
_FLIGHT_CHARS = 512 << 10
_LOG_BYTES = 16 << 10
_MOST_RANKS = 64
_ROWS_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RawEvidence:
    """The raw evidence of a rank, unparsed: people read it as files.

    Attributes:
        stacks: of all threads.
        flight: the flight recorder's dump, as JSON.
        log: the last lines of what it printed.
    """

    stacks: str = ""
    flight: str = ""
    log: str = ""

    def bounded(self) -> Self:
        """A copy in bounded sizes, without control characters and without anything that looks
        like a secret.
        """
        return type(self)(
            stacks=_safe(self.stacks)[:_STACKS_CHARS],
            flight=shortened(_safe(self.flight), limit=_FLIGHT_CHARS),
            log=_safe(self.log)[-_LOG_BYTES:],
        )

    def to_json(self) -> dict[str, str]:
        """A message for the head, at most 1 MiB; what is still too large is cut again."""
        bounded = self.bounded()
        value = {"stacks": bounded.stacks, "flight": bounded.flight, "log": bounded.log}
        if len(json.dumps(value)) > MESSAGE_BYTES:  # each character of some scripts takes six bytes
            value = {"stacks": bounded.stacks[: 64 << 10], "flight": "", "log": bounded.log}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads the output of to_json, and bounds it again.

        Raises:
            KeyError, TypeError: if the value is not such an object.
        """
        return cls(str(value["stacks"]), str(value["flight"]), str(value["log"])).bounded()


def end_of_log(path: Path) -> str:
    """The last lines of a rank's log; empty if there is no log."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-LOG_LINES:])


def keep_evidence(
    run: RunDir,
    verdict: Verdict,
    *,
    table: Path,
    raw: Mapping[int, RawEvidence],
    looks: Mapping[int, Look],
    programs: Programs | None = None,
) -> tuple[Evidence, ...]:
    """Writes the evidence that a verdict cites: stacks and flight recorder of all ranks, log and
    rows of the culprits.

    A second verdict of a run gets its own files. A full disk gives less evidence and no error. This
    takes up to 5 s, so the ranks are ended first.

    Args:
        verdict: whose `ranks` are the culprits.
        table: the plan's token table, `data.cache_dir`.
        raw: by rank.
        looks: by rank.
        programs: that run the task which looks up rows; tests pass different ones.
    """
    ranks = sorted(raw, key=lambda rank: (rank not in verdict.ranks, rank))[:_MOST_RANKS]
    files = _Files(run.evidence)
    for rank in ranks:
        files.text("stacks", rank, raw[rank].stacks)
        files.text("flight", rank, raw[rank].flight, suffix="json")
    for rank in verdict.ranks[:_MOST_RANKS]:
        files.text("log", rank, raw[rank].log if rank in raw else "")
        look = looks.get(rank)
        if look is not None and look.rows and _is_in_step(verdict.phase):
            rows = row_ids(table, look.rows, programs=programs)
            value = {
                "schema": 1,
                "rank": rank,
                "step": verdict.step,
                "sequences": list(look.rows),
                "rows": rows,
            }
            files.json("rows", rank, value)
    return tuple(files.cited(run.root))


def row_ids(table: Path, sequences: Sequence[int], *, programs: Programs | None = None) -> list[str]:
    """The sources of some training sequences, e.g. `train.jsonl:17`; empty if they cannot be found
    within 5 s.
    """
    request = RowsRequest(str(table), tuple(sequences))
    # The sequences' numbers are written in any case.
    with contextlib.suppress(UnisonoError, OSError):
        return run_request(request, programs=programs, silence_s=_ROWS_LIMIT_S)["rows"]
    return []


class _Files:
    """Files of one verdict; those of an earlier verdict keep their names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: list[tuple[Path, str]] = []
        with contextlib.suppress(OSError):
            make_private_dir(folder)
        self._number = 1
        while any(folder.glob(f"*-rank-?????{self._mark}.*")):
            self._number += 1

    @property
    def _mark(self) -> str:
        return f"-{self._number}" if self._number > 1 else ""

    def text(self, kind: str, rank: int, text: str, *, suffix: str = "txt") -> None:
        if text:
            path = self._path(kind, rank, suffix)
            with contextlib.suppress(OSError):
                write_text(path, text if text.endswith("\n") else text + "\n", mode=0o600)
                self._written.append((path, _CAPTIONS[kind].format(rank=rank)))

    def json(self, kind: str, rank: int, value: Mapping[str, object]) -> None:
        path = self._path(kind, rank, "json")
        with contextlib.suppress(OSError):
            write_json(path, value, mode=0o600)
            self._written.append((path, _CAPTIONS[kind].format(rank=rank)))

    def cited(self, root: Path) -> Iterator[Evidence]:
        for path, caption in self._written:
            yield Evidence(where=str(path.relative_to(root)), text=caption)

    def _path(self, kind: str, rank: int, suffix: str) -> Path:
        return self._folder / f"{kind}-rank-{rank:05d}{self._mark}.{suffix}"


_CAPTIONS = {
    "stacks": "the Python stacks of all threads of rank {rank}",
    "flight": "the last collectives of rank {rank}, by torch's flight recorder",
    "log": f"the last {LOG_LINES} lines that rank {{rank}} printed",
    "rows": "the rows that rank {rank} worked on",
}


def _is_in_step(phase: str | None) -> bool:
    """Whether a rank works on rows in this phase; in other phases its memory still holds those of
    its last step.
    """
    return phase is not None and PHASES[phase_named(phase)].in_step


def _safe(text: str) -> str:
    return redact(plain(text))
