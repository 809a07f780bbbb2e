"""The features of pictures in a model whose vision part is not trained: computed once, kept in
memory, and used in place of the vision part from then on.

The vision part gets one picture at a time, whether its features are kept or not: how pictures are
batched changes the last bits of a sum, and a feature must not depend on what else was in a batch.

If the projector is trained, what it gets is kept. It lies inside the vision part in some models, so
its place is not known: the forward of the vision part is repeated with modules that return
constants of the shapes that they gave, which costs nothing, and the projector gets what was kept.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.trainer.model.multimodal import (
    body_of,
    part_of,
    projector_modules,
    text_prefixes,
    with_vision,
)

Tensors = Mapping[str, torch.Tensor]
_PIXELS = "pixel_"
_HOST = torch.device("cpu")
Medium = Literal["image", "video"]
"""As transformers names them."""
_USED = ("pooler_output", "deepstack_features")
"""Of the output of the vision part, what the decoder gets."""


@dataclass(frozen=True)
class PictureFeatures:
    """What is kept of a picture, in host memory.

    Attributes:
        others: its tensors that are no pixels, e.g. the number of patches.
        kept: the fields of the vision part's output; with a trained projector the arguments of each
            of its calls.
        medium: what the model gets it as.
        shapes: with a trained projector constants as large as the pixels, by their names, and as
            the outputs of each frozen module's calls.
    """

    others: Tensors
    kept: Any
    medium: "Medium"
    shapes: "tuple[Tensors, Mapping[str, list[Any]]] | None" = None

    @property
    def bytes(self) -> int:
        """Its size."""
        held = [*tree_leaves(self.kept), *self.others.values()]
        return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))


@dataclass
class FrozenVision:
    """The vision part of a model that does not train it, with the features of pictures by number.

    Attributes:
        module: the module around vision part and decoder.
        frozen: with a trained projector the modules whose outputs are replaced, by name.
        projector: then its modules; empty: it is not trained.
        most_bytes: of features in memory; those of the first pictures stay.
    """

    module: Any
    frozen: Mapping[str, torch.nn.Module]
    projector: Sequence[torch.nn.Module]
    most_bytes: int = 0
    kept: dict[int, PictureFeatures] = field(default_factory=dict)
    _bytes: int = 0
    _is_full: bool = False
    _kinds: dict[Medium, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, base: Any, samples: Sequence[Tensors]) -> "FrozenVision | None":
        """That of a model; None if features cannot be kept: the vision part is trained or draws
        random numbers, or the test with a picture gives other bits.

        Args:
            base: of transformers, with or without layers of an adapter.
            samples: the tensors of any picture, and of any video if there are some, on the device
                of the model.
        """
        inside = text_prefixes(base)
        trained = {part_of(name, inside) for name, p in base.named_parameters() if p.requires_grad}
        module = with_vision(base)
        accepts = all(
            "mm_encoder_outputs" in inspect.signature(one.forward).parameters for one in (base, module)
        )
        if "vision" in trained or not accepts or not hasattr(module, "get_image_features"):
            return None
        projector = [base.get_submodule(name) for name in projector_modules(base)]
        frozen = _frozen_modules(module, {body_of(base), *projector})
        if _varies(base, frozen.values()):
            return None
        vision = cls(module, frozen, projector if "projector" in trained else [])
        return vision if all(map(vision._repeats, samples)) else None

    @property
    def is_full(self) -> bool:
        """Whether there was no memory for the features of a picture."""
        return self._is_full

    def features(self, number: int, pixels: Callable[[], Tensors]) -> PictureFeatures:
        """Those of a picture, which are kept if there is memory for them."""
        if number in self.kept:
            return self.kept[number]
        features = self._computed(pixels())
        if self._bytes + features.bytes <= self.most_bytes:
            self._bytes += features.bytes
            self.kept[number] = features
        else:
            self._is_full = True
        return features

    def outputs(self, pictures: Sequence[PictureFeatures]) -> dict[str, Any]:
        """The argument `mm_encoder_outputs` for pictures in order, with gradients of a trained
        projector.
        """
        outputs: dict[str, Any] = {}
        for medium in dict.fromkeys(one.medium for one in pictures):
            parts = [self._fields(one) for one in pictures if one.medium == medium]
            joined = {name: _joined([part[name] for part in parts]) for name in parts[0]}
            outputs[medium] = self._kinds[medium](**joined)
        return outputs

    @property
    def device(self) -> torch.device:
        """Of the model."""
        device: torch.device = self.module.device
        return device

    def _fields(self, picture: PictureFeatures) -> dict[str, Any]:
        device = self.device
        kept = tree_map_only(torch.Tensor, lambda value: value.to(device), picture.kept)
        if picture.shapes is None:
            return dict(kept)
        pixels, outputs = picture.shapes
        tensors = {name: value.to(device) for name, value in picture.others.items()}
        with self._replaced(kept, outputs):
            return self._run({**_constants(pixels, device), **tensors})

    def _repeats(self, sample: Tensors) -> bool:
        """Whether kept features of a picture are bit for bit those of the vision part."""
        try:
            with torch.no_grad():
                direct = self._run(sample)
                (again,) = self.outputs([self._computed(sample)]).values()
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
            return False
        pairs = [(tree_leaves(value), tree_leaves(again[name])) for name, value in direct.items()]
        return bool(pairs) and all(
            len(one) == len(two) and all(map(torch.equal, one, two)) for one, two in pairs
        )

    def _computed(self, tensors: Tensors) -> PictureFeatures:
        others = {name: value.cpu() for name, value in tensors.items() if not name.startswith(_PIXELS)}
        medium = _medium_of(tensors)
        with torch.no_grad():
            if not self.projector:
                return PictureFeatures(others, _in_host_memory(self._run(tensors)), medium)
            calls: list[Any] = []
            outputs: dict[str, list[Any]] = {name: [] for name in self.frozen}
            with self._recorded(calls, outputs):
                self._run(tensors)
        pixels = {name: value for name, value in tensors.items() if name.startswith(_PIXELS)}
        return PictureFeatures(
            others, _in_host_memory(calls), medium, (_constants(pixels, _HOST), _constants(outputs, _HOST))
        )

    def _run(self, tensors: Tensors) -> dict[str, Any]:
        """The fields of the vision part's output that are used, for one picture."""
        output = _seen(self.module, tensors)
        self._kinds[_medium_of(tensors)] = type(output)
        return {name: output[name] for name in _USED if output.get(name) is not None}

    @contextlib.contextmanager
    def _recorded(self, calls: list[Any], outputs: Mapping[str, list[Any]]) -> Iterator[None]:
        """A context in which arguments of the projector and outputs of frozen modules are noted."""

        def note(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            calls.append((args, kwargs))

        hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in self.projector]
        for name, module in self.frozen.items():

            def note_output(_module: torch.nn.Module, _args: Any, output: Any, name: str = name) -> None:
                outputs[name].append(output)

            hooks.append(module.register_forward_hook(note_output))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def _replaced(self, calls: Sequence[Any], outputs: Mapping[str, list[Any]]) -> Iterator[None]:
        """A context in which the projector gets what was kept, and frozen modules return
        constants.
        """
        remaining = iter(calls)
        hooks = [
            one.register_forward_pre_hook(lambda *_: next(remaining), with_kwargs=True)
            for one in self.projector
        ]
        own = {name: vars(module).get("forward") for name, module in self.frozen.items()}
        for name, module in self.frozen.items():
            values = iter(outputs[name])
            module.forward = lambda *_args, _values=values, **_more: _constants(next(_values), self.device)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, module in self.frozen.items():
                del module.forward
                if own[name] is not None:
                    module.forward = own[name]


