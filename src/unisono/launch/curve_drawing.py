"""Draws a run's loss curve: at the end here, and meanwhile in a process of its own.

A thread of the front that was writing the picture while the disk began to hang would keep the front from ending.

Run: python -m unisono.launch.curve_drawing RUN TITLE
"""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from unisono.files import write_text
from unisono.rundir import RunDir
from unisono.rundir.curve import draw_curve
from unisono.rundir.records import read_metrics

_CLOSE_S = 5.0


def draw(run: RunDir, *, title: str) -> None:
    """Draws loss.svg from metrics.jsonl. A picture is not worth a run: a full disk leaves the old one."""
    if not run.metrics.exists():
        return
    lines = read_metrics(run.metrics)
    losses = [(float(x["step"]), float(x["loss"])) for x in lines if _has(x, "loss")]
    evaluations = [(float(x["step"]), float(x["eval_loss"])) for x in lines if _has(x, "eval_loss")]
    with contextlib.suppress(OSError):
        write_text(run.curve, draw_curve(losses, evaluations, title=title))


class Drawing:
    """Draws the curve while the ranks run, one picture at a time; requests that arrive meanwhile are served by the next one."""

    def __init__(self, run: RunDir, *, title: str) -> None:
        self._run, self._title = run, title
        self._words = (sys.executable, "-m", __spec__.name, str(run.root), title)
        self._process: subprocess.Popen[bytes] | None = None

    def again(self) -> None:
        """Does not wait. If no process can be started (a limit), there is no picture until the next request."""
        if self._process is not None and self._process.poll() is None:
            return
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._words,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def finish(self) -> None:
        """Draws the last one, after the one that is in work, if the disk answers."""
        if self._process is not None:
            try:
                self._process.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                threading.Thread(target=self._process.wait, name="reap", daemon=True).start()
        draw(self._run, title=self._title)


def _has(line: dict[str, Any], name: str) -> bool:
    return isinstance(line.get(name), int | float) and "step" in line


if __name__ == "__main__":
    draw(RunDir(Path(sys.argv[1])), title=sys.argv[2])
