"""Adds the adapter to a model: new, from another adapter, or from the base weights' own principal
components.

Letters: W (out, in) a base weight, A (r, in) and B (out, r) of the adapter, s its scaling: the
layer computes W + s·B·A.

A base weight may be changed in memory: adapters that are merged first add s₁·B₁·A₁, and PiSSA
(arXiv:2404.02948) subtracts s·B₀·A₀, the part that A and B begin with. The file on disk stays as it
is, so the result is stored as an adapter of a higher rank that contains the change:

    W + s·B₁·A₁ + s·B·A = W + s·[B B₁]·[A; A₁]
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from unisono.base.errors import ModelError
from unisono.base.text import library_words, nearest
from unisono.trainer.config.model_sections import LANGUAGE, AdapterSection, ModelPart
from unisono.trainer.model.file_settings import ADAPTER_FILE, StoredAdapter, find_adapters
from unisono.trainer.model.multimodal import projector_modules, vision_layers
from unisono.trainer.model.parts import adaptable_weights, refuse_unfit_settings, targeted_weights
from unisono.trainer.model.quantization import QuantizedEmbedding, parameters_of_experts

if TYPE_CHECKING:
    from peft.tuners.lora.layer import LoraLayer

_PREFIX = "base_model.model."  # of peft's names
_OVERSAMPLING = 8  # columns beyond the rank of a randomized SVD, as its authors recommend
_SHOWN = 3


@dataclass(frozen=True)
class LowRank:
    """A product that was added to a base weight, in units of the trained adapter's scaling: W := W
    + s·up·down.

    Attributes:
        down: (k, in) float32, in host memory.
        up: (out, k) float32, in host memory.
    """

    down: torch.Tensor
    up: torch.Tensor


BaseChanges = dict[str, LowRank]
"""By the layer's name in the peft model; all of one rank k."""


def add_adapter(
    base: Any,
    section: AdapterSection,
    *,
    seed: int,
    grown: bool = False,
    head: str | None = None,
    parts: Collection[ModelPart] = LANGUAGE,
) -> tuple[torch.nn.Module, BaseChanges]:
    """The peft model of a transformers model, and what has changed in the base weights.

    Args:
        base: its weights may be changed in place.
        section: `adapter` of the config.
        seed: of the run.
        grown: whether the vocabulary has new rows: embedding and head are trained then.
        head: name of the head of a reward model or classifier, which is trained and stored with the
            adapter.
        parts: of a vision-language model that are trained.

    Raises:
        ModelError: if the section, or an adapter that it names, does not match the model.
    """
    stored = find_adapters(section, has_head=head is not None)
    first = stored.pop() if section.from_ is not None else None
    merged = [(adapter, _merge(base, adapter)) for adapter in stored]
    with parameters_of_experts(base):
        model = _new_adapter(base, section, grown=grown, head=head, parts=parts)
        _refuse_lost_tensors(model)
    layers = _lora_layers(model)
    if merged or section.init == "pissa":
        _refuse_experts(layers, where="adapter.merge" if merged else "adapter.init: pissa")
    changes: BaseChanges = {}
    if merged:
        changes = _changes_of_merged(merged, layers, scaling=_scaling(layers))
    if first is not None:
        _load_weights(model, first)
    if section.init == "pissa":
        begun = _begin_with_principal_components(layers, section, seed=seed)
        changes = {name: _joined([*_one(changes, name), begun[name]]) for name in layers}
    return model, changes


def _new_adapter(
    base: Any, section: AdapterSection, *, grown: bool, head: str | None, parts: Collection[ModelPart]
) -> Any:
    from peft import get_peft_model

    targets = []
    if "language" in parts:
        targets = targeted_weights(adaptable_weights(base, head=head), section.targets, head=head)
    refuse_unfit_settings(targets, section)
    _check_modules_to_save(base, section.modules_to_save)
    whole = {*section.modules_to_save, *(_vocabulary_modules(base) if grown else ())}
    whole |= {head} if head is not None else set()
    whole |= set(projector_modules(base)) if "projector" in parts else set()
    seeing = vision_layers(base) if "vision" in parts else []
    shared = {
        "target_modules": [weight.name for weight in targets if not weight.is_parameter] + seeing,
        "modules_to_save": sorted(whole) or None,
        "task_type": "CAUSAL_LM" if head is None else "SEQ_CLS",
    }
    parameters = [weight.parameter for weight in targets if weight.is_parameter]
    tied = grown and _is_tied(base)
    try:
        model = get_peft_model(base, _settings_of(section, shared, parameters=parameters, tied=tied))
    except ValueError as error:
        raise ModelError.of(
            "the adapter does not match the model", where="adapter", why=library_words(error)
        ) from error
    if head is not None:  # peft adds all names that it knows of such heads
        model.peft_config["default"].modules_to_save = sorted(whole)
    return model


