"""No command ends with a traceback, hangs, or says 1, whatever its streams, its directory and the files of a run are.

Run: pytest tests/cli/test_surroundings.py; all commands, also those that start torch: -m long (hours)
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROWS = Path(__file__).parents[2] / "examples" / "data" / "train.jsonl"
UNISONO = [sys.executable, "-m", "unisono"]
HANG_S = 20.0
"""Of a machine that does nothing else. A busy one gets five times as long; a hang lasts for ever."""
LIMIT_S = 5 * HANG_S
ZEROS_BYTES = 1 << 30
DEEP = "[" * 2000 + "]" * 2000

# Runs commands in forks of one process that has imported the front, so that one of them costs 50 ms and not half a second.
FORKS = """
import importlib, json, os, signal, sys, time
from unisono.cli.app import build_app, main
for name in ("checkpoint.store", "diagnose.ours", "diagnose.reading", "launch.logs", "launch.launchers", "cli.screen"):
    importlib.import_module("unisono." + name)
build_app()
for line in sys.stdin:
    job = json.loads(line)
    if not (pid := os.fork()):
        os.setsid()
        fd = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.argv = ["unisono", *job["words"]]
        code = 1
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.stdout.flush()
            os._exit(code)
    limit = time.monotonic() + job["limit_s"]
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > limit:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    print(json.dumps(os.waitstatus_to_exitcode(ended[1])), flush=True)
"""


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def nothing(path: Path) -> None:
    path.touch()


def deep_json(path: Path) -> None:
    path.write_text(DEEP)


def zeros(path: Path) -> None:
    path.touch()
    os.truncate(path, ZEROS_BYTES)


KINDS: tuple[Callable[[Path], None], ...] = (a_fifo, a_directory, nothing, deep_json, zeros)
of_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("surroundings")
    config = {
        "model": "builtin:tiny", "data": {"train": str(ROWS), "max_length": 64}, "batch": {"global": 4}, "duration": "4 steps",
        "checkpoint": {"every": "2 steps", "keep": 2}, "output_dir": str(folder / "run"),
    }  # fmt: skip
    (folder / "train.yaml").write_text(yaml.safe_dump(config))
    ended = subprocess.run(
        [*UNISONO, "train", str(folder / "train.yaml")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


@pytest.fixture
def forks() -> Iterator[Callable[[list[str], Path], int]]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sent, came = process.stdin, process.stdout

        def give(words: list[str], out: Path) -> int:
            sent.write(json.dumps({"words": words, "out": str(out), "limit_s": LIMIT_S}) + "\n")
            sent.flush()
            return int(json.loads(came.readline()))

        yield give
        sent.close()


def files_of(run: Path) -> list[str]:
    """Every file of a run; of its checkpoints, those of the newest."""
    newest = max((run / "checkpoints").glob("step-*")).name
    found = [str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.is_file()]
    kept = [name for name in found if not name.startswith("checkpoints/step-") or newest in name]
    return [*kept, "run.lock", "verdict.json", "checkpoints/verified.json"]


@contextlib.contextmanager
def copy_with(run: Path, name: str, kind: Callable[[Path], None], folder: Path) -> Iterator[Path]:
    """A copy of the run in which one file is something else; removed again, for a test makes hundreds."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    (copy / name).unlink(missing_ok=True)
    kind(copy / name)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def reading(copy: Path) -> list[list[str]]:
    """Commands of the front that read a run."""
    plan = [str(copy / "config.yaml"), f"output_dir={copy}"]
    return [
        ["checkpoint", "ls", str(copy)], ["checkpoint", "verify", str(copy), "--json"], ["logs", str(copy)],
        ["diagnose", str(copy), "--timeline"], ["train", *plan, "duration=6 steps", "--dry-run", "--resume"],
        ["checkpoint", "prune", str(copy), "--keep", "1"],
    ]  # fmt: skip


def faults_of(words: list[str], code: int, text: str) -> str:
    """What is wrong with how a command ended; empty where nothing is."""
    if code < 0:
        return f"{words}: ended by signal {-code} (9: it hung)\n{text[-2000:]}"
    if code == 1 or "Traceback (most recent call last)" in text or "defect of unisono" in text:
        return f"{words}: exit {code}\n{text[-2000:]}"
    return ""


@pytest.mark.slow
@of_kinds
def test_commands_of_the_front_bear_any_file_of_a_run_that_is_something_else(
    kind: Callable[[Path], None], run: Path, tmp_path: Path, forks: Callable[[list[str], Path], int]
) -> None:
    wrong = []
    for name in files_of(run):
        with copy_with(run, name, kind, tmp_path) as copy:
            for words in reading(copy):
                code = forks(words, tmp_path / "out")
                if fault := faults_of(words, code, (tmp_path / "out").read_text(errors="replace")[-100_000:]):
                    wrong.append(f"{name}: {fault}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n\n".join(wrong)
