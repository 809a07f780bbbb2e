"""`unisono export`: a directory that transformers, peft and others load as it is."""

from typing import Annotated, Any

import typer

from unisono.cli.generate import Step, Target
from unisono.cli.output import output


def export(
    target: Target,
    out: Annotated[
        str,
        typer.Argument(metavar="OUT", help="a directory that is empty or does not exist", show_default=False),
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the weights of its base model.")
    ] = False,
    step: Step = None,
) -> None:
    """Writes the adapter, or the whole model, with tokenizer, chat template and generation_config."""
    from unisono.cli.progress import Progress
    from unisono.supervise.task_process import run_task

    speak = output()
    with Progress(speak) as progress:
        result = run_task(
            "export", {"target": target, "step": step, "out": out, "merge": merge}, on_message=progress.show
        )
    if speak.json:
        speak.emit({"schema": 1, **result})
        return
    for text in _lines(result):
        speak.result(text)


def _lines(result: dict[str, Any]) -> list[str]:
    from unisono.text import one_line
    from unisono.units import show_bytes

    lines = [
        f"{result['out']}: {result['what']}, {show_bytes(result['bytes'])}, of {one_line(result['description'])}"
    ]
    if result["merged"]:
        difference = result["logits_differ_by"]
        lines.append(
            f"  read again: its logits differ from base plus adapter by {difference:.1e} of their spread ({result['dtype']})"
        )
    if result["what"] == "adapter":
        lines.append(
            f"  it goes with {result['base']}: peft.AutoPeftModelForCausalLM.from_pretrained({result['out']!r})"
        )
    else:
        lines.append(f"  transformers.AutoModelForCausalLM.from_pretrained({result['out']!r}) loads it")
    return lines
