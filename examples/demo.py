"""Fine-tunes the built-in model and shows the results before and after: the program behind `make demo`.

    python examples/demo.py [--seed 0]

The run (`unisono train examples/demo.yaml`) measures all figures; this program reads them from its directory.
"""

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import shorten
from typing import Any

ROOT = Path(__file__).parents[1]
RUN = ROOT / "runs" / "demo"
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def curve(losses: list[float], columns: int = _COLUMNS) -> str:
    """A line of bars: the logarithm of the loss, averaged over equal parts of the run."""
    columns = min(columns, len(losses))
    edges = [round(i * len(losses) / columns) for i in range(columns + 1)]
    heights = [math.log(max(sum(losses[a:b]) / (b - a), 1e-6)) for a, b in itertools.pairwise(edges)]
    low, high = min(heights), max(heights)
    scale = (len(_BARS) - 1) / (high - low or 1.0)
    return "".join(_BARS[round((height - low) * scale)] for height in heights)


def show_samples(events: list[dict[str, Any]]) -> None:
    """The same requests answered before the first step and after the last."""
    samples = [event for event in events if event["kind"] == "sample"]
    last = max(sample["step"] for sample in samples)
    after = {sample["prompt"]: sample["text"] for sample in samples if sample["step"] == last}
    room = shutil.get_terminal_size().columns - len("  before  ''")
    for sample in samples:
        if sample["step"] == 0:
            print(f"request   {sample['prompt'].strip()}")
            print(f"  before  {shorten(sample['text'], room, placeholder='…')!r}")
            print(f"  after   {after[sample['prompt']]}")
            print(f"  correct {sample['reference']}\n")


def main() -> int:
    """Trains, then shows answers, curve and exact match; gives the exit code of the training."""
    parser = argparse.ArgumentParser(
        description="Fine-tune the built-in model and show the results before and after."
    )
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    command = [sys.executable, "-m", "unisono", "train", "examples/demo.yaml", "--fresh", f"seed={seed}"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        return code
    result = json.loads((RUN / "result.json").read_text("utf-8"))
    losses = [line["loss"] for line in _read_lines(RUN / "metrics.jsonl") if "loss" in line]
    print("\nThree held-out requests:\n")
    show_samples(_read_lines(RUN / "events" / "rank-00000.jsonl"))
    print(
        f"loss {losses[0]:.2f} {curve(losses)} {losses[-1]:.3f}   ({(RUN / 'loss.svg').relative_to(ROOT)})\n"
    )
    print(f"exact match before: {100 * result['eval']['exact_match_before']:.1f} %")
    print(f"exact match after: {100 * result['eval']['exact_match']:.1f} %")
    print("\nChat with it: unisono chat runs/demo")
    return 0


if __name__ == "__main__":
    sys.exit(main())
