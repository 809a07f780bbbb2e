"""The front never imports what is heavy, and `--help` answers at once.

Run: pytest tests/front/cli/test_front_is_light.py
"""

import json
import os
import resource
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "accelerate",
    "numpy",
    "pyarrow",
    "tokenizers",
    "safetensors",
)
NOT_FOR_HELP = (*HEAVY, "pydantic", "rich", "yaml")
# The promise is 0.3 s of CPU on a quiet machine; a busy one, with cold caches, is given five times
# as much.
HELP_CPU_S = 0.3 * 5

IMPORT_THE_FRONT = """
import importlib, json, pkgutil, sys
import unisono, unisono.front.cli.app
rooms = ["cli", "doctor", "drill", "serve", "launch", "plan", "config", "facts", "rundir", "causes"]
names = ["unisono." + name for name in ("errors", "events", "child", "files", "text")]
names += ["unisono.trainer.checkpoint.manifest", "unisono.trainer.checkpoint.store", "unisono.jobs.runs.preparation", "unisono.jobs.runs.curve_drawing"]
for room in rooms:
    package = importlib.import_module("unisono." + room)
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
unisono.front.cli.app.build_app()
print(json.dumps([sorted(sys.modules), len(names)]))
"""


def test_no_module_of_the_front_imports_what_is_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_THE_FRONT], capture_output=True, text=True, check=True
    )
    modules, n_front = json.loads(done.stdout)
    assert n_front > 40
    assert [name for name in HEAVY if name in modules] == []


def test_help_needs_neither_a_schema_nor_a_terminal_library() -> None:
    script = (
        "import sys\nfrom unisono.front.cli.app import build_app\nbuild_app()\nprint(' '.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [name for name in NOT_FOR_HELP if name in done.stdout.split()] == []


def test_help_is_quick() -> None:
    subprocess.run(
        [sys.executable, "-m", "unisono", "--help"], capture_output=True, check=True
    )  # warms the caches
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "unisono", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < HELP_CPU_S, f"{used:.2f} s of CPU"


def commands() -> list[tuple[str, ...]]:
    from unisono.front.cli.app import command_names

    return command_names()


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_help_with_a_command_to_paste(command: tuple[str, ...]) -> None:
    arguments = [sys.executable, "-m", "unisono", *command, "--help"]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "100"}
    )
    assert done.returncode == 0
    assert "For example: unisono" in done.stdout
