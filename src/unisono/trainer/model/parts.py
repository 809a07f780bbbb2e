"""The parts of a language model by the structure of its modules, and the weights of each that an
adapter can change.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from unisono.base.errors import ModelError
from unisono.trainer.config.model_sections import AdapterSection
from unisono.trainer.config.sections import parts_named
from unisono.trainer.model.files import TensorHeader

if TYPE_CHECKING:  # figures of plain decoders are read without torch
    import torch

_MIXER = re.compile(r"att(entio)?n|mixer|mamba|conv|temporal|recurrent")  # names of modules
_MLP_CLASS = re.compile(r"(MLP|Mlp|FeedForward)$")
_EXPERTS_CLASS = re.compile(r"Experts$")
_ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that an adapter can change.

    Attributes:
        name: of its linear layer; of the parameter itself if no linear layer has it.
        parameter: its full name.
        part: of the model, e.g. `attention`.
        shape: (out, in), or (experts, out, in); some models have in and out the other way round.
        is_parameter: whether peft needs the name of the parameter, not that of a linear layer.
        refused: why peft does not adapt it; empty: it does.
    """

    name: str
    parameter: str
    part: str
    shape: tuple[int, ...]
    is_parameter: bool
    refused: str

    @property
    def in_out(self) -> int:
        """Sum of in and out over its matrices; times rank it is the size of an adapter."""
        matrices = self.shape[0] if len(self.shape) == 3 else 1
        return matrices * sum(self.shape[-2:])


def parts_of(model: Any, *, head: str | None = None) -> dict[str, str]:
    """The part of each module by its name: attention (or another mixer of tokens), mlp, experts,
    router, embeddings, head, other.

    Args:
        model: of transformers.
        head: name of the head of a reward model.
    """
    from torch.nn import Embedding

    modules = dict(model.named_modules())
    routers = set(_routers(modules))
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    parts: dict[str, str] = {}
    for name, module in modules.items():
        above = parts.get(name.rpartition(".")[0], "other")
        if above in ("experts", "router"):
            parts[name] = above
        elif module is output or name == head:
            parts[name] = "head"
        elif module is embedding or isinstance(module, Embedding):
            parts[name] = "embeddings"
        elif name in routers:
            parts[name] = "router"
        elif count_experts(name, module):
            parts[name] = "experts"
        else:
            parts[name] = _part_of_linear(name, modules) if _is_linear(module) else "other"
    return parts


def _routers(modules: dict[str, "torch.nn.Module"]) -> Iterator[str]:
    """The names of what lies beside experts and gives a value for each of them."""
    for name, module in modules.items():
        count = count_experts(name, module)
        block = name.rpartition(".")[0]
        for last, beside in modules[block].named_children() if count else ():
            weight = getattr(beside, "weight", None)
            rows = weight.shape[0] if weight is not None and weight.ndim == 2 else 0
            if rows == count or _ROUTER_CLASS.search(type(beside).__name__):
                yield f"{block}.{last}"


def count_experts(name: str, module: "torch.nn.Module") -> int:
    """How many experts a module has, as layers or in tensors; 0 if it has none."""
    from torch.nn import ModuleList

    if isinstance(module, ModuleList) and name.endswith(".experts"):
        return len(module)
    if not _EXPERTS_CLASS.search(type(module).__name__):
        return 0
    return next((tensor.shape[0] for _, tensor in _own_tensors(module) if tensor.ndim == 3), 0)


def _own_tensors(module: "torch.nn.Module") -> Iterator[tuple[str, "torch.Tensor"]]:
    """Name and value of each parameter; of quantized experts a tensor without values."""
    for name in module._parameters:  # noqa: SLF001 - theirs are None, which no public name gives
        tensor = getattr(module, name)
        if tensor is not None:
            yield name, tensor


