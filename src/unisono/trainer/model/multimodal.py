"""Multimodal checkpoints whose rows are text.

They are loaded in their own class, so that names of parameters are those of the checkpoint. Vision
and audio parts are not kept in memory: what is written of the model copies their tensors, and the
files of the processor, from the original directory.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from unisono.base.errors import ModelError
from unisono.base.files import open_plain
from unisono.trainer.config.model_sections import ModelPart
from unisono.trainer.model.directory import multimodal_class
from unisono.trainer.model.files import (
    ConfigJson,
    TensorHeader,
    read_safetensors_header,
    weight_files,
)
from unisono.trainer.plan import VisionFacts


def auto_class(settings: ConfigJson, *, has_head: bool) -> Any:
    """The class of transformers that loads a model with this config.json for rows of text;
    `has_head`: with the head of a reward model or classifier.
    """
    import transformers

    if has_head:
        return transformers.AutoModelForSequenceClassification
    if multimodal_class(settings) is not None:
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def body_of(base: Any) -> Any:
    """The module of a transformers model that gives the hidden states of tokens: in a multimodal
    model the innermost one with the embedding of tokens.

    The text model of Llama 4 has another prefix than its class says (transformers 5.23).
    """
    if base.config.get_text_config() is base.config:
        if hasattr(base, base.base_model_prefix):
            return getattr(base, base.base_model_prefix)
        return next(child for child in base.children() if hasattr(child, "base_model_prefix"))
    embedding = base.get_input_embeddings()
    models = [module for module in base.modules() if isinstance(module, PreTrainedModel)]
    return [model for model in models if embedding in set(model.modules())][-1]


def freeze_parts(base: Any) -> None:
    """Freezes what is neither the decoder nor the head of a multimodal model."""
    base.requires_grad_(False)
    for part in (body_of(base), base.get_output_embeddings()):
        for parameter in part.parameters():
            parameter.requires_grad_(parameter.is_floating_point())  # others are quantized


_PROJECTOR = re.compile(
    r"(^|\.)(multi_modal_projector|mm_projector|connector|merger|deepstack_merger_list|aligner|embed_vision|image_newline)"
    r"(\.|$)"
)
"""In the names of what lies between the vision part and the decoder. LLaVA's `image_newline` is a
parameter without a module, which peft cannot train whole beside an adapter.
"""
_PEFT = "base_model.model."


def part_of(name: str, inside: tuple[str, ...]) -> ModelPart:
    """The part of a vision-language model that a module or parameter belongs to.

    Args:
        name: of it, also in a peft model.
        inside: `text_prefixes` of the model.
    """
    plain = name.removeprefix(_PEFT)
    if f"{plain}.".startswith(inside):
        return "language"
    return "projector" if _PROJECTOR.search(plain) else "vision"


def select_parts(base: Any, parts: Collection[ModelPart]) -> None:
    """Freezes the parts of a vision-language model that are not trained.

    Raises:
        ModelError: if it lacks one that is.
    """
    inside = text_prefixes(base)
    present = set()
    for name, parameter in base.named_parameters():
        part = part_of(name, inside)
        present.add(part)
        if parameter.is_floating_point():  # others are quantized
            parameter.requires_grad_(part in parts)
    missing = sorted(set(parts) - present)
    if missing:
        raise ModelError.of(
            f"the model has no {missing[0]}",
            where="train_parts",
            why=f"its modules outside of the decoder are {', '.join(sorted(_outer_names(base, inside))[:12])}",
            fix=f"remove {missing[0]} from train_parts",
        )


def _outer_names(base: Any, inside: tuple[str, ...]) -> set[str]:
    names = (name for name, _ in base.named_parameters() if not name.startswith(inside))
    return {".".join(name.split(".")[:3]) for name in names}


def vision_layers(base: Any) -> list[str]:
    """The names of the linear layers of a model's vision part, without the projector."""
    inside = text_prefixes(base)
    return [
        name
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and part_of(name, inside) == "vision"
    ]


