"""Loads the weights of a target: of a model, of a base model with an adapter, of a checkpoint; and merges adapters into weights."""

import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unisono.child import without_bitsandbytes
from unisono.errors import ModelError
from unisono.model.adapter import fit_base_to_adapter
from unisono.model.file_settings import ADAPTER_FILE
from unisono.model.files import odd_weights, read_contents, read_safetensors_header, weight_files
from unisono.model.layers import take_rope
from unisono.model.load import (
    DTYPES,
    LIBRARY_ERRORS,
    LoadedModel,
    load_base,
    load_for_training,
    load_tokenizer,
    odd_parameters,
    set_pad_token,
)
from unisono.model.quantization import count_parameters, is_quantized, make_dense, quantized_load
from unisono.task.target import Target
from unisono.text import library_words

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MISSING_KEYS = "Found missing adapter keys"  # peft's warning; the tensors would stay as they were drawn
_SIZE_MISMATCH = re.compile(
    r"size mismatch for (\S+): .*?torch\.Size\(\[([\d, ]*)\]\).*?torch\.Size\(\[([\d, ]*)\]\)"
)


def load_target(target: Target, *, dtype: str, device: torch.device) -> LoadedModel:
    """Loads the weights of a target in evaluation mode; adapters are not merged into their base model.

    Raises:
        ModelError: if files are missing or do not match each other, or a weight is NaN or infinite.
    """
    loaded = _load(target, dtype=dtype, device=device)
    odd = odd_parameters(loaded.model)
    if odd:
        raise _odd_weights(target, odd, dtype)
    return loaded


def _odd_weights(target: Target, odd: list[str], dtype: str) -> ModelError:
    """The error for NaN or infinite parameters: the files have such values, or else the dtype of the conversion is too narrow."""
    files = weight_files(target.base)
    if target.weights != target.base:
        files += sorted(target.weights.glob("*.safetensors"))
    found = {file: contents.odd for file in files if (contents := read_contents(file)).odd}
    if found:
        return odd_weights(found)
    return ModelError.of(
        f"{odd[0]} has values out of the range of {dtype}",
        where=str(target.weights),
        why=f"they are infinite in {dtype}; {len(odd)} tensors have such values",
        fix="use a device that computes in the dtype of the files",
    )


def _load(target: Target, *, dtype: str, device: torch.device) -> LoadedModel:
    if target.source == "model":
        tokenizer = load_tokenizer(target.weights, trust_remote_code=trusts_code(target))
        base = load_base(
            target.weights,
            dtype=DTYPES[dtype],
            trust_remote_code=trusts_code(target),
            reward=target.is_reward,
            quantized=quantized_load(None, target.weights, dtype=dtype, device=device),
        ).to(device)
        if target.is_reward:
            set_pad_token(base, tokenizer)
        return _loaded(base, base, tokenizer, {})
    if target.source == "checkpoint":
        return _load_checkpoint(target, dtype=dtype, device=device)
    tokenizer = adapter_tokenizer(target)
    with torch.random.fork_rng(devices=[]):  # a new head of a reward model is drawn; the adapter has its own
        base = load_base(
            target.base,
            dtype=DTYPES[dtype],
            trust_remote_code=trusts_code(target),
            adjust=partial(take_rope, directory=target.weights),
            reward=target.is_reward,
            quantized=quantized_load(
                target.plan.config if target.plan else None, target.base, dtype=dtype, device=device
            ),
        ).to(device)
    if target.is_reward:
        set_pad_token(base, tokenizer)
    for adapter in target.merged:
        base = merge_adapter(_with_adapter(base, adapter, target, device), where=str(adapter))
    model = _with_adapter(base, target.weights, target, device)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return _loaded(model, base, tokenizer, trainable)


def _with_adapter(base: Any, directory: Path, target: Target, device: torch.device) -> Any:
    """The peft model of a base model and the adapter in a directory.

    Raises:
        ModelError: if they do not match.
    """
    from peft import PeftModel

    header = read_safetensors_header(directory / ADAPTER_FILE)  # refuses a damaged file
    fit_base_to_adapter(base, {tensor.name: tuple(tensor.shape) for tensor in header})
    try:
        with warnings.catch_warnings(), without_bitsandbytes():
            warnings.filterwarnings("error", message=f".*{_MISSING_KEYS}")
            return PeftModel.from_pretrained(
                base, str(directory), is_trainable=True, torch_device=str(device)
            )
    except (*LIBRARY_ERRORS, UserWarning) as error:
        raise _adapter_mismatch(directory, target.base, error) from error


