"""What the watch costs: each beat, the second thread, the front's reading, and a run with the watch
and without it in turn.

    python bench/watch_cost.py               about ten minutes; writes bench/results/watch_cost.json
    python bench/watch_cost.py --pairs 2 --out /tmp/cost.json
    python bench/watch_cost.py --before ../old          the parts of an earlier checkout as well, in turn with these

    computed cost of a step = Σ over kinds of beat (beats a step × cost of one) + (CPU time of the
    second thread + of the front, a second) × step

All costs are CPU time, which a busy machine stretches less than the clock. The second thread and
the front are measured beside ranks that compute and beat as in steps of 50 ms: both do more where a
rank is silent. Beats a step are counted in real runs, by ranks that count their calls. Runs without
the watch have ranks without --beat-fds that beat nowhere, and a front that never looks: there is no
such option, so this file is its own front (`front MODE WORDS …`) and its own rank (`rank MODE WORDS
…`).
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

if TYPE_CHECKING:
    from unisono.guard.places.ranks import NodePlace, RankPlace
    from unisono.guard.watch import Beats

ROOT = Path(__file__).parents[1]
HERE = str(Path(__file__).resolve())
Mode = Literal["on", "off", "counting"]
KINDS = ("enter", "begin_micro", "begin_collective", "waiting", "begin_step")
STEPS_S = (0.05, 0.005)
ALLOWED = {0.05: 0.001, 0.005: 0.01}
ROUNDS, CALLS = 30, 5000
WARM_S, MEASURED_S, POLL_S = 6.0, 5.0, 0.2
PARTS = {"second_thread_cpu_s_per_s": "second_thread_s_per_s", "front_cpu_s_per_s_and_rank": "front_s_per_s"}
PART_ROUNDS = 3
_WORK = bytes(1 << 16)
FIRST_COUNTED = 5


def beat_costs_ns() -> dict[str, dict[str, float]]:
    """CPU nanoseconds of one call of each kind, in memory that is shared as a run's is: the least
    and the median of some rounds.
    """
    from unisono.guard.watch import Beats
    from unisono.guard.watch.views import BeatMemory

    memory = BeatMemory(0)
    beats = Beats.inherited(memory.record_fd)
    beats.begin_step(1)
    beats.begin_step(2)
    sequences = list(range(1000, 1008))

    def wait() -> None:
        with beats.waiting():
            pass

    calls: dict[str, Callable[[], object]] = {
        "enter": lambda: beats.enter("compute"), "begin_micro": lambda: beats.begin_micro(sequences),
        "begin_collective": lambda: beats.begin_collective("all_reduce", 1000), "waiting": wait, "begin_step": lambda: beats.begin_step(3),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        rounds = []
        for _ in range(ROUNDS):
            began = time.thread_time_ns()
            for _ in range(CALLS):
                call()
            rounds.append((time.thread_time_ns() - began) / CALLS)
        found[name] = {"least": round(min(rounds), 1), "median": round(statistics.median(rounds), 1)}
    memory.close()
    return found


def second_thread_s_per_s() -> float:
    """CPU seconds a second that a process has used beside its main thread, which computes and
    beats; the kernel's part is in it.
    """
    from unisono.guard.watch import Beats
    from unisono.guard.watch.views import BeatMemory

    beats = Beats.inherited(BeatMemory(0).record_fd)
    beats.pulse().start()
    step, until = 0, time.monotonic() + WARM_S
    began, used = 0.0, 0.0
    while time.monotonic() < until:
        step += 1
        _one_step(beats, step)
        if not began and time.monotonic() > until - MEASURED_S:
            began, used = time.monotonic(), time.process_time() - time.thread_time()
    return (time.process_time() - time.thread_time() - used) / (time.monotonic() - began)


def _one_step(beats: "Beats", step: int) -> None:
    """50 ms of work that does not hold the interpreter, as tensors do, with the beats of a step."""
    beats.begin_step(step)
    beats.begin_micro([step])
    for phase in ("compute", "comm", "update", "log"):
        beats.enter(phase)
        end = time.monotonic() + STEPS_S[0] / 4
        while time.monotonic() < end:
            hashlib.blake2b(_WORK)


@dataclasses.dataclass
class OneNode:
    """Who takes part, for the watch."""

    ranks: "Sequence[RankPlace]"
    nodes: "Sequence[NodePlace]" = ()
    total_steps: int = 1000
    own_code: None = None

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def on_node(self, node_rank: int) -> "Sequence[RankPlace]":
        """All of them."""
        del node_rank
        return self.ranks


def front_s_per_s() -> float:
    """CPU seconds a second and rank of a front's watch on two real ranks that work, called as often
    as a run calls it.
    """
    from tests.guard.watch.conftest import watch_deeds
    from unisono.guard.supervise.rank_monitor import StallMonitor

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = watch_deeds(folder, ("work", "work"), stack)
        ranks.until(lambda views: all(view.beat is not None for view in views))
        watching = StallMonitor(OneNode(ranks.local.places), ranks.signs, None, print)
        began, used = time.monotonic(), 0.0
        while time.monotonic() < began + MEASURED_S:
            ranks.local.poll(POLL_S)  # as a front does, watch or no watch
            before = time.thread_time()
            assert watching.look() is None
            used += time.thread_time() - before
        return used / (time.monotonic() - began) / len(ranks.local.places)


def parts_in_turn(before: Path | None) -> dict[str, dict[str, float]]:
    """The second thread's and the front's cost, by process: of this checkout and, in turn, of an
    earlier one; medians of some rounds.
    """
    checkouts = {"now": ROOT} | ({"before": before} if before else {})
    found: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in checkouts}
    for _ in range(PART_ROUNDS):
        for name, checkout in checkouts.items():
            for part in PARTS:
                environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}:{ROOT}"}
                words = [sys.executable, HERE, "part", part]
                told = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
                found[name][part].append(float(told.stdout.split()[-1]))
    return {
        name: {part: round(statistics.median(rounds), 6) for part, rounds in parts.items()}
        for name, parts in found.items()
    }


class Runs:
    """Real runs of two ranks in a folder, each with a mode of its own."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._count = 0

    def run(self, mode: Mode, **sections: Any) -> dict[str, Any]:
        """One run: CPU and clock seconds a step of rank 0's process, and CPU seconds of the front a
        second.

        The quickest tenth of the steps is what other work on the machine has disturbed least.
        """
        from tests.jobs.nodes.harness import Job
        from tests.jobs.nodes.network_namespaces import Loopback

        class OwnFront(Job):
            def _program(self, node: int, answers: dict[str, Any] | None) -> list[str]:
                del node, answers
                return [sys.executable, HERE, "front", mode]

        self._count += 1
        folder = self._folder / f"run{self._count}"
        folder.mkdir()
        rows = ROOT / "examples" / "data" / "dev.jsonl"
        job = OwnFront(
            Loopback(), folder, model=Path("builtin:tiny"), rows=rows, caches=self._folder / "caches", nodes=1
        )
        common = {
            "duration": f"{self._steps} steps",
            "checkpoint": {"every": f"{self._steps} steps"},
            "batch": {"global": 16, "micro": 8},
        }
        job.config(**(common | sections))
        try:
            front = job.start(0, "--nproc", "2", topology=False, json=True)
            used = _cpu_between_steps(job, front, FIRST_COUNTED, self._steps)
            code = front.wait()
            assert code == 0, front.text()
        finally:
            job.close()
        lines = [line for line in job.metrics() if line["step"] > FIRST_COUNTED]
        cpu_s = [line["cpu_time_s"] for line in lines]
        counts = [json.loads(path.read_text()) for path in sorted(job.out.glob("beats-*.json"))]
        return {
            "cpu_s": statistics.median(cpu_s),
            "cpu_s_of_the_quickest": statistics.quantiles(cpu_s, n=10)[0],
            "clock_s": statistics.median(line["step_time_s"] for line in lines),
            "front_cpu_s_per_s": used, "beats_a_step": counts[0] if counts else None,
        }  # fmt: skip


