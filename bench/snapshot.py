"""What it costs to keep each step of an adapter in memory: seconds a step, as a share of the
step.

    python bench/snapshot.py [--steps 13] [--batch 8]
    python bench/snapshot.py --kills 3

Runs `unisono train` as a user does, on the random model of 135 M parameters and the rows of
bench/workload.py, with LoRA of rank 16: one rank, two replicas, and two shards (FSDP2), each of
which keeps its half and then waits until the other has kept its own. The figures are the worker's
own, by which it decides (medians of ten steps, the first left out): for how long a step waits for
it, that wait included. `load_average` is that at the end of the job: what is much above the number
of ranks is other work, which the wait for another rank feels most. With `--kills` nothing but
deaths is measured: two ranks of `builtin:tiny`, steps of some tens of milliseconds, one of them
killed with SIGKILL at a moment after step 30 that is drawn, `--kills` times with an adapter of rank
16 and as often with one of rank 128, which costs more. `lost` counts the steps that rank 0 had
shown and the checkpoint of the rescue does not have; `promised` is what the first screen says,
`kept_every` what plan.json has by then. `apart` takes the same pass apart in a process of its own,
on tensors of the same sizes: the copy alone, and with the digest; best of many, so that other work
on the machine counts less. Results go to bench/results/snapshot.json, those of deaths to
snapshot_deaths.json.
"""

import argparse
import json
import mmap
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from workload import make  # type: ignore[import-not-found]  # beside this script

from unisono.base.messages import read_message

WAYS = {"one rank": ("auto", 1), "two replicas": ("ddp", 2), "two shards": ("fsdp", 2)}


def job(work: Path, way: str, *, steps: int, batch: int) -> list[dict[str, Any]]:
    """One job; gives what each rank that keeps its steps has measured."""
    strategy, nproc = WAYS[way]
    run = work / way.replace(" ", "-")
    config = work / "config.yaml"
    config.write_text(
        f"model: {{path: {work / 'm135'}, dtype: float32}}\nadapter: {{rank: 16, alpha: 32}}\nparallel:"
        f" {{strategy: {strategy}}}\ndevice: cpu\ndata: {{train: {work / 'alpaca.jsonl'}, max_length: 512,"
        f" too_long: cut, packing: false}}\nduration: {steps} steps\nbatch: {{global: {batch}, micro:"
        f" 2}}\ncheckpoint: {{every: 100000 steps}}\noutput_dir: {run}\n"
    )
    command = [
        sys.executable,
        "-m",
        "unisono",
        "train",
        str(config),
        "--quiet",
        "--fresh",
        "--no-first-checkpoint",
    ]
    command += ["--nproc", str(nproc)] if nproc > 1 else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = []
    for rank in range(nproc):
        lines = map(json.loads, (run / "events" / f"rank-{rank:05d}.jsonl").read_text().splitlines())
        (kept,) = [line for line in lines if line["kind"] == "kept"]
        figures = {name: round(kept[name], 6) for name in ("cost_s", "step_time_s")} | {
            "kept_every": kept["every"]
        }
        share = round(kept["cost_s"] / kept["step_time_s"], 6)
        found.append(
            {"way": way, "rank": rank, **figures, "share": share, "memory_bytes": kept["bytes"],
             "load_average": round(os.getloadavg()[0], 2)}
        )  # fmt: skip
    return found


_LOST = re.compile(
    r"step (\d+) was saved from memory as checkpoint \S+; (?:nothing is lost|the (\d+) after it are lost)"
)
_PROMISED = re.compile(r"a rank's death costs [^\n]*")


