"""The commands `unisono checkpoint ls`, `verify` and `prune`, and `unisono export`: the saved
states of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from unisono.front.cli.generate import Overrides, Step, Target
from unisono.front.cli.output import output

if TYPE_CHECKING:
    from unisono.base.errors import Problem
    from unisono.guard.rundir import RunDir
    from unisono.jobs.runs.replay import Replayed
    from unisono.trainer.checkpoint.retention import CheckpointRow
    from unisono.trainer.checkpoint.store import CheckpointStore
    from unisono.trainer.checkpoint.verify import Damage, ModelCheck, VerificationResult
    from unisono.trainer.plan.task_requests import Exported, GgufExported


app = typer.Typer(help="List, verify, export and prune the checkpoints of a run.", rich_markup_mode=None)
Run = Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)]


@app.command("export", epilog="For example: unisono checkpoint export runs/demo out --step 200")
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
            help=(
                "gguf for llama.cpp and Ollama; of the LoRA of an image model: diffusers, or kohya for A1111"
                " and ComfyUI."
            ),
            show_default=False,
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="With gguf: f16 (default), bf16, f32, or a type of llama-quantize, e.g. q8_0 or q4_k_m.",
            show_default=False,
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="With gguf: the adapter alone, not merged.")
    ] = False,
    converter: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With gguf: llama.cpp's convert_hf_to_gguf.py, which then writes the file.",
            show_default=False,
        ),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PROGRAM",
            help="Also print the command of vllm, ollama or transformers that serves the export.",
            show_default=False,
        ),
    ] = None,
    no_read_back: Annotated[
        bool, typer.Option("--no-read-back", help="Do not load what was written again; GGUF always is.")
    ] = False,
) -> None:
    """Write the adapter, or the whole model, with tokenizer, chat template and
    generation_config.
    """
    from unisono.base.errors import UsageError, require_writable
    from unisono.base.files import expand
    from unisono.front.cli.llamafactory_file import read_inference_file, split_prompt
    from unisono.front.cli.serving_commands import format_for, serving_command
    from unisono.front.cli.terminal import TaskProgress
    from unisono.guard.supervise.task_process import run_request
    from unisono.trainer.plan.task_requests import ExportRequest, GgufRequest, RequestedModel

    if format_ not in (None, "diffusers", "kohya", "gguf"):
        raise UsageError.of(
            f"--format {format_} is unknown", where="--format", fix="use gguf, diffusers or kohya"
        )
    format_ = format_for(program, format_)
    gguf = _gguf_type(quantize, adapter=adapter, converter=converter, is_gguf=format_ == "gguf")
    out, overrides = split_prompt(out, overrides)
    given = read_inference_file(target, overrides)
    model = replace(given.model if given else RequestedModel(target), step=step)
    out = given.export_dir if given and out is None else out
    if not out:
        raise UsageError.of("there is no directory to write to", where="OUT", fix="add one, e.g. `merged`")
    target_path = expand(out).absolute()
    why, fix = f"the export would be {target_path}", "name a directory that you may write"
    require_writable(target_path.parent, where="OUT", why=why, fix=fix)
    printer = output()
    result: Exported | GgufExported
    with TaskProgress(printer) as progress:
        if gguf is None:
            request = ExportRequest(
                model=model,
                out=out,
                merge=merge or (given is not None and given.merges),
                read_back=not no_read_back,
                max_shard_size=given.max_shard_size if given else None,
                format=format_,
            )
            result = exported = run_request(request, on_message=progress.show)
            lines = _lines(exported)
        else:
            kind, tool = gguf
            gguf_request = GgufRequest(
                model=model,
                out=out,
                quantize=kind,
                adapter=adapter,
                tool=tool,
                converter=str(expand(converter).absolute()) if converter else None,
                read_back=not no_read_back,
            )
            result = written = run_request(gguf_request, on_message=progress.show)
            lines = _gguf_lines(written)
    serves: dict[str, str] = {}
    if program is not None:
        command, why = serving_command(program, result)
        serves = {"serve": command} if command else {"not_served": why}
        lines.append(f"  serve it: {command}" if command else f"  not served: {why}")
    if printer.json:
        printer.emit({"schema": 1, **result, **serves})
        return
    for text in lines:
        printer.result(text)


def _gguf_type(
    quantize: str | None, *, adapter: bool, converter: str | None, is_gguf: bool
) -> tuple[str, str | None] | None:
    """The type that `--quantize` names, and the path of llama-quantize if it needs that; None for
    other formats than GGUF.

    Raises:
        UsageError: if an option does not apply, or what is needed is not installed.
    """
    import shutil
    from importlib.util import find_spec

    from unisono.base.errors import UsageError
    from unisono.base.files import expand

    if not is_gguf:
        for option, given in (("--quantize", quantize), ("--adapter", adapter), ("--converter", converter)):
            if given:
                raise UsageError.of(
                    f"{option} applies to GGUF only", where=option, fix="add --format gguf, or omit it"
                )
        return None
    if find_spec("gguf") is None:
        raise UsageError.of(
            "`--format gguf` needs the package gguf, which is not installed",
            where="--format gguf",
            fix="pip install 'unisono[gguf]'",
        )
    if converter and adapter:
        raise UsageError.of(
            "--converter writes whole models",
            where="--adapter",
            fix="omit --converter, or use llama.cpp's convert_lora_to_gguf.py",
        )
    if converter and not expand(converter).is_file():
        raise UsageError.of(
            f"there is no file {converter}",
            where="--converter",
            fix="name convert_hf_to_gguf.py in a clone of llama.cpp",
        )
    kind = (quantize or "f16").lower()
    tool = None
    if kind not in ("f16", "bf16", "f32"):
        if adapter:
            raise UsageError.of(
                f"an adapter is not quantized to {kind}",
                where="--quantize",
                why="llama.cpp reads f16, bf16 and f32 adapters",
                fix="omit --quantize",
            )
        tool = shutil.which("llama-quantize")
        if tool is None:
            raise UsageError.of(
                f"{kind} needs llama-quantize of llama.cpp, which is not on the PATH",
                where="--quantize",
                why="without it f16, bf16 and f32 can be written",
                fix=(
                    "export with --quantize f16, and on a machine with llama.cpp type: llama-quantize"
                    f" OUT/model-f16.gguf model-{kind}.gguf {kind.upper()}"
                ),
            )
    return kind, tool


def _gguf_lines(result: "GgufExported") -> list[str]:
    from unisono.base.text import one_line, show_bytes

    lines = [
        f"{result['out']}: {result['what']} ({result['architecture']}, {result['dtype']}),"
        f" {show_bytes(result['bytes'])}, of {one_line(result['description'])}"
    ]
    if (converted := result["converted"]) is not None:
        number, others = len(converted["others"]), ", ".join(converted["others"][:3])
        lines.append(
            f"  read again: {converted['equal']} of {converted['equal'] + number} tensors have the values of the"
            " model"
            + (
                f"; the converter joined, split or computed {number}: {others}{' …' if number > 3 else ''}"
                if number
                else ""
            )
        )
    else:
        differs = f"its tensors differ by at most {result['differs_by']:.1e} of their size"
        lines.append(f"  read again, tensor by tensor: {differs if result['differs_by'] else 'equal'}")
    if (back := result["read_back"]) is not None:
        lines.append(
            f"  loaded in llama.cpp: its logits differ by {back['differs_by']:.1e} of their spread from those"
            " of the model that was written"
            if back["compared"] == "logits"
            else f"  not loaded in llama.cpp, as {back['why']}"
        )
    file = f"{result['out']}/{result['file']}"
    if result["what"] == "GGUF adapter":
        lines.append(f"  llama-cli -m BASE.gguf --lora {file}, where BASE.gguf is the model {result['base']}")
    else:
        lines.append(f"  llama-cli -m {file}; ollama create NAME -f {result['out']}/Modelfile")
    vision = next((name for name in result["files"] if name.startswith("mmproj-")), None)
    if vision is not None:
        lines.append(f"  with pictures: llama-mtmd-cli -m {file} --mmproj {result['out']}/{vision}")
    if not result["has_template"]:
        lines.append("  the Modelfile has no TEMPLATE; llama.cpp takes the one inside the file (--jinja)")
    return lines


def _lines(result: "Exported") -> list[str]:
    from unisono.base.text import one_line, show_bytes

    lines = [
        f"{result['out']}: {result['what']}, {show_bytes(result['bytes'])}, of"
        f" {one_line(result['description'])}"
    ]
    if result.get("pictures"):
        file = next(f"{result['out']}/{name}" for name in result["files"] if name.endswith(".safetensors"))
        loads = "copy it to models/loras of ComfyUI, or models/Lora of A1111"
        if result["format"] == "diffusers":
            loads = f"pipeline.load_lora_weights({result['out']!r}) of diffusers loads it"
        return [*lines, *_read_back(result), f"  {file}: {loads}"]
    if result["merged"]:
        difference = result["logits_differ_by"]
        lines.append(
            f"  its logits differ from base plus adapter by {difference:.1e} of their spread"
            f" ({result['dtype']})"
        )
        if result["dequantized"]:
            lines.append(
                "  the base weights were quantized in training; they are written as they were computed with,"
                f" rounded to {result['dtype']}: quantized again, they give other values"
            )
    lines += _read_back(result)
    outputs = 1 if result["reward"] else len(result["labels"])
    kind, more = ("SequenceClassification", f", num_labels={outputs}") if outputs else ("CausalLM", "")
    if result.get("embeds"):
        return [*lines, f"  sentence_transformers.SentenceTransformer({result['out']!r}) loads it"]
    kind = "MultimodalLM" if result.get("multimodal") else kind
    if result["what"] == "adapter" and kind == "MultimodalLM":
        lines.append(
            f"  load it with peft.PeftModel.from_pretrained(transformers.AutoModelFor{kind}"
            f".from_pretrained({result['base']!r}), {result['out']!r})"
        )
    elif result["what"] == "adapter":
        lines.append(
            f"  its base model is {result['base']}; load both with"
            f" peft.AutoPeftModelFor{kind}.from_pretrained({result['out']!r}{more})"
        )
    else:
        lines.append(f"  transformers.AutoModelFor{kind}.from_pretrained({result['out']!r}) loads it")
    return lines


def _read_back(result: "Exported") -> list[str]:
    """The line about it; none with --no-read-back."""
    back = result["read_back"]
    if back is None:
        return []
    if back["compared"] == "digests":
        return [f"  read back: names, shapes and digests only, as {back['why']}"]
    return [
        f"  read back: its {'logits' if back['compared'] == 'logits' else 'predictions'} differ by"
        f" {back['differs_by']:.1e} of their spread from those of the model that was written"
    ]


@app.command("verify", epilog="For example: unisono checkpoint verify runs/demo --replay 3")
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.", show_default=False)] = None,
    replay: Annotated[
        int | None,
        typer.Option(
            "--replay",
            min=1,
            max=1000,
            metavar="N",
            help="Also run N logged steps again, and compare the losses.",
            show_default=False,
        ),
    ] = None,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            help="Execute your own `FILE.py:CLASS` of `objective` and `optim.kind` in each rank.",
        ),
    ] = False,
) -> None:
    """Read the checkpoints of a run, and its final adapter or model, completely, and report damage.

    The exit code is 7 if anything is damaged.
    """
    from unisono.base.errors import IntegrityError
    from unisono.base.requirements import refuse_without_trainer

    if replay is not None:
        refuse_without_trainer("command line: --replay")
    final = _check_final(run) if step is None else None
    readings = _read(run, step, may_be_none=final is not None)
    printer = output()
    if not printer.json:
        _print_readings(readings)
        _print_final(final)
    replayed = _replay(run, step, replay, trust_code=trust_code) if replay is not None else None
    problems = _problems(readings)
    if final is not None and not final.intact:
        problems += final.refusal(restore=_restore(run, readings)).problems
    if replayed is not None and not replayed.is_right:
        problems += replayed.error(str(run)).problems
    if printer.json:
        rows = [_row(reading) for reading in readings]
        more = {"replay": replayed.to_json()} if replayed is not None else {}
        printer.emit({"schema": 1, "checkpoints": rows, "final": _final_row(final), **more})
        raise typer.Exit(IntegrityError.exit_code if problems else 0)
    if replayed is not None and replayed.is_right:
        for line in replayed.lines():
            printer.result(line)
    if problems:
        raise IntegrityError(*problems)


def _check_final(run: Path) -> "ModelCheck | None":
    """Reads adapter/ or model/ of the run through; None without either."""
    from unisono.guard.rundir import RunDir
    from unisono.trainer.checkpoint.verify import check_model

    there = [path for path in (RunDir(run).adapter, RunDir(run).model) if path.is_dir()]
    return check_model(there[0]) if there else None


def _read(run: Path, step: int | None, *, may_be_none: bool) -> "list[VerificationResult]":
    """Reads the checkpoint of a step, or all, and records the result."""
    from unisono.base.errors import UsageError
    from unisono.trainer.checkpoint.retention import record_verified
    from unisono.trainer.checkpoint.verify import read_through

    store, key = open_run(run)
    paths = [path for path in store.list() if step is None or path == store.path(step)]
    if not paths and not may_be_none:
        raise UsageError.of(
            "there is no checkpoint to verify" if step is None else f"there is no checkpoint of step {step}",
            where=str(store.root),
            fix=f"`unisono checkpoint ls {run}` lists the checkpoints that exist",
        )
    readings = [read_through(path, key=key) for path in paths]
    there = [
        reading for reading in readings if reading.path.exists()
    ]  # the run may have pruned one meanwhile
    record_verified(store.root, there)
    return there


def _replay(run: Path, step: int | None, steps: int, *, trust_code: bool) -> "Replayed":
    from unisono.front.cli.terminal import TaskProgress
    from unisono.guard.rundir import RunDir
    from unisono.jobs.runs.replay import Replay

    with TaskProgress(output()) as progress:
        return Replay(RunDir(run), steps, step, progress.show, trust_code=trust_code).carry_out()


def _print_readings(readings: "list[VerificationResult]") -> None:
    printer = output()
    for reading in readings:
        printer.result(f"{reading.path.name}  {'intact' if reading.intact else 'DAMAGED'}")
        for finding in reading.findings:
            if not finding.is_fatal:
                printer.result(f"               {finding}")


def _print_final(final: "ModelCheck | None") -> None:
    if final is None:
        return
    printer = output()
    state = (
        ("intact" if final.intact else "DAMAGED")
        if final.listed
        else "not verified: it was written without a list of digests"
    )
    printer.result(f"{final.path.name:<13}  {state}")
    for finding in final.findings:
        if not finding.is_fatal:
            printer.result(f"               {finding}")


class FindingRow(TypedDict):
    """Damage of a file, in the output of `verify --json`."""

    file: str
    what: str
    kind: str
    tensors: list[str]


class FinalRow(TypedDict):
    """The final adapter or model, in the output of `verify --json`."""

    path: str
    listed: bool
    intact: bool | None
    findings: list[FindingRow]


class VerifiedRow(TypedDict):
    """A checkpoint, in the output of `verify --json`."""

    step: int
    path: str
    intact: bool
    foreign: bool
    findings: list[FindingRow]


def _final_row(final: "ModelCheck | None") -> FinalRow | None:
    if final is None:
        return None
    return {
        "path": str(final.path),
        "listed": final.listed,
        "intact": final.intact if final.listed else None,
        "findings": [_finding(f) for f in final.findings],
    }


def _finding(finding: "Damage") -> FindingRow:
    return {
        "file": finding.file,
        "what": finding.what,
        "kind": finding.kind,
        "tensors": list(finding.tensors),
    }


def _row(reading: "VerificationResult") -> VerifiedRow:
    return {
        "step": _step(reading.path),
        "path": str(reading.path),
        "intact": reading.intact,
        "foreign": reading.is_foreign,
        "findings": [_finding(f) for f in reading.findings],
    }


def _problems(readings: "list[VerificationResult]") -> "list[Problem]":
    """All damage, each with its consequence for the run."""
    from unisono.base.errors import Problem

    good = [_step(reading.path) for reading in readings if reading.intact]
    if good:
        fix = (
            f"nothing, if step {max(good)} is recent enough: the run resumes from it; otherwise restore the"
            " file from a copy"
        )
    else:
        fix = "restore the file from a copy, or start from scratch with `unisono train … --fresh`"
    return [
        Problem(f"{reading.path.name}/{finding}", str(reading.path), "", fix)
        for reading in readings
        for finding in reading.findings
        if finding.is_fatal
    ]


def _restore(run: Path, readings: "list[VerificationResult]") -> str:
    """How to restore a damaged final adapter or model."""
    good = [_step(reading.path) for reading in readings if reading.intact]
    if not good:
        return "copy the directory again"
    return f"`unisono export {run} OUT --step {max(good)}` writes the weights of that checkpoint"


def open_run(run: Path) -> "tuple[CheckpointStore, bytes]":
    """The run's checkpoints, and the user's key.

    Raises:
        UsageError: if it is not a run.
    """
    from unisono.base.errors import UsageError
    from unisono.base.user_key import user_key
    from unisono.guard.facts import read_environment
    from unisono.guard.rundir import RunDir, or_nearest_run
    from unisono.trainer.checkpoint.store import CheckpointStore

    files = RunDir(run)
    if not files.plan.exists() and not files.checkpoints.is_dir():
        raise UsageError.of(
            f"{run} is not a run",
            where="command line",
            why="there is no plan.json and no directory of checkpoints in it",
            fix=or_nearest_run(run, "name the output_dir of a run, as in `unisono checkpoint ls runs/demo`"),
        )
    key = user_key(read_environment().settings_dir)
    return CheckpointStore(files.checkpoints, key=key), key


def table(rows: "Sequence[CheckpointRow]", *, now: datetime | None = None) -> list[str]:
    """The rows in columns, under a line of titles.

    Args:
        rows: the checkpoints.
        now: the time of day, UTC.
    """
    from unisono.base.text import one_line, show_bytes

    now = now or datetime.now(UTC)
    cells = [("STEP", "SIZE", "AGE", "VERIFIED", "STATE", "KEPT", "HOST")]
    for row in rows:
        state = "intact" if row["intact"] else "DAMAGED"
        verified = _ago(row["verified_at"], now) if row["read_again"] else "when written"
        cells.append(
            (
                str(row["step"]),
                "?" if row["bytes"] is None else show_bytes(row["bytes"]),
                _age(row["created"], now),
                verified if row["verified_at"] else "?",
                "foreign" if row["foreign"] and row["intact"] else state,
                _kept(row),
                one_line(row["holder"] or "?", limit=60),
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _kept(row: "CheckpointRow") -> str:
    marks = [("best", row["best"]), ("permanent", row["for_ever"])]
    return ", ".join(name for name, is_so in marks if is_so)


def _ago(moment: str | None, now: datetime) -> str:
    return f"{_age(moment, now)} ago"


def _age(moment: str | None, now: datetime) -> str:
    """The time since an ISO time, roughly: `3 days`, `2 h 05 min`."""
    from unisono.base.text import show_seconds

    try:
        seconds = (now - datetime.fromisoformat(str(moment))).total_seconds()
    except (ValueError, TypeError):  # a damaged manifest, or a time without a zone
        return "?"
    days = int(seconds // 86_400)
    if days >= 2:
        return f"{days} days"
    return show_seconds(max(0.0, seconds)) if seconds < 10 else show_seconds(round(seconds))


@app.command("ls", epilog="For example: unisono checkpoint ls runs/demo")
def list_(run: Run) -> None:
    """List the checkpoints of a run, oldest first.

    Only manifests and sizes are read, not the tensors.
    """
    from unisono.guard.rundir import RunDir
    from unisono.trainer.checkpoint.retention import Rules, row_of

    store, key = open_run(run)
    files = RunDir(run)
    section, every = _keeping(files)
    best = _best_step(store, files, section["best"]) if section.get("best") else None
    rules = Rules(keep=1, every=every)
    rows: list[CheckpointRow] = [
        {
            **row_of(path, key=key),
            "best": _step(path) == best,
            "for_ever": rules.are_permanent(_step(path)),
        }
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
    """Delete old checkpoints and partial files of killed writers.

    The latest valid checkpoints, the last one read back, the best, and permanent ones are kept.
    """
    from unisono.base.errors import UsageError
    from unisono.guard.rundir import RunDir
    from unisono.guard.rundir.lock import read_holder

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


def _keeping(files: "RunDir") -> tuple[Mapping[str, Any], int | None]:
    """The section `checkpoint` of the run's config, empty if unreadable, and `keep_every`."""
    from unisono.base.files import read_object

    plan = read_object(files.plan)
    config = plan.get("config")
    section = config.get("checkpoint") if isinstance(config, dict) else None
    every = plan.get("keep_every")
    return section if isinstance(section, dict) else {}, every if type(every) is int and every > 0 else None


def _refuse_damaged_plan(files: "RunDir") -> None:
    """Refuses to prune with an unreadable plan, which says what is kept forever, and whether the
    best is kept.
    """
    from unisono.base.errors import UsageError
    from unisono.base.files import read_json
    from unisono.base.text import why_unreadable

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
    from unisono.guard.rundir.records import best_evaluated

    best = best_evaluated(files.metrics, {_step(path) for path in store.list()}, metric=metric)
    return best[0] if best else None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
