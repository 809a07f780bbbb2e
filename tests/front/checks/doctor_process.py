"""`unisono doctor` as a user starts it, under limits, mounts and variables that a test chooses."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from tests.jobs.nodes.harness import STRANGERS
from tests.needs import need

FRONT = Path(__file__).parents[2] / "jobs" / "nodes" / "front.py"
LIMIT_S = 240.0  # of a busy machine; it takes one second


@dataclass(frozen=True)
class Seen:
    """What it said."""

    code: int
    out: str
    err: str

    @property
    def checks(self) -> list[dict[str, Any]]:
        """Of `--json`."""
        return list(json.loads(self.out)["checks"])

    def of(self, check: str) -> list[dict[str, Any]]:
        """The findings of one check."""
        found = [finding for finding in self.checks if finding["id"] == check]
        assert found, f"{check} was not looked at: {self.out}\n{self.err}"
        return found

    def text(self, check: str) -> str:
        """All that is said of a check."""
        return "\n".join(
            line for finding in self.of(check) for line in [*finding["evidence"], *finding["fix"]]
        )

    def status(self, check: str) -> str:
        """Its worst finding."""
        found = {finding["status"] for finding in self.of(check)}
        return next(status for status in ("fail", "warn", "unknown", "pass") if status in found)


def doctor(
    folder: Path,
    *words: str,
    before: str = "",
    env: dict[str, str] | None = None,
    answers: dict[str, Any] | None = None,
    unshare: bool = False,
    as_json: bool = True,
) -> Seen:
    """Runs it in a folder.

    Args:
        folder: the working directory; caches are in it, too.
        words: of the command line.
        before: shell commands that come first: `ulimit -n 64`, mounts. Where one fails the test is
            skipped.
        env: variables.
        answers: recorded ones, see tests/jobs/nodes/front.py.
        unshare: whether mounts and processes are its own; needs root.
        as_json: whether it speaks JSON.
    """
    program = [sys.executable, "-m", "unisono"]
    if answers is not None:
        file = folder / "answers.json"
        file.write_text(json.dumps(answers))
        program = [sys.executable, str(FRONT), str(file)]
    command = [*program, "doctor", *words, *(["--json"] if as_json else [])]
    variables = environment(folder) | (env or {})
    if not before and not unshare:
        done = front_server.run(command, cwd=folder, env=variables, timeout=LIMIT_S)
        return Seen(done.returncode, done.stdout, done.stderr)
    shell = f"{{ {before or 'true'}; }} || exit 99; exec {shlex.join(command)}"
    start = ["bash", "-c", shell]
    if unshare:
        need("unshare", root=True)
        own = ["--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "--kill-child"]
        start = ["unshare", *own, *start]
    done = subprocess.run(
        start, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )  # fmt: skip
    if done.returncode == 99:
        pytest.skip(f"needs what this shell may not do: {before}: {done.stderr.strip()[-300:]}")
    return Seen(done.returncode, done.stdout, done.stderr)


def environment(folder: Path) -> dict[str, str]:
    """This process's variables, without those of jobs, and with caches below the folder."""
    kept = {name: value for name, value in os.environ.items() if not STRANGERS.match(name)}
    return kept | {
        "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "settings"),
        "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder),
    }  # fmt: skip
