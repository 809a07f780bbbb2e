"""Score `unisono diagnose` on a file of cases: `python tests/guard/diagnosis/scoring.py
tests/guard/diagnosis/cases/made.jsonl`.

A case is a line of JSON: `files` (name -> text) and what has to be said of them: `class` (or one of
`also_accept`), `culprit_rank` and `culprit_host` (exactly that one has to be named),
`fix_must_mention` (each item; `a|b` is either).
"""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unisono.guard.diagnosis.reading import diagnose_logs, find_sources, read_all

COMMAND = [sys.executable, "-m", "unisono", "--json", "diagnose"]
LIMIT_S = 60
Judge = Callable[[list[str]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Mark:
    """How one case went; None where the case does not ask."""

    case: str
    cause: str
    printed: str
    right: bool
    culprit: bool | None
    remedy: bool | None
    blamed_nobody: bool | None


def cases(file: Path) -> list[dict[str, Any]]:
    """The cases of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def by_command(paths: list[str]) -> dict[str, Any]:
    """The verdict as the command prints it; {} where it prints nothing that can be read."""
    done = subprocess.run([*COMMAND, *paths], capture_output=True, timeout=LIMIT_S, check=False)
    text = done.stdout.decode(errors="replace")
    try:
        printed = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]
    except ValueError:
        return {}
    return printed if isinstance(printed, dict) else {}


def in_process(paths: list[str]) -> dict[str, Any]:
    """The same verdict without a new process for each case."""
    read = read_all(find_sources(paths))
    return diagnose_logs(read.scanned, read.recordings).verdict.to_json()


def verdict(case: Mapping[str, Any], judge: Judge = in_process) -> dict[str, Any]:
    """What is said of a case's files."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in sorted(case["files"])]
        for path in paths:
            path.write_text(case["files"][path.name], encoding="utf-8", newline="")
        return judge([str(path) for path in paths])


def mark(case: Mapping[str, Any], printed: Mapping[str, Any]) -> Mark:
    """What is right in a verdict."""
    cause, ranks, hosts = str(printed.get("cause")), printed.get("ranks") or [], printed.get("hosts") or []
    rank, host = case["culprit_rank"], case["culprit_host"]
    named = None
    if rank is not None or host:
        named = (rank is None or ranks == [rank]) and (
            not host or (len(hosts) == 1 and (host in hosts[0] or hosts[0] in host))
        )
    fix = " ".join(map(str, printed.get("fix") or [])).lower()
    wanted = [[x.strip().lower() for x in item.split("|")] for item in case["fix_must_mention"]]
    nobody = not ranks if named is None and case["class"] in ("healthy", "undetermined") else None
    return Mark(
        case=case["id"],
        cause=case["class"],
        printed=cause,
        right=cause in (case["class"], *case["also_accept"]),
        culprit=named,
        remedy=all(any(x in fix for x in item) for item in wanted) if wanted else None,
        blamed_nobody=nobody,
    )


SURE = 0.8
"""A verdict with this much confidence or more is believed."""


def is_surely_wrong(case: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether it says with confidence another cause, or names somebody else; to name nobody is no
    wrong word.
    """
    if (said.get("confidence") or 0.0) < SURE:
        return False
    ranks, hosts = said.get("ranks") or [], said.get("hosts") or []
    rank, host = case["culprit_rank"], case["culprit_host"]
    other_rank = rank is not None and bool(ranks) and ranks != [rank]
    other_host = bool(host) and bool(hosts) and not any(host in one or one in host for one in hosts)
    return said.get("cause") not in (case["class"], *case["also_accept"]) or other_rank or other_host


def share(found: Iterator[bool | None]) -> float:
    """The part that is True of those that are asked; 1 where none is."""
    marks_found = [x for x in found if x is not None]
    return sum(marks_found) / len(marks_found) if marks_found else 1.0


@dataclasses.dataclass(frozen=True)
class Score:
    """How a file of cases went."""

    marks: tuple[Mark, ...]

    @property
    def cause(self) -> float:
        return share(m.right for m in self.marks)

    @property
    def culprit(self) -> float:
        return share(m.culprit for m in self.marks)

    @property
    def remedy(self) -> float:
        return share(m.remedy for m in self.marks)

    @property
    def false_alarms(self) -> list[str]:
        """Healthy runs that were called anything else."""
        return [m.case for m in self.marks if m.cause == "healthy" and not m.right]

    @property
    def missed(self) -> list[str]:
        """Failed runs that were called healthy."""
        return [m.case for m in self.marks if m.printed == "healthy" and not m.right]

    def wrong(self) -> list[str]:
        """A line for each case with something wrong in it."""
        rows = []
        for m in self.marks:
            off = [
                w
                for w, x in (
                    ("cause", m.right),
                    ("culprit", m.culprit),
                    ("remedy", m.remedy),
                    ("blames a rank", m.blamed_nobody),
                )
                if x is False
            ]
            if off:
                rows.append(f"{m.case}: want {m.cause}, said {m.printed} ({', '.join(off)})")
        return rows

    def by_class(self) -> dict[str, tuple[int, int]]:
        """How many of each class were right, and how many there are."""
        all_of = collections.Counter(m.cause for m in self.marks)
        right = collections.Counter(m.cause for m in self.marks if m.right)
        return {c: (right[c], n) for c, n in sorted(all_of.items())}


def score(file: Path) -> Score:
    """Run the command on each case of a file, one after another."""
    return Score(tuple(mark(c, verdict(c)) for c in cases(file)))


def main() -> None:
    found = score(Path(sys.argv[1]))
    print("\n".join(found.wrong()))
    print("\n".join(f"{c:<32}{a}/{n}" for c, (a, n) in found.by_class().items()))
    print(
        f"cases {len(found.marks)}  cause {found.cause:.3f}  culprit {found.culprit:.3f}  remedy {found.remedy:.3f}"
    )
    print(f"false alarms {found.false_alarms}  missed {found.missed}")


if __name__ == "__main__":
    main()
