"""Draws the pictures of README.md and README.zh.md.

    python scripts/readme_pictures.py [--record stall] [--record board]    writes docs/pictures

stall.svg is the README's config on two ranks, one of which is stopped; `--record stall` runs it and
writes what its terminal showed to stall.json. speed.svg is made from bench/results. board.png has
three runs of the same config with other learning rates; `--record board` makes them.
"""

import argparse
import io
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.front.board.boards import chromium  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
RECORD = PICTURES / "stall.json"
RESULTS = ROOT / "bench" / "results"
LANGUAGES = ("en", "zh")

# ---- a terminal

STOPPED_AFTER_STEP = 20
COLUMNS, _INDENT = 104, 10
_CHARACTER, _LINE, _MARGIN = 8.43, 20, 14
_CONSOLE = Console(file=io.StringIO())
_SHOWN = re.compile(r"(device|ranks|model|steps|设备|rank|模型|步数) ")
_LABEL = re.compile(r"(?:WHAT|WHO|DETECTED|EVIDENCE|FIX|问题|责任方|检出|证据|解决) +")
_RESTARTED = re.compile(r"(?s)\[rank_stopped\].*\[rank_stopped\].*\d+/\d+ (步 )?· ")
_STACK = re.compile(r"/\S*/(?=(?:unisono|torch|transformers)/)")
_COMMENTS = {
    "en": "# in another terminal: kill -STOP {pid}, the process of rank 1",
    "zh": "# 在另一个终端：kill -STOP {pid}，即 rank 1 的进程",
}


def first_config() -> str:
    """The first config of the README."""
    shown = re.search(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown, "README.md has no config"
    return shown[1]


def stalled_run(language: str, folder: Path) -> list[str]:
    """Trains on two ranks and stops the second; gives what the terminal showed, with the command.

    Raises:
        TimeoutError: if the run does not come to its restart.
    """
    _write_inputs(folder)
    settings = [f"UNISONO_LANG={language}", "PYTHONUNBUFFERED=1", "OMP_NUM_THREADS=1"]
    log = folder / "log.txt"
    with (
        log.open("w") as out,
        subprocess.Popen(
            ["/usr/bin/env", *settings, sys.executable, "-m", "unisono", "train", "first.yaml", "--nproc", "2"],
            cwd=folder, stdout=out, stderr=subprocess.STDOUT,
        ) as front,
    ):  # fmt: skip
        try:
            pid = _stop_rank(folder / "runs" / "first")
            before = log.read_text().splitlines()
            _wait_for(lambda: bool(_RESTARTED.search(log.read_text())))
        finally:
            front.send_signal(signal.SIGTERM)
    after = log.read_text().splitlines()[len(before) :]
    shown = [line for line in before if _SHOWN.match(line)]
    steps = [line for line in before if re.search(r"\d+/\d+ (步 )?· ", line)]
    verdict = list(_shortened(after, folder))
    return [
        "$ unisono train first.yaml --nproc 2", *shown, steps[-1], "", _COMMENTS[language].format(pid=pid), *verdict
    ]  # fmt: skip


def _write_inputs(folder: Path) -> None:
    """The config and the rows of the README."""
    (folder / "first.yaml").write_text(first_config())
    (folder / "examples").symlink_to(ROOT / "examples")


def _stop_rank(run: Path) -> int:
    """Stops rank 1 once it has trained some steps; gives its process id."""
    metrics, events = run / "metrics.jsonl", run / "events" / "rank-00001.jsonl"
    _wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= STOPPED_AFTER_STEP)
    (pid, *_) = re.findall(r'"pid": (\d+)', events.read_text())
    os.kill(int(pid), signal.SIGSTOP)
    return int(pid)


