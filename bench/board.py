"""What the board takes: of a long run with many ranks, of many runs, of lines that come, and of a
page that stays open.

    python bench/board.py                     about ten minutes; needs Chromium; writes bench/results/board.json
    python bench/board.py --only long many    parts: long many live open cost paired studio

long: 100,000 steps and 64 ranks: first paint of curves, the server's memory, the size of the file.
many: 20 runs of 10,000 steps, and zoom. live: from an appended line to the draw of its curve. open:
eight hours of steps of a second, appended as fast as they are shown. cost: the server's CPU beside
a run that logs 20 steps a second. paired: a real run, whose stretches alternate between a board
with a client that follows it as the page does, and none; the medians of step times and of CPU
seconds a step, pair by pair. studio: first paint of its page; from a typed key to its YAML. On a machine that is busy with other work the spread of the pairs is
larger than the bound.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402

from tests.front.board.boards import (  # noqa: E402
    CHROMIUM,
    CHROMIUM_FLAGS,
    RunningBoard,
    board_of,
    chromium,
)
from tests.front.board.made_runs import append, make_run, metrics_line  # noqa: E402
from tests.front.studio.studios import first_paint_ms, opened, studio_of, typed_ms  # noqa: E402

BOUNDS = {
    "long": {"first_paint_s": 2.0, "server_mb": 150, "file_mb": 5.0, "file_requests": 0},
    "many": {"first_paint_s": 3.0, "zoom_ms": 100},
    "live": {"median_s": 1.0, "worst_s": 2.0},
    "open": {"server_growth": 0.1, "page_growth": 0.1},
    "cost": {"server_cpu_of_two_cores": 0.01},
    "paired": {"step_time_more": 0.01},
    "studio": {"first_paint_s": 1.0, "typed_ms": 100},
}
LINES = 500
HOURS_8 = 28_800


def memory_mb(pid: int, name: str = "VmRSS") -> float:
    """Of a process, from /proc."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1000, 1)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def page_of(url: str, *, is_scrolled: bool = False, **options: Any) -> Iterator[Page]:
    """A page in a new Chromium, with its curves painted."""
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, args=[*CHROMIUM_FLAGS, "--enable-precise-memory-info"]
        )
        page = browser.new_context(viewport={"width": 1400, "height": 900}, **options).new_page()
        if is_scrolled:  # curves below the window are drawn when they are scrolled to
            page.add_init_script(
                "const scrolling = setInterval(() => { document.getElementById('curves')?.scrollIntoView();"
                " if (document.documentElement.dataset.lines === '20') clearInterval(scrolling); }, 30)"
            )
        page.goto(url)
        page.wait_for_selector("[data-painted]", timeout=60_000)
        yield page
        browser.close()


def painted_s(page: Page) -> float:
    """Seconds from the beginning of the navigation to the first drawn curve."""
    return round(float(page.evaluate("Number(document.documentElement.dataset.painted)")) / 1000, 3)


def address_without_token(board: RunningBoard) -> tuple[str, dict[str, Any]]:
    """The address, and the options of a browser that has the cookie."""
    board.json("/api/runs")
    name, _, value = board.cookie.partition("=")
    cookie = {"name": name, "value": value, "domain": "127.0.0.1", "path": "/"}
    return f"http://127.0.0.1:{board.port}/", {"storage_state": {"cookies": [cookie], "origins": []}}


def measure_long(folder: Path) -> dict[str, Any]:
    """A run with 100,000 steps and 64 ranks."""
    run = make_run(folder / "long", steps=100_000, total=100_000, ranks=64)
    began = time.monotonic()
    with board_of(run) as board:
        started = time.monotonic() - began
        url, options = address_without_token(board)
        paints = []
        for _ in range(3):
            with page_of(url, **options) as page:
                paints.append(painted_s(page))
        server = memory_mb(board.process.pid, "VmHWM")
    out = folder / "long.html"
    subprocess.run(
        [sys.executable, "-m", "unisono", "board", str(run), "--out", str(out)],
        check=True,
        capture_output=True,
    )
    requests: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        context = browser.new_context(offline=True)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.goto(out.as_uri())
        page.wait_for_selector("[data-painted]", timeout=60_000)
        of_file = painted_s(page)
        browser.close()
    return {
        "first_paint_s": statistics.median(paints), "first_paints_s": paints, "server_start_s": round(started, 2), "server_mb": server,
        "file_mb": round(out.stat().st_size / 1e6, 2), "file_first_paint_s": of_file, "file_requests": len([url for url in requests if url != out.as_uri()]),
    }  # fmt: skip