@dataclass(frozen=True)
class KeptPictures:
    """The pictures of some rows, by number, for a vision part that is not trained.

    Attributes:
        vision: of the model.
        numbers: of the pictures, in order.
        pixels: loads the tensors of one, on the device.
    """

    vision: FrozenVision
    numbers: Sequence[int]
    pixels: Callable[[int], Tensors]

    def arguments(self) -> dict[str, Any]:
        """The arguments of the model for them; the vision part runs where features are not kept."""
        features = [self.vision.features(n, partial(self.pixels, n)) for n in self.numbers]
        names = dict.fromkeys(name for one in features for name in one.others)
        others = {
            name: torch.cat([one.others[name] for one in features if name in one.others]).to(
                self.vision.device
            )
            for name in names
        }
        return {**others, "mm_encoder_outputs": self.vision.outputs(features)}

    def tensors(self) -> list[Tensors]:
        """Those of each picture, for a model that gets pixels."""
        return [self.pixels(n) for n in self.numbers]


def _seen(module: Any, tensors: Tensors) -> Any:
    """What the vision part of a model gives for one picture or video."""
    read = getattr(module, f"get_{_medium_of(tensors)}_features")
    names = inspect.signature(read).parameters
    given = in_dtype_of(module, {name: value for name, value in tensors.items() if name in names})
    return read(**given, return_dict=True)


