"""What each launcher costs at the start, against local: seconds from typing to the first step, and
to the end of a run of four steps.

    python bench/launchers.py                          all launchers, three times; writes bench/results/launchers.json
    python bench/launchers.py --times 1 --only ray     some of them; the others keep what is in the file

Two ranks everywhere: of one node (local), or of two nodes that are network namespaces of this
machine, with a real sshd, Slurm and Ray. The clusters are up before. Launchers take turns, so that
a busy machine slows all alike; what to look at is the difference to local. The load before each run
is in the result. Where other work cannot be stopped, a control group with many cpu.shares helps
(`--note` keeps that).
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.jobs.nodes.fronts import Front  # noqa: E402 - the tests are found through the line above
from tests.jobs.nodes.harness import Job  # noqa: E402
from tests.jobs.nodes.network_namespaces import Namespaces, why_no_namespaces  # noqa: E402
from tests.jobs.nodes.test_hosts import Hosts  # noqa: E402
from tests.jobs.ray.cluster import RayCluster, config_of  # noqa: E402
from tests.jobs.slurm.harness import SlurmJob  # noqa: E402
from tests.jobs.slurm.slurm_cluster import cluster, why_no_slurm  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "launchers.json"
TWO = ("--nodes", "2", "--nproc", "1")
MODEL = "builtin:tiny"
_LIMIT_S = 300.0
Start = Callable[[], Front]


class Bench:
    """Clusters that are up, and a way to start a run by each launcher, each time in a new
    directory.
    """

    def __init__(self, folder: Path, only: list[str], stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.rows = folder / "rows.jsonl"
        lines = [{"prompt": f"What is {n} plus one?", "completion": f"It is {n + 1}."} for n in range(64)]
        self.rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._stack = stack
        self._count = 0
        self._ground = Namespaces(2, self._new("ground"))
        stack.callback(self._ground.close)
        makers: dict[str, Callable[[], Start]] = {
            "local": self._local, "nodes": self._nodes, "ssh": self._ssh, "srun": self._srun, "slurm": self._slurm, "ray": self._ray,
        }  # fmt: skip
        self.starts = {name: make() for name, make in makers.items() if not only or name in only}

    def _new(self, name: str) -> Path:
        self._count += 1
        made = self.folder / f"{name}-{self._count}"
        made.mkdir()
        return made

    def _job(self, kind: Callable[..., Job], first: Any, nodes: int | None = None) -> Job:
        caches = self.folder / "caches"
        named = {"model": Path(MODEL), "rows": self.rows, "caches": caches} | (
            {"nodes": nodes} if nodes else {}
        )
        job = kind(first, self._new("job"), **named)
        job.config(data={"max_length": 256})
        self._stack.callback(job.close)
        return job

    def _local(self) -> Start:
        return lambda: self._job(Job, self._ground, 1).start(0, "--nproc", "2", topology=False, json=True)

    def _nodes(self) -> Start:
        return lambda: self._job(Job, self._ground, 2).start_all("--nproc", "1")[0]

    def _ssh(self) -> Start:
        earlier: list[Hosts] = []

        def start() -> Front:
            while earlier:  # they all have one port
                earlier.pop().close()
            hosts = Hosts(self._ground, self._job(Job, self._ground, 2), self._new("sshd"))
            earlier.append(hosts)
            self._stack.callback(hosts.close)
            return hosts.type()

        return start

    def _of_slurm(self) -> SlurmJob:
        if not hasattr(self, "_cluster"):
            self._cluster = self._stack.enter_context(cluster(self._ground, self._new("slurm")))
        job = self._job(SlurmJob, self._cluster)
        assert isinstance(job, SlurmJob)
        return job

    def _srun(self) -> Start:
        self._of_slurm()
        return lambda: self._of_slurm().srun()

    def _slurm(self) -> Start:
        self._of_slurm()
        return lambda: self._of_slurm().type("--launcher", "slurm", *TWO)

    def _ray(self) -> Start:
        ground = Namespaces(2, self._new("ground"))
        self._stack.callback(ground.close)
        made = RayCluster(ground, self._new("ray"), cpus=[2, 2])
        self._stack.callback(made.close)

        def start() -> Front:
            self._count += 1
            path = made.disk / f"c{self._count}.yaml"
            body = config_of(made, model=Path(MODEL), rows=self.rows)
            body["data"]["max_length"] = 256
            body["output_dir"] = str(made.disk / f"out{self._count}")
            made.on_disk(0, path).write_text(json.dumps(body))
            return made.type("train", str(path), "--launcher", "ray", *TWO, "--no-first-checkpoint")

        return start


@dataclass(frozen=True)
class Seen:
    """One run.

    Attributes:
        first_step_s: seconds from typing to the first step.
        end_s: to the end.
        load: of this machine in the minute before: how many wanted a core.
    """

    first_step_s: float
    end_s: float
    load: float


def measure(start: Start) -> Seen:
    """One run, from typing to its end."""
    load = os.getloadavg()[0]
    front = start()
    code = front.wait(limit_s=_LIMIT_S)
    assert code == 0, front.text()
    first = front.printed_at('"kind": "step"')
    assert first is not None
    assert front.ended is not None
    return Seen(first - front.started, front.ended - front.started, load)


def main() -> None:
    """Measures, and writes the table."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--times", type=int, default=3)
    asked.add_argument("--only", nargs="*", default=[])
    asked.add_argument(
        "--note", default="", help="what else is to be known of the machine; kept in the result"
    )
    options = asked.parse_args()
    for why in (why_no_namespaces(), why_no_slurm()):
        if why:
            sys.exit(f"not measured: {why}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="launchers-")))
        bench = Bench(folder, options.only, stack)
        seen: dict[str, list[Seen]] = {name: [] for name in bench.starts}
        for _ in range(options.times):
            for name, start in bench.starts.items():
                one = measure(start)
                seen[name].append(one)
                print(
                    f"{name}: first step after {one.first_step_s:.1f} s, end after {one.end_s:.1f} s, load"
                    f" {one.load:.1f}",
                    flush=True,
                )
            _write(seen, options.note)


def _write(seen: dict[str, list[Seen]], note: str) -> None:
    body: dict[str, Any] = {"schema": 1, "launchers": {}}
    if RESULTS.exists():
        body = json.loads(RESULTS.read_text())
    body["machine"] = {
        "cpus": os.cpu_count(), "python": platform.python_version(), "load_at_the_end": [round(load, 1) for load in os.getloadavg()],
        "note": note,
    }  # fmt: skip
    for name, runs in seen.items():
        first, end = ([round(run.first_step_s, 2) for run in runs], [round(run.end_s, 2) for run in runs])
        body["launchers"][name] = {
            "first_step_s": first, "end_s": end, "load": [round(run.load, 1) for run in runs], "median_first_step_s": statistics.median(first), "median_end_s": statistics.median(end),
        }  # fmt: skip
    local = body["launchers"].get("local")
    for row in body["launchers"].values():
        if local is not None:
            row["first_step_after_local_s"] = round(
                row["median_first_step_s"] - local["median_first_step_s"], 2
            )
    RESULTS.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
