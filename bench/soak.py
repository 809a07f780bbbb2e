"""Healthy runs with long pauses on a busy machine: is anybody named, or ended, who only does what
healthy ranks do?

    python bench/soak.py --minutes 30            writes bench/results/soak.json as it goes; nobody may be named
    nohup python bench/soak.py --minutes 30 > /tmp/soak.log 2>&1 &

Runs of two ranks (replicas) and of three (sharded weights) come in turn, each for some minutes,
with pauses that are drawn anew: a slow first step (8 s) or a compiler's work in it (20 s),
evaluations of 20 s, saves of 15 s, garbage collections of up to 2 s, small hitches of up to 1.5 s;
of all ranks or of one. For half of the time, in turns, other processes want as many cores again as
there are. Counted are verdicts (the run was ended), names (a warning that says who stands still),
suspicions (a line that something is looked at), and stragglers: a rank that loses its core to
another process is slow in truth, so these are told apart.
"""

import argparse
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs.nodes.fronts import Front  # noqa: E402 - the tests are found through the line above
from tests.jobs.nodes.harness import Job  # noqa: E402
from tests.jobs.nodes.network_namespaces import Loopback  # noqa: E402

ROWS = ROOT / "examples" / "data" / "dev.jsonl"
LAYOUTS = (("ddp", 2), ("fsdp", 3))
FIRST_STEP_S, COMPILE_S, EVALUATION_S, SAVE_S, COLLECTION_S, HITCH_S = 8.0, 20.0, 20.0, 15.0, 2.0, 1.5
EVAL_EVERY, SAVE_EVERY, STEPS = 40, 30, 1_000_000
EVAL_ROWS, MICRO = 30, 1
BUSY_S = 20.0
PART_S = (150.0, 300.0)
STARTS_WITHIN_S = 240.0
_BURN = "while True: pass"


@dataclass
class Part:
    """One run of the soak.

    Attributes:
        layout: strategy and ranks.
        seconds: that it ran.
        steps: that it finished.
        pauses: seconds that were due in it, by kind.
        verdicts, names, suspicions, stragglers: what its front said.
        exit_code: 130, since it is interrupted at its end.
    """

    layout: str
    seconds: float = 0.0
    steps: int = 0
    exit_code: int = 0
    pauses: dict[str, int] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    suspicions: list[str] = field(default_factory=list)
    stragglers: list[str] = field(default_factory=list)


def draw_pauses(chance: random.Random, ranks: int) -> list[dict[str, Any]]:
    """The pauses of a run."""

    def whom() -> list[int]:
        return chance.choice([list(range(ranks)), [chance.randrange(ranks)]])

    def pause(how: str, seconds: float, *steps: int, ranks: list[int] | None = None) -> dict[str, Any]:
        return {"how": how, "seconds": round(seconds, 2), "steps": list(steps), "ranks": ranks or whom()}

    rounds = math.ceil(EVAL_ROWS / (MICRO * ranks))
    first = chance.choice([pause("sleep", FIRST_STEP_S, 1), pause("work", COMPILE_S, 1)])
    # Objects that a collection goes through are there from the start, as those of a data set are.
    found = [first, pause("collect", 0.1, 1, ranks=list(range(ranks)))]
    evaluations = [at for at in range(EVAL_EVERY, 40 * EVAL_EVERY, EVAL_EVERY) if chance.random() < 0.5]
    saves = [at for at in range(SAVE_EVERY, 40 * SAVE_EVERY, SAVE_EVERY) if chance.random() < 0.5]
    found += [pause("evaluate", EVALUATION_S / rounds, at) for at in evaluations]
    found += [pause("save", SAVE_S, at) for at in saves]
    for how, longest in (("collect", COLLECTION_S), ("sleep", HITCH_S)):
        found += [pause(how, chance.uniform(0.1, longest), chance.randrange(2, 1500)) for _ in range(60)]
    return found