def _medium_of(tensors: Tensors) -> Medium:
    """What the tensors are of; InternVL's videos are pictures to the model."""
    return "video" if any(name.startswith(f"{_PIXELS}values_videos") for name in tensors) else "image"


def reached_by_pictures(
    base: Any, trained: Mapping[str, torch.nn.Parameter], sample: Tensors
) -> tuple[str, ...]:
    """The names of trained parameters that are outside of the decoder, and have a gradient if rows
    have pictures.

    Args:
        base: of transformers, with or without layers of an adapter.
        trained: parameters by name.
        sample: the tensors of any picture.
    """
    inside = text_prefixes(base)
    names = [name for name in trained if part_of(name, inside) != "language"]
    if not names:
        return ()
    with torch.enable_grad():
        output = _seen(with_vision(base), sample)
        total = torch.stack([one.float().sum() for one in tree_leaves([output.get(name) for name in _USED])
                             if isinstance(one, torch.Tensor)]).sum()  # fmt: skip
        gradients = torch.autograd.grad(total, [trained[name] for name in names], allow_unused=True)
    return tuple(name for name, gradient in zip(names, gradients, strict=True) if gradient is not None)


def in_dtype_of(module: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model with pixels in its dtype, to which some models do not convert
    them.
    """
    return {
        name: value.to(module.dtype) if name.startswith(_PIXELS) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def _frozen_modules(module: Any, others: set[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The outermost modules, by name, that have a forward and contain none of `others`."""
    chosen: dict[str, torch.nn.Module] = {}
    for name, child in module.named_children():
        if child in others:
            continue
        inside = set(child.modules())
        if isinstance(child, torch.nn.ModuleList) or inside & others:
            chosen |= {f"{name}.{below}": one for below, one in _frozen_modules(child, others).items()}
        else:
            chosen[name] = child
    return chosen


def _varies(base: Any, modules: Any) -> bool:
    """Whether a vision part may give different values for the same picture in training."""
    settings = base.config.to_dict().get("vision_config") or {}
    drops = [value for name, value in settings.items() if "drop" in name and isinstance(value, int | float)]
    inside = [one for module in modules for one in module.modules()]
    drops += [float(getattr(one, "p", 0)) for one in inside if "Drop" in type(one).__name__]
    return any(drops) or any("BatchNorm" in type(one).__name__ for one in inside)


def _in_host_memory(value: Any) -> Any:
    """A copy that does not share memory with more than it needs."""
    return tree_map_only(torch.Tensor, lambda one: one.detach().to("cpu", copy=True).contiguous(), value)


def _constants(value: Any, device: torch.device) -> Any:
    """The same structure with tensors that take no memory. They are ones: zeros are padding to some
    models.
    """
    return tree_map_only(
        torch.Tensor, lambda one: torch.ones((), dtype=one.dtype, device=device).expand(one.shape), value
    )


def _joined(values: Sequence[Any]) -> Any:
    """The same field of several pictures: tensors one behind another, also inside of a tuple whose
    entries are layers.
    """
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if first and isinstance(first[0], list | tuple):
        return [_joined(of_layer) for of_layer in zip(*values, strict=True)]
    return [part for value in values for part in value]
