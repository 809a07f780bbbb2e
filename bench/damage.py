"""Damages real checkpoints at random, and starts on them: is every damage found, named, and never
read?

    python bench/damage.py                    100 damages; writes bench/results/damage.json
    python bench/damage.py --damages 1000 --starts 0

Each is one of: a flipped bit, a zeroed page, a truncation, a missing file, the file of another step
or run, a manifest without files, a half-deleted directory; in the manifest, in state.json, or in
tensors: by turns in a rank's shards, of all weights on two ranks, and in whole files, of an adapter
on one. All of them are judged as a start judges them, by CheckpointStore; some of them also by the
whole command, `unisono train`, which must name the file and go on from the checkpoint before.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs.damage.damages import (  # noqa: E402 - the tests are found through the line above
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
from tests.jobs.nodes.harness import Job  # noqa: E402
from tests.jobs.nodes.network_namespaces import Loopback  # noqa: E402
from unisono.base.user_key import user_key  # noqa: E402

STEPS = 4
_RUNS: dict[int, dict[str, Any]] = {
    2: {"parallel": {"strategy": "fsdp"}, "adapter": None, "optim": {"lr": 1e-3}},
    1: {"adapter": {"rank": 4, "alpha": 8}},
}
"""By the number of ranks: shards, and whole files."""


@dataclass(frozen=True)
class Victim:
    """A run that has ended and is damaged again and again.

    Attributes:
        ranks: with which it was made.
        whole: a copy of its output_dir as it was.
        specimen: the checkpoints in that copy.
    """

    job: Job
    ranks: int
    whole: Path
    specimen: Specimen

    @property
    def root(self) -> Path:
        """Its checkpoints, which are damaged."""
        return self.job.out / "checkpoints"

    def heal(self) -> None:
        """Makes it as it was."""
        shutil.rmtree(self.job.out)
        shutil.copytree(self.whole, self.job.out)


def trained(folder: Path, ranks: int, chance: random.Random, *, model: str, data: str) -> Victim:
    """Makes the run whose checkpoints are damaged."""
    folder.mkdir()
    job = Job(Loopback(), folder, model=Path(model), rows=Path(data), caches=folder / "caches", nodes=1)
    job.config(duration=f"{STEPS} steps", checkpoint={"every": "1 steps", "keep": 3}, **_RUNS[ranks])
    front = job.start(0, "--nproc", str(ranks), topology=False)
    assert front.wait() == 0, front.text()
    key = user_key(folder / "caches" / "place0" / "settings" / "unisono")
    whole = shutil.copytree(job.out, folder / "whole")
    other = another_run(whole / "checkpoints", folder / "other", key, chance)
    return Victim(
        job, ranks, whole, Specimen(whole / "checkpoints", other, key, job.read("plan.json")["run_id"])
    )


def injure(victim: Victim, chance: random.Random) -> Injected:
    """Damages a random file of the newest checkpoint; gives how."""
    path = max(victim.root.glob("step-*"))
    how = chance.choice([*OF_A_FILE, *OF_A_DIRECTORY])
    return damage(victim.specimen, path, chance.choice(files_of(path)), how, chance)


def judge(victim: Victim, injected: Injected, counts: Counter[str]) -> None:
    """Counts what a start would make of it."""
    found = look(victim.specimen, victim.root)
    wanted = sorted(path.name for path in victim.root.glob("step-*"))[-2]
    counts["damages"] += 1
    counts["named_by_file"] += is_named(injected, found)
    counts["named_by_tensor"] += bool(injected.tensors) and names_its_tensors(injected, found)
    counts["of_tensors"] += bool(injected.tensors)
    counts["last_intact_used"] += found.used == wanted
    counts["silently_loaded"] += found.used == injected.path.name or not found.is_as_written


def start(victim: Victim, injected: Injected, counts: Counter[str]) -> None:
    """Starts the damaged run by the command, for a step more."""
    job, words = victim.job, ("--nproc", str(victim.ranks), "--resume", f"duration={STEPS + 1} steps")
    front = job.start(0, *words, topology=False, json=False)
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
        victims = [
            trained(Path(name) / f"ranks-{ranks}", ranks, chance, model=arguments.model, data=arguments.data)
            for ranks in _RUNS
        ]
        for number in range(arguments.damages):
            victim = victims[number % len(victims)]
            victim.heal()
            injected = injure(victim, chance)
            kinds[injected.how] += 1
            files[kind_of_file(injected.files[0])] += 1
            judge(victim, injected, counts)
            if number < arguments.starts:
                start(victim, injected, counts)
            print(
                f"{number + 1} of {arguments.damages}: {injected.how} of {injected.files[0]}", file=sys.stderr
            )
        for victim in victims:
            victim.job.close()
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
