"""What the guard costs inside a rank of somebody else's program: each hook, the threads, and a DDP
toy with the guard and without it in turn.

    python bench/guard_cost.py               about five minutes; writes bench/results/guard_cost.json after each pair
    python bench/guard_cost.py --pairs 2 --out /tmp/cost.json

    computed cost of a step = Σ over hooks (calls a step × cost of one) + CPU time of the threads, a
    second × step

All costs are CPU time, which a busy machine stretches less than the clock. The toy is torch's own
DDP on gloo, two ranks, with steps of about 5 ms; it is started with the injected environment and
without it, and nothing else differs. A step has one collective in C++, which no hook sees, and here
one all_reduce from Python beside it, one batch of a loader, and one optimizer step.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "src"))
WORLD, STEP_S, ALLOWED = 2, 0.005, 0.01
LONG_STEP_S, LONG_ALLOWED = 0.05, 0.001
ROUNDS, CALLS, MOVES_S = 20, 5000, 20.0
GUARD_THREADS = ("pulse", "unisono-sampling")
FIRST_COUNTED = 20


def rank_main(steps: int) -> None:
    """The toy: prints the CPU time of a step, and its median wall time, into a file."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(steps * 32, 256)), batch_size=32)
    walls, began_cpu, total = [], 0.0, torch.zeros(1)
    last = time.perf_counter()
    for number, (batch,) in enumerate(loader):
        if number == FIRST_COUNTED:
            began_cpu = time.process_time()
        loss = model(batch).pow(2).mean()
        loss.backward()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        walls.append(now - last)
        last = now
    cpu_s = (time.process_time() - began_cpu) / (steps - FIRST_COUNTED)
    if dist.get_rank() == 0:
        told = {"cpu_s": cpu_s, "wall_s": statistics.median(walls[FIRST_COUNTED:])}
        Path(os.environ["TOLD"]).write_text(json.dumps(told))
    dist.destroy_process_group()


def hooks_main() -> None:
    """Prints what each hook costs in a guarded rank, in CPU nanoseconds, and the threads' share of
    a processor.
    """
    import torch  # it is what is hooked

    from unisono.guard.integrations.inside.guarded_process import this_process
    from unisono.guard.integrations.inside.process_groups import beating

    at = this_process()
    assert at is not None
    assert at.is_rank
    tensor, rows = torch.ones(10), [0]

    def nothing(_: object) -> None:
        return None

    wrapped = beating(nothing, 1, at)
    bare_ns = least_ns(lambda: nothing(tensor))

    def batch() -> None:
        before = at.beats.phase
        at.beats.enter("data")
        if at.step_starts.batch(rows):
            at.beats.take_batch()
        at.beats.enter(before)

    costs = {
        "collective": least_ns(lambda: wrapped(tensor)) - bare_ns,
        "batch": least_ns(batch),
        "optimizer_step": least_ns(at.stepped),
    }
    print(json.dumps({"hooks_ns": costs, "threads_share": threads_share(at.stepped)}))


def threads_share(step: Callable[[], None]) -> float:
    """The share of a processor that the guard's threads take while steps are made."""
    threads = [one.ident for one in threading.enumerate() if one.name in GUARD_THREADS]
    clocks = [time.pthread_getcpuclockid(one) for one in threads if one is not None]
    assert len(clocks) == len(GUARD_THREADS)

    def used_s() -> float:
        return sum(map(time.clock_gettime, clocks))

    began, before = time.monotonic(), used_s()
    while time.monotonic() - began < MOVES_S:
        time.sleep(LONG_STEP_S)
        step()
    return (used_s() - before) / (time.monotonic() - began)


