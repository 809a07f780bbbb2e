"""Kills runs of one and of several ranks at random moments: does the end have the same bits as that
of an undisturbed run?

    python bench/resumes.py                 200 of each kind; more than an hour on two quiet cores; writes bench/results/resumes.json
    python bench/resumes.py --each 20 -k fsdp
    python bench/resumes.py --seed 21 --out bench/results/resumes-seed21.json     other kills than those before
    python bench/resumes.py --show          the table of all results there are

SIGKILL hits one rank, all ranks, the front, or, in a job of two nodes, the head's front: half of
the time inside a save, else anywhere in training or before it. After a rank's death the front goes
on by itself; after its own the same command is given again. Every loss and evaluation in
metrics.jsonl, the bytes of the final weights, and the rows that each step's forwards took, as the
ranks wrote them down, are compared with those of the undisturbed run. (The results of two nodes
with the seeds 0, 11 and 22 are older than the writing down of their rows.) The run is a tiny one,
and saves after every step, so that many saves are hit. Results are written as they come. Two nodes
are network namespaces where the user is root, else two names on loopback.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs.nodes.harness import Job  # noqa: E402
from tests.jobs.nodes.network_namespaces import Ground, Loopback, Namespaces, why_no_namespaces  # noqa: E402
from tests.jobs.resume.killed_runs import Layout, Struck, beat, draw_blows, mix, undisturbed  # noqa: E402

_MOMENTS = ("before step 1", "in training", "inside a save", "at the end")


class Bench:
    """Folders, nodes and runs."""

    def __init__(self, folder: Path, *, model: str, data: str, steps: int, seed: int) -> None:
        self._folder = folder
        self._model, self._data, self._steps = model, data, steps
        self._chance = random.Random(seed)
        self._jobs = 0
        self._nodes: Ground = Loopback() if why_no_namespaces() else Namespaces(2, folder)

    def job(self, nodes: int) -> Job:
        """A job in a folder of its own."""
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        folder.mkdir()
        ground = self._nodes if nodes > 1 else Loopback()
        caches = self._folder / "caches"
        return Job(ground, folder, model=Path(self._model), rows=Path(self._data), caches=caches, nodes=nodes)

    def kill(self, layout: Layout, each: dict[Any, int]) -> Iterator[Struck]:
        """All kills of a layout."""
        straight = self.job(layout.nodes)
        wanted = undisturbed(straight, layout, steps=self._steps)
        straight.close()
        blows = draw_blows(each, self._chance, start_s=wanted.start_s)
        yield from beat(lambda: self.job(layout.nodes), layout, blows, wanted, steps=self._steps)

    def close(self) -> None:
        """Leaves no namespace behind."""
        self._nodes.close()


def rows_of_table(struck: list[Struck]) -> list[dict[str, Any]]:
    """A row for each layout and kind."""
    groups: dict[tuple[str, str], list[Struck]] = {}
    for blow in struck:
        groups.setdefault((blow.layout, blow.kind), []).append(blow)
    return [
        {"layout": layout, "kind": kind, **figures(of_group)} for (layout, kind), of_group in groups.items()
    ]


def figures(struck: list[Struck]) -> dict[str, Any]:
    """What came of some kills together."""
    moments: Counter[str] = Counter(blow.moment for blow in struck)
    lost = [blow.steps_lost for blow in struck if blow.steps_lost is not None]
    return {
        "kills": len(struck),
        "moments": {moment: moments[moment] for moment in _MOMENTS},
        "survived": sum(blow.survived for blow in struck),
        "bit_equal": sum(blow.bit_equal for blow in struck),
        "steps_lost": {"min": min(lost), "median": statistics.median(lost), "max": max(lost)} if lost else None,
    }  # fmt: skip


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of several results as one; and one row for each kind, over all layouts."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in [row for result in results for row in result["rows"]]:
        groups.setdefault((row["layout"], row["kind"]), []).append(row)
    rows = [
        {"layout": layout, "kind": kind, **_sums(parts)} for (layout, kind), parts in sorted(groups.items())
    ]
    for kind in sorted({kind for _, kind in groups}):
        parts = [row for row in rows if row["kind"] == kind]
        rows.append({"layout": "all", "kind": kind, **_sums(parts)})
    return {"rows": rows, "all": _sums([result["all"] for result in results])}


def _sums(parts: list[dict[str, Any]]) -> dict[str, Any]:
    lost = [part["steps_lost"] for part in parts if part["steps_lost"]]
    return {
        **{name: sum(part[name] for part in parts) for name in ("kills", "survived", "bit_equal")},
        "moments": {moment: sum(part["moments"][moment] for part in parts) for moment in _MOMENTS},
        "steps_lost": (
            {"min": min(one["min"] for one in lost), "max": max(one["max"] for one in lost)} if lost else None
        ),
    }


def show(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        "| run | killed | kills | inside a save | survived | bit-equal | steps lost: least, most |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in [*result["rows"], {"layout": "all", "kind": "", **result["all"]}]:
        lost = row["steps_lost"]
        steps = f"{lost['min']}, {lost['max']}" if lost else ""
        saves = row["moments"]["inside a save"]
        lines.append(
            f"| {row['layout']} | {row['kind']} | {row['kills']} | {saves} | {row['survived']} |"
            f" {row['bit_equal']} | {steps} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=200, help="kills of each kind, over all layouts")
    parser.add_argument(
        "-k", default="", metavar="WORD", help="only layouts whose name has this word, as fsdp or lora"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--data", default=str(ROOT / "examples" / "data" / "dev.jsonl"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "resumes.json")
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the table of all results in the folder of --out, and do nothing",
    )
    arguments = parser.parse_args()
    if arguments.show:
        found = sorted(arguments.out.parent.glob("resumes*.json"))
        print(show(together([json.loads(path.read_text()) for path in found])))
        return 0
    began = time.monotonic()
    struck: list[Struck] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(
            Path(name), model=arguments.model, data=arguments.data, steps=arguments.steps, seed=arguments.seed
        )
        try:
            for layout, each in mix(arguments.each).items():
                if arguments.k in layout.name:
                    for blow in bench.kill(layout, each):
                        struck.append(blow)
                        write(arguments, struck, time.monotonic() - began)
        finally:
            bench.close()
    print(show(json.loads(arguments.out.read_text())))
    return 0 if struck and all(blow.survived and blow.bit_equal for blow in struck) else 1


def write(arguments: argparse.Namespace, struck: list[Struck], seconds: float) -> None:
    """Keeps what is known so far, and says it."""
    result = {
        "schema": 1, "seed": arguments.seed, "model": Path(arguments.model).name, "steps": arguments.steps,
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}", "python": platform.python_version(),
        "nodes": "loopback" if why_no_namespaces() else "network namespaces", "rows": rows_of_table(struck), "all": figures(struck),
        "seconds": round(seconds, 1),
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    every = result["all"]
    assert isinstance(every, dict)
    print(
        f"{len(struck)} kills, {every['bit_equal']} bit-equal; the last: {struck[-1]}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
