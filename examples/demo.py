"""Fine-tunes the built-in model and shows the results before and after: the program behind `make
demo`, `make demo-dpo`, `make demo-grpo` and `make demo-vision`.

    python examples/demo.py [sft | dpo | grpo | vision] [--seed 0] [key=value ...]

`sft` teaches answers to requests (`unisono train examples/demo.yaml`), `dpo` which of two answers
is preferred (`examples/demo-dpo.yaml`), `grpo` which of the model's own answers is right, by a
reward (`examples/demo-grpo.yaml`), `vision` what pictures show (`examples/demo-vision.yaml`). The
run measures all figures; this program reads them from its directory.
"""

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

ROOT = Path(__file__).parents[1]
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
_SHOWN = 3
_RIGHT = 0.3

Lines = list[dict[str, Any]]


def main() -> int:
    """Trains, then shows answers, curves and figures; gives the exit code of the training."""
    parser = argparse.ArgumentParser(
        description="Fine-tune the built-in model and show the results before and after."
    )
    parser.add_argument("objective", choices=["sft", "dpo", "grpo", "vision"], nargs="?", default="sft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config")
    args = parser.parse_args()
    name, show = {
        "sft": ("demo", show_sft),
        "dpo": ("demo-dpo", show_dpo),
        "grpo": ("demo-grpo", show_grpo),
        "vision": ("demo-vision", show_vision),
    }[args.objective]
    options = [f"seed={args.seed}", *args.overrides]
    if args.objective == "grpo":
        options = ["--nproc", "2", *options]  # each samples half of the answers
        write_start(ROOT / "runs" / "demo-grpo-start.jsonl")
        code = train("demo-grpo-start", ["--nproc", "2", f"seed={args.seed}"])
        if code:
            return code
    if args.objective == "vision":
        subprocess.run(
            [sys.executable, "examples/vision/make_shapes.py", f"runs/{name}-start"], cwd=ROOT, check=True
        )
    code = train(name, options)
    if code:
        return code
    run = ROOT / "runs" / name
    events = _read_lines(run / "events" / "rank-00000.jsonl")
    samples = [event for event in events if event["kind"] == "sample"]
    if args.objective == "vision":
        print(f"\nResults: {run.relative_to(ROOT)}, with the curve of the loss in loss.svg")
        show(run, samples)
        return 0
    show(run, samples)
    print(f"\nResults: {run.relative_to(ROOT)}, with the curve of the loss in loss.svg")
    print(f"Chat with it: unisono chat {run.relative_to(ROOT)}")
    return 0


def train(name: str, options: list[str]) -> int:
    """Trains by a config of the examples; gives the exit code."""
    command = [sys.executable, "-m", "unisono", "train", f"examples/{name}.yaml", "--fresh", *options]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def write_start(path: Path) -> None:
    """Rows of which three in ten have the right form, and the others repeat the request."""
    path.parent.mkdir(exist_ok=True)
    rows = _read_lines(ROOT / "examples" / "data" / "train.jsonl")
    others = itertools.islice(itertools.cycle(rows), round(len(rows) * (1 / _RIGHT - 1)))
    rows += [{"prompt": row["prompt"], "completion": f"ok, {row['prompt']}"} for row in others]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def show_grpo(run: Path, samples: Lines) -> None:
    """Answers of the first and of the last step with their rewards, the curve of the reward, and
    the reward of the likeliest answers to the held-out requests.
    """
    from pyarrow import parquet

    files = sorted((run / "rollouts").glob("*.parquet"))
    for title, file in (("first", files[0]), ("last", files[-1])):
        print(f"\nAnswers sampled in the {title} step, with their rewards:\n")
        for row in parquet.read_table(file).to_pylist()[:: len(files[:8]) + 1][:_SHOWN]:
            print(f"request  {json.loads(row['prompt'])}\n  {row['reward']:.0f}  {row['text']}\n")
    show_curve("reward", _metric(run, "reward"))
    print()
    show_share(run, "reward")


