"""Draws a run's loss curve: at the end here, and meanwhile in a process of its own.

A thread of the front that was writing the picture while the disk began to hang would keep the front
from ending.

Run: python -m unisono.jobs.runs.curve_drawing RUN TITLE
"""

import contextlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from unisono.base.files import write_text
from unisono.base.text import one_line
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import read_metrics

Point = tuple[float, float]
"""(step, loss)."""

_WIDTH, _HEIGHT = 820, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 44, 44
# a picture takes 0.2 CPU seconds, and a small model evaluates every second. A run of seconds has
# the one at its end
_EVERY_S = 10.0
_MOST_POINTS = 1_500  # more than one a pixel shows nothing more

# One neutral grey and two hues of middle lightness, which are legible on white and on near-black
# alike; where the viewer tells its scheme the hues are tuned to it. No background is painted: the
# page's own shows through.
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#777}.title{font-size:14px;fill:#666}"
    ".grid{stroke:#888;stroke-opacity:.25}.raw{stroke:#3b82c4;stroke-opacity:.35;fill:none}"
    ".smooth{stroke:#2b78c0;stroke-width:2;fill:none}.eval{stroke:#d9730d;stroke-width:2;fill:none}.dot{fill:#d9730d}"
    "@media(prefers-color-scheme:dark){text{fill:#aaa}.title{fill:#bbb}.raw,.smooth{stroke:#6cb2f0}"
    ".eval{stroke:#f2a154}.dot{fill:#f2a154}}"
)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The position of a step and a loss on the picture, in pixels."""

    steps: tuple[float, float]
    losses: tuple[float, float]

    def x(self, step: float) -> float:
        low, high = self.steps
        return _LEFT + (step - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, loss: float) -> float:
        low, high = self.losses
        return _HEIGHT - _BOTTOM - (loss - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def draw_curve(train: Sequence[Point], evaluation: Sequence[Point] = (), *, title: str = "") -> str:
    """The SVG of a run: the loss of each step, its smoothed line, and the evaluations' losses.

    Values that are not finite are left out. Text is escaped and loses control characters.
    """
    drawn, tested = _finite(train), _finite(evaluation)
    frame = _frame(drawn + tested)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{_text(title or 'loss')}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="20">{_text(title)}</text>',
        *_axes(frame),
        *_line(_thinned(drawn), "raw", frame),
        *_line(_thinned(smoothed(drawn)), "smooth", frame),
        *_line(_thinned(tested), "eval", frame),
        *(
            f'<circle class="dot" cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="3"/>'
            for s, v in _thinned(tested)
        ),
        *_legend(drawn, tested),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def smoothed(points: Sequence[Point]) -> list[Point]:
    """An exponential mean whose memory is a fiftieth of the run, without the pull of its first
    value.

    m_i = Σ_j β^(i-j) v_j / Σ_j β^(i-j), with β = 1 - 1 / max(1, n / 50).
    """
    beta = 1.0 - 1.0 / max(1.0, len(points) / 50)
    total = weight = 0.0
    result = []
    for step, value in points:
        total, weight = beta * total + value, beta * weight + 1.0
        result.append((step, total / weight))
    return result


def ticks(low: float, high: float, *, about: int = 6) -> list[float]:
    """Round numbers between low and high: 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / distance - 1e-9)
    last = math.floor(high / distance + 1e-9)
    return [index * distance for index in range(first, last + 1)]


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(s, v) for s, v in points if math.isfinite(s) and math.isfinite(v) and abs(v) < 1e30]


def _frame(points: list[Point]) -> _Frame:
    steps = [step for step, _ in points] or [0.0, 1.0]
    losses = [loss for _, loss in points] or [0.0, 1.0]
    first, last = min(steps), max(steps)
    low, high = min(losses), max(losses)
    low = 0.0 if 0 <= low < 0.5 * high else low  # a curve that falls far is drawn from zero
    room = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return _Frame(
        (first, last if last > first else first + 1), (low if low == 0 else low - room, high + room)
    )


def _axes(frame: _Frame) -> list[str]:
    elements = []
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for loss in ticks(*frame.losses):
        y = frame.y(loss)
        elements.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        elements.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.4g}</text>')
    for step in ticks(*frame.steps, about=8):
        if step != int(step):
            continue
        x = frame.x(step)
        elements.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        elements.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{int(step):,}</text>')
    elements.append(f'<text x="{(_LEFT + right) / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>')
    elements.append(
        f'<text x="16" y="{(_TOP + bottom) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(_TOP + bottom) / 2:.0f})">loss</text>'
    )
    return elements


def _line(points: list[Point], name: str, frame: _Frame) -> list[str]:
    if not points:
        return []
    places = " ".join(f"{frame.x(step):.1f},{frame.y(loss):.1f}" for step, loss in points)
    return [f'<polyline class="{name}" points="{places}"/>']


def _legend(train: list[Point], evaluation: list[Point]) -> list[str]:
    entries = [("smooth", f"training {train[-1][1]:.4g}")] if train else []
    entries += [("eval", f"evaluation {evaluation[-1][1]:.4g}")] if evaluation else []
    elements = []
    for index, (name, text) in enumerate(entries):
        x, y = _WIDTH - _RIGHT - 160 * (len(entries) - index), 34
        elements.append(f'<line class="{name}" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>')
        elements.append(f'<text x="{x + 28}" y="{y}">{_text(text)}</text>')
    return elements


def _thinned(points: list[Point]) -> list[Point]:
    """At most so many points as are seen, the last of them always."""
    stride = -(-len(points) // _MOST_POINTS) or 1
    kept = points[::stride]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _text(text: str) -> str:
    return escape(one_line(text, limit=120), {'"': "&quot;"})


_CLOSE_S = 5.0


def draw(run: RunDir, *, title: str) -> None:
    """Draws loss.svg from metrics.jsonl.

    A picture is not worth a run: a full disk leaves the old one.
    """
    if not run.metrics.exists():
        return
    lines = read_metrics(run.metrics)
    losses = [(float(x["step"]), float(x["loss"])) for x in lines if _has(x, "loss")]
    evaluations = [(float(x["step"]), float(x["eval_loss"])) for x in lines if _has(x, "eval_loss")]
    with contextlib.suppress(OSError):
        write_text(run.curve, draw_curve(losses, evaluations, title=title))


class CurveDrawing:
    """Draws the curve while the ranks run, one picture at a time and at most one in ten seconds,
    the first of which count from here.

    A request that comes earlier is served by the next one.
    """

    def __init__(self, run: RunDir, *, title: str) -> None:
        self._run, self._title = run, title
        self._words = (sys.executable, "-m", __spec__.name, str(run.root), title)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()

    def again(self) -> None:
        """Does not wait.

        If no process can be started (a limit), there is no picture until the next request.
        """
        if self._process is not None and self._process.poll() is None:
            return
        if time.monotonic() - self._started < _EVERY_S:
            return
        self._started = time.monotonic()
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


def _has(line: dict[str, object], name: str) -> bool:
    return isinstance(line.get(name), int | float) and "step" in line


if __name__ == "__main__":
    draw(RunDir(Path(sys.argv[1])), title=sys.argv[2])