def least_ns(call: Callable[[], object]) -> float:
    """CPU nanoseconds of one call, the least of some rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        found.append((time.thread_time_ns() - began) / CALLS)
    return min(found)


def environment(folder: Path, *, guarded: bool) -> dict[str, str]:
    """Of the ranks; with the guard this process is their front."""
    from unisono.guard.integrations.border import Guard
    from unisono.guard.integrations.inside import injected

    plain = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(WORLD),
    }
    if not guarded:
        return plain
    return injected(plain, Guard(folder / "guard", "one", os.getpid()).write())


def run(steps: int, port: int, *, guarded: bool) -> dict[str, float]:
    """One run of the toy."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        env = environment(folder, guarded=guarded) | {
            "MASTER_PORT": str(port),
            "TOLD": str(folder / "told.json"),
        }
        command = [sys.executable, str(HERE), "rank", str(steps)]
        ranks = [
            subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(WORLD)
        ]
        codes = [rank.wait(600) for rank in ranks]
        assert codes == [0] * WORLD, codes
        if guarded:
            assert len(list((folder / "guard").glob("rank-*.json"))) == WORLD, "they were not guarded"
        found: dict[str, float] = json.loads((folder / "told.json").read_text())
        return found


def hooks() -> dict[str, Any]:
    """What hooks_main finds, in a process of its own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        env = environment(Path(name), guarded=True) | {"RANK": "0", "LOCAL_RANK": "0"}
        done = subprocess.run(
            [sys.executable, str(HERE), "hooks"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--port", type=int, default=23_411)
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "guard_cost.json")
    asked = parser.parse_args()
    found = hooks()
    pairs: list[dict[str, Any]] = []
    write(asked.out, found, pairs)
    for number in range(asked.pairs):
        order = (True, False) if number % 2 else (False, True)
        pair = {
            guarded: run(asked.steps, asked.port + 2 * number + guarded, guarded=guarded) for guarded in order
        }
        pairs.append({"on": pair[True], "off": pair[False], "load": round(os.getloadavg()[0], 1)})
        print(
            f"pair {number + 1}: cpu {pair[True]['cpu_s'] / pair[False]['cpu_s']:.4f}, wall"
            f" {pair[True]['wall_s'] / pair[False]['wall_s']:.4f}",
            flush=True,
        )
        write(asked.out, found, pairs)


def write(path: Path, found: dict[str, Any], pairs: list[dict[str, Any]]) -> None:
    """The figures so far: what was computed, and medians and quartiles of the pairs."""
    hooks_s = sum(found["hooks_ns"].values()) / 1e9
    computed_s = hooks_s + found["threads_share"] * STEP_S
    long_share = hooks_s / LONG_STEP_S + found["threads_share"]
    each = {name: [pair["on"][f"{name}_s"] / pair["off"][f"{name}_s"] for pair in pairs] for name in ("cpu", "wall")}  # fmt: skip
    ratios = {name: statistics.median(found) if found else None for name, found in each.items()}
    quartiles = {
        name: [quarter[0], quarter[2]] if (quarter := quarters(found)) else None
        for name, found in each.items()
    }
    bare = [pair["off"]["wall_s"] for pair in pairs]
    value = {
        "schema": 1, "machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version(), "step_s": STEP_S, **found,
        "computed_s": computed_s, "computed_share": computed_s / STEP_S, "allowed_share": ALLOWED,
        "long_step_s": LONG_STEP_S, "long_share": long_share, "long_allowed": LONG_ALLOWED,
        "cpu_ratio": ratios["cpu"], "cpu_quartiles": quartiles["cpu"], "wall_ratio": ratios["wall"], "wall_quartiles": quartiles["wall"],
        "bare_step_s": statistics.median(bare) if bare else None, "load": [pair["load"] for pair in pairs], "pairs": pairs,
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")
    print(
        f"computed {value['computed_share']:.3%} of a step of 5 ms, {long_share:.3%} of one of 50 ms; "
        f"of {len(pairs)} pairs: {ratios}, quartiles {quartiles}",
        flush=True,
    )


def quarters(found: list[float]) -> list[float] | None:
    """The quartiles; None of too few."""
    return statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else None


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["rank", steps]:
            rank_main(int(steps))
        case ["hooks"]:
            hooks_main()
        case _:
            main()