def _adapter_mismatch(adapter: Path, base: Path, error: Exception) -> ModelError:
    """The error for an adapter that peft refused, with the tensors from its long message: the missing ones, or the first of a wrong shape."""
    weights, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    if isinstance(error, UserWarning):
        names = re.findall(r"'([^']+)'", str(error).partition(_MISSING_KEYS)[2])
        return ModelError.of(
            f"{len(names)} tensors of the adapter are missing from its file: {', '.join(names[:3])}{' …' * (len(names) > 3)}",
            where=str(weights),
            why=f"{settings} and the model {base} require them",
            fix="copy the whole directory of the adapter again",
        )
    shapes = _SIZE_MISMATCH.search(str(error))
    if shapes:
        name, found, wanted = shapes[1], *(f"({shape})" for shape in shapes.groups()[1:])
        return ModelError.of(
            f"{name} has the shape {found}, but adapter_config.json and the base model require {wanted}",
            where=str(weights),
            why=f"{settings} belongs to a different adapter, or {base} is not the model that it was trained on",
            fix="copy the whole directory again, or set base_model_name_or_path in adapter_config.json to the model that it was trained on",
        )
    return ModelError.of(
        "the adapter does not match its base model",
        where=str(adapter),
        why=library_words(error, library="peft"),
        fix="copy adapter_config.json again, or set its base_model_name_or_path to the model that it was trained on",
    )


def _loaded(model: Any, base: Any, tokenizer: Any, trainable: dict[str, torch.nn.Parameter]) -> LoadedModel:
    return LoadedModel(model.eval(), base, tokenizer, trainable, count_parameters(model))


def _load_checkpoint(target: Target, *, dtype: str, device: torch.device) -> LoadedModel:
    """Loads the model as training does, and then the trained weights of the checkpoint."""
    from unisono.checkpoint.state import CheckpointReader
    from unisono.model.directory import locate_tokenizer

    plan = target.plan
    assert plan is not None
    with torch.random.fork_rng(devices=[]):  # an adapter's initial weights are random, and overwritten below
        loaded = load_for_training(
            plan.config,
            directory=target.base,
            tokenizer_directory=locate_tokenizer(plan.config),
            dtype=dtype,
            device=device,
        )
    reader = CheckpointReader(target.weights)
    saved = {name: outline.shape for name, outline in reader.groups["trainable"].items()}
    if {name: tuple(p.shape) for name, p in loaded.trainable.items()} != saved:
        raise ModelError.of(
            "the checkpoint does not match the run's original model",
            where=str(target.weights),
            why=f"the model is now read from {target.base}",
            fix="restore the original model there",
        )
    with torch.no_grad():
        for name, parameter in loaded.trainable.items():
            parameter.copy_(reader.tensor("trainable", name))  # one by one, and without the optimizer state
    loaded.model.eval()
    return loaded


def adapter_tokenizer(target: Target) -> Any:
    """The adapter's own tokenizer if it has one (it may have the template of its training), else the base model's."""
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    own = any((target.weights / name).is_file() for name in names)
    return load_tokenizer(target.weights if own else target.base, trust_remote_code=trusts_code(target))


def trusts_code(target: Target) -> bool:
    """Whether the run's config allows the model's own Python code."""
    return target.plan is not None and target.plan.config.model.trust_remote_code


def stored_dtype(directory: Path) -> str:
    """The dtype of the largest tensor in a model's files; packed bytes of quantized weights do not count."""
    headers = [header for file in weight_files(directory) for header in read_safetensors_header(file)]
    headers = [header for header in headers if header.dtype not in ("U8", "I8")]
    largest = max(headers, key=lambda header: torch.Size(header.shape).numel())
    return _DTYPES.get(largest.dtype, "float32")


def merge_adapter(model: Any, *, where: str) -> Any:
    """The transformers model with the adapter merged into its weights. Sums are computed in float32 and rounded once.

    Tied weights stay tied; the dtype is that of the base model. Quantized weights become dense.

    Args:
        model: a peft model; it cannot be used afterwards.
        where: for messages.

    Raises:
        ModelError: if the adapter changes one of two tied weights, or is of a kind that cannot be merged.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    _refuse_tied(model, where)
    base = model.get_base_model()
    if is_quantized(base):
        make_dense(model, base, dtype=base.dtype)
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if not hasattr(layer, "merge"):
            raise ModelError.of(
                f"an adapter of kind {type(layer).__name__} cannot be merged",
                where=where,
                fix="export without --merge",
            )
        weight = layer.get_base_layer().weight
        dtype = weight.dtype
        weight.data = weight.data.float()
        layer.merge()
        weight.data = weight.data.to(dtype)
    return model.unload()


def _refuse_tied(model: Any, where: str) -> None:
    """Refuses an adapter on head or embedding if both share one matrix and the adapter's do not: merging would change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    both = (base.get_input_embeddings(), base.get_output_embeddings())
    if (
        both[1] is None
        or not base.config.get_text_config().tie_word_embeddings
        or both[0].weight is both[1].weight
    ):
        return
    for module in both:
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper):
            raise ModelError.of(
                "the adapter changes the embedding or the head, which share one matrix in this model",
                where=where,
                why="merging would change both",
                fix="export without --merge",
            )