def _part_of_linear(name: str, modules: dict[str, "torch.nn.Module"]) -> str:
    names = name.split(".")[:-1]
    if not any(part.isdecimal() for part in names):  # in no layer
        return "other"
    above = [".".join(names[:end]) for end in range(1, len(names) + 1)]
    is_mlp = any(_MLP_CLASS.search(type(modules[path]).__name__) for path in above)
    return "attention" if not is_mlp and any(map(_MIXER.search, names)) else "mlp"


def _is_linear(module: "torch.nn.Module") -> bool:
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Linear | Conv1D)


def adaptable_weights(model: Any, *, head: str | None = None) -> list[Weight]:
    """The weights that an adapter can change, in the model's order: of linear layers, experts and
    routers.

    Args:
        model: of transformers, without an adapter.
        head: name of the head of a reward model.
    """
    from torch.nn import Linear

    from unisono.trainer.model.multimodal import text_prefixes

    parts = parts_of(model, head=head)
    last_names = {name.rpartition(".")[2] for name, module in model.named_modules() if _is_linear(module)}
    moved = {last for last in last_names if _is_moved(model, last)}
    refused = {last: reason for last in last_names if (reason := _refusal(model, last))}
    weights: list[Weight] = []
    inside = text_prefixes(model)
    for name, module in model.named_modules():
        if not f"{name}.".startswith(inside):
            continue
        part, last = parts[name], name.rpartition(".")[2]
        # Subclasses that route have a forward of their own, which a layer of peft does not call.
        if _is_linear(module) and (part != "router" or type(module) is Linear):
            shape = (
                (module.out_features, module.in_features)
                if hasattr(module, "in_features")
                else module.weight.shape
            )
            weights.append(
                Weight(name, f"{name}.weight", part, tuple(shape), last in moved, refused.get(last, ""))
            )
            continue
        for leaf, parameter in _own_tensors(module):
            if parameter.ndim == 3 if part == "experts" else part == "router" and leaf == "weight":
                full = f"{name}.{leaf}"
                weights.append(Weight(full, full, part, tuple(parameter.shape), True, ""))
    return weights


def _is_moved(model: Any, last: str) -> bool:
    """Whether peft takes the name of a linear layer for that of experts in files of transformers 4,
    although other layers of the model have it, too: the shared expert, dense layers.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe = LoraConfig(target_modules=[last])
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError:  # it is one of two that are one tensor
        return True
    return last not in (probe.target_modules or ())


def _refusal(model: Any, last: str) -> str:
    """Why peft does not adapt a layer of this name in this model; empty: it does."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, last)
    except ValueError as error:
        return str(error).rpartition("] ")[2].partition(". ")[0]
    return ""


def targeted_weights(
    weights: list[Weight], targets: str | list[str], *, head: str | None = None
) -> list[Weight]:
    """The weights that `adapter.targets` names, without those that peft refuses and only a word
    names.

    Args:
        weights: of `adaptable_weights`.
        targets: words joined by `+`, or patterns, each of which must match at least one weight.
        head: name of the head of a reward model, which is trained itself.

    Raises:
        ModelError: if the model has no such weights.
    """
    if isinstance(targets, str):
        return _of_parts(weights, targets)
    matching: list[Weight] = []
    for pattern in targets:
        matches = [weight for weight in weights if weight.name != head and re.search(pattern, weight.name)]
        if not matches:
            last = sorted({weight.name.rpartition(".")[2] for weight in weights})
            raise ModelError.of(
                f"no linear layer matches {pattern!r}",
                where="adapter.targets",
                fix=f"the names of the linear layers end in {', '.join(last)}",
            )
        matching += matches
    return [weight for weight in weights if weight in matching]


def _of_parts(weights: list[Weight], words: str) -> list[Weight]:
    present = {weight.part for weight in weights}
    for word in words.split("+"):
        if not present & parts_named(word):
            raise ModelError.of(
                f"the model has no weights of the part {word}",
                where="adapter.targets",
                fix=f"use {' or '.join(sorted(present - {'head', 'other'}))}",
            )
    return [weight for weight in weights if weight.part in parts_named(words) and not weight.refused]


