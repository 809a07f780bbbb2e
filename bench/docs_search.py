"""How often the documentation site's own search finds the page of a cause, in the first three
results, for a pasted line of a log.

make docs; python bench/docs_search.py [--site site]

The lines: tests/docs/search_lines.jsonl, and, since pages and search were made with a look at
those, the decisive lines of tests/guard/diagnosis/cases, too.
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST = 3
SETS = ("made", "written", "kept_away", "tools_kept", "tools_read", "tools_after")


def main() -> None:
    """Measures, prints, and keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    site = parser.parse_args().site
    sets = {"tests/docs/search_lines.jsonl": list(kept_lines())}
    for name in SETS:
        sets[f"tests/guard/diagnosis/cases/{name}.jsonl"] = list(case_lines(name))
    result: dict[str, Any] = {
        "schema": 1,
        "command": "make docs; python bench/docs_search.py",
        "machine": f"{platform.system()} {platform.machine()}",
        "results_that_count": FIRST,
        "sets": {},
    }
    for name, rows in sets.items():
        found = [
            bool(set(row["causes"]) & set(first)) for row, first in zip(rows, ask(site, rows), strict=True)
        ]
        result["sets"][name] = {
            "lines": len(rows),
            "found": sum(found),
            "rate": round(sum(found) / len(rows), 3),
        }
    print(json.dumps(result, indent=2))
    (ROOT / "bench" / "results" / "docs_search.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def kept_lines() -> Iterator[dict[str, Any]]:
    """The lines of the test, each with the causes that are right."""
    for text in (ROOT / "tests" / "docs" / "search_lines.jsonl").read_text("utf-8").splitlines():
        yield json.loads(text)


def case_lines(name: str) -> Iterator[dict[str, Any]]:
    """The decisive line of each case of a file that says which one it is."""
    for text in (
        (ROOT / "tests" / "guard" / "diagnosis" / "cases" / f"{name}.jsonl").read_text("utf-8").splitlines()
    ):
        case = json.loads(text)
        decisive = case["evidence_substring"] or ""
        lines = [line for log in case["files"].values() for line in log.splitlines() if decisive in line]
        if decisive and lines and case["class"] != "healthy":
            yield {"causes": [case["class"], *case["also_accept"]], "line": lines[0].strip()}


def ask(site: Path, rows: list[dict[str, Any]], *, whole: bool = False) -> list[list[str]]:
    """For each line, the names of the first pages that the site's search finds; `whole` with their
    folders.
    """
    done = subprocess.run(
        ["node", str(ROOT / "tests" / "docs" / "search.js"), str(site)],
        input=json.dumps([row["line"] for row in rows]), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found = [[page.removesuffix(".html") for page in pages[:FIRST]] for pages in json.loads(done.stdout)]
    return found if whole else [[Path(page).name for page in pages] for pages in found]


if __name__ == "__main__":
    main()
