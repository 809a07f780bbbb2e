"""Causes each fault for real, and measures how long it takes until every node says the same words
about it.

    python bench/faults.py                       all faults once; writes bench/results/faults.json
    python bench/faults.py --times 3 -k network  some of them, three times

The faults are those of tests/jobs/nodes and tests/jobs/nproc that carry the marker `fault`; a row is only
written where the test holds. Seconds are counted from the start of the last front (Python's own
start is in them), or, in a run that trains, from the blow. `named_after_s` is what the verdict
itself says: from the moment at which all that it needs was there.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs.nodes.fronts import Named  # noqa: E402 - the tests are found through the line above
from tests.jobs.nodes.harness import Job  # noqa: E402


@dataclass(eq=False)  # pytest keeps its plugins by identity
class Table:
    """A plugin of pytest that turns tests into rows."""

    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Takes what a test's fronts have told, if the test holds."""
        marker = item.get_closest_marker("fault")
        if call.when != "call" or marker is None:
            return
        if call.excinfo is not None:
            self.failed.append(item.nodeid)
            return
        jobs = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Job)]
        found = [front.named for job in jobs for front in job.fronts if front.named is not None]
        if found:
            self._add(_name(item, marker.args[0]), max(len(job.fronts) for job in jobs), found[-1])

    def _add(self, fault: str, nodes: int, found: Named) -> None:
        verdict = found.verdict
        who = [f"rank {rank}" for rank in verdict.ranks] + [f"host {host}" for host in verdict.hosts]
        row = self.rows.setdefault(
            fault,
            {
                "fault": fault, "fronts": nodes, "cause": verdict.cause, "severity": verdict.severity, "who": ", ".join(who) or "nobody is blamed",
                "summary": verdict.summary.replace(sys.executable, "python"), "seconds": [], "ended_s": [], "named_after_s": [],
            },
        )  # fmt: skip
        row["seconds"].append(round(found.seconds, 2))
        row["ended_s"].append(round(found.ended_s, 2))
        if verdict.named_after_s is not None:
            row["named_after_s"].append(round(verdict.named_after_s, 2))


def _name(item: pytest.Item, text: str) -> str:
    callspec = getattr(item, "callspec", None)
    return f"{text}: {callspec.id}" if callspec is not None and "{" not in text else text


def show(rows: list[dict[str, Any]]) -> str:
    """A table in Markdown."""
    lines = ["| fault | cause | named | seconds to the words everywhere |", "|---|---|---|---|"]
    for row in rows:
        cause = row["cause"] + ("" if row["severity"] == "fatal" else f" ({row['severity']})")
        lines.append(f"| {row['fault']} | {cause} | {row['who']} | {statistics.median(row['seconds']):.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("-k", dest="chosen", default="", help="as pytest's")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "faults.json")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    table = Table()
    words = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "fault",
        str(ROOT / "tests/jobs/nodes"),
        str(ROOT / "tests/jobs/nproc"),
    ]
    for _ in range(asked.times):
        pytest.main([*words, *(["-k", asked.chosen] if asked.chosen else [])], plugins=[table])
    rows = list(table.rows.values())
    body = {
        "what": "fault → cause → who → seconds until every node had said it", "times": asked.times,
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg()[0]},
        "failed": table.failed, "faults": rows,
    }  # fmt: skip
    asked.out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    print(show(rows))
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
