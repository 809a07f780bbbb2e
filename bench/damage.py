"""Damages real checkpoints of two ranks at random, and starts on them: is every damage found, named, and never read?

    python bench/damage.py                    100 damages; writes bench/results/damage.json
    python bench/damage.py --damages 1000 --starts 0

Each is one of: a flipped bit, a zeroed page, a truncation, a missing file, the file of another step or run, a manifest without files, a
half-deleted directory; in the manifest, in state.json, or in a rank's tensors. All of them are judged as a start judges them, by
CheckpointStore; some of them also by the whole command, `unisono train`, which must name the file and go on from the checkpoint before.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.damage.damages import (  # noqa: E402 - the tests are found through the line above
    OF_A_DIRECTORY,
    OF_A_FILE,
    Injected,
    Specimen,
    another_run,
    damage,
    files_of,
    is_named,
    kind_of_file,
    look,
    names_its_tensors,
)
from tests.nodes.ground import Loopback  # noqa: E402
from tests.nodes.harness import Job  # noqa: E402
from unisono.checkpoint.signing import user_key  # noqa: E402

STEPS = 4


def train(folder: Path, *, model: str, data: str) -> Job:
    """The run whose checkpoints are damaged."""
    job = Job(Loopback(), folder, model=Path(model), rows=Path(data), caches=folder / "caches", nodes=1)
    job.config(
        duration=f"{STEPS} steps", checkpoint={"every": "1 steps", "keep": 3}, parallel={"strategy": "fsdp"}, adapter=None,
        optim={"lr": 1e-3},
    )  # fmt: skip
    front = job.start(0, "--nproc", "2", topology=False)
    assert front.wait() == 0, front.text()
    return job


def injure(specimen: Specimen, root: Path, chance: random.Random) -> Injected:
    """Damages a random file of the newest checkpoint; gives how."""
    path = max(root.glob("step-*"))
    how = chance.choice([*OF_A_FILE, *OF_A_DIRECTORY])
    return damage(specimen, path, chance.choice(files_of(path)), how, chance)


def judge(specimen: Specimen, root: Path, injected: Injected, counts: Counter[str]) -> None:
    """Counts what a start would make of it."""
    found = look(specimen, root)
    wanted = sorted(path.name for path in root.glob("step-*"))[-2]
    counts["damages"] += 1
    counts["named_by_file"] += is_named(injected, found)
    counts["named_by_tensor"] += bool(injected.tensors) and names_its_tensors(injected, found)
    counts["of_tensors"] += bool(injected.tensors)
    counts["last_intact_used"] += found.used == wanted
    counts["silently_loaded"] += found.used == injected.path.name or not found.is_as_written


def start(job: Job, injected: Injected, counts: Counter[str]) -> None:
    """Starts the damaged run by the command, for a step more."""
    front = job.start(
        0, "--nproc", "2", "--resume", f"duration={STEPS + 1} steps", topology=False, json=False
    )
    code = front.wait()
    resumed = job.read("plan.json")["resume"]
    lines = [line for line in front.text().splitlines() if f"{injected.path.name}: " in line]
    counts["starts"] += 1
    counts["starts_named"] += any(file in line for line in lines for file in injected.files)
    counts["starts_from_the_last_intact"] += code == 0 and resumed["step"] == STEPS - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--starts", type=int, default=10, help="how many of them by the whole command, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--data", default=str(ROOT / "examples" / "data" / "dev.jsonl"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "damage.json")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    began = time.monotonic()
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    files: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = train(folder, model=arguments.model, data=arguments.data)
        root = job.out / "checkpoints"
        key = user_key(folder / "caches" / "place0" / "settings" / "unisono")
        other = another_run(root, folder / "other", key, chance)
        whole = shutil.copytree(job.out, folder / "whole")
        specimen = Specimen(whole / "checkpoints", other, key, job.read("plan.json")["run_id"])
        for number in range(arguments.damages):
            shutil.rmtree(job.out)
            shutil.copytree(whole, job.out)
            injected = injure(specimen, root, chance)
            kinds[injected.how] += 1
            files[kind_of_file(injected.files[0])] += 1
            judge(specimen, root, injected, counts)
            if number < arguments.starts:
                start(job, injected, counts)
            print(
                f"{number + 1} of {arguments.damages}: {injected.how} of {injected.files[0]}", file=sys.stderr
            )
        job.close()
    result: dict[str, Any] = {
        "schema": 1, "seed": arguments.seed, "model": arguments.model,
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}", "python": platform.python_version(),
        **dict(counts), "silently_loaded": counts["silently_loaded"], "kinds": dict(sorted(kinds.items())),
        "files": dict(sorted(files.items())), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    good = counts["named_by_file"] == counts["last_intact_used"] == counts["damages"]
    good = good and counts["starts_named"] == counts["starts_from_the_last_intact"] == counts["starts"]
    return (
        0
        if good and not counts["silently_loaded"] and counts["named_by_tensor"] == counts["of_tensors"]
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
