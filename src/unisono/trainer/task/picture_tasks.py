"""The tasks `generate` and `export` of image models: pictures of a prompt, and LoRA files for other
tools.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.base.errors import ConfigError, UsageError
from unisono.base.events import Reporter
from unisono.base.files import read_object
from unisono.guard.facts import read_environment
from unisono.trainer.checkpoint.state import CheckpointReader
from unisono.trainer.checkpoint.verify import write_model_manifest
from unisono.trainer.families.pictures.drawing import Drawing, draw, open_pipeline, save_picture
from unisono.trainer.families.pictures.lora_file import (
    LORA_FILE,
    SETTINGS_FILE,
    LoraFile,
    kohya_metadata,
    lora_of,
    read_lora,
    write_diffusers,
    write_kohya,
)
from unisono.trainer.families.pictures.picture_folders import need_pillow
from unisono.trainer.families.pictures.pipeline_files import INDEX, Pipeline, read_pipeline
from unisono.trainer.families.pictures.single_file import is_whole_model, open_single_file
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.task_requests import Drawn, DrawRequest, ExportRequest
from unisono.trainer.task.target import Target, find_target, verify_target


@dataclass
class Opened:
    """A pipeline and its LoRA.

    Attributes:
        pipeline: None for a LoRA file without its model.
        lora: the LoRA; None for a pipeline alone.
        plan: of the run.
        name: for the settings of pictures.
        description: one line for the user.
        step: of the run's weights, if it is known.
        target: the run or checkpoint that it is of; None for other files.
    """

    pipeline: Pipeline | None
    lora: LoraFile | None
    plan: RunPlan | None
    name: str
    description: str
    step: int | None = None
    target: Target | None = None


def open_target(
    name: str,
    report: Reporter,
    *,
    step: int | None = None,
    tokenizer: str | None = None,
    prediction: str | None = None,
) -> Opened:
    """Finds RUN|MODEL: a run, a pipeline of diffusers, a whole model in one file, or a LoRA file of
    diffusers or sd-scripts.

    A whole model in one file is converted to a pipeline in the cache, as for training, unless that
    has been done before.

    Raises:
        UsageError: if it is none of these.
        ModelError: if a file cannot be read or converted.
    """
    need_pillow()
    path = Path(name).expanduser()
    if path.suffix == ".safetensors" and path.is_file() and is_whole_model(path):
        report.phase("model", "reading the model's file; the first time it is converted to a pipeline")
        pipeline, _, _ = open_single_file(
            path.resolve(),
            tokenizer=tokenizer,
            prediction=prediction or "auto",
            cache_dir=read_environment().cache_dir,
        )
        return Opened(pipeline, None, None, path.stem, f"the model {name}")
    if path.suffix == ".safetensors":
        return Opened(None, read_lora(path), None, path.stem, f"the LoRA {name}")
    if (path / INDEX).is_file():
        return Opened(read_pipeline(path.resolve()), None, None, path.name, f"the model {name}")
    if (path / LORA_FILE).is_file() and not (path / "plan.json").is_file():
        return Opened(None, read_lora(path / LORA_FILE), None, path.name, f"the LoRA {name}")
    target = find_target(name, step=step)
    verify_target(target, report)
    assert target.plan is not None
    assert target.plan.config.adapter is not None
    if target.source == "checkpoint":
        reader = CheckpointReader(target.weights)
        tensors = {key: reader.weight(key) for key in reader.groups["trainable"]}
        lora = lora_of(tensors, target.plan.config.adapter.alpha)
        step = target.step
    else:
        lora = read_lora(target.weights / LORA_FILE)
        step = read_object(target.weights / SETTINGS_FILE).get("steps")
    pipeline = read_pipeline(target.base)
    return Opened(pipeline, lora, target.plan, path.resolve().name, target.description, step, target)


def run_generate(request: DrawRequest, report: Reporter) -> Drawn:
    """Draws pictures.

    Raises:
        ConfigError: if the size does not fit the model.
    """
    opened = open_target(
        request.target,
        report,
        step=request.step,
        tokenizer=request.tokenizer,
        prediction=request.prediction,
    )
    if opened.pipeline is None:
        raise UsageError.of(
            f"{request.target} has no model to draw with",
            where="RUN|MODEL",
            why="it is only a LoRA",
            fix="pass the run that made it, or load it with its model in diffusers, A1111 or ComfyUI",
        )
    width, height = _size(request, opened)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    report.phase("load_model", f"loading the weights of {opened.description}")
    with tempfile.TemporaryDirectory() as folder:
        if opened.lora is not None:
            write_diffusers(opened.lora, Path(folder) / LORA_FILE)
        lora = Path(folder) if opened.lora is not None else None
        pipe = open_pipeline(opened.pipeline, dtype=dtype, device=device, lora=lora)
    out, files = request.out.expanduser(), []
    for i in range(request.number):
        drawing = Drawing(
            request.prompt,
            request.seed + i,
            request.steps,
            request.guidance,
            width,
            height,
            request.negative or "",
        )

        def show(step: int, i: int = i) -> None:
            report.phase("draw", f"picture {i + 1} of {request.number}", done=step, total=request.steps)

        image = draw(pipe, drawing, on_step=show)
        file = out / f"{drawing.seed:05d}.png"
        save_picture(image, file, drawing, model=opened.name, scheduler=type(pipe.scheduler).__name__)
        files.append(str(file))
    return {"description": opened.description, "files": files, "device": str(device)}


def _size(request: DrawRequest, opened: Opened) -> tuple[int, int]:
    assert opened.pipeline is not None
    trained = opened.plan.config.data.resolution if opened.plan is not None else None
    width, height = trained if isinstance(trained, list) else [trained or opened.pipeline.resolution] * 2
    width, height = request.width or width, request.height or height
    factor = opened.pipeline.factor
    for side, number in (("--width", width), ("--height", height)):
        if number % factor:
            raise ConfigError.of(
                f"{side} is {number}, not a multiple of {factor} pixels",
                where=side,
                fix=f"set it to {max(1, round(number / factor)) * factor}",
            )
    return width, height


def run_export(request: ExportRequest, report: Reporter, out: Path, directory: Path) -> tuple[str, Opened]:
    """Writes a LoRA file into a new directory; gives its name, and what was written.

    Args:
        request: of the task.
        report: receives progress.
        out: the directory as it will be named.
        directory: where to write.

    Raises:
        UsageError: if there is no LoRA.
    """
    target, step = request.model.target, request.model.step
    file = Path(target).expanduser()
    is_whole = file.suffix == ".safetensors" and file.is_file() and is_whole_model(file)
    opened = None if is_whole else open_target(target, report, step=step)
    if opened is None or opened.lora is None:
        raise UsageError.of(
            f"{target} has no LoRA",
            where="RUN|MODEL",
            why="it is a whole model",
            fix="pass a run, or a LoRA file",
        )
    directory.mkdir()
    if request.format == "kohya":
        name = f"{out.name}.safetensors"
        plan = opened.plan
        is_xl = opened.pipeline is not None and opened.pipeline.is_xl
        if is_xl and opened.pipeline is not None:
            opened.lora.sgm = int(opened.pipeline.unet.get("layers_per_block", 2))
        dtype = torch.float16 if request.half else None
        more = kohya_metadata(opened.lora, plan, opened.pipeline, step=opened.step)
        entry = write_kohya(opened.lora, directory / name, dtype=dtype, more=more)
    else:
        name = LORA_FILE
        entry = write_diffusers(opened.lora, directory / name)
    write_model_manifest(directory, {name: entry})
    return name, opened
