"""A job of several nodes: its folders, configs and fronts; sees that nothing of them stays."""

import contextlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests import front_server
from tests.jobs.nodes.fronts import LIMIT_S, Front
from tests.jobs.nodes.network_namespaces import Ground, Own

ENTRY = Path(__file__).parent / "front.py"
PACED = {"faults": {"pause": [{"how": "sleep", "seconds": 0.08, "every": 1}]}}
"""Answers for runs in which a test does something: each step sleeps, so that there is time for it,
which costs no arithmetic and is the same on a busy machine.
"""
STRANGERS = re.compile(
    r"^(CUDA_|NCCL_|GLOO_|TORCH|MASTER_|RANK$|WORLD_SIZE$|LOCAL_|NNODES$|NODE_RANK$|NPROC_|UNISONO_(?!FORK_SERVER)|SLURM_|OMP_|PET_)"
)


class Job:
    """One job: a folder for each node with its own config, and the fronts that were started.

    Attributes:
        out: the output_dir that all nodes name.
        token: the shared secret that they are given.
        model, rows, caches: what it was made with.
    """

    def __init__(
        self, ground: Ground, folder: Path, *, model: Path, rows: Path, caches: Path, nodes: int
    ) -> None:
        self.ground = ground
        self.folder = folder
        self.nodes = nodes
        self.out = folder / "out"
        self.token = secrets.token_hex(32)
        self.port = ground.head_port()
        self.fronts: list[Front] = []
        self.model, self.rows, self.caches = model, rows, caches
        self._mark = secrets.token_hex(8)
        for node in range(nodes):
            self.home(node).mkdir()
        self.config(model={"path": str(model)}, data={"train": str(rows)})

    def home(self, node: int) -> Path:
        """The folder in which a node's command is given."""
        return self.folder / f"node{node}"

    def config(self, *nodes: int, **sections: Any) -> None:
        """Lays sections over the config of some nodes, or of all."""
        for node in nodes or range(self.nodes):
            path = self.home(node) / "c.yaml"
            body = json.loads(path.read_text()) if path.exists() else self._default()
            for name, value in sections.items():
                old = body.get(name)
                body[name] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
            path.write_text(json.dumps(body))

    def _default(self) -> dict[str, Any]:
        return {
            "model": {"dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8, "dropout": 0.0},
            "data": {"max_length": 64}, "optim": {"lr": 1e-2}, "duration": "4 steps", "batch": {"global": 8},
            "checkpoint": {"every": "2 steps"}, "device": "cpu", "output_dir": str(self.out),
        }  # fmt: skip

    @property
    def head(self) -> str:
        return f"{self.ground.address(0)}:{self.port}"

    def start(
        self, node: int, *words: str, env: dict[str, str] | None = None, answers: dict[str, Any] | None = None,
        own: Own | None = None, json: bool | None = None, place: int | None = None, topology: bool = True,
        rehearse: bool = False, command: str = "train", config: bool = True,
    ) -> Front:  # fmt: skip
        """Starts a node's front.

        Args:
            node: its rank, and the folder of its config.
            words: of the command line, after those that every node has.
            env: variables; an empty value takes one away.
            answers: recorded ones, for devices and the like; see front.py.
            own: what it sees in place of the machine's own files and mounts.
            json: whether it speaks JSON; otherwise even nodes do.
            place: where it runs, if not where a node of its rank does.
            topology: whether --nodes, --node-rank and --head are given.
            rehearse: whether the first checkpoint is read back, by a process that imports torch;
                most tests are not about it.
            command: what is started: train, doctor.
            config: whether it is given the config.
        """
        front_server.wait_for_rank_server()
        place, own = node if place is None else place, own or Own()
        json = node % 2 == 0 if json is None else json
        place_in_job = [
            "--nodes", str(self.nodes), "--node-rank", str(node), "--head", self.head, "--join-timeout", "60"
        ]  # fmt: skip
        rest = [
            *(["--json"] if json else []),
            *([] if rehearse or command != "train" else ["--no-first-checkpoint"]),
        ]
        words = (*(place_in_job if topology else ()), *words, *rest)
        started = [*self._program(node, answers), command, *(["c.yaml"] if config else []), *words]
        front = Front(
            started, node=node, host=self.ground.host(place), cwd=self.home(node), environment=self._environment(place, env or {}), json=json,
            place=self.ground.place(place, own), executed=self.ground.command(place, started, own),
        )  # fmt: skip
        self.fronts.append(front)
        return front

    def start_all(self, *words: str, **named: Any) -> list[Front]:
        """Starts all nodes with the same words."""
        return [self.start(node, *words, **named) for node in range(self.nodes)]

    def _program(self, node: int, answers: dict[str, Any] | None) -> list[str]:
        if answers is None:
            return [sys.executable, "-m", "unisono"]
        path = self.home(node) / f"answers-{len(self.fronts)}.json"
        path.write_text(json.dumps(answers))
        return [sys.executable, str(ENTRY), str(path)]

    def _environment(self, place: int, changes: dict[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not STRANGERS.match(name)}
        cache = self.caches / f"place{place}"
        own = {
            "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache / "cache"), "XDG_CONFIG_HOME": str(cache / "settings"),
            "HF_HUB_OFFLINE": "1", "UNISONO_TOKEN": self.token, "TEST_JOB": self._mark,
        }  # fmt: skip
        paths = [value for value in (changes.get("PYTHONPATH"), kept.get("PYTHONPATH")) if value]
        whole = kept | own | changes | {"PYTHONPATH": os.pathsep.join(paths)}
        return {name: value for name, value in whole.items() if value}

    def processes(self) -> list[psutil.Process]:
        """All living processes of this job, by a mark in their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get("TEST_JOB") == self._mark
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def ranks(self) -> dict[int, psutil.Process]:
        """The living ranks (`-m unisono.worker`), by rank."""
        found = {}
        for process in self.processes():
            try:
                if "unisono.worker" in process.cmdline():
                    found[int(process.environ().get("RANK", "0"))] = process
            except (psutil.Error, OSError):
                continue
        return found

    def wait_gone(self, *, limit_s: float = 30.0) -> None:
        """Waits until no process of the job lives."""
        self.until(lambda: not self.processes(), limit_s=limit_s, what="the job's processes end")

    def until(self, condition: Callable[[], bool], *, limit_s: float = LIMIT_S, what: str = "it") -> None:
        """Waits for an event, with a limit."""
        limit = time.monotonic() + limit_s
        while not condition():
            reported = "\n".join(f"--- {front.label}\n{front.text()}" for front in self.fronts)
            assert time.monotonic() < limit, f"never happened: {what}\n{reported}"
            time.sleep(0.05)

    def read(self, name: str) -> Any:
        """A JSON file of the output_dir."""
        return json.loads((self.out / name).read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """The steps of metrics.jsonl."""
        lines = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if "loss" in line]

    def waits_for_step(self, step: int) -> None:
        """Waits until a step is in metrics.jsonl."""

        def done() -> bool:
            path = self.out / "metrics.jsonl"
            assert any(front.exit_code is None for front in self.fronts), self.transcript()
            return path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines())

        self.until(done, what=f"step {step}")

    def transcript(self) -> str:
        """All that all fronts said, for a failed test."""
        return "\n".join(f"--- {front.label}: {front.exit_code}\n{front.text()}" for front in self.fronts)

    def close(self) -> None:
        """Ends what still runs."""
        for front in self.fronts:
            front.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it was just ending
                process.kill()
        for front in self.fronts:
            front.close()
