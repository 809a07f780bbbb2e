"""How long a run stands still when a rank dies: seconds from the verdict to the first step after
it, with all that is between.

    python bench/restarts.py                 ten kills of each layout; a few minutes on two quiet cores; writes bench/results/restarts.json

A rank of a tiny run is killed by SIGKILL after some steps, again and again; the front ends the
others, finds the step to go on from, and starts all ranks anew. What that costs is what the run
itself writes down (`restarts` in result.json): it begins with the verdict and holds the end of the
other ranks, their start, the model, the meeting of the ranks, and one step. Each layout runs twice:
ranks forked from a process that has imported torch, as everywhere, and each a fresh interpreter, as
where nothing can be forked; most of the latter is imports.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs.nodes.harness import Job  # noqa: E402
from tests.jobs.nodes.network_namespaces import Loopback  # noqa: E402 - the tests are found through the line above
from tests.jobs.resume.killed_runs import Layout, last_step  # noqa: E402

_LAYOUTS = (Layout("ddp", 2, "lora"), Layout("ddp", 2, "full"), Layout("fsdp", 2, "full"))
_WAYS = ("exec", "fork")
_APART = 3  # steps between two kills


def restarts_of(
    job: Job, layout: Layout, kills: int, chance: random.Random, way: str
) -> list[dict[str, Any]]:
    """What a run that is killed so often has written down of its restarts."""
    layout.config(job, steps=_APART * (kills + 1))
    answers = {"exec": way == "exec"}
    (front,) = job.start_all("--nproc", str(layout.ranks), answers=answers, topology=False)
    for _ in range(kills):
        _wait_for(job, last_step(job) + _APART - 1)
        _, process = chance.choice(sorted(job.ranks().items()))
        process.kill()
    if (code := front.wait()) != 0:
        raise SystemExit(f"{layout.name} ended with {code}:\n{front.text()}")
    restarts: list[dict[str, Any]] = job.read("result.json")["restarts"]
    return restarts


def _wait_for(job: Job, step: int) -> None:
    job.until(lambda: last_step(job) >= step, what=f"step {step}")


def main() -> None:
    """Kills, and keeps the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="of each layout")
    arguments = parser.parse_args()
    medians: dict[tuple[str, str], float] = {}
    load, chance, rows = os.getloadavg()[0], random.Random(0), []
    with tempfile.TemporaryDirectory() as name:
        for number, (layout, way) in enumerate(product(_LAYOUTS, _WAYS)):
            (folder := Path(name) / f"job{number}").mkdir()
            job = Job(
                Loopback(), folder, model=Path("builtin:tiny"),
                rows=ROOT / "examples" / "data" / "dev.jsonl", caches=Path(name) / "caches", nodes=1,
            )  # fmt: skip
            try:
                seconds = [one["cost_s"] for one in restarts_of(job, layout, arguments.kills, chance, way)]
            finally:
                job.close()
            figures = {"least": min(seconds), "median": statistics.median(seconds), "most": max(seconds)}
            rows.append({"layout": layout.name, "started": way, "restarts": len(seconds), "cost_s": figures})
            medians[layout.name, way] = figures["median"]
            print(json.dumps(rows[-1]), flush=True)
    ratios = {
        layout.name: round(medians[layout.name, "fork"] / medians[layout.name, "exec"], 3)
        for layout in _LAYOUTS
    }
    print(json.dumps({"fork_to_exec": ratios}))
    result = {
        "schema": 2, "fork_to_exec": ratios, "command": f"python bench/restarts.py --kills {arguments.kills}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}", "load": load, "rows": rows,
    }  # fmt: skip
    path = Path(__file__).parent / "results" / "restarts.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