def projector_modules(base: Any) -> list[str]:
    """The names of the outermost modules of a model's projector that have a forward."""
    inside = text_prefixes(base)
    chosen: list[str] = []
    for name, module in base.named_modules():
        is_first = not any(name.startswith(f"{other}.") for other in chosen)
        is_list = isinstance(module, torch.nn.ModuleList)
        if name and is_first and not is_list and part_of(name, inside) == "projector":
            chosen.append(name)
    return chosen


def count_trained(model: Any, base: Any) -> dict[str, list[int]]:
    """Trained and all parameters of each part of a vision-language model, by part; empty for
    others, and without its vision part in memory.
    """
    if not hasattr(base, "config") or base.config.get_text_config() is base.config:
        return {}
    inside, counts = text_prefixes(base), dict[str, list[int]]()
    for name, parameter in model.named_parameters():
        of_part = counts.setdefault(part_of(name, inside), [0, 0])
        of_part[0] += parameter.numel() * parameter.requires_grad
        of_part[1] += parameter.numel()
    return counts if "vision" in counts else {}


def vision_facts(base: Any) -> VisionFacts:
    """The figures of a model's vision part, also on the meta device."""
    inside, counts = text_prefixes(base), Counter[str]()
    for name, parameter in base.named_parameters():
        counts[part_of(name, inside)] += parameter.numel()
    layers = (base.get_submodule(name) for name in vision_layers(base))
    settings = getattr(base.config, "vision_config", None)

    def setting(*names: str, missing: float = 1) -> Any:
        values = (getattr(settings, name, None) for name in names)
        return next((value for value in values if value is not None), missing)

    hidden = setting("embed_dim", "hidden_size")
    patch = setting("patch_size")
    height, width = patch if isinstance(patch, list | tuple) else (patch, patch)
    return VisionFacts(
        layers=setting("num_hidden_layers", "depth"),
        hidden_size=hidden,
        intermediate_size=setting("intermediate_size", missing=int(hidden * setting("mlp_ratio", missing=4))),
        patch_values=setting("num_channels", "in_channels", missing=3)
        * height
        * width
        * setting("temporal_patch_size"),
        parameters=counts["vision"],
        in_out=sum(layer.in_features + layer.out_features for layer in layers),
        projector_parameters=counts["projector"],
    )


def with_vision(base: Any) -> Any:
    """The module of a multimodal model that gives the hidden states of tokens and pictures: the one
    around its decoder and its vision part; the model itself if there is none inside.
    """
    body = body_of(base)
    around = (child for child in base.children() if body in set(child.modules()))
    return next((child for child in around if hasattr(child, "get_image_features")), base)


