"""The task `export`: writes a directory that transformers and peft can load, completely or not at
all.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from unisono.base.errors import (
    ModelError,
    UnfitError,
    UsageError,
    error_number,
    storage_reason,
    storage_remedy,
    storage_words,
)
from unisono.base.events import Reporter
from unisono.base.files import fsync_dir, fsync_tree, read_json, write_json
from unisono.base.text import parse_bytes
from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.verify import read_model_manifest, write_model_manifest
from unisono.trainer.config.model_sections import LANGUAGE
from unisono.trainer.config.training_sections import CheckpointSection
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.families.text.written import WrittenModel
from unisono.trainer.families.vision.sight import WrittenVisionModel, row_with_picture
from unisono.trainer.model.file_settings import ADAPTER_SETTINGS
from unisono.trainer.model.load import load_tokenizer
from unisono.trainer.model.quantization import is_quantized
from unisono.trainer.model.result_logits import ResultLogits, fixed_rows
from unisono.trainer.model.sentence_files import copy_sentence_files, write_sentence_files
from unisono.trainer.plan.families import family_at, need_decoder
from unisono.trainer.plan.task_requests import Exported, ExportRequest, MergeFigures
from unisono.trainer.task.inference import (
    adapter_tokenizer,
    load_target,
    merge_adapter,
    stops_of,
    stored_dtype,
    template_of,
    trusts_code,
)
from unisono.trainer.task.read_back import ReadBack, by_digests, read_back
from unisono.trainer.task.target import Target, requested_target, verify_target
from unisono.trainer.training.weights import (
    Entries,
    copy_files,
    entries_of,
    multimodal_original,
    round_as_stored,
    trained_parts,
    write_generation_config,
    write_model,
    write_weights,
)

if TYPE_CHECKING:
    from unisono.trainer.task.picture_tasks import Opened

_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.py")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "config.json", "README.md")
# Root mean square of the difference of logits, relative to their spread: rounding of one addition,
# or of a 16-bit weight.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.06}


def run(request: ExportRequest, report: Reporter) -> Exported:
    """Writes the directory.

    Raises:
        UsageError: if OUT exists and is not empty, or the target does not exist.
        ModelError: if an adapter cannot be merged.
        IntegrityError: if the target is damaged, or what was written is not the same model when it
            is loaded again; it stays there.
        UnfitError: if the storage fails.
    """
    out = free_place(request.out)
    if family_at(Path(request.model.target).expanduser()).draws:
        return _export_lora(request, report, out)
    need_decoder(request.model.target, where="RUN|MODEL")
    if request.format:
        raise UsageError.of(
            f"--format {request.format} is for image models",
            where="--format",
            fix="omit it: transformers, vLLM and llama.cpp's converter load the export as it is",
        )
    target = requested_target(request.model)
    verify_target(target, report)
    merge = request.merge and has_adapter(target)
    if request.merge and not merge:
        report.warning("nothing_to_merge", "there is no adapter to merge: the model already has all weights")
    if target.merged and not merge:
        raise UsageError.of(
            f"{len(target.merged) + 1} adapters are not one adapter",
            where="adapter_name_or_path",
            why="they are merged into the model, one after the other",
            fix="add --merge, or pass one adapter",
        )
    report.phase("export", f"writing {out}")
    wanted: ResultLogits | None
    figures: MergeFigures | None
    with whole_directory(out) as directory:
        if merge:
            figures, entries, wanted = write_merged(
                target, directory, report, max_file_bytes=_largest_file(target, request.max_shard_size)
            )
        else:
            figures = None
            entries, wanted = write_as_it_is(target, directory, reads_back=request.read_back)
        _write_rest(target, directory)
        write_model_manifest(directory, entries)
    back = None
    if request.read_back:
        report.phase("verify", f"reading {out} back")
        back = _read_back(target, out, wanted)
    what = "merged model" if merge else "adapter" if has_adapter(target) else "model"
    files = sorted(file for file in out.rglob("*") if file.is_file())
    result: Exported = {
        "out": str(out),
        "what": what,
        "description": target.description,
        "base": str(target.base),
        "merged": merge,
        "files": [str(file.relative_to(out)) for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "reward": target.head is not None and not target.head.labels,
        "labels": list(target.head.labels) if target.head is not None else [],
        "embeds": target.embeds,
        "multimodal": multimodal_original(target.base) is not None,
        "read_back": back.to_json() if back is not None else None,
    }
    return {**result, **figures} if figures is not None else result


def _export_lora(request: ExportRequest, report: Reporter, out: Path) -> Exported:
    from unisono.trainer.task.picture_tasks import run_export

    if request.merge:
        raise UsageError.of(
            "a LoRA of an image model is not merged",
            where="--merge",
            why="diffusers, A1111 and ComfyUI load it beside the model",
            fix="omit --merge",
        )
    report.phase("export", f"writing {out}")
    with whole_directory(out) as directory:
        name, opened = run_export(request, report, out, directory)
    back = None
    if request.read_back:
        report.phase("verify", f"reading {out} back")
        back = _read_back_lora(opened, out / name, half=request.half)
    files = sorted(file for file in out.rglob("*") if file.is_file())
    kind = request.format or "diffusers"
    return {
        "out": str(out),
        "files": [str(file.relative_to(out)) for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "read_back": back.to_json() if back is not None else None,
        "what": f"LoRA ({kind})",
        "description": opened.description,
        "base": str(opened.pipeline.root) if opened.pipeline is not None else "",
        "merged": False,
        "reward": False,
        "labels": [],
        "pictures": True,
        "format": kind,
        "file": name,
    }


def _read_back_lora(opened: "Opened", file: Path, *, half: bool) -> ReadBack:
    """Loads a LoRA file in diffusers, and compares it with the run or checkpoint that it is of."""
    from unisono.trainer.families.pictures.written import WrittenLora
    from unisono.trainer.task.picture_read_back import trained_predictions

    wanted = trained_predictions(opened.target) if opened.target is not None else None
    if wanted is None or opened.pipeline is None:
        return by_digests(file.parent, "nothing is known of what its model predicts")
    return read_back(WrittenLora(file.parent, opened.pipeline, file.name, half), wanted)


def _read_back(target: Target, out: Path, wanted: ResultLogits | None) -> ReadBack:
    """Loads what was written, and compares it with the model that it is of."""
    is_adapter = (out / ADAPTER_SETTINGS).is_file()
    config = target.plan.config if target.plan is not None else None
    if config is not None and not is_adapter:  # a merged model is not quantized any more
        config = config.model_copy(update={"model": config.model.model_copy(update={"quantize": None})})
    base = target.base if is_adapter else out
    written = WrittenModel(out, base, config, has_head=target.head is not None)
    if _sees(target):
        written = WrittenVisionModel(out, base, config, has_head=False, original=target.base)
    if wanted is None:
        return by_digests(out, "the files are copies, and nothing is known of the model's logits")
    return read_back(written, wanted)


def write_as_it_is(
    target: Target, directory: Path, *, reads_back: bool
) -> tuple[Entries, ResultLogits | None]:
    """Writes the adapter or the full model with unchanged weights; gives the digests of the weight
    files, and the logits of its model if known.
    """
    if target.source == "checkpoint":
        assert target.plan is not None
        loaded = load_target(
            target, dtype=target.plan.dtype, device=torch.device("cpu"), keeps_parts=_sees(target)
        )
        entries = write_weights(loaded, target.plan, directory)
        round_as_stored(loaded, target.plan)
        return entries, _logits_of(target, loaded.model, target.plan.dtype) if reads_back else None
    directory.mkdir()
    patterns = _ADAPTER_FILES if target.source == "adapter" else _MODEL_FILES
    for file in sorted({file for pattern in patterns for file in target.weights.glob(pattern)}):
        shutil.copyfile(file, directory / file.name)
    if target.source == "adapter":
        _name_base(target, directory / "adapter_config.json")
    elif multimodal_original(target.weights) is not None:
        copy_files(target.weights, directory)
    # Verified before; damage during the copy is detected when the copy is read.
    listing = read_model_manifest(target.weights)
    if listing is None:
        return entries_of(target.weights), None
    entries = {name: entry for name, entry in listing.files.items() if name.endswith(".safetensors")}
    return entries, _logits_of_run(target)


def _logits_of_run(target: Target) -> ResultLogits | None:
    """Those that the rank kept which had the trained weights; None for others than the result of a
    run.
    """
    kept = RunDir(target.weights.parent).result_logits
    if target.plan is None or not kept.is_file():
        return None
    if target.source == "adapter" and target.base != Path(target.plan.model.directory):
        return None  # on another base model it gives others
    return ResultLogits.read(kept)


def _sees(target: Target) -> bool:
    """Whether it was trained on rows with pictures."""
    return target.plan is not None and target.plan.model.reads_pictures


def _logits_of(target: Target, model: Any, dtype: str) -> ResultLogits:
    """The logits of three rows, one with a picture if it was trained on such."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    rows = fixed_rows(base.get_input_embeddings().weight.shape[0])
    if not _sees(target):
        return ResultLogits.of(model, rows, dtype=dtype)
    ids, picture = row_with_picture(PictureProcessor(target.base, trust_remote_code=trusts_code(target)))
    return ResultLogits.of(model, [*rows[:2], ids], dtype=dtype, pictures={2: picture})


