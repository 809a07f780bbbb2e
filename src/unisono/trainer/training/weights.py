"""Writes final weights in the Hugging Face layout, gathered tensor by tensor.

A full tensor exists only while it is written, and only on the ranks that have just gathered it; so
rank 0 never holds more than its own part of the model and one full tensor.
"""

import contextlib
import copy
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from unisono.base.files import read_json, write_json
from unisono.base.text import parse_bytes
from unisono.guard.rundir import MODEL_MANIFEST
from unisono.trainer.checkpoint.manifest import FileEntry
from unisono.trainer.checkpoint.state import bytes_of, dtype_name
from unisono.trainer.checkpoint.writer import TensorPart, file_order, write_tensor_file
from unisono.trainer.config.heads import EMBED
from unisono.trainer.config.model_sections import LANGUAGE, ModelPart
from unisono.trainer.data.tokenizer import TOKENIZER_FILES
from unisono.trainer.data.trained_template import stop_ids_of, trained_template
from unisono.trainer.families import training_of
from unisono.trainer.model.adapter import BaseChanges, stored_settings, with_change
from unisono.trainer.model.directory import multimodal_class, read_model_config
from unisono.trainer.model.file_settings import ADAPTER_FILE
from unisono.trainer.model.files import read_contents, read_safetensors_header, weight_files
from unisono.trainer.model.load import DTYPES, LoadedModel
from unisono.trainer.model.multimodal import (
    KeptTensor,
    kept_tensors,
    name_exactly,
    other_names,
    part_of,
    text_names,
    text_prefixes,
)
from unisono.trainer.model.sentence_files import write_sentence_files
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.sharding import full_on_one_rank

Tensors = dict[str, torch.Tensor]

_MODEL_FILES = "model{suffix}.safetensors"
MODEL_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: in the file.
        source: name of the model's tensor that it is computed from.
        shape: in the file.
        dtype: in the file.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """The files and their tensors.

    Attributes:
        files: for each file its tensors, in order; some may be copied from a different file.
        index: the JSON object of the index; None if there is only one file.
        convert: gives the tensors of the files that are computed from a full tensor of the model.
    """

    files: dict[str, list[StoredTensor | KeptTensor]]
    index: Mapping[str, object] | None
    convert: Callable[[str, torch.Tensor], Tensors]


def model_layout(
    base: Any,
    *,
    dtype: torch.dtype,
    max_file_bytes: int,
    original: Path | None = None,
    parts: Collection[ModelPart] = LANGUAGE,
) -> FileLayout | None:
    """The layout of a full model; None if a file's tensor is computed from several of the model's,
    which must be gathered together.

    Args:
        base: of transformers; its weights may be sharded.
        dtype: of floating-point tensors in the files.
        max_file_bytes: maximum size of a file; a larger tensor gets a separate file.
        original: the directory of a multimodal checkpoint: what is not of `parts` is copied.
        parts: of it that were trained.

    Raises:
        ModelError: if the tensors of such a checkpoint have other names.
    """
    shown = {name: _without_data(tensor, dtype) for name, tensor in untied(base).items()}
    tied = _tied(base, shown)
    if original is not None:
        inside = text_prefixes(base)
        shown = {name: tensor for name, tensor in shown.items() if part_of(name, inside) in parts}
    try:
        wanted = _reverted(base, dict(shown))
        apart = {name: _reverted(base, {name: tensor}) for name, tensor in shown.items()}
    # Any error of an operation that fails on single tensors or without data, but works on all.
    except Exception:  # noqa: BLE001
        return None
    sources = {name: source for source, made in apart.items() for name in made}
    alike = {name: tensor for made in apart.values() for name, tensor in made.items()}
    if sum(map(len, apart.values())) != len(wanted) or _outline(alike) != _outline(wanted):
        return None
    stored = [
        StoredTensor(name, sources[name], tuple(tensor.shape), tensor.dtype)
        for name, tensor in wanted.items()
    ]

    def convert(source: str, tensor: torch.Tensor) -> Tensors:
        return _reverted(base, {source: tensor})

    kept = [] if original is None else kept_tensors(original, wanted, tied=_reverted(base, tied))
    inside = text_prefixes(base)
    in_memory = base.num_parameters()
    if original is not None:  # its other parts are among the kept ones, also if they are in memory
        written = (p.numel() for name, p in base.named_parameters() if part_of(name, inside) in parts)
        in_memory = sum(written)
    parameters = in_memory + sum(prod(tensor.shape) for tensor in kept)
    files, index = _split([*stored, *kept], max_file_bytes, parameters=parameters)
    return FileLayout(files, index, convert)