def omitted_weights(weights: list[Weight], targets: str | list[str]) -> dict[str, str]:
    """What the words of `adapter.targets` omit because peft refuses it: reasons by last name."""
    parts = parts_named(targets) if isinstance(targets, str) else frozenset()
    return {
        weight.name.rpartition(".")[2]: weight.refused
        for weight in weights
        if weight.refused and weight.part in parts
    }


def refuse_unfit_settings(targets: list[Weight], section: AdapterSection) -> None:
    """Refuses what peft computes for linear layers only, not for parameters that it adapts by name.

    Raises:
        ModelError: with the targets that are left.
    """
    first = next((weight for weight in targets if weight.is_parameter), None)
    is_lora = section.kind in ("lora", "rslora")
    if first is None or (section.dropout == 0 and is_lora):
        return
    key, value = ("kind", "lora") if not is_lora else ("dropout", "0")
    others = {weight.part for weight in targets} - {weight.part for weight in targets if weight.is_parameter}
    raise ModelError.of(
        f"adapter.{key}: {getattr(section, key)} is not possible on {first.name}",
        where=f"adapter.{key}",
        why=(
            "peft adds the adapter to this weight before the multiplication, so the adapter has no separate"
            " input"
        ),
        fix=f"set adapter.{key}: {value}"
        + (f", or adapter.targets: {'+'.join(sorted(others))}" if others else ""),
    )


def count_parts(model: Any, *, head: str | None = None) -> dict[str, int]:
    """Parameters of each part of a model, without vision and audio; shared ones count once, where
    they come first.
    """
    from unisono.trainer.model.multimodal import text_prefixes

    parts, inside = parts_of(model, head=head), text_prefixes(model)
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if name.startswith(inside):
            counts[parts[name.rpartition(".")[0]]] += parameter.numel()
    return dict(counts)


def experts_of_layer(weights: list[Weight]) -> int:
    """Parameters of the largest module of experts that are tensors of many matrices."""
    counts: Counter[str] = Counter()
    for weight in weights:
        if len(weight.shape) == 3:
            counts[weight.name.rpartition(".")[0]] += prod(weight.shape)
    return max(counts.values(), default=0)


def weights_in_files(headers: Sequence[TensorHeader]) -> tuple[list[Weight], dict[str, int]]:
    """The weights that an adapter can change, and the parameters of each part, in the files of a
    decoder whose layers are `self_attn` and `mlp`, of linear layers.
    """
    weights: list[Weight] = []
    counts: Counter[str] = Counter()
    for header in headers:
        layer, _, leaf = header.name.rpartition(".")
        part = "attention" if ".self_attn." in layer else "mlp" if ".mlp." in layer else "other"
        if not layer.endswith("_proj"):
            last = layer.rpartition(".")[2]
            part = {"embed_tokens": "embeddings", "lm_head": "head", "score": "head"}.get(last, "other")
        elif leaf == "weight":
            weights.append(Weight(layer, header.name, part, header.shape, False, ""))
        counts[part] += prod(header.shape)
    return weights, dict(counts)


def adapter_figures(weights: list[Weight], section: AdapterSection, *, head: str | None) -> dict[str, object]:
    """The fields of `ModelFacts` about the adapter of a config.

    Raises:
        ModelError: if the model has no weights that `adapter.targets` names.
    """
    targets = targeted_weights(weights, section.targets, head=head)
    refuse_unfit_settings(targets, section)
    adapted: Counter[str] = Counter()
    for weight in targets:
        adapted[weight.part] += weight.in_out
    return {
        "adapted_in_out": dict(adapted),
        "summed_parameters": sum(prod(weight.shape) for weight in targets if weight.is_parameter),
        "omitted": omitted_weights(weights, section.targets),
    }
