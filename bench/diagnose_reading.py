"""What `unisono diagnose` says of cases that its rules have not been tried on: `python
bench/diagnose_reading.py CASES --out RESULT`.

A first reading is made once, before a rule is touched, and its result is kept: afterwards the cases
are known, and no measure any more.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.guard.diagnosis.scoring import Score, cases, is_surely_wrong, mark, verdict


def reading(file: Path) -> dict[str, Any]:
    """The figures of a file of cases."""
    said = [(case, verdict(case)) for case in cases(file)]
    score = Score(tuple(mark(case, answer) for case, answer in said))
    return {
        "schema": 1,
        "what": "unisono diagnose on cases that were written down before they were read",
        "file": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "cases": len(said),
        "by_tool": dict(sorted(collections.Counter(case["id"].split("-")[0] for case, _ in said).items())),
        "class": round(score.cause, 3),
        "culprit": round(score.culprit, 3),
        "culprits_asked": sum(one.culprit is not None for one in score.marks),
        "remedy": round(score.remedy, 3),
        "healthy": sum(one.cause == "healthy" for one in score.marks),
        "healthy_accused": score.false_alarms,
        "failed_called_healthy": score.missed,
        "confidently_wrong": [case["id"] for case, answer in said if is_surely_wrong(case, answer)],
        "wrong": score.wrong(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", help="add the reading to the file under this name, beside others")
    given = parser.parse_args()
    found = reading(given.cases)
    if given.name and given.out:
        others = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {}
        found = others | {given.name: found}
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