def _wait_for(condition: Callable[[], bool], *, seconds: float = 300) -> None:
    """Raises TimeoutError if the condition stays false."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the run has not come this far")
        time.sleep(0.05)


def _shortened(lines: list[str], folder: Path) -> Iterator[str]:
    """The verdict, with one line of a stack, and which step was saved."""
    saved = next(line for line in lines if "step-0" in line)
    (_, start) = [number for number, line in enumerate(lines) if "[rank_stopped]" in line][:2]
    stacks = 0
    for line in itertools.takewhile(_LABEL.match, lines[start:]):
        is_stack = bool(re.search(r"\.py:\d+", line))
        stacks += is_stack
        if not (is_stack and stacks > 1):
            yield _STACK.sub("…/", line.replace(f"{folder}/", ""))
    yield saved


def drawn_terminal(lines: list[str]) -> str:
    """An SVG of a terminal. A line that is too long continues below its text, not below its label."""
    body, top = [], 2 * _LINE
    for line in lines:
        label, text = _split_label(line)
        kind = _style(line)
        if label:
            body.append(_text(_MARGIN, top, label, f"class='{kind or 'label'}'"))
        for part in _wrapped(text, COLUMNS - (_INDENT if label else 0)):
            left = _MARGIN + (_INDENT * _CHARACTER if label else 0)
            body.append(_text(left, top, part, f"class='{kind}'" if kind else ""))
            top += _LINE
    width = 2 * _MARGIN + COLUMNS * _CHARACTER
    return (
        f"<svg viewBox='0 0 {width} {top}' xmlns='http://www.w3.org/2000/svg' fill='#d4d4d4' font-size='14'\n"
        ' font-family=\'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",'
        ' "Noto Sans Mono CJK SC", monospace\'>\n'
        "<style>.command { font-weight: bold } .comment { fill: #9e9e9e; font-style: italic }"
        " .what { fill: #ff7b72; font-weight: bold } .label { fill: #79c0ff }</style>\n"
        f"<rect width='{width}' height='{top}' rx='8' fill='#1e1e1e'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _split_label(line: str) -> tuple[str, str]:
    """The label of a line, and its text."""
    label = _LABEL.match(line) or _SHOWN.match(line)
    return (label[0].rstrip(), line[label.end() :].lstrip()) if label else ("", line)


def _wrapped(text: str, columns: int) -> list[str]:
    """Lines of at most so many columns, of which a Chinese character takes two."""
    return [str(part).rstrip() for part in Text(text).wrap(_CONSOLE, columns)] or [""]


def _style(line: str) -> str:
    if "[rank_stopped]" in line:
        return "what"
    return {"$": "command", "#": "comment"}.get(line[:1], "")


# ---- the board

_RATES = ("1.0e-3", "4.0e-3", "1.6e-2")


def board_picture(folder: Path) -> bytes:
    """Trains three times; gives a PNG of the runs in the browser."""
    _write_inputs(folder)
    unisono = [sys.executable, "-m", "unisono"]
    for rate in _RATES:
        overrides = [
            f"optim.lr={rate}",
            f"output_dir=runs/lr-{rate}",
            "duration=4 epochs",
            "eval.every=12 steps",
        ]
        subprocess.run([*unisono, "train", "first.yaml", *overrides], cwd=folder, check=True)
    subprocess.run([*unisono, "board", "runs", "--out", "page.html"], cwd=folder, check=True)
    with chromium() as browser:
        page = browser.new_page(
            color_scheme="light", viewport={"width": 1280, "height": 1100}, timezone_id="UTC"
        )
        page.goto((folder / "page.html").as_uri() + "?lang=en")
        page.wait_for_selector("[data-painted]")
        return page.screenshot()


# ---- speed


@dataclass(frozen=True)
class Panel:
    """A group of bars with the same unit.

    Attributes:
        bars: tokens per second by the name of an arm.
    """

    title: dict[str, str]
    bars: dict[str, float]


def panels() -> list[Panel]:
    """The figures of `bench/peers.py` and `bench/gpu_peers.py`."""
    one_thread = json.loads((RESULTS / "peers-m135-t1.json").read_text())["medians"]
    gpu = json.loads((RESULTS / "gpu_peers.json").read_text())["arms"]
    return [
        Panel(
            {
                "en": "LoRA, Llama of 135 M parameters, one CPU thread: tokens per second of CPU time",
                "zh": "LoRA，1.35 亿参数的 Llama，单个 CPU 线程：每秒 CPU 时间训练的 token 数",
            },
            {
                label: one_thread[arm]["tokens_per_cpu_s"]
                for label, arm in (
                    ("unisono", "unisono"),
                    ("LLaMA-Factory, tuned", "llamafactory best"),
                    ("LLaMA-Factory, defaults", "llamafactory default"),
                    ("TRL, packing", "trl packing"),
                    ("TRL, defaults", "trl default"),
                )
            },
        ),
        Panel(
            {
                "en": "LoRA, Llama 3.2 1B with random weights, one H100: tokens per second",
                "zh": "LoRA，Llama 3.2 1B（随机权重），一块 H100：每秒训练的 token 数",
            },
            {
                label: statistics.median(run["tokens_per_s"] for run in gpu[arm])
                for label, arm in (
                    ("unisono", "1b unisono"),
                    ("TRL, packing, flash attention, Liger", "1b trl-tuned"),
                    ("TRL, defaults", "1b trl-default"),
                )
            },
        ),
    ]


_WIDTH, _LEFT, _ROW = 880, 290, 26


def drawn_bars(language: str) -> str:
    """An SVG of the panels, on white, which is readable on dark pages too."""
    body, top = [], 14
    for panel in panels():
        body.append(_text(14, top + 14, panel.title[language], "font-weight='bold'"))
        top += 28
        longest = max(panel.bars.values())
        for name, value in panel.bars.items():
            width = (_WIDTH - _LEFT - 90) * value / longest
            colour = "#00796b" if name == "unisono" else "#9e9e9e"
            body += [
                _text(_LEFT - 10, top + 16, name, "text-anchor='end'"),
                f"<rect x='{_LEFT}' y='{top + 3}' width='{width:.1f}' height='{_ROW - 8}' fill='{colour}'/>",
                _text(_LEFT + width + 8, top + 16, f"{value:,.0f}"),
            ]
            top += _ROW
        top += 14
    style = "font-family='sans-serif' font-size='14' fill='#212121'"
    return (
        f"<svg viewBox='0 0 {_WIDTH} {top}' xmlns='http://www.w3.org/2000/svg' {style}>\n"
        f"<rect width='{_WIDTH}' height='{top}' fill='white'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    more = more and f" {more}"
    return f"<text x='{x:.1f}' y='{y}'{more}>{escape(text)}</text>"


def name_of(picture: str, language: str) -> str:
    """The file of a picture."""
    return f"{picture}.svg" if language == "en" else f"{picture}.{language}.svg"


def drawn() -> dict[str, str]:
    """The pictures by file name, from the recorded run and from the figures of bench/results."""
    record = json.loads(RECORD.read_text())
    pictures = {name_of("stall", language): drawn_terminal(record[language]) for language in LANGUAGES}
    return pictures | {name_of("speed", language): drawn_bars(language) for language in LANGUAGES}


def record(name: str) -> None:
    """Runs what a picture shows."""
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, language) for language in LANGUAGES]
        for folder in folders:
            folder.mkdir()
        if name == "board":
            (PICTURES / "board.png").write_bytes(board_picture(folders[0]))
        else:
            lines = {folder.name: stalled_run(folder.name, folder) for folder in folders}
            RECORD.write_text(json.dumps(lines, ensure_ascii=False, indent=1) + "\n")


def main() -> None:
    """Records what the command line names, and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", choices=["stall", "board"], action="append", default=[])
    for name in parser.parse_args().record:
        record(name)
    for name, svg in drawn().items():
        (PICTURES / name).write_text(svg)


if __name__ == "__main__":
    main()