def measure_many(folder: Path) -> dict[str, Any]:
    """20 runs of 10,000 steps over each other."""
    for number in range(20):
        make_run(
            folder / "many" / f"run-{number:02d}",
            steps=10_000,
            total=10_000,
            seed=number,
            lr=1e-4 * (number + 1),
        )
    with board_of(folder / "many") as board:
        url, options = address_without_token(board)
        paints, zooms = [], []
        for _ in range(3):
            with page_of(url, is_scrolled=True, **options) as page:
                until(
                    page,
                    "document.querySelectorAll('[data-region=status] tbody tr .badge').length >= 20 &&"
                    " Number(document.documentElement.dataset.lines) >= 20",
                )
                paints.append(round(float(page.evaluate("performance.now()")) / 1000, 3))
                page.wait_for_timeout(1_000)
                for _ in range(5):
                    page.click("[data-region=curves] .zoom button:nth-child(1)")
                    page.wait_for_timeout(600)
                    zooms.append(float(page.evaluate("Number(document.documentElement.dataset.zoomed)")))
        return {
            "first_paint_s": statistics.median(paints),
            "first_paints_s": paints,
            "zoom_ms": statistics.median(zooms),
            "zoom_worst_ms": max(zooms),
            "server_mb": memory_mb(board.process.pid, "VmHWM"),
        }


def until(page: Page, condition: str, *, limit_s: float = 60) -> None:
    """Waits until an expression is true; the page's policy forbids wait_for_function."""
    limit = time.monotonic() + limit_s
    while not page.evaluate(condition):
        assert time.monotonic() < limit, condition
        page.wait_for_timeout(50)


def measure_live(folder: Path) -> dict[str, Any]:
    """From an appended line to the draw of its curve."""
    run = make_run(folder / "live", steps=1_000, total=2_000, outcome=None)
    rng = random.Random(0)
    with board_of(run) as board:
        url, options = address_without_token(board)
        with page_of(url, **options) as page:
            page.evaluate(
                """() => { window.seen = {}; const card = document.querySelector('[data-curve=loss]');
                new MutationObserver(() => requestAnimationFrame(() => { const step = card.dataset.drawn; window.seen[step] ??= Date.now(); })).observe(card, { attributes: true, attributeFilter: ['data-drawn'] }); }"""
            )
            sent = {}
            for step in range(1_001, 1_001 + LINES):
                append(run, metrics_line(step, rng))
                sent[step] = time.time()
                page.wait_for_timeout(rng.uniform(20, 450))
            page.wait_for_timeout(3_000)
            seen = {int(step): at / 1000 for step, at in page.evaluate("window.seen").items()}
    # a line that came together with a later one was drawn with that
    delays = sorted(
        min(at for other, at in seen.items() if other >= step) - when for step, when in sent.items()
    )
    return {
        "lines": LINES,
        "median_s": round(statistics.median(delays), 3),
        "p95_s": round(delays[int(LINES * 0.95)], 3),
        "worst_s": round(delays[-1], 3),
    }