def release_parts(base: Any) -> None:
    """Removes what rows of text do not need from a multimodal model; what is neither its decoder
    nor its head is frozen.

    Which parts these are is tested: without them, the decoder must get the same inputs.
    """
    decoder, head = body_of(base), base.get_output_embeddings()
    path = next(name for name, module in base.named_modules() if module is decoder).split(".")
    parents = [base.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    text = {*parents, decoder, head}
    before = _decoder_input(base, decoder)
    for parent in parents:
        parent.requires_grad_(False)
        for name, part in list(parent.named_children()):
            if part in text:
                continue
            setattr(parent, name, None)
            after = _decoder_input(base, decoder)
            if before is None or after is None or not torch.equal(before, after):
                setattr(parent, name, part)
    for parameter in (*decoder.parameters(), *head.parameters()):
        parameter.requires_grad_(parameter.is_floating_point())  # others are quantized


class _Reached(Exception):  # noqa: N818 - ends a forward, and is no error
    """The forward has reached the decoder.

    Attributes:
        value: the input of the decoder.
    """

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value


def _decoder_input(base: Any, decoder: torch.nn.Module) -> torch.Tensor | None:
    """What the decoder of a multimodal model gets for a row of text: embeddings (1, T, E), or
    tokens (1, T); None if the forward fails before.
    """

    def stop(_module: torch.nn.Module, _args: object, inputs: dict[str, torch.Tensor]) -> None:
        embeddings = inputs.get("inputs_embeds")
        raise _Reached(inputs["input_ids"] if embeddings is None else embeddings)

    hook = decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            base(input_ids=torch.arange(8, device=base.device)[None], use_cache=False)
    except _Reached as reached:
        return reached.value
    # It needs a part that was removed; or it fails on text anyway, which `choose_forward` refuses.
    except (AttributeError, TypeError, KeyError, ValueError, IndexError, RuntimeError):
        return None
    finally:
        hook.remove()
    return None


def text_names(base: Any) -> set[str]:
    """The names of a multimodal model's tensors that belong to its decoder or its head, including
    tied ones.
    """
    return {name for name in base.state_dict(keep_vars=True) if name.startswith(text_prefixes(base))}


def text_prefixes(base: Any) -> tuple[str, ...]:
    """How the names of a model's tensors begin that belong to its decoder or its head; all of those
    of a model for text alone.
    """
    if base.config.get_text_config() is base.config:
        return ("",)
    parts = {body_of(base), base.get_output_embeddings()}
    return tuple(f"{name}." for name, module in base.named_modules() if module in parts)


def name_exactly(settings: Any, model: Any) -> None:
    """Names the layers that an adapter of a multimodal model adapts, and the modules that it trains
    whole, in full: peft would find shorter names in the vision part, too.

    Args:
        settings: of the adapter, of peft; changed in place. Those of other models stay as they are.
        model: of peft.
    """
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.utils import ModulesToSaveWrapper

    base = model.get_base_model()
    if base.config.get_text_config() is base.config:
        return
    modules = dict(base.named_modules())
    settings.target_modules = [
        name
        for name, layer in modules.items()
        if isinstance(layer, LoraLayer) and not isinstance(layer, ParamWrapper)
    ] or settings.target_modules
    whole = [name for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)]
    settings.modules_to_save = whole or None


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that is copied from a file of the original."""

    file: Path
    header: TensorHeader

    @property
    def name(self) -> str:
        """In the file."""
        return self.header.name

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        return self.header.shape

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return self.header.end - self.header.begin

    def read(self, *, nothing: bool) -> memoryview:
        """Its bytes; with `nothing` none, on ranks that do not write."""
        if nothing:
            return memoryview(b"")
        with open_plain(self.file) as stream:
            stream.seek(self.header.begin)
            return memoryview(stream.read(self.bytes))


def kept_tensors(original: Path, written: Collection[str], *, tied: Collection[str]) -> list[KeptTensor]:
    """The tensors of a multimodal checkpoint that are copied, since the model has no others for
    them.

    Args:
        original: the directory of the checkpoint.
        written: the names of the tensors that are written of the model.
        tied: the names of those that are the same as others; they are not written.

    Raises:
        ModelError: if the checkpoint does not have the written ones by these names.
    """
    kept = [
        KeptTensor(file, header)
        for file in weight_files(original)
        for header in read_safetensors_header(file)
    ]
    names = {tensor.name for tensor in kept}
    unknown = [name for name in written if name not in names and not name.endswith("lm_head.weight")]
    if unknown:  # a head is new if it was tied
        raise other_names(original, f"there is no {unknown[0]}")
    return [tensor for tensor in kept if tensor.name not in written and tensor.name not in tied]


def other_names(original: Path, why: str) -> ModelError:
    """The error for a multimodal checkpoint whose tensors cannot be replaced one by one."""
    return ModelError.of(
        "the trained tensors have different names than the checkpoint's",
        where=str(original),
        why=why,
        fix="load it in transformers, save it with `save_pretrained`, and use that as the model",
    )
