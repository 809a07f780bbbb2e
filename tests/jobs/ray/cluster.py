"""A real Ray cluster of network namespaces, each with a disk of its own, and commands that are
typed on its nodes.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import unisono
from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.network_namespaces import Namespaces, Own

_RAYS_FOLDER = Path("/tmp/ray")
_PORT = 6379
_START_S = 900.0
_TRIES = 12
_STRANGERS = (
    "RAY_",
    "CUDA_",
    "NCCL_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "UNISONO_TOKEN",
    "SLURM_",
    "OMP_",
    "PET_",
    "NNODES",
    "NPROC",
)


class RayCluster:
    """So many nodes, of which the first is Ray's head, and where commands are typed.

    Attributes:
        disk: a path at which each node has a disk of its own.
        token: that Ray asks for.
    """

    def __init__(
        self, ground: Namespaces, folder: Path, *, cpus: list[int], mark: str = "", dashboard: bool = False
    ) -> None:
        self.ground = ground
        self.folder = folder
        self.disk = folder / "disk"
        self.token = secrets.token_hex(20)
        self.mark = mark or secrets.token_hex(8)
        self.fronts: list[Front] = []
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._cpus = cpus
        self._dashboard = dashboard
        self._starts = 0
        self.disk.mkdir()
        _RAYS_FOLDER.mkdir(exist_ok=True)
        self.start_nodes(*range(len(cpus)))

    @property
    def address(self) -> str:
        return f"{self.ground.address(0)}:{_PORT}"

    def start_nodes(
        self, *nodes: int, python: str = sys.executable, before: Sequence[str] = (), **changes: str
    ) -> None:
        """Starts Ray on nodes, and waits until they are in.

        Args:
            nodes: which.
            python: that runs Ray there.
            before: words in front of the command.
            changes: of their environment.
        """
        for node in nodes:
            start = partial(self._start, node, changes, [*before, python])
            start()
            self.until(partial(self._is_in, node, start), limit_s=_START_S, what=f"Ray runs on node {node}")

    def _start(self, node: int, changes: dict[str, str], python: list[str]) -> None:
        words = [
            *python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", f"--num-cpus={self._cpus[node]}",
            "--object-store-memory=80000000", f"--node-ip-address={self.ground.address(node)}",
        ]  # fmt: skip
        dashboard = ["--include-dashboard=true", "--dashboard-host=0.0.0.0"]
        words += (
            ["--head", f"--port={_PORT}", *(dashboard if self._dashboard else ["--include-dashboard=false"])]
            if node == 0
            else [f"--address={self.address}"]
        )
        own = Own(small=[(_RAYS_FOLDER, 1_000_000_000), (self.disk, 500_000_000)])
        with self._log(node).open("wb") as log:
            self.nodes[node] = subprocess.Popen(
                self.ground.command(node, words, own), env=self.environment(**changes), start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip

    def stop_node(self, node: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Takes a node out of the cluster at once, with all that runs on it."""
        process = self.nodes.pop(node)
        for pid in self._pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)
        process.wait(30)

    def raylet(self, node: int) -> psutil.Process:
        """Ray's own process that has a node in the cluster."""
        pids = map(int, self._pids(node))
        return next(p for p in map(psutil.Process, pids) if p.cmdline()[0].endswith("raylet/raylet"))

    def other_ray(self, version: str) -> Path:
        """A folder with another version of Ray, by its own word: all else of it is the installed
        one.
        """
        folder = self.folder / f"ray-{version}"
        found = importlib.util.find_spec("ray")
        assert found is not None
        assert found.origin is not None
        installed = Path(found.origin).parent
        (folder / "ray").mkdir(parents=True)
        for path in installed.iterdir():
            if path.name not in ("_version.py", "__pycache__"):
                (folder / "ray" / path.name).symlink_to(path)
        own = importlib.metadata.version("ray")
        text = (installed / "_version.py").read_text().replace(f'"{own}"', f'"{version}"')
        (folder / "ray/_version.py").write_text(text)
        return folder

    def other_code(self) -> Path:
        """A folder with another unisono, as a node has it that was not updated; it is on the same
        path everywhere.
        """
        folder = self.folder / "other"
        if not folder.exists():
            shutil.copytree(
                Path(unisono.__file__).parent,
                folder / "unisono",
                ignore=shutil.ignore_patterns("__pycache__"),
            )
            with (folder / "unisono/base/text.py").open("a") as file:
                file.write("# another one\n")
        return folder

    def environment(self, **changes: str) -> dict[str, str]:
        """Of Ray and of what is typed; an empty value takes a variable away."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_STRANGERS)}
        own = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0", "HF_HUB_OFFLINE": "1",
            "RAY_worker_niceness": "0",  # Ray's 15 would starve ranks beside the other tests of a suite
            "XDG_CACHE_HOME": str(self.disk / "cache"), "XDG_CONFIG_HOME": str(self.disk / "settings"), "HOME": str(self.disk),
            "OMP_NUM_THREADS": "1", "TEST_RAY": self.mark, "RAY_JOB_STOP_WAIT_TIME_S": "60",
        }  # fmt: skip
        return {name: value for name, value in {**kept, **own, **changes}.items() if value}

    def inside(self, node: int, words: list[str], *, cwd: Path) -> list[str]:
        """The command line that runs `words` on a node, on its disk."""
        script = f'cd "{cwd}" && exec "$@"'
        return [
            "nsenter",
            "-t",
            str(self.nodes[node].pid),
            "-m",
            "-n",
            "-u",
            "bash",
            "-c",
            script,
            "inside",
            *words,
        ]

    def on_disk(self, node: int, path: Path) -> Path:
        """A path of a node's disk, as this process sees it."""
        return Path(f"/proc/{self.nodes[node].pid}/root{path}")

    def out_of(self, config: str) -> Path:
        """The output_dir of a config, on the disk where it was typed."""
        body = json_of(self.on_disk(0, Path(config)))
        return self.on_disk(0, Path(body["output_dir"]))

    def type(
        self,
        *words: str,
        node: int = 0,
        speaks_json: bool = True,
        python: str = sys.executable,
        **changes: str,
    ) -> Front:
        """Types `unisono WORDS` on a node."""
        program = [python, "-m", "unisono", *words, *(["--json"] if speaks_json else [])]
        front = Front(
            self.inside(node, program, cwd=self.disk), node=node, host=self.ground.host(node), cwd=self.folder,
            environment=self.environment(**{"RAY_ADDRESS": self.address, **changes}), json=speaks_json,
        )  # fmt: skip
        self.fronts.append(front)
        return front

    def processes(self) -> list[psutil.Process]:
        """Living processes that carry this cluster's mark: Ray's, and all that it has started."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def ours(self) -> list[str]:
        """Command lines of what unisono has running on any node."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                if re.search(r" -m unisono\b|bin/unisono |ray::Keeper", line):
                    found.append(line)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """The living ranks, by rank."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                if "unisono.worker" in process.cmdline():
                    found[int(process.environ().get("RANK", "0"))] = process
        return found

    def node_of(self, process: psutil.Process) -> int:
        """On which node a process runs."""
        network = Path(f"/proc/{process.pid}/ns/net").stat().st_ino
        return next(
            node
            for node, ray in self.nodes.items()
            if Path(f"/proc/{ray.pid}/ns/net").stat().st_ino == network
        )

    def left(self) -> str:
        """What a job has left in the cluster: placement groups and actors that are not gone, and
        folders on disks.
        """
        script = (
            "import ray, json; ray.init(address='auto', logging_level='ERROR', log_to_driver=False)\n"
            "from ray.util import placement_group_table\n"
            "from ray._private.state import actors\n"
            "groups = [g['name'] for g in placement_group_table().values() if g['state'] != 'REMOVED']\n"
            "print(json.dumps(groups + [a['State'] for a in actors().values() if a['State'] != 'DEAD']))"
        )
        done = subprocess.run(
            self.inside(0, [sys.executable, "-c", script], cwd=self.disk), env=self.environment(RAY_ADDRESS=self.address),
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        folders = [
            str(folder)
            for node in self.nodes
            for folder in self.on_disk(node, self.disk / "cache/unisono/ray").glob("*")
        ]
        return " ".join([*([] if done.stdout.strip() == "[]" else [done.stdout.strip()]), *folders])

    def nothing_left(self) -> None:
        """Waits until neither process, nor actor, nor placement group, nor folder of a job is
        left.
        """
        self.until(lambda: not self.ours(), limit_s=60, what=f"no process of a job is left: {self.ours()}")
        reported = self.left()
        self.until(
            lambda: not (reported and self.left()),
            limit_s=60,
            what=f"nothing is left in the cluster: {reported}",
        )

    def until(self, condition: Callable[[], bool], *, limit_s: float, what: str) -> None:
        """Waits for an event, with a limit."""
        limit = time.monotonic() + limit_s
        while not condition():
            reported = "\n".join(f"--- {front.label}\n{front.text()}" for front in self.fronts[-1:])
            assert time.monotonic() < limit, f"never happened: {what}\n{reported}"
            time.sleep(0.1)

    def close(self) -> None:
        """Ends everything that was started."""
        for front in self.fronts:
            front.close()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for ray in self.nodes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ray.pid, signal.SIGKILL)
            ray.wait(30)
        shutil.rmtree(self.disk, ignore_errors=True)

    def _pids(self, node: int) -> list[str]:
        done = subprocess.run(
            ["ip", "netns", "pids", self.ground.name(node)],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return done.stdout.split()

    def _is_in(self, node: int, start: Callable[[], None]) -> bool:
        """Whether `ray start` says so.

        It gives its own processes 30 s, which a busy machine may not keep: then once more.
        """
        if "Ray runtime started" in self._log(node).read_text():
            return True
        if self.nodes[node].poll() is not None:
            self._starts += 1
            assert self._starts < _TRIES, self._log(node).read_text()
            start()
        return False

    def _log(self, node: int) -> Path:
        return self.folder / f"ray-{node}.log"

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TEST_RAY") == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False


def config_of(cluster: RayCluster, *, model: Path, rows: Path, **sections: Any) -> dict[str, Any]:
    """A short run on the CPU, whose directory is on the disk of who types."""
    return {
        "model": {"path": str(model), "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8, "dropout": 0.0},
        "data": {"train": str(rows), "max_length": 64}, "optim": {"lr": 1e-2}, "duration": "4 steps", "batch": {"global": 8},
        "checkpoint": {"every": "2 steps"}, "device": "cpu", "output_dir": str(cluster.disk / "out"), **sections,
    }  # fmt: skip


def json_of(path: Path) -> dict[str, Any]:
    """The object in a file."""
    body: dict[str, Any] = json.loads(path.read_text())
    return body