def death(work: Path, number: int, *, rank: int = 16) -> dict[str, Any]:
    """One run of two ranks with an adapter of this rank, of which one is killed; gives what was
    lost.
    """
    run = work / f"death-{rank}-{number}"
    config = work / "tiny.yaml"
    config.write_text(
        f"model: builtin:tiny\nadapter: {{rank: {rank}}}\ndevice: cpu\ndata: {{train:"
        f" {Path(__file__).parents[1] / 'examples' / 'data' / 'train.jsonl'}, max_length: 64}}\nduration:"
        " 2000 steps\nbatch: {global: 2}\ncheckpoint: {every: 10000 steps}\nrestarts: 0\noutput_dir:"
        f" {run}\n"
    )
    command = [sys.executable, "-m", "unisono", "train", str(config), "--nproc", "2", "--no-first-checkpoint"]
    front = subprocess.Popen(
        command,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    chance = random.Random(number)
    step = 30 + chance.randrange(40)
    while _last_step(run) < step and front.poll() is None:
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.1))
    kept = json.loads((run / "plan.json").read_text())["kept_every"]
    ranks = [
        child
        for child in psutil.Process(front.pid).children(recursive=True)
        if "unisono.worker" in child.cmdline()
    ]
    chance.choice(ranks).kill()
    _, said = front.communicate(timeout=300)
    found, promised = _LOST.search(said), _PROMISED.search(said)
    messages = [
        read_message(line)  # None for the last one of the killed rank, which may be torn
        for file in (run / "events").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    measured = max(
        (message for message in messages if message is not None and message["kind"] == "kept"),
        key=lambda message: message["cost_s"] / message["step_time_s"],  # that of the slowest rank decides
    )
    return {
        "adapter_rank": rank, "cost_s": round(measured["cost_s"], 6), "step_time_s": round(measured["step_time_s"], 6),
        "share": round(measured["cost_s"] / measured["step_time_s"], 6), "kept_every": kept, "promised": promised[0] if promised else None,
        "kept_step": int(found[1]) if found else None, "lost": int(found[2] or 0) if found else None,
        "load_average": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def _last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def apart(sizes: list[int], *, rounds: int) -> dict[str, float]:
    """Best times in seconds of one pass over float32 tensors of these numbers of elements: copied,
    and copied and digested.
    """
    import torch
    import xxhash

    torch.set_num_threads(1)
    sources = [torch.randn(size) for size in sizes]
    whole = torch.frombuffer(memoryview(mmap.mmap(-1, 4 * sum(sizes))), dtype=torch.float32)
    targets = list(whole.split(sizes))
    content = memoryview(whole.view(torch.uint8).numpy())
    found = {"copy_s": float("inf"), "copy_and_digest_s": float("inf")}
    for _ in range(rounds):
        began = time.perf_counter()
        torch._foreach_copy_(targets, sources)
        found["copy_s"] = min(found["copy_s"], time.perf_counter() - began)
        began, at, block = time.perf_counter(), 0, 0
        digest = xxhash.xxh3_128()
        for number in range(len(sizes)):
            if 4 * sum(sizes[block : number + 1]) < 1 << 19 and number + 1 < len(sizes):
                continue
            torch._foreach_copy_(targets[block : number + 1], sources[block : number + 1])
            end = at + 4 * sum(sizes[block : number + 1])
            digest.update(content[at:end])
            at, block = end, number + 1
        found["copy_and_digest_s"] = min(found["copy_and_digest_s"], time.perf_counter() - began)
    return {name: round(seconds, 5) for name, seconds in found.items()}


def main() -> None:
    """All ways, and the pass taken apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument(
        "--kills",
        type=int,
        default=0,
        help="only runs of two ranks of which one is killed, so many with each adapter",
    )
    args = parser.parse_args()
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    if args.kills:
        with tempfile.TemporaryDirectory() as folder:
            deaths = [
                death(Path(folder), number, rank=rank) for rank in (16, 128) for number in range(args.kills)
            ]
        command = f"python bench/snapshot.py --kills {args.kills}"
        keep("snapshot_deaths.json", {"schema": 1, "command": command, "machine": machine, "deaths": deaths})
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make(work, rows=400)
        found = [line for way in WAYS for line in job(work, way, steps=args.steps, batch=args.batch)]
    # A and B of q, k, v, o, gate, up, down in 30 layers; each with two moments.
    pairs = [(576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576)]
    sizes = [16 * n for pair in pairs for n in pair] * 30 * 3
    result = {
        "schema": 1, "command": f"python bench/snapshot.py --steps {args.steps} --batch {args.batch}",
        "machine": machine,
        "adapter": {"kind": "lora", "rank": 16, "parameters": sum(sizes) // 3, "state_bytes": 4 * sum(sizes)},
        "found": found, "apart": apart(sizes, rounds=30),
    }  # fmt: skip
    keep("snapshot.json", result)


def keep(name: str, result: dict[str, Any]) -> None:
    """Shows a result, and writes it beside the others."""
    print(json.dumps(result, indent=1))
    (Path(__file__).parent / "results" / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