def _settings_of(
    section: AdapterSection, shared: Mapping[str, Any], *, parameters: list[str], tied: bool
) -> Any:
    """peft's settings of an adapter: `shared` by all kinds, and those of its own."""
    from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig

    if section.kind == "oft":
        return OFTConfig(oft_block_size=section.rank, **shared)
    if not section.is_of_pairs:
        kinds = {"loha": LoHaConfig, "lokr": LoKrConfig}
        return kinds[section.kind](r=section.rank, alpha=section.alpha, **shared)
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_parameters=parameters or None,
        ensure_weight_tying=tied,
        use_rslora=section.kind == "rslora",
        use_dora=section.kind == "dora",
        bias="none",
        **shared,
    )


def _vocabulary_modules(base: Any) -> list[str]:
    """Last names of the embedding and, unless it shares the embedding's matrix, of the head."""
    names = {id(module): name.rpartition(".")[2] for name, module in base.named_modules()}
    modules = [base.get_input_embeddings(), *([] if _is_tied(base) else [base.get_output_embeddings()])]
    return [names[id(module)] for module in modules if module is not None]


def _is_tied(base: Any) -> bool:
    """Whether embedding and head share one matrix."""
    head = base.get_output_embeddings()  # None in a reward model
    return head is not None and base.get_input_embeddings().weight is head.weight


def fit_base_to_adapter(base: Any, rows_of: Mapping[str, tuple[int, ...]]) -> None:
    """Resizes the embedding of a base model to that which an adapter has saved, if it has.

    Args:
        base: of transformers.
        rows_of: the shapes of the adapter's tensors by name.
    """
    embedding = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embedding)
    shape = rows_of.get(f"{_PREFIX}{name}.weight")
    if shape is not None and shape[0] != embedding.weight.shape[0]:
        base.resize_token_embeddings(shape[0], mean_resizing=False)  # overwritten by the adapter's rows


def _check_modules_to_save(base: torch.nn.Module, names: list[str]) -> None:
    ends = {name.rpartition(".")[2] for name, _ in base.named_modules() if name}
    unknown = [name for name in names if name.rpartition(".")[2] not in ends]
    if unknown:
        near = nearest(unknown[0], sorted(ends))
        raise ModelError.of(
            f"the model has no module {unknown[0]!r}",
            where="adapter.modules_to_save",
            fix=f"did you mean {near!r}?" if near else f"one of {', '.join(sorted(ends)[:12])}",
        )
    last_parts = {name.rpartition(".")[2] for name in names}
    for name, module in base.named_modules():
        if isinstance(module, QuantizedEmbedding) and name.rpartition(".")[2] in last_parts:
            raise ModelError.of(
                f"{name} is quantized, and cannot be trained",
                where="adapter.modules_to_save",
                fix="set model.quantize_embeddings: false, or remove it from adapter.modules_to_save",
            )


def _lora_layers(model: torch.nn.Module) -> "dict[str, LoraLayer]":
    """The adapted layers by their names in the peft model."""
    from peft.tuners.lora.layer import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _refuse_experts(layers: "dict[str, LoraLayer]", *, where: str) -> None:
    """Refuses what changes the base weights of layers of experts, which are one tensor of many
    matrices.

    Raises:
        ModelError: with the targets that are left.
    """
    from peft.tuners.lora.layer import ParamWrapper

    experts = [
        name.removeprefix(_PREFIX)
        for name, layer in layers.items()
        if isinstance(layer, ParamWrapper) and layer.get_param().ndim == 3
    ]
    if not experts:
        return
    others = {
        name.rpartition(".")[2] for name, layer in layers.items() if not isinstance(layer, ParamWrapper)
    }
    raise ModelError.of(
        f"{experts[0]} is one tensor of many matrices, the experts'",
        where=where,
        why="the change of a base weight is stored as one matrix A and one B, which it has for each expert",
        fix=f"remove {where.partition(':')[0]}, or set adapter.targets to other layers: [{', '.join(sorted(others))}]",
    )


def _scaling(layers: "dict[str, LoraLayer]") -> float:
    """s, the same in all layers."""
    return float(next(iter(layers.values())).scaling["default"])


