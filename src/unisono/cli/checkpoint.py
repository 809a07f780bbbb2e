"""The commands `unisono checkpoint ls`, `verify` and `prune`, and `unisono export`: the saved states of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.checkpoint_verify import verify
from unisono.cli.generate import Overrides, Step, Target
from unisono.cli.output import output

if TYPE_CHECKING:
    from unisono.checkpoint.store import CheckpointStore
    from unisono.rundir import RunDir


def export(
    target: Target,
    out: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT",
            help="A directory that is empty or does not exist; default: export_dir of a LLaMA-Factory file.",
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the weights of its base model.")
    ] = False,
    step: Step = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Of the LoRA of an image model: diffusers, or kohya for A1111 and ComfyUI.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the adapter, or the whole model, with tokenizer, chat template and generation_config."""
    from unisono.cli.llamafactory_file import read_inference_file, split_prompt
    from unisono.cli.terminal import Progress
    from unisono.errors import UsageError
    from unisono.supervise.task_process import run_task

    if format_ not in (None, "diffusers", "kohya"):
        raise UsageError.of(f"--format {format_} is unknown", where="--format", fix="use diffusers or kohya")
    out, overrides = split_prompt(out, overrides)
    given = read_inference_file(target, overrides)
    request = given.export(merge=merge) if given else {"target": target, "merge": merge}
    if out is not None:
        request["out"] = out
    if not request.get("out"):
        raise UsageError.of("there is no directory to write to", where="OUT", fix="add one, e.g. `merged`")
    printer = output()
    with Progress(printer) as progress:
        result = run_task("export", request | {"step": step, "format": format_}, on_message=progress.show)
    if printer.json:
        printer.emit({"schema": 1, **result})
        return
    for text in _lines(result):
        printer.result(text)


def _lines(result: dict[str, Any]) -> list[str]:
    from unisono.text import one_line, show_bytes

    lines = [
        f"{result['out']}: {result['what']}, {show_bytes(result['bytes'])}, of {one_line(result['description'])}"
    ]
    if result.get("pictures"):
        file = next(f"{result['out']}/{name}" for name in result["files"] if name.endswith(".safetensors"))
        loads = "copy it to models/loras of ComfyUI, or models/Lora of A1111"
        if result["format"] == "diffusers":
            loads = f"pipeline.load_lora_weights({result['out']!r}) of diffusers loads it"
        return [*lines, f"  {file}: {loads}"]
    if result["merged"]:
        difference = result["logits_differ_by"]
        lines.append(
            f"  read again: its logits differ from base plus adapter by {difference:.1e} of their spread ({result['dtype']})"
        )
        if result["dequantized"]:
            lines.append(
                f"  the base weights were quantized in training; they are written as they were computed with, rounded to {result['dtype']}:"
                " quantized again, they give other values"
            )
    kind, more = ("SequenceClassification", ", num_labels=1") if result["reward"] else ("CausalLM", "")
    if result["what"] == "adapter":
        lines.append(
            f"  its base model is {result['base']}; load both with peft.AutoPeftModelFor{kind}.from_pretrained({result['out']!r}{more})"
        )
    else:
        lines.append(f"  transformers.AutoModelFor{kind}.from_pretrained({result['out']!r}) loads it")
    return lines


app = typer.Typer(help="List, verify, export and prune the checkpoints of a run.", rich_markup_mode=None)
app.command("export", epilog="For example: unisono checkpoint export runs/demo out --step 200")(export)
app.command("verify", epilog="For example: unisono checkpoint verify runs/demo --replay 3")(verify)

Run = Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)]


@app.command("ls", epilog="For example: unisono checkpoint ls runs/demo")
def list_(run: Run) -> None:
    """List the checkpoints of a run, oldest first. Only manifests and sizes are read, not the tensors."""
    from unisono.checkpoint.retention import Rules, row_of
    from unisono.cli.checkpoint_verify import open_run, table
    from unisono.rundir import RunDir

    store, key = open_run(run)
    files = RunDir(run)
    section, every = _keeping(files)
    best = _best_step(store, files, section["best"]) if section.get("best") else None
    rules = Rules(keep=1, every=every)
    rows = [
        row_of(path, key=key) | {"best": _step(path) == best, "for_ever": rules.are_permanent(_step(path))}
        for path in store.list()
    ]
    printer = output()
    if printer.json:
        printer.emit({"schema": 1, "checkpoints": rows})
    elif not rows:
        printer.result(f"no checkpoints yet in {store.root}")
    else:
        for line in table(rows):
            printer.result(line)