def soak(folder: Path, strategy: str, ranks: int, *, seconds: float, chance: random.Random) -> Part:
    """One run of so many seconds after its first step."""
    part = Part(f"{strategy} {ranks}")
    folder.mkdir()
    job = Job(
        Loopback(), folder, model=Path("builtin:tiny"), rows=ROWS, caches=folder.parent / "caches", nodes=1
    )
    pauses = draw_pauses(chance, ranks)
    job.config(
        duration=f"{STEPS} steps", parallel={"strategy": strategy}, batch={"global": 2 * ranks, "micro": MICRO},
        data={"eval": EVAL_ROWS / 200}, eval={"every": f"{EVAL_EVERY} steps"}, checkpoint={"every": f"{SAVE_EVERY} steps", "keep": 1},
    )  # fmt: skip
    try:
        front = job.start(
            0, "--nproc", str(ranks), topology=False, json=True, answers={"faults": {"pause": pauses}}
        )
        began = time.monotonic()
        job.until(
            lambda: bool(front.messages("step")) or front.exit_code is not None,
            limit_s=STARTS_WITHIN_S,
            what="step 1",
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end and front.exit_code is None:
            time.sleep(0.5)
        part.seconds = time.monotonic() - began
        front.signal(signal.SIGINT)
        part.exit_code = front.wait(limit_s=STARTS_WITHIN_S)
        _count(part, front, pauses)
    finally:
        job.close()
    return part


def _count(part: Part, front: Front, pauses: list[dict[str, Any]]) -> None:
    part.steps = max((int(message["step"]) for message in front.messages("step")), default=0)
    for pause in pauses:
        due = sum(step <= part.steps for step in pause["steps"])
        part.pauses[pause["how"]] = part.pauses.get(pause["how"], 0) + due
    part.verdicts = [message["summary"] for message in front.messages("verdict")]
    part.verdicts += [restart["verdict"]["summary"] for restart in front.result["restarts"]]
    for message in front.messages("warning"):
        if "verdict" in message:
            told = part.stragglers if message["code"] == "straggler" else part.names
            told.append(message["text"])
    part.suspicions = [line.text for line in front.lines if "looking at it:" in line.text]


@contextmanager
def burners(count: int) -> Iterator[None]:
    """Processes that want a core each, in turn running and stopped for BUSY_S, for as long as the
    context lasts.
    """
    script = (
        "import os, signal, subprocess, sys, time\n"
        f"them = [subprocess.Popen([sys.executable, '-c', {_BURN!r}]) for _ in range({count})]\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
        "try:\n"
        "    while os.getppid() == int(sys.argv[1]):\n"
        f"        time.sleep({BUSY_S}); [one.send_signal(signal.SIGSTOP) for one in them]\n"
        f"        time.sleep({BUSY_S}); [one.send_signal(signal.SIGCONT) for one in them]\n"
        "finally:\n"
        "    [one.kill() for one in them]\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(os.getpid())])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def write(arguments: argparse.Namespace, parts: list[Part], seconds: float) -> dict[str, Any]:
    """Keeps what is known so far."""
    kinds = ("verdicts", "names", "suspicions", "stragglers")
    result = {
        "schema": 1, "what": "healthy runs with long pauses, on a machine that has twice as much to do as it has cores for half of the time",
        "command": f"python bench/soak.py --minutes {arguments.minutes:g} --seed {arguments.seed}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}", "load": os.getloadavg()[0],
        "minutes": round(seconds / 60, 1), "steps": sum(part.steps for part in parts),
        "pauses": {how: sum(part.pauses.get(how, 0) for part in parts) for how in sorted({how for part in parts for how in part.pauses})},
        **{kind: sum(len(getattr(part, kind)) for part in parts) for kind in kinds},
        "parts": [{**vars(part), "seconds": round(part.seconds, 1)} for part in parts],
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


def main() -> int:
    """Gives 1 if anybody was named or ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    began, parts, result = time.monotonic(), list[Part](), dict[str, Any]()
    until = began + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as name, burners(os.cpu_count() or 1):
        while time.monotonic() < until:
            strategy, ranks = LAYOUTS[len(parts) % len(LAYOUTS)]
            seconds = min(chance.uniform(*PART_S), max(60.0, until - time.monotonic()))
            parts.append(
                soak(Path(name) / f"part{len(parts)}", strategy, ranks, seconds=seconds, chance=chance)
            )
            result = write(arguments, parts, time.monotonic() - began)
            print(json.dumps(result["parts"][-1], ensure_ascii=False), flush=True)
    told = {
        name: result[name]
        for name in ("minutes", "steps", "pauses", "verdicts", "names", "suspicions", "stragglers")
    }
    print(json.dumps(told))
    return 1 if result["verdicts"] or result["names"] or any(part.exit_code != 130 for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