def _refuse_lost_tensors(model: Any) -> None:
    """Refuses an adapter that peft writes and does not load again: it renames tensors as in files
    of the base model, in some models those of an adapter, too.

    Raises:
        ModelError: with the layers.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    written = get_peft_model_state_dict(model, save_embedding_layers=False)
    lost = sorted(set_peft_model_state_dict(model, dict(written)).unexpected_keys)
    if lost:
        layers = sorted({name.partition(".lora_")[0].removeprefix(_PREFIX) for name in lost})
        raise ModelError.of(
            f"peft would not load the adapter of {layers[0]} again",
            where="adapter.targets",
            why=f"it renames the tensors of {len(layers)} layers of this model when it loads them",
            fix="set adapter.targets to other layers, e.g. attention",
        )


# ---- weights of other adapters


def _load_weights(model: Any, adapter: StoredAdapter) -> None:
    """Copies the weights of an adapter into the new one, which must have the same tensors."""
    from peft import get_peft_model_state_dict

    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    stored = load_file(adapter.directory / ADAPTER_FILE)
    differing = sorted(expected.keys() ^ stored.keys())
    if differing:
        here = [name for name in differing if name in expected]
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ModelError.of(
            f"the adapter in {adapter.directory} is on other modules: {', '.join(differing[:_SHOWN])}{more}",
            where="adapter.targets",
            why=f"{len(here)} of these tensors are new, {len(differing) - len(here)} are in the file only",
            fix=f"set adapter.targets to the target_modules of its adapter_config.json: {_targets_of(adapter)}",
        )
    for name, tensor in expected.items():
        if stored[name].shape != tensor.shape:
            raise _wrong_shape(adapter, name, stored[name].shape, tensor.shape)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])


def _targets_of(adapter: StoredAdapter) -> str:
    targets = adapter.settings.get("target_modules")
    if not isinstance(targets, list):
        return str(targets)
    parameters = adapter.settings.get("target_parameters") or []
    return f"[{', '.join(sorted([*targets, *(name.removesuffix('.weight') for name in parameters)]))}]"


def _wrong_shape(
    adapter: StoredAdapter, name: str, shape: torch.Size, expected: torch.Size | tuple[int, ...]
) -> ModelError:
    return ModelError.of(
        f"{name} has the shape {tuple(shape)}, but the model needs {tuple(expected)}",
        where=str(adapter.directory / ADAPTER_FILE),
        why=f"{adapter.key} was trained on a different model",
        fix="use an adapter of this model, or set model.path to the model that it was trained on",
    )


def _merge(base: Any, adapter: StoredAdapter) -> dict[str, LowRank]:
    """Adds s·B·A of an adapter to the base weights, each sum in float32 and rounded once; gives A
    and s·B by layer.
    """
    tensors = load_file(adapter.directory / ADAPTER_FILE)
    modules = dict(base.named_modules())
    added: dict[str, LowRank] = {}
    for name in sorted({name.rpartition(".lora_")[0] for name in tensors}):
        down, up = (tensors.get(f"{name}.lora_{letter}.weight") for letter in "AB")
        module = modules.get(name.removeprefix(_PREFIX))
        if down is None or up is None or module is None or not hasattr(module, "weight"):
            raise ModelError.of(
                f"{name} in {adapter.directory / ADAPTER_FILE} is not a pair of LoRA matrices of a layer of this model",
                where=adapter.key,
                fix="use a LoRA adapter of this model",
            )
        low = LowRank(down.float(), up.float() * adapter.scaling)
        weight, turned = module.weight, _is_turned(module)
        expected = tuple(reversed(weight.shape)) if turned else tuple(weight.shape)
        if (up.shape[0], down.shape[1]) != expected:
            raise _wrong_shape(adapter, name, torch.Size((up.shape[0], down.shape[1])), expected)
        _add(weight, low, turned=turned)
        added[name] = low
    return added


def _is_turned(module: torch.nn.Module) -> bool:
    """Whether its weight is (in, out), as in the Conv1D of GPT-2."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _add(weight: torch.Tensor, low: LowRank, *, turned: bool, factor: float = 1.0) -> None:
    product = low.up.to(weight.device) @ low.down.to(weight.device)
    summed = weight.data.float() + factor * (product.t() if turned else product)
    weight.data.copy_(summed)