def _cpu_between_steps(job: Any, front: Any, first: int, last: int) -> float:
    import psutil

    def reached(step: int) -> Callable[[], bool]:
        return lambda: (
            any(message["step"] >= step for message in front.messages("step")[-1:])
            or front.exit_code is not None
        )

    process = psutil.Process(front.pid)
    job.until(reached(first), what=f"step {first}")
    assert front.exit_code is None, front.text()
    began, used = time.monotonic(), sum(process.cpu_times()[:2])
    job.until(reached(last - FIRST_COUNTED), what=f"step {last}")
    return float(sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)


def in_turn(runs: Runs, pairs: int) -> dict[str, Any]:
    """Runs with the watch and without it, in turn, each pair in the other order than the last."""
    found: list[dict[str, dict[str, Any]]] = []
    for number in range(pairs):
        order: tuple[Mode, Mode] = ("on", "off") if number % 2 == 0 else ("off", "on")
        found.append({mode: runs.run(mode) for mode in order})
        print(f"pair {number + 1}: {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    table: dict[str, Any] = {"pairs": pairs, "step": {}}
    for name in ("cpu_s", "cpu_s_of_the_quickest", "clock_s"):
        ratios = sorted(pair["on"][name] / pair["off"][name] for pair in found)
        low, middle, high = statistics.quantiles(ratios, n=4) if pairs > 1 else ratios * 3
        table["step"][name] = {
            "on_median": round(statistics.median(pair["on"][name] for pair in found), 5),
            "off_median": round(statistics.median(pair["off"][name] for pair in found), 5),
            "ratio_median": round(middle, 4), "ratio_quartiles": [round(low, 4), round(high, 4)],
            "ratio_all": [round(ratio, 4) for ratio in ratios],
        }  # fmt: skip
    for mode in ("on", "off"):
        table[f"front_cpu_s_per_s_{mode}"] = round(
            statistics.median(pair[mode]["front_cpu_s_per_s"] for pair in found), 5
        )
    return table


def computed(
    costs: Mapping[str, Mapping[str, float]],
    counts: Mapping[str, float],
    *,
    second_thread: float,
    front: float,
) -> dict[str, Any]:
    """The share of a step that the watch takes, with the medians of what each costs."""
    beats_s = sum(counts.get(name, 0) * costs[name]["median"] for name in KINDS) / 1e9
    shares = {}
    for step_s in STEPS_S:
        cost_s = beats_s + (second_thread + front) * step_s
        share = cost_s / step_s
        shares[f"step of {step_s * 1000:g} ms"] = {
            "share": round(share, 6), "allowed": ALLOWED[step_s], "is_under": share < ALLOWED[step_s],
        }  # fmt: skip
    return {"beats_a_step": counts, "beats_us_a_step": round(beats_s * 1e6, 2), **shares}


def be_front(mode: Mode, words: list[str]) -> None:
    """`unisono WORDS`, with this file's ranks, and in mode off without the watch."""
    import unisono.guard.supervise.local_ranks
    import unisono.guard.supervise.rank_supervisor
    import unisono.jobs.runs.train_request
    from unisono.front.cli import app
    from unisono.guard.supervise.child_process import Programs, worker_command
    from unisono.guard.watch.views import RunView

    class Request(unisono.jobs.runs.train_request.TrainRequest):
        def __init__(self, *arguments: object, **named: object) -> None:
            super().__init__(*arguments, **named)  # type: ignore[arg-type]
            programs = dataclasses.replace(Programs(), worker=(sys.executable, HERE, "rank", mode))
            object.__setattr__(self, "programs", programs)

    class LooksAway:
        def __init__(self, plan: object, signs: object, server: object, show: object, **how: object) -> None:
            del plan, signs, server, show, how
            self.picture = RunView({}, {})

        def look(self) -> None:
            return None

        def raw(self) -> dict[int, object]:
            return {}

    def without_beats(*arguments: Any, **named: Any) -> list[str]:
        return worker_command(*arguments, **(named | {"beat_fds": ()}))

    unisono.jobs.runs.train_request.TrainRequest = Request  # type: ignore[misc]
    if mode == "off":
        mock.patch.object(unisono.guard.supervise.rank_supervisor, "StallMonitor", LooksAway).start()
        mock.patch.object(unisono.guard.supervise.local_ranks, "worker_command", without_beats).start()
    app.main(words)


def be_rank(mode: Mode, words: list[str]) -> int:
    """A rank; in mode off it does not beat, in mode counting it leaves the number of its calls
    beside its plan.
    """
    import unisono.trainer.worker.entry as worker

    if mode == "on":
        return worker.main(words)
    if mode == "off":
        mock.patch.object(worker, "Beats", _silent()).start()
        return worker.main(words)
    seen: list[tuple[int, Counter[str]]] = []
    mock.patch.object(worker, "Beats", _counting(seen)).start()
    code = worker.main(words)
    (first, before), (last, after) = seen[1], seen[-1]
    each = {name: (after[name] - before[name]) / (last - first) for name in KINDS}
    (Path(words[0]).parent / f"beats-{os.environ['RANK']}.json").write_text(json.dumps(each))
    return code


def _silent() -> type:
    from unisono.guard.watch import Beats

    class NoBeats(Beats):
        def _write(self, now: int) -> None:
            del now

        def _change(self, phase: int) -> None:
            self._phase = phase

        def begin_micro(self, sequences: list[int]) -> None:
            del sequences

    return NoBeats


def _counting(seen: list[tuple[int, Counter[str]]]) -> type:
    """Beats that leave at each step how often each of their methods has been called."""
    from unisono.guard.watch import Beats

    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(Beats, name)

        def call(self: Beats, *arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            if name == "begin_step":
                seen.append((int(arguments[0]), counts.copy()))
            return real(self, *arguments, **named)

        return call

    return type("CountedBeats", (Beats,), {name: counted(name) for name in KINDS})


def main() -> int:
    """Gives 1 if the watch costs more than it may."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=80, help="of each run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "watch_cost.json")
    parser.add_argument("--before", type=Path, help="an earlier checkout, to compare with")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    costs, parts = beat_costs_ns(), parts_in_turn(arguments.before and arguments.before.resolve())
    second_thread, front = (parts["now"][part] for part in PARTS)
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name), steps=arguments.steps)
        layouts: dict[str, dict[str, Any]] = {
            "ddp, 1 micro batch": {}, "ddp, 4 micro batches": {"batch": {"global": 16, "micro": 2}},
            "fsdp, 1 micro batch": {"parallel": {"strategy": "fsdp"}},
        }  # fmt: skip
        counts = {
            layout: runs.run("counting", **sections)["beats_a_step"] for layout, sections in layouts.items()
        }
        result: dict[str, Any] = {
            "schema": 1, "command": f"python bench/watch_cost.py --pairs {arguments.pairs} --steps {arguments.steps}",
            "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, python {platform.python_version()}",
            "load_before": round(load, 1), "one_beat_cpu_ns": costs,
            **parts["now"], "before": parts.get("before"),
            "computed": {layout: computed(costs, count, second_thread=second_thread, front=front) for layout, count in counts.items()},
        }  # fmt: skip
        print(json.dumps(result, indent=1), flush=True)
        if arguments.pairs:
            result["in_turn"] = in_turn(runs, arguments.pairs)
            print(json.dumps(result["in_turn"], indent=1))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    every = [
        share
        for layout in result["computed"].values()
        for share in layout.values()
        if isinstance(share, dict) and "is_under" in share
    ]
    return 0 if all(share["is_under"] for share in every) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    match sys.argv[1:]:
        case ["front", mode, *words]:
            be_front(mode, words)  # type: ignore[arg-type]
        case ["part", name]:
            print(globals()[PARTS[name]]())
        case ["rank", mode, *words]:
            sys.exit(be_rank(mode, words))  # type: ignore[arg-type]
        case _:
            sys.exit(main())
