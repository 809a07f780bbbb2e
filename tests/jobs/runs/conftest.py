"""Starts the front as a process, with stand-ins for worker and tasks behind it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests import front_server
from tests.session_server import cache_with_kernels

STANDINS = Path(__file__).parent / "standins"
ROOT = Path(__file__).parents[3]
LIMIT_S = 240.0  # of a loaded machine


class Front:
    """One `unisono …` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.environment = {
            **os.environ, "XDG_CONFIG_HOME": str(folder / "settings"), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
        }  # fmt: skip
        (folder / "tmp").mkdir()
        self.config(train="rows")

    @property
    def script_environment(self) -> dict[str, str]:
        """For a front that is not forked: the script finds the modules of the tests."""
        return {**self.environment, "PYTHONPATH": str(ROOT)}

    def config(self, *, train: str, **more: Any) -> None:
        """Writes c.yaml: 10 steps of 4 sequences, a checkpoint every 3 steps."""
        body = {
            "model": "builtin:tiny", "data": {"train": train}, "output_dir": str(self.out), "duration": "10 steps",
            "batch": {"global": 4}, "checkpoint": {"every": "3 steps"}, "device": "cpu", **more,
        }  # fmt: skip
        (self.folder / "c.yaml").write_text(json.dumps(body))

    def arguments(self, *words: str, faults: dict[str, Any] | None = None) -> list[str]:
        return [
            sys.executable,
            str(STANDINS / "front.py"),
            json.dumps(faults or {}),
            "train",
            "c.yaml",
            *words,
        ]

    def run(self, *words: str, faults: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        return front_server.run(
            self.arguments(*words, faults=faults), cwd=self.folder, env=self.environment, timeout=LIMIT_S
        )

    def start(self, *words: str, faults: dict[str, Any] | None = None) -> "subprocess.Popen[str]":
        return front_server.start(
            self.arguments(*words, faults=faults), cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def steps(self) -> list[int]:
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def waits_before(self, step: int) -> Callable[[], bool]:
        """Whether the stand-in worker has come to the step before which it was told to wait."""
        events = self.out / "events" / "rank-00000.jsonl"
        return lambda: events.exists() and f"waiting before step {step}" in events.read_text()


class Place:
    """A folder with a model, rows, a config and a user's settings; real ranks train in it.

    Args:
        folder: it.
        cache: where what is prepared of the rows is kept; places may share it.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.model, self.rows = folder / "model", folder / "rows.jsonl"
        self.environment = {
            **os.environ, "XDG_CONFIG_HOME": str(folder / "settings"), "XDG_CACHE_HOME": str(cache_with_kernels(cache)),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        body = {
            "model": str(self.model), "data": {"train": str(self.rows), "max_length": 64}, "batch": {"global": 8}, "optim": {"lr": 1e-2},
            "adapter": {"rank": 4, "alpha": 8}, "duration": "3 steps", "device": "cpu", "output_dir": str(folder / "out"),
        }  # fmt: skip
        self.out = folder / "out"
        (folder / "c.yaml").write_text(json.dumps(body))

    def train(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unisono", "train", "c.yaml", *words]
        return front_server.run(command, cwd=self.folder, env=self.environment, timeout=LIMIT_S)

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text())

    def losses(self) -> list[float]:
        lines = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    def change_rows(self) -> None:
        lines = self.rows.read_text().splitlines()
        self.rows.write_text("\n".join(lines[:-6]) + "\n")

    def change_weights(self) -> None:
        file = self.model / "model.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if "q_proj" in name)
        tensors[name] = tensors[name] * 2
        save_file(tensors, file, metadata={"format": "pt"})

    def change_tokenizer(self) -> None:
        """Two words change places in the vocabulary."""
        file = self.model / "tokenizer.json"
        body = json.loads(file.read_text())
        vocabulary = body["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        file.write_text(json.dumps(body))


def wait_until(condition: Callable[[], bool], *, limit_s: float = LIMIT_S) -> None:
    """Waits for an event, with a limit."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.02)


def tasks_of(front: int) -> list[psutil.Process]:
    """The living tasks of a front, whoever is their parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[-2:] == ["--front-pid", str(front)] and "--events" not in words:
                found.append(process)
    return found


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, rows_file: Path) -> Place:
    """A finished run of three steps; not to be touched, see `finished`."""
    folder = tmp_path_factory.mktemp("finished") / "place"
    folder.mkdir()
    shutil.copytree(model_dir, folder / "model")
    shutil.copy(rows_file, folder / "rows.jsonl")
    place = Place(folder, folder.parent / "cache")
    done = place.train()
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="session")
def straight(trained: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The finished run, carried elsewhere and made two steps longer with nothing changed; not to be
    touched.
    """
    folder = tmp_path_factory.mktemp("straight") / "place"
    shutil.copytree(trained.folder, folder)
    place = Place(folder, trained.folder.parent / "cache")
    done = place.train("--resume", "duration=5 steps")
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def finished(trained: Place, tmp_path: Path) -> Place:
    """A finished run of three steps, with everything that it came from, carried to another
    folder.
    """
    shutil.copytree(trained.folder, tmp_path / "place")
    return Place(tmp_path / "place", trained.folder.parent / "cache")


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(tmp_path)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    return wait_until


@pytest.fixture
def started(front: Front) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts fronts that are ended with the test, whatever becomes of it."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str, faults: dict[str, Any] | None = None) -> "subprocess.Popen[str]":
        running.append(front.start(*words, faults=faults))
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()