def adapter_layout(model: Any, changes: BaseChanges | None = None) -> FileLayout:
    """The layout of a peft model's adapter: always one file.

    Args:
        model: of peft; its weights may be sharded.
        changes: how its base weights differ from their files: the adapter in the file contains
            them.
    """
    from peft import get_peft_model_state_dict

    shown = {name: _without_data(tensor, tensor.dtype) for name, tensor in model.state_dict().items()}
    sources = {id(tensor): name for name, tensor in shown.items()}
    kept = get_peft_model_state_dict(model, state_dict=dict(shown), save_embedding_layers=False)
    names = {
        sources[id(tensor)]: name for name, tensor in kept.items()
    }  # peft renames tensors, but does not change them

    def convert(source: str, tensor: torch.Tensor) -> Tensors:
        return {names[source]: with_change(source, tensor, changes or {})}

    outlines = {source: convert(source, shown[source])[name] for source, name in names.items()}
    stored: list[StoredTensor | KeptTensor] = [
        StoredTensor(names[source], source, tuple(outline.shape), outline.dtype)
        for source, outline in outlines.items()
    ]
    return FileLayout({ADAPTER_FILE: stored}, None, convert)


def untied(base: Any) -> Tensors:
    """The tensors of a model by name; tensors that share memory once, by their first name, as
    transformers saves them.
    """
    seen: dict[int, str] = {}
    ignored = set(base._keys_to_ignore_on_save or ())  # noqa: SLF001 - not public in transformers 5.23
    return {
        name: tensor.detach()
        for name, tensor in base.state_dict(keep_vars=True).items()
        if seen.setdefault(id(tensor), name) == name and name not in ignored
    }


def _tied(base: Any, shown: Tensors) -> Tensors:
    """The tensors of a multimodal model's decoder and head that share memory with others."""
    state = base.state_dict(keep_vars=True)
    return {name: state[name].detach().to("meta") for name in text_names(base) - shown.keys()}


