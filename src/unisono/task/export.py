"""The task `export`: writes a directory that transformers and peft can load, completely or not at all.

Request: target, step (or null), out, merge. Result: out, what (`adapter`, `merged model` or `model`), description, base, dtype, files,
bytes, reward (whether it is a reward model), and for a merged model how much its logits differ from those of base plus adapter.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.verify import read_model_manifest, write_model_manifest
from unisono.config.schema import CheckpointSection
from unisono.errors import (
    ModelError,
    UnfitError,
    UsageError,
    error_number,
    storage_reason,
    storage_remedy,
    storage_words,
)
from unisono.events import Reporter
from unisono.files import fsync_dir, fsync_tree, read_json, write_json
from unisono.model.forward import head_values
from unisono.model.load import SCORE, load_base, load_tokenizer
from unisono.model.quantization import is_quantized
from unisono.rundir.records import is_image_model
from unisono.task.inference import (
    adapter_tokenizer,
    load_target,
    merge_adapter,
    stops_of,
    stored_dtype,
    template_of,
    trusts_code,
)
from unisono.task.target import Target, requested_target, verify_target
from unisono.text import parse_bytes
from unisono.train.weights import (
    Entries,
    entries_of,
    write_generation_config,
    write_model,
    write_weights,
)

_MODEL_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.py")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "config.json", "README.md")
# Root mean square of the difference of logits, relative to their spread: rounding of one addition, or of a 16-bit weight.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.06}


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Writes the directory.

    Raises:
        UsageError: if OUT exists and is not empty, or the target does not exist.
        ModelError: if an adapter cannot be merged.
        IntegrityError: if the target is damaged.
        UnfitError: if the storage fails.
    """
    out = free_place(request["out"])
    if is_image_model(Path(request["target"]).expanduser()):
        return _export_lora(request, report, out)
    if request.get("format"):
        raise UsageError.of(
            f"--format {request['format']} is for image models",
            where="--format",
            fix="omit it: transformers, vLLM and llama.cpp's converter load the export as it is",
        )
    target = requested_target(request)
    verify_target(target, report)
    merge = bool(request.get("merge")) and has_adapter(target)
    if request.get("merge") and not merge:
        report.warning("nothing_to_merge", "there is no adapter to merge: the model already has all weights")
    if target.merged and not merge:
        raise UsageError.of(
            f"{len(target.merged) + 1} adapters are not one adapter",
            where="adapter_name_or_path",
            why="they are merged into the model, one after the other",
            fix="add --merge, or pass one adapter",
        )
    report.phase("export", f"writing {out}")
    with whole_directory(out) as directory:
        if merge:
            extra, entries = write_merged(
                target, directory, report, max_file_bytes=_largest_file(target, request.get("max_shard_size"))
            )
        else:
            extra, entries = {}, write_as_it_is(target, directory)
        _write_rest(target, directory)
        write_model_manifest(directory, entries)
    what = "merged model" if merge else "adapter" if has_adapter(target) else "model"
    files = sorted(file for file in out.rglob("*") if file.is_file())
    return {
        "out": str(out),
        "what": what,
        "description": target.description,
        "base": str(target.base),
        "merged": merge,
        "files": [str(file.relative_to(out)) for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "reward": target.is_reward,
        **extra,
    }


def _export_lora(request: dict[str, Any], report: Reporter, out: Path) -> dict[str, Any]:
    from unisono.task.picture_tasks import run_export

    if request.get("merge"):
        raise UsageError.of(
            "a LoRA of an image model is not merged",
            where="--merge",
            why="diffusers, A1111 and ComfyUI load it beside the model",
            fix="omit --merge",
        )
    report.phase("export", f"writing {out}")
    with whole_directory(out) as directory:
        found = run_export(request, report, out, directory)
    files = sorted(file for file in out.rglob("*") if file.is_file())
    return {
        "out": str(out),
        "files": [str(file.relative_to(out)) for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        **found,
    }


def write_as_it_is(target: Target, directory: Path) -> Entries:
    """Writes the adapter or the full model with unchanged weights; gives the digests of the weight files."""
    if target.source == "checkpoint":
        assert target.plan is not None
        return write_weights(
            load_target(target, dtype=target.plan.dtype, device=torch.device("cpu")), target.plan, directory
        )
    directory.mkdir()
    patterns = _ADAPTER_FILES if target.source == "adapter" else _MODEL_FILES
    for file in sorted({file for pattern in patterns for file in target.weights.glob(pattern)}):
        shutil.copyfile(file, directory / file.name)
    if target.source == "adapter":
        _name_base(target, directory / "adapter_config.json")
    # Verified before; damage during the copy is detected when the copy is read.
    listing = read_model_manifest(target.weights)
    if listing is None:
        return entries_of(target.weights)
    return {name: entry for name, entry in listing.files.items() if name.endswith(".safetensors")}


def write_merged(
    target: Target, directory: Path, report: Reporter, *, max_file_bytes: int
) -> tuple[dict[str, Any], Entries]:
    """Writes the model with the adapter merged into its weights, in the dtype of the model's own files.

    The written model is loaded again, and its logits are compared with those of base plus adapter.

    Raises:
        ModelError: if the adapter cannot be merged.
    """
    dtype = stored_dtype(target.base)
    report.phase("load_model", f"loading {target.description}")
    loaded = load_target(target, dtype=dtype, device=torch.device("cpu"))
    wanted = logits_of_probe(loaded.model)
    report.phase("merge", "merging the adapter into the weights")
    was_quantized = is_quantized(loaded.base)
    merged = merge_adapter(loaded.model, where=str(target.weights))
    merged.config.use_cache = True
    entries = write_model(merged, directory, dtype=dtype, max_file_bytes=max_file_bytes)
    del loaded, merged
    report.phase("verify", "verifying the merged model")
    again = load_base(
        directory,
        dtype=getattr(torch, dtype),
        trust_remote_code=trusts_code(target),
        reward=target.is_reward,
    ).eval()
    difference = float(
        (logits_of_probe(again) - wanted).square().mean().sqrt() / wanted.std().clamp_min(1e-6)
    )
    if not difference <= TOLERANCE[dtype]:
        raise ModelError.of(
            "the merged model differs from base plus adapter",
            where=str(target.weights),
            why=f"the logits differ by {difference:.2g} of their spread; rounding explains up to {TOLERANCE[dtype]:g}",
            fix="export without --merge",
        )
    found = {"dtype": dtype, "logits_differ_by": difference, "dequantized": was_quantized}
    return found, entries


@contextlib.contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Gives a new path next to `out`; at the end the directory there is synced and renamed to `out`.

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
    """Maximum bytes of a weight file: as requested, else by the run's config, else the config's default."""
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
    """Writes the tokenizer with the run's chat template, and a generation_config with its stop tokens."""
    tokenizer: Any = load_tokenizer(target.weights) if target.source == "model" else adapter_tokenizer(target)
    template = template_of(target, tokenizer)
    stops = stops_of(target, tokenizer, template)
    if template is not None and template.text is not None:
        tokenizer.chat_template = template.text
    tokenizer.save_pretrained(str(directory))
    if not target.is_reward:
        write_generation_config(
            directory, tokenizer=tokenizer, stops=stops, known=(target.base, target.weights)
        )


_PROBE_TOKENS = 16


def logits_of_probe(model: Any) -> torch.Tensor:
    """(2, tokens, vocabulary) float32: the logits of a model for two fixed rows of tokens; (2, tokens) of a reward model, its values."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    vocabulary = base.get_input_embeddings().weight.shape[0]
    ids = [
        [(11 + 7 * i) % vocabulary for i in range(_PROBE_TOKENS)],
        [(3 + 5 * i) % vocabulary for i in range(_PROBE_TOKENS)],
    ]
    inputs: dict[str, Any] = {"input_ids": torch.tensor(ids, device=base.device), "use_cache": False}
    with torch.no_grad():
        if hasattr(base, SCORE):  # its logits are one value for a row, too few to compare
            body = getattr(base, base.base_model_prefix)
            logits = head_values(base, body(**inputs).last_hidden_state)
        else:
            logits = model(**inputs).logits
    return logits.float().cpu()