def measure_open(folder: Path) -> dict[str, Any]:
    """Eight hours of steps of a second, in little time; memory after a quarter of them and at the
    end.
    """
    run = make_run(folder / "open", steps=100, total=HOURS_8, outcome=None)
    rng = random.Random(0)
    found = []
    with board_of(run) as board:
        url, options = address_without_token(board)
        with page_of(url, **options) as page:
            client = page.context.new_cdp_session(page)

            def heap_mb() -> float:
                client.send("HeapProfiler.collectGarbage")
                client.send("Performance.enable")
                metrics = {
                    one["name"]: one["value"] for one in client.send("Performance.getMetrics")["metrics"]
                }
                return round(metrics["JSHeapUsedSize"] / 1e6, 2)

            for batch in range(HOURS_8 // 100):
                step = 100 + batch * 100
                append(run, *[metrics_line(step + one, rng) for one in range(1, 101)])
                page.wait_for_timeout(300)
                if (batch + 1) % (HOURS_8 // 800) == 0:
                    until(
                        page,
                        f"Number(document.querySelector('[data-curve=loss]').dataset.drawn) >= {step + 100}",
                    )
                    found.append((memory_mb(board.process.pid), heap_mb()))
    server, page_mb = [one[0] for one in found], [one[1] for one in found]
    return {
        "server_mb": server, "page_mb": page_mb, "server_growth": round(server[-1] / server[1] - 1, 3), "page_growth": round(max(page_mb[4:]) / max(page_mb[:4]) - 1, 3),
    }  # fmt: skip


def measure_cost(folder: Path) -> dict[str, Any]:
    """The server's CPU while a page follows a run of 64 ranks with 20 steps a second."""
    run = make_run(folder / "cost", steps=2_000, total=10_000, ranks=64, outcome=None)
    rng = random.Random(0)
    with board_of(run) as board:
        url, options = address_without_token(board)
        with page_of(url, **options) as page:
            before, began = cpu_s(board.process.pid), time.monotonic()
            for step in range(2_001, 2_601):
                append(run, metrics_line(step, rng))
                page.wait_for_timeout(50)
            used, passed = cpu_s(board.process.pid) - before, time.monotonic() - began
    return {
        "server_cpu_s_per_s": round(used / passed, 4),
        "server_cpu_of_two_cores": round(used / passed / 2, 4),
        "seconds": round(passed, 1),
    }


PAIRS, STRETCH_S = 12, 10.0


def measure_paired(folder: Path) -> dict[str, Any]:
    """Step times and CPU seconds a step of one run, in stretches with and without a board that is
    followed.
    """
    run = folder / "run"
    rows = "".join(json.dumps({"prompt": f"say {n}", "completion": f"{n} " * 40}) + "\n" for n in range(500))
    (folder / "rows.jsonl").write_text(rows)
    config = {
        "model": "builtin:tiny", "data": {"train": str(folder / "rows.jsonl")}, "output_dir": str(run), "duration": "100000 steps",
        "batch": {"global": 2}, "optim": {"lr": 1e-4},
    }  # fmt: skip
    (folder / "train.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "unisono", "train", str(folder / "train.yaml"), "--quiet"]
    # One thread: the client, which is a browser on a different machine in use, has the other core.
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as training:
        try:
            while not (run / "metrics.jsonl").exists() or len(step_times(run)) < 20:
                time.sleep(0.5)
            rank = rank_of(run)
            found: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
            for number in range(PAIRS):
                for name in ("with", "without") if number % 2 else ("without", "with"):
                    found[name].append(stretch(run, rank, is_followed=name == "with"))
        finally:
            training.terminate()
            training.wait()
    steps, cpu = (
        [more[part] / less[part] - 1 for more, less in zip(found["with"], found["without"], strict=True)]
        for part in (0, 1)
    )
    return {
        "pairs": PAIRS,
        "step_ms_without": round(1000 * statistics.median(one[0] for one in found["without"]), 2),
        "step_time_more": round(statistics.median(steps), 4),
        "step_time_more_quartiles": [round(one, 4) for one in statistics.quantiles(steps, n=4)],
        "cpu_more": round(statistics.median(cpu), 4),
        "cpu_more_quartiles": [round(one, 4) for one in statistics.quantiles(cpu, n=4)],
    }


def stretch(run: Path, rank: int, *, is_followed: bool) -> tuple[float, float]:
    """The median step time, and the rank's CPU seconds a step, over some seconds."""
    with contextlib.ExitStack() as stack:
        if is_followed:
            board = stack.enter_context(board_of(run))
            board.json("/api/runs")
            following = stack.enter_context(ThreadPoolExecutor(1))
            over = threading.Event()
            stack.callback(over.set)
            following.submit(follow, board, over)
            time.sleep(2.0)  # it has read what was there
        before, cpu = len(step_times(run)), cpu_s(rank)
        time.sleep(STRETCH_S)
        times, used = step_times(run)[before:], cpu_s(rank) - cpu
    return statistics.median(times), used / len(times)


def follow(board: RunningBoard, over: threading.Event) -> None:
    """Asks for what has changed, as often as the page does."""
    while not over.wait(0.25):
        for region in ("status", "curves?points=600&since=0", "ranks", "log"):
            board.ask(f"/api/runs/run/{region}")


def step_times(run: Path) -> list[float]:
    """Seconds of all steps so far."""
    lines = (run / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    return [one["step_time_s"] for one in map(json.loads, lines) if "step_time_s" in one]


def rank_of(run: Path) -> int:
    """The process of the rank."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "unisono.worker" in words and str(run / "plan.json") in words:
            return int(process.pid)
    raise AssertionError("the rank has ended")


def measure_studio(folder: Path) -> dict[str, Any]:
    """The page of `unisono studio`, with the fields of all settings on it."""
    paints: list[float] = []
    times: list[float] = []
    with studio_of(folder) as studio, chromium() as browser:
        for _ in range(5):
            page = opened(browser, studio.url, [])
            paints.append(round(first_paint_ms(page) / 1000, 3))
            page.locator("#s-new_run details summary").click()
            times += typed_ms(page, "f-output_dir", "-a-long-name")
            page.context.close()
    return {
        "first_paint_s": statistics.median(paints), "first_paints_s": paints,
        "typed_ms": round(statistics.median(times), 1), "worst_typed_ms": round(max(times), 1),
    }  # fmt: skip


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "long": measure_long, "many": measure_many, "live": measure_live, "open": measure_open, "cost": measure_cost,
    "paired": measure_paired, "studio": measure_studio,
}  # fmt: skip


def main() -> None:
    """Measures, prints, and writes the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "board.json")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    results |= {
        "bounds": BOUNDS,
        "cores": os.cpu_count(),
        "chromium": (
            subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        ),
    }
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="board-") as folder:
            load = os.getloadavg()[0]
            results[name] = PARTS[name](Path(folder)) | {"load_average": round(load, 2)}
        for figure, bound in BOUNDS[name].items():
            value = results[name][figure]
            print(
                f"{name:<6} {figure:<26} {value:>10}  at most {bound}  {'' if value <= bound else 'NOT MET'}",
                flush=True,
            )
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