def _without_data(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The full tensor as in the file, without data."""
    return torch.empty(
        tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device="meta"
    )


def _reverted(base: Any, tensors: Tensors) -> Tensors:
    """The tensors with the names and shapes of the model's files: transformers converts many models
    when it loads them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted: Tensors = revert_weight_conversion(base, tensors)
    return reverted


def _outline(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _split(
    stored: list[StoredTensor | KeptTensor], max_file_bytes: int, *, parameters: int
) -> tuple[dict[str, list[StoredTensor | KeptTensor]], Mapping[str, object] | None]:
    """The tensors split into files, as huggingface_hub splits them, and the index."""
    from huggingface_hub import split_state_dict_into_shards_factory

    by_name = {tensor.name: tensor for tensor in stored}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.bytes,
        filename_pattern=_MODEL_FILES,
        max_shard_size=max_file_bytes,
    )
    files = {file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()}
    if not split.is_sharded:
        return files, None
    metadata = {"total_parameters": parameters, **split.metadata}
    return files, {"metadata": metadata, "weight_map": split.tensor_to_filename}


_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_METADATA = {"format": "pt"}  # transformers refuses files without it
_FILES_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
_WRITTEN = {*TOKENIZER_FILES, MODEL_INDEX, MODEL_MANIFEST, "config.json", "generation_config.json"}

Entries = dict[str, FileEntry]


def write_weights(
    loaded: LoadedModel, plan: RunPlan, directory: Path, *, step: int | None = None, writes: bool = True
) -> Entries:
    """Writes the adapter in peft's layout, or the full model in that of transformers, with
    everything that generation needs.

    If weights are sharded, all ranks must call it.

    Args:
        loaded: the model.
        plan: of the run.
        directory: a new directory; its parent must exist.
        step: of the weights; None: the last one.
        writes: whether this rank writes; the others only contribute their parts.

    Returns:
        the intended digests of the weight files.

    Raises:
        OSError: if the storage fails.
    """
    if writes:
        directory.mkdir()
    target = directory if writes else None
    entries = training_of(plan).write_result(loaded, plan, target, step=step or plan.total_steps)
    if entries is not None:
        return entries
    if plan.config.adapter is not None:
        entries = write_adapter_of(loaded, plan, target)
    else:
        limit = parse_bytes(plan.config.checkpoint.max_shard_size)
        loaded.base.config.use_cache = True
        entries = write_model(
            loaded.base,
            target,
            dtype=stored_dtype(plan),
            max_file_bytes=limit,
            original=multimodal_original(Path(plan.model.directory)),
            parts=trained_parts(plan),
        )
        loaded.base.config.use_cache = False
    if target is not None and plan.config.adapter is not None and _differs(plan):
        _write_settings(loaded.base, target)
    if target is not None:
        _set_template(loaded.tokenizer, plan)
        loaded.tokenizer.save_pretrained(str(target))
        if plan.config.objective == EMBED:
            write_sentence_files(
                target,
                plan.config.embed,
                hidden_size=plan.model.hidden_size,
                max_length=plan.config.data.max_length,
            )
        elif _generates(loaded.base):
            _write_stops(loaded.tokenizer, plan, target)
    return entries


def _differs(plan: RunPlan) -> bool:
    """Whether the config of the trained model says more than that of its base."""
    return plan.config.model.rope is not None or (plan.head is not None and bool(plan.head.labels))


def _write_stops(tokenizer: Any, plan: RunPlan, directory: Path) -> None:
    """Writes generation_config.json of a run's result."""
    known = (Path(plan.model.directory),)
    stops = stop_ids_of(plan, tokenizer, trained_template(plan, tokenizer, known), known)
    write_generation_config(directory, tokenizer=tokenizer, stops=stops, known=known)


def write_generation_config(
    directory: Path, *, tokenizer: Any, stops: set[int], known: Sequence[Path]
) -> None:
    """Writes generation_config.json with the stop tokens of the training, whatever is written:
    transformers and vLLM stop at them alone.

    Args:
        directory: of the model or adapter.
        tokenizer: of transformers.
        stops: the tokens that end an answer.
        known: directories that may have such a file; the last one's other settings are kept.
    """
    settings: dict[str, object] = {}
    for place in known:
        with contextlib.suppress(OSError, ValueError):
            settings = read_json(place / "generation_config.json")
    settings.pop("_from_model_config", None)  # transformers would take the stop tokens of config.json instead
    if stops:
        settings["eos_token_id"] = sorted(stops) if len(stops) > 1 else min(stops)
    if isinstance(tokenizer.pad_token_id, int):
        settings.setdefault("pad_token_id", tokenizer.pad_token_id)
    write_json(directory / "generation_config.json", settings)


def _write_settings(base: Any, directory: Path) -> None:
    """Writes the config of the base model in memory, which differs from its file, beside the
    adapter.
    """
    base.config.use_cache, base.config.architectures = True, [type(base).__name__]
    base.config.save_pretrained(str(directory))
    base.config.use_cache = False


def trained_parts(plan: RunPlan) -> Collection[ModelPart]:
    """The parts of a vision-language model that a run has changed; of other models the language."""
    return plan.config.train_parts if plan.model.reads_pictures else LANGUAGE


def multimodal_original(directory: Path) -> Path | None:
    """The directory of a model, if what is written of it has to keep vision or audio parts."""
    return directory if multimodal_class(read_model_config(directory)) is not None else None


def copy_files(original: Path, directory: Path) -> None:
    """Copies the files that a multimodal checkpoint has beside weights, tokenizer and settings:
    those of its processor, and code.

    Raises:
        OSError: if the storage fails.
    """
    for file in sorted({file for pattern in _FILES_BESIDE for file in original.glob(pattern)}):
        if file.name not in _WRITTEN and not file.name.startswith("adapter_"):
            shutil.copyfile(file, directory / file.name)


def write_model(
    base: Any,
    directory: Path | None,
    *,
    dtype: str,
    max_file_bytes: int,
    original: Path | None = None,
    parts: Collection[ModelPart] = LANGUAGE,
) -> Entries:
    """Writes weights and config of a transformers model, as its `save_pretrained` would;
    `write_generation_config` writes the rest.

    If weights are sharded, all ranks must call it.

    Args:
        base: the model.
        directory: target; None on ranks that only contribute their parts.
        dtype: of the files.
        max_file_bytes: a larger model is split into several files.
        original: the directory of a multimodal checkpoint, of which other parts and files are
            copied.
        parts: of it that were trained, and are not copied.

    Returns:
        the digests of the weight files: the intended ones where unisono wrote the file.

    Raises:
        OSError: if the storage fails.
        ModelError: if the tensors of a multimodal checkpoint have other names than the model's.
    """
    tensors = untied(base)
    layout = model_layout(
        base, dtype=DTYPES[dtype], max_file_bytes=max_file_bytes, original=original, parts=parts
    )
    if layout is None and original is not None:
        raise other_names(original, "transformers joins several of its tensors into one tensor of the file")
    # If a tensor of the file is made from several of the model's (three fused into one),
    # transformers must see all of them. Only then does rank 0 hold the full model.
    state = {} if layout else _all_full(tensors, DTYPES[dtype], keep=directory is not None)
    if directory is not None:
        with _plain_generation(base):
            base.save_pretrained(str(directory), state_dict=state, max_shard_size=max_file_bytes)
        _write_dtype(directory / "config.json", dtype)
        if original is not None:
            copy_files(original, directory)
    if layout is None:
        return entries_of(directory) if directory is not None else {}
    entries = _write_files(layout, tensors, directory)
    if directory is not None and layout.index is not None:
        write_json(directory / MODEL_INDEX, layout.index)
    return entries


@contextlib.contextmanager
def _plain_generation(base: Any) -> Iterator[None]:
    """A context in which a model generates by default settings: transformers refuses to save
    invalid ones, and weights with them.
    """
    from transformers import GenerationConfig

    before = getattr(base, "generation_config", None)
    if before is not None:
        base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        if before is not None:
            base.generation_config = before


def entries_of(directory: Path) -> Entries:
    """The digests of the weight files in a directory, read from disk."""
    files = {file.name: read_contents(file, tensors=True) for file in directory.glob("*.safetensors")}
    return {
        name: FileEntry(bytes=contents.bytes, xxh3_128=contents.digest, tensors=contents.tensors)
        for name, contents in files.items()
    }


def write_adapter_of(loaded: LoadedModel, plan: RunPlan, directory: Path | None) -> Entries:
    """Writes the adapter of a run, see `write_adapter`."""
    name = _base_name(plan)
    return write_adapter(
        loaded.model,
        directory,
        base_name=name,
        base_revision=plan.config.model.revision if name == plan.config.model.path else None,
        changes=loaded.base_changes,
    )


def write_adapter(
    model: Any,
    directory: Path | None,
    *,
    base_name: str,
    base_revision: str | None = None,
    changes: BaseChanges | None = None,
) -> Entries:
    """Writes weights, settings and model card of a peft model's adapter, as its `save_pretrained`
    would.

    If weights are sharded, all ranks must call it.

    Args:
        model: the model.
        directory: an existing directory; None on ranks that only contribute their parts.
        base_name: where peft will load the base model from.
        base_revision: of a hub id; without it peft would load another version of the model than the
            trained one.
        changes: how its base weights in memory differ from their files.

    Returns:
        the intended digest of the weight file.

    Raises:
        OSError: if the storage fails.
    """
    entries = _write_files(adapter_layout(model, changes), dict(model.state_dict()), directory)
    if directory is None:
        return entries
    model.peft_config["default"].base_model_name_or_path = base_name
    model.create_or_update_model_card(str(directory))
    settings = copy.copy(model.peft_config["default"])
    settings.inference_mode, settings.revision = True, base_revision
    stored_settings(settings, model, changes or {})
    name_exactly(settings, model)
    settings.save_pretrained(str(directory))
    return entries


def stored_dtype(plan: RunPlan) -> str:
    """The dtype in which trained weights are stored: that of the original files, else that of the
    computation.
    """
    if plan.config.model.weights == "random":
        return plan.dtype
    headers = [
        header
        for file in weight_files(Path(plan.model.directory))
        for header in read_safetensors_header(file)
    ]
    largest = max(headers, key=lambda header: torch.Size(header.shape).numel())
    return _NAMES.get(largest.dtype, plan.dtype)


def round_as_stored(loaded: LoadedModel, plan: RunPlan) -> None:
    """Rounds trained weights as they are in the files, so that the model is that of the files.

    It cannot be trained on.
    """
    if plan.config.adapter is not None:
        return  # adapters are stored as they are
    dtype = DTYPES[stored_dtype(plan)]
    with torch.no_grad():
        for parameter in loaded.trainable.values():
            parameter.copy_(parameter.to(dtype))


def _write_files(layout: FileLayout, tensors: Tensors, directory: Path | None) -> Entries:
    """Writes the files of a layout, or only takes part in gathering their tensors, in the same
    order; gives the digests of written files.
    """
    entries: Entries = {}
    file_tensors = _FileTensors(layout, tensors, keep=directory is not None)
    for name, stored in layout.files.items():
        parts = file_tensors.parts(stored)
        if directory is not None:
            entries[name] = write_tensor_file(directory / name, parts, metadata=_METADATA)
        else:
            for part in file_order(parts):
                part.read()
        file_tensors.forget()
    return entries


class _FileTensors:
    """The tensors of the files, computed on demand; those of one source are read one after the
    other.

    On a rank that does not keep them, reading a tensor only takes part in gathering it.
    """

    def __init__(self, layout: FileLayout, tensors: Tensors, *, keep: bool) -> None:
        self._layout = layout
        self._keep = keep
        self._tensors = tensors
        self._source = ""
        self._now: Tensors = {}

    def parts(self, stored: list[StoredTensor | KeptTensor]) -> list[TensorPart]:
        """The tensors of one file."""
        return [
            TensorPart(tensor.name, dtype_name(tensor.dtype), tensor.shape, partial(self._bytes, tensor))
            if isinstance(tensor, StoredTensor)
            else TensorPart(
                tensor.name, tensor.header.dtype, tensor.shape, partial(tensor.read, nothing=not self._keep)
            )
            for tensor in stored
        ]

    def forget(self) -> None:
        """Frees the tensors that were computed last."""
        self._source, self._now = "", {}

    def _bytes(self, stored: StoredTensor) -> memoryview:
        if self._source != stored.source:
            self.forget()  # before the next full tensor exists
            full = _full(self._tensors[stored.source], stored.dtype, keep=self._keep)
            self._now = self._layout.convert(stored.source, full) if full is not None else {}
            self._source = stored.source
        return bytes_of(self._now[stored.name].contiguous()) if self._keep else memoryview(b"")


def _full(tensor: torch.Tensor, dtype: torch.dtype, *, keep: bool) -> torch.Tensor | None:
    """The full tensor, cast before it is gathered, so that it is never larger than in the file.

    All ranks must call it.
    """
    return full_on_one_rank(tensor.detach().to(dtype), keep=keep)


def _all_full(tensors: Tensors, dtype: torch.dtype, *, keep: bool) -> Tensors:
    """All full tensors at once, on the rank that keeps them. All ranks must call it."""
    full_tensors: Tensors = {}
    for name, tensor in tensors.items():
        full = _full(tensor, dtype if tensor.is_floating_point() else tensor.dtype, keep=keep)
        if full is not None:
            full_tensors[name] = full.contiguous()
    return full_tensors


def _write_dtype(file: Path, dtype: str) -> None:
    """Writes the files' dtype to config.json: transformers writes the model's dtype in memory,
    which may differ.
    """
    config = read_json(file)
    config.pop("torch_dtype", None)
    for part in config.values():
        if isinstance(part, dict) and "dtype" in part:  # of the text or vision part
            part["dtype"] = dtype
    write_json(file, config | {"dtype": dtype})


def _generates(base: Any) -> bool:
    """Whether it has settings of generation; a reward model has none."""
    return getattr(base, "generation_config", None) is not None


def _set_template(tokenizer: Any, plan: RunPlan) -> None:
    """Sets the chat template that the run was trained with, also if it came from a file or is the
    fallback.
    """
    used = Path(plan.data.cache_dir) / "template.jinja"
    if used.is_file() and (plan.config.data.template is not None or tokenizer.chat_template is None):
        tokenizer.chat_template = used.read_text(encoding="utf-8")


def _base_name(plan: RunPlan) -> str:
    """The source from which peft will load the base model: the hub id as configured, or the
    directory.
    """
    path = plan.config.model.path
    return plan.model.directory if path.startswith("builtin:") or Path(path).exists() else path
