"""`unisono eval`: how well a model knows the rows of a file, and how near its answers come to theirs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.cli.generate import Step, Target
from unisono.cli.output import output

_LABELS = {
    "rows": "rows", "loss_tokens": "loss tokens", "loss": "loss", "perplexity": "perplexity", "questions": "answers compared",
    "exact_match": "exact match", "rouge_l": "ROUGE-L", "bleu": "BLEU",
}  # fmt: skip


def evaluate(
    target: Target,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Rows with answers, in any training format.",
            show_default=False,
        ),
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first N rows.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write every answer to this file, one JSON object per line.",
            show_default=False,
        ),
    ] = None,
    step: Step = None,
) -> None:
    """Measures loss and perplexity over the loss tokens, exact match, ROUGE-L and BLEU of greedy answers."""
    import json

    from unisono.cli.progress import Progress
    from unisono.errors import UsageError
    from unisono.facts import read_environment
    from unisono.files import write_text
    from unisono.supervise.task_process import run_task

    if out is not None and out.exists():
        raise UsageError.of(
            f"{out} exists", where="--out", why="it would be overwritten", fix="name a new file"
        )
    request = {
        "target": target, "step": step, "data": data, "limit": limit, "cache_dir": str(read_environment().cache_dir),
    }  # fmt: skip
    speak = output()
    with Progress(speak) as progress:
        result = run_task("eval", request, on_message=progress.show)
    if out is not None:
        write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result["rows"]))
        speak.say(f"wrote {len(result['rows'])} answers to {out}")
    if speak.json:
        others = {name: result[name] for name in ("description", "ledger", "formats")}
        speak.emit({"schema": 1, **result["figures"], **others})
        return
    for text in table(result, data):
        speak.result(text)


def table(result: dict[str, Any], data: str) -> list[str]:
    """The figures as lines for people."""
    from unisono.text import one_line
    from unisono.units import show_count

    figures, ledger = result["figures"], result["ledger"]
    lost = {name: ledger.get(name, 0) for name in ("cut", "split", "dropped", "bad")}
    note = ", ".join(f"{count} {name}" for name, count in lost.items() if count)
    lines = [f"{one_line(result['description'])}, on {one_line(data)}"]
    lines += [f"  {text}" for text in result["formats"]]
    for name, label in _LABELS.items():
        value = figures[name]
        if value is None:
            shown = "-"
        elif name in ("exact_match", "rouge_l"):
            shown = f"{100 * value:.1f} %"
        elif isinstance(value, int):
            shown = show_count(value)
        else:
            shown = f"{value:.4f}" if name == "loss" else f"{value:.4g}"
        lines.append(f"  {label:<17} {shown}" + (f"   ({note})" if name == "rows" and note else ""))
    return lines