@app.command("prune", epilog="For example: unisono checkpoint prune runs/demo --keep 1")
def prune(
    run: Run,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of recent checkpoints to keep. [default: from config]", show_default=False
        ),
    ] = None,
) -> None:
    """Delete old checkpoints and partial files of killed writers. The latest valid checkpoints, the last one read back, the best, and permanent ones are kept."""
    from unisono.cli.checkpoint_verify import open_run
    from unisono.errors import UsageError
    from unisono.rundir import RunDir
    from unisono.rundir.lock import read_holder

    store, _ = open_run(run)
    files = RunDir(run)
    holder = read_holder(files.lock)
    if holder is not None:
        raise UsageError.of(
            f"the run is active: {holder}",
            where=str(files.lock),
            why="it prunes its checkpoints itself",
            fix="wait until it has ended",
        )
    _refuse_damaged_plan(files)
    section, every = _keeping(files)
    best = _best_step(store, files, section["best"]) if section.get("best") else None
    removed = store.sweep()
    deleted = store.prune(
        keep if keep is not None else section.get("keep", 3),
        {best} if best is not None else (),
        every=every,
    )
    _print_pruned(store, deleted, removed)


def _print_pruned(store: "CheckpointStore", deleted: list[Path], removed: list[Path]) -> None:
    kept = store.list()
    printer = output()
    if printer.json:
        lists = {"deleted": deleted, "kept": kept, "swept": removed}
        printer.emit({"schema": 1, **{name: [str(path) for path in paths] for name, paths in lists.items()}})
        return
    for path in deleted:
        printer.result(f"deleted {path.name}")
    for path in removed:
        printer.result(f"removed {path.name}, which a killed writer had left")
    printer.result(
        f"{len(kept)} checkpoint{'s' * (len(kept) != 1)} stay{'s' * (len(kept) == 1)} in {store.root}"
    )


def _keeping(files: "RunDir") -> tuple[dict[str, Any], int | None]:
    """The section `checkpoint` of the run's config, empty if unreadable; and `keep_every` in steps."""
    from unisono.files import read_object

    plan = read_object(files.plan)
    config = plan.get("config")
    section = config.get("checkpoint") if isinstance(config, dict) else None
    every = plan.get("keep_every")
    return section if isinstance(section, dict) else {}, every if type(every) is int and every > 0 else None


def _refuse_damaged_plan(files: "RunDir") -> None:
    """Refuses to prune with an unreadable plan, which says what is kept forever, and whether the best is kept."""
    from unisono.errors import UsageError
    from unisono.files import read_json
    from unisono.text import why_unreadable

    if not files.plan.exists():
        return
    try:
        why = _plan_problem(read_json(files.plan))
    except (OSError, ValueError) as error:
        why = why_unreadable(error)
    if why:
        raise UsageError.of(
            "the run's plan cannot be read, so no checkpoint is deleted",
            where=str(files.plan),
            why=f"{why}; it defines which checkpoints are kept",
            fix="restore plan.json from a copy",
        )


def _plan_problem(plan: Any) -> str:
    """The problem with the retention settings of a plan."""
    config = plan.get("config") if isinstance(plan, dict) else None
    section = config.get("checkpoint") if isinstance(config, dict) else None
    if not isinstance(section, dict):
        return "it has no object config.checkpoint"
    keep, every = section.get("keep", 3), plan.get("keep_every")
    if type(keep) is not int or keep < 1:
        return f"config.checkpoint.keep is {keep!r} and should be a whole number from 1"
    if every is not None and (type(every) is not int or every < 1):
        return f"keep_every is {every!r} and should be a whole number from 1, or null"
    return ""


def _best_step(store: "CheckpointStore", files: "RunDir", metric: str) -> int | None:
    """The best step by a metric among those with a checkpoint."""
    from unisono.rundir.records import best_evaluated

    found = best_evaluated(files.metrics, {_step(path) for path in store.list()}, metric=metric)
    return found[0] if found else None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