def _changes_of_merged(
    merged: list[tuple[StoredAdapter, dict[str, LowRank]]], layers: "dict[str, LoraLayer]", *, scaling: float
) -> BaseChanges:
    """What merged adapters have added, for each layer of the new adapter; zeros where an adapter
    has no part.
    """
    for adapter, added in merged:
        outside = sorted(added.keys() - layers.keys())
        if outside:
            raise ModelError.of(
                f"{adapter.directory} adapts {outside[0].removeprefix(_PREFIX)}, which the new adapter does not",
                where="adapter.targets",
                why="the result contains both, as one adapter",
                fix="set adapter.targets: all-linear, or patterns that match these modules, too",
            )
    return {
        name: _joined(
            [
                LowRank(part.down, part.up / scaling)
                if (part := added.get(name)) is not None
                else _zeros(layer, adapter.rank)
                for adapter, added in merged
            ]
        )
        for name, layer in layers.items()
    }


def _zeros(layer: "LoraLayer", rank: int) -> LowRank:
    return LowRank(torch.zeros(rank, layer.in_features), torch.zeros(layer.out_features, rank))


def _one(changes: BaseChanges, name: str) -> list[LowRank]:
    return [changes[name]] if name in changes else []


def _joined(parts: list[LowRank]) -> LowRank:
    return LowRank(torch.cat([part.down for part in parts]), torch.cat([part.up for part in parts], dim=1))


# ---- PiSSA


def _begin_with_principal_components(
    layers: "dict[str, LoraLayer]", section: AdapterSection, *, seed: int
) -> BaseChanges:
    """Sets A and B to the r largest singular values and vectors of W, and W to the rest
    (arXiv:2404.02948, section 3).

    In 16-bit weights the rest is rounded, as W itself is.
    """
    scaling = _scaling(layers)
    changes: BaseChanges = {}
    name, least = min(
        ((name, min(layer.in_features, layer.out_features)) for name, layer in layers.items()),
        key=lambda pair: pair[1],
    )
    if section.rank > least:
        raise ModelError.of(
            f"adapter.rank is {section.rank}, but {name.removeprefix(_PREFIX)} has only {least} singular values",
            where="adapter.rank",
            why="adapter.init: pissa starts from the adapter.rank largest ones",
            fix=f"set adapter.rank to {least} or less",
        )
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight
        full = weight.data.float().t() if layer.fan_in_fan_out else weight.data.float()
        u, values, v = _svd(full, section.rank, steps=section.init_steps, seed=f"{seed} {name}")
        root = (values / scaling).sqrt()
        down, up = root[:, None] * v, u * root
        layer.lora_A["default"].weight.data.copy_(down)
        layer.lora_B["default"].weight.data.copy_(up)
        begun = LowRank(down, up)
        _add(weight, begun, turned=layer.fan_in_fan_out, factor=-scaling)
        changes[name] = LowRank(down.cpu(), -up.cpu())
    return changes


def _svd(
    matrix: torch.Tensor, rank: int, *, steps: int | None, seed: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `rank` largest singular values (r,), with left (m, r) and right (r, n) vectors.

    Args:
        matrix: (m, n) float32.
        rank: r, at most min(m, n).
        steps: None: exact. Else a randomized SVD with this many power iterations (arXiv:0909.4061,
            algorithms 4.4 and 5.1).
        seed: of the random matrix, which is drawn on the CPU, so that it is the same on every
            device.
    """
    if steps is None:
        u, values, v = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], values[:rank], v[:rank]
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7]))
    columns = min(rank + _OVERSAMPLING, *matrix.shape)
    drawn = torch.randn(matrix.shape[1], columns, generator=generator).to(matrix.device)
    basis = torch.linalg.qr(matrix @ drawn).Q
    for _ in range(steps):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.t() @ basis).Q).Q
    small, values, v = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return (basis @ small)[:, :rank], values[:rank], v[:rank]


# ---- the result


def stored_settings(settings: Any, model: torch.nn.Module, changes: BaseChanges) -> None:
    """Changes a copy of peft's settings to those of the adapter that contains the changes of the
    base weights: plain LoRA of rank r + k.
    """
    if not changes:
        return
    settings.r += next(iter(changes.values())).down.shape[0]
    settings.lora_alpha = _scaling(_lora_layers(model)) * settings.r
    settings.use_rslora = False


def with_change(source: str, tensor: torch.Tensor, changes: BaseChanges) -> torch.Tensor:
    """A full tensor of the model as it is stored: A and B of a layer with the change of its base
    weight.
    """
    name, separator, letter = source.partition(".lora_")
    if not separator or name not in changes or letter[:1] not in "AB":
        return tensor
    change = changes[name]
    if letter.startswith("A."):
        return torch.cat([tensor, change.down.to(tensor)])
    return torch.cat([tensor, change.up.to(tensor)], dim=1)