def write_merged(
    target: Target, directory: Path, report: Reporter, *, max_file_bytes: int
) -> tuple[MergeFigures, Entries, ResultLogits]:
    """Writes the model with the adapter merged into its weights, in the dtype of the model's own
    files; gives its logits in memory, too.

    They are compared with those of base plus adapter.

    Raises:
        ModelError: if the adapter cannot be merged.
    """
    dtype = stored_dtype(target.base)
    report.phase("load_model", f"loading {target.description}")
    loaded = load_target(target, dtype=dtype, device=torch.device("cpu"), keeps_parts=_sees(target))
    wanted = _logits_of(target, loaded.model, dtype)
    report.phase("merge", "merging the adapter into the weights")
    was_quantized = is_quantized(loaded.base)
    merged = merge_adapter(loaded.model, where=str(target.weights))
    logits = _logits_of(target, merged.eval(), dtype)
    difference = wanted.difference(logits)
    if not difference <= TOLERANCE[dtype]:
        raise ModelError.of(
            "the merged model differs from base plus adapter",
            where=str(target.weights),
            why=f"the logits differ by {difference:.2g} of their spread; rounding explains up to {TOLERANCE[dtype]:g}",
            fix="export without --merge",
        )
    report.phase("export", "writing the merged model")
    merged.config.use_cache = True
    entries = write_model(
        merged,
        directory,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        original=multimodal_original(target.base),
        parts=trained_parts(target.plan) if target.plan is not None else LANGUAGE,
    )
    return {"dtype": dtype, "logits_differ_by": difference, "dequantized": was_quantized}, entries, logits


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Gives a new path next to `out`; at the end the directory there is synced and renamed to
    `out`.

    Raises:
        UnfitError: if the storage fails; nothing is left behind then.
    """
    temporary = out.parent / f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        fsync_tree(temporary)
        temporary.rename(out)  # over an empty directory, too
        fsync_dir(out.parent)
    except BaseException as error:  # Ctrl-C must not leave a partial export, either; raised again
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) or error_number(error) is not None:
            raise UnfitError.of(
                f"{out} cannot be written: {storage_words(error)}",
                where=str(out),
                why=storage_reason(error),
                fix=f"{storage_remedy(error)}; nothing was left behind",
            ) from error
        raise


def free_place(name: str) -> Path:
    """The directory of an export.

    Raises:
        UsageError: if there is something.
    """
    out = Path(name).expanduser().absolute()
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UsageError.of(
            f"{name} already exists",
            where=str(out),
            why="an export never overwrites",
            fix="use a directory that does not exist or is empty",
        )
    return out


def _largest_file(target: Target, size: str | None) -> int:
    """Maximum bytes of a weight file: as requested, else by the run's config, else the config's
    default.
    """
    if size:
        return parse_bytes(size)
    section = target.plan.config.checkpoint if target.plan else CheckpointSection()
    return parse_bytes(section.max_shard_size)


def has_adapter(target: Target) -> bool:
    """Whether a target is an adapter on a base model."""
    if target.source == "checkpoint":
        return target.plan is not None and target.plan.config.adapter is not None
    return target.source == "adapter"


def _name_base(target: Target, file: Path) -> None:
    """Sets the base model of an adapter that was trained elsewhere to its present directory."""
    settings = read_json(file)
    named = str(settings.get("base_model_name_or_path") or "")
    if not named or (named.startswith(("/", ".")) and not Path(named).is_dir()):
        settings["base_model_name_or_path"] = str(target.base)
    write_json(file, settings)


def _write_rest(target: Target, directory: Path) -> None:
    """Writes the tokenizer with the run's chat template, and a generation_config with its stop
    tokens.
    """
    tokenizer: Any = load_tokenizer(target.weights) if target.source == "model" else adapter_tokenizer(target)
    template = template_of(target, tokenizer)
    stops = stops_of(target, tokenizer, template)
    if template is not None and template.text is not None:
        tokenizer.chat_template = template.text
    tokenizer.save_pretrained(str(directory))
    _copy_sentencepiece(target, directory)
    if target.embeds:
        _write_sentence_files(target, directory)
    elif target.head is None:
        write_generation_config(
            directory, tokenizer=tokenizer, stops=stops, known=(target.base, target.weights)
        )


def _copy_sentencepiece(target: Target, directory: Path) -> None:
    """Copies SentencePiece's own file, which transformers reads and does not write: llama.cpp's
    converter needs it.
    """
    trained = [Path(target.plan.model.directory)] if target.plan is not None else []
    for source in (target.weights, target.base, *trained):
        if (file := source / "tokenizer.model").is_file():
            shutil.copyfile(file, directory / file.name)
            return


def _write_sentence_files(target: Target, directory: Path) -> None:
    """Writes what sentence-transformers needs, as the run or the exported model has it."""
    if target.plan is None:
        copy_sentence_files(target.weights, directory)
        return
    config, hidden_size = target.plan.config, target.plan.model.hidden_size
    write_sentence_files(directory, config.embed, hidden_size=hidden_size, max_length=config.data.max_length)
