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
    "jinja2",
    "sacrebleu",
    "rouge_score",
    "huggingface_hub",
    "re2",
    "starlette",
    "uvicorn",
)
NOT_FOR_HELP = (*HEAVY, "pydantic", "rich", "yaml")
# The promise is 0.3 s of CPU on a quiet machine; a busy one, with cold caches, is given five times
# as much.
HELP_CPU_S = 0.3 * 5

# Integrations belong to the libraries that they integrate with; servers are the extra `board`.
IMPORT_THE_CORE = """
import importlib, json, pkgutil, sys
heavy, apart = map(json.loads, sys.argv[1:])
sys.modules.update(dict.fromkeys(heavy))  # as if they were not installed
names = ["unisono", "unisono.trainer.checkpoint.store", "unisono.trainer.config", "unisono.trainer.plan"]
for wing in ("base", "guard", "jobs", "front"):
    package = importlib.import_module("unisono." + wing)
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if name not in apart:
        importlib.import_module(name)
from unisono.front.cli.app import build_app
build_app()
print(len(names))
"""
APART = (
    *(f"unisono.guard.integrations.{name}" for name in ("accelerate", "lightning", "transformers")),
    "unisono.guard.integrations.torchrun_handler",
    "unisono.front.api.loading",
    *("unisono.front.board.server", "unisono.front.http_server"),
    *("unisono.front.serve.server", "unisono.front.serve.answer_streams"),
    *(
        f"unisono.front.studio.{name}"
        for name in ("actions", "gate", "models", "owner", "results", "runs", "studio_server", "suggestions")
    ),
)


def test_no_module_of_the_core_imports_a_package_of_the_trainer() -> None:
    script = [sys.executable, "-c", IMPORT_THE_CORE, json.dumps(HEAVY), json.dumps(APART)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200


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