def show_vision(run: Path, samples: Lines) -> None:
    """Answers about held-out pictures before and after, the curve of the loss, and the share of
    right answers.
    """
    rows = _read_lines(run.with_name(f"{run.name}-start") / "heldout.jsonl")
    last = max(sample["step"] for sample in samples)
    before, after = ([one for one in samples if one["step"] == step] for step in (0, last))
    print("\nThree held-out pictures:\n")
    for row, first, final in zip(rows, before, after, strict=False):
        print(f"{run.relative_to(ROOT)}-start/{row['images'][0]}  {first['prompt'].strip()}")
        for name, text in (
            ("before", first["text"]),
            ("after", final["text"]),
            ("correct", first["reference"]),
        ):
            print(f"  {name:8} {shorten(text, 60, placeholder='…')}")
    show_curve("\nloss", _metric(run, "loss"), math.log)
    figures = json.loads((run / "result.json").read_text("utf-8"))["eval"]
    shares = [f"{100 * figures[key]:.1f} %" for key in ("exact_match_before", "exact_match")]
    print(f"\ncorrect: {shares[0]} before, {shares[1]} after")


def show_sft(run: Path, samples: Lines) -> None:
    """Answers before and after beside the correct ones, the curve of the loss, and exact match."""
    print("\nThree held-out requests:\n")
    for sample, after in itertools.islice(_before_and_after(samples), _SHOWN):
        show_answers(sample, after, {"correct": sample["reference"]})
    show_curve("loss", _metric(run, "loss"), math.log)
    print()
    show_share(run, "exact_match")


def show_dpo(run: Path, samples: Lines) -> None:
    """Answers before and after beside both sides of the pair, the curves of the metrics, and reward
    accuracy.
    """
    pairs = _read_lines(ROOT / "examples" / "data" / "pairs-heldout.jsonl")
    rejected = {pair["prompt"]: pair["rejected"] for pair in pairs}
    print("\nThree held-out requests, with the answer that is preferred and the one that is not:\n")
    answers = list(_before_and_after(samples))
    for sample, last in answers[:_SHOWN]:
        sides = {"chosen": sample["reference"], "rejected": rejected[sample["prompt"].strip()]}
        show_answers(sample, last, sides)
    show_curve("loss", _metric(run, "loss"), math.log)
    for name in ("reward_margin", "logps_chosen", "logps_rejected"):
        show_curve(name, _metric(run, name))
    before, after = (
        sum(sample["text"] == sample["reference"] for sample in part) for part in zip(*answers, strict=True)
    )
    print(
        f"\nanswers equal to the chosen one: {before} of {len(answers)} before, {after} of {len(answers)} after"
    )
    show_share(run, "reward_accuracy")


def show_answers(before: dict[str, Any], after: dict[str, Any], right: dict[str, str]) -> None:
    """A request, the answers to it before the first step and after the last, and those of the
    data.
    """
    room = shutil.get_terminal_size().columns - len("  before   ''")
    width = max(len(name) for name in ("before", *right))
    print(f"request {' ' * (width - 5)} {before['prompt'].strip()}")
    print(f"  {'before':{width}} {shorten(before['text'], room, placeholder='…')!r}")
    print(f"  {'after':{width}} {after['text']}")
    for name, text in right.items():
        print(f"  {name:{width}} {text}")
    print()


def show_curve(name: str, values: list[float], scale: Callable[[float], float] = float) -> None:
    """A line: the first value, bars of averages over equal parts of the run, and the last value."""
    columns = min(_COLUMNS, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    heights = [scale(max(mean, 1e-6)) if scale is math.log else scale(mean) for mean in means]
    low, high = min(heights), max(heights)
    factor = (len(_BARS) - 1) / (high - low or 1.0)
    bars = "".join(_BARS[round((height - low) * factor)] for height in heights)
    print(f"{name:14} {values[0]:7.2f} {bars} {values[-1]:.3f}")


def show_share(run: Path, name: str) -> None:
    """A figure of all held-out rows, before the first step and after the last."""
    found = json.loads((run / "result.json").read_text("utf-8"))["eval"]
    for when, key in (("before", f"{name}_before"), ("after", name)):
        print(f"{name.replace('_', ' ')} {when}: {100 * found[key]:.1f} %")


def _before_and_after(samples: Lines) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The samples of the first evaluation, each with that of the last for the same request."""
    last = max(sample["step"] for sample in samples)
    after = {sample["prompt"]: sample for sample in samples if sample["step"] == last}
    return ((sample, after[sample["prompt"]]) for sample in samples if sample["step"] == 0)


def _metric(run: Path, name: str) -> list[float]:
    return [line[name] for line in _read_lines(run / "metrics.jsonl") if name in line]


def _read_lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
