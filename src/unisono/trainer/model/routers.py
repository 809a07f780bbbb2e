"""The routers of a mixture of experts: their losses, and the load of experts.

Letters: T tokens, L layers with a router, E experts of a layer, k experts of a token.

A router is known by what it gives: (logits (T, E), weights (T, k), experts (T, k)), as nearly all
of transformers do. How logits become probabilities is not looked up in a list of names, but tested
on short rows: the weights must be those of a softmax or of a sigmoid.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unisono.base.errors import ModelError
from unisono.trainer.config.training_sections import RouterLossSection

_ROUNDING = 1e-2  # of bfloat16
Probabilities = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Decisions:
    """What the routers have decided for some tokens.

    Attributes:
        logits: of each layer (T, E), with a gradient.
        experts: of each layer (T, k) int64.
        probabilities: (T, E) of logits.
    """

    logits: list[torch.Tensor]
    experts: list[torch.Tensor]
    probabilities: Probabilities

    def load(self) -> torch.Tensor:
        """(L, E) float32: how many tokens each expert has."""
        sizes = [logits.shape[-1] for logits in self.logits]
        pairs = zip(self.experts, sizes, strict=True)
        return torch.stack([_counts(experts.flatten(), size) for experts, size in pairs])

    def load_balancing(self, load: torch.Tensor, *, tokens: int, together: bool) -> torch.Tensor:
        """The part of these tokens in the load balancing loss of a global batch (Switch,
        arXiv:2101.03961, equations 4 to 6): E · Σ f · P, the mean over the layers; parts add up.

        f, the tokens of an expert per token, has no gradient, and P, the mean of its probability,
        is a sum over tokens. So a part has the gradient of the whole if f is that of all tokens.

        Args:
            load: (L, E), of the global batch.
            tokens: of the global batch.
            together: f and P are means over tokens and layers, as in transformers'
                `load_balancing_loss_func`.
        """
        sums = torch.stack([self.probabilities(logits.float()).sum(0) for logits in self.logits])  # (L, E)
        layers, experts = sums.shape
        if together:
            load, sums, layers = load.sum(0), sums.sum(0), layers**2
        return experts * (load * sums).sum() / (layers * tokens**2)

    def z_loss(self, *, tokens: int) -> torch.Tensor:
        """The part of these tokens in the z-loss of a global batch (ST-MoE, arXiv:2202.08906,
        equation 5): the mean over tokens and layers of (log Σ exp logits)².
        """
        squares = [logits.float().logsumexp(-1).square().sum() for logits in self.logits]
        return torch.stack(squares).sum() / (len(squares) * tokens)


def _counts(experts: torch.Tensor, size: int) -> torch.Tensor:
    """(size,) float32; unlike bincount it does not wait for a GPU."""
    return experts.new_zeros(size, dtype=torch.float32).index_add_(
        0, experts, torch.ones_like(experts, dtype=torch.float32)
    )


class Routers:
    """The routers of a model, whose decisions are recorded while it is trained.

    Attributes:
        numbers: of the layers, L of them.
        experts: E.
    """

    def __init__(
        self, modules: Mapping[int, torch.nn.Module], experts: int, probabilities: Probabilities
    ) -> None:
        self.numbers = list(modules)
        self.experts = experts
        self._probabilities = probabilities
        self._recorded: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]] = [
            [] for _ in modules
        ]
        self._records = False
        self._real: torch.Tensor | None = None
        for layer, module in enumerate(modules.values()):
            module.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[[torch.nn.Module, Any, Any], None]:
        def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            # Not while activations are recomputed: so nothing here may save a tensor for backward.
            if self._records:
                logits, experts = output[0].flatten(0, -2), output[2].flatten(0, -2)
                self._recorded[layer].append((logits, experts, self._real))

        return record

    @contextlib.contextmanager
    def recording(self, real: torch.Tensor | None) -> Iterator[None]:
        """A context in which decisions are recorded, until `take`.

        Args:
            real: (T,) int64, the places that are not padding; None: all.
        """
        self._records, self._real = True, real
        try:
            yield
        finally:
            self._records, self._real = False, None

    def take(self) -> Decisions | None:
        """What was recorded since the last call; None for nothing."""
        if not self._recorded[0]:
            return None
        parts = [list(zip(*[_chosen(*each) for each in layer], strict=True)) for layer in self._recorded]
        for layer in self._recorded:
            layer.clear()
        logits, experts = ([_joined(part[index]) for part in parts] for index in (0, 1))
        return Decisions(logits, experts, self._probabilities)


def _chosen(
    logits: torch.Tensor, experts: torch.Tensor, real: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return (logits, experts) if real is None else (logits[real], experts[real])


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def recorded_routers(base: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules that transformers records as `router_logits`, by name; none: the model has no
    experts, or does not say where.
    """
    kinds: list[type] = []
    for module in base.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kind = getattr(recorder, "target_class", recorder)
            kinds += [kind] if isinstance(kind, type) else []
    return {name: module for name, module in base.named_modules() if isinstance(module, tuple(kinds))}


def find_routers(
    base: torch.nn.Module, run: Callable[[], object], *, section: RouterLossSection | None
) -> Routers | None:
    """The routers of a model; None for a model without experts, or with routers of another kind if
    there is no loss of them.

    Args:
        base: the model.
        run: computes a forward of some tokens, without gradients.
        section: `optim.router_loss`.

    Raises:
        ModelError: if the model cannot have the losses of the section.
    """
    modules = recorded_routers(base)
    if not modules and section is None:
        return None
    outputs: dict[torch.nn.Module, Any] = {}

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        del inputs
        outputs[module] = output

    hooks = [module.register_forward_hook(keep) for module in modules.values()]
    run()
    for hook in hooks:
        hook.remove()
    why, probabilities = _kind_of(list(outputs.values()))
    if not why and probabilities is _given and section is not None and section.z_loss:
        why = "its routers give probabilities, and z_loss needs logits"
    if not why:
        used = {name: module for name, module in modules.items() if module in outputs}
        numbers = [re.search(r"\.(\d+)\.", name) for name in used]
        layers = [int(number[1]) if number else place for place, number in enumerate(numbers)]
        experts = outputs[next(iter(used.values()))][0].shape[-1]
        return Routers(dict(zip(layers, used.values(), strict=True)), experts, probabilities)
    if section is None:
        return None
    raise ModelError.of(
        "the model cannot have router losses",
        where="optim.router_loss",
        why=why,
        fix="remove optim.router_loss, or train a mixture of experts whose routers transformers records",
    )


def _given(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _kind_of(outputs: list[Any]) -> tuple[str, Probabilities]:
    """Why the outputs of routers are of no kind that is known, or how they become
    probabilities.
    """
    if not outputs:
        return (
            "transformers records no routers of it: it has no experts, or its code does not say where",
            _given,
        )
    if not all(_is_triple(output) for output in outputs):
        return "its routers return something other than logits, weights and experts", _given
    if len({output[0].shape[-1] for output in outputs}) > 1:
        return "its layers have different numbers of experts", _given
    for kind in (_given, _softmax, _sigmoid):
        if all(_explains(kind, *output[:3]) for output in outputs):
            return "", kind
    return "its routers weigh experts by neither a softmax nor a sigmoid of their logits", _given


def _is_triple(output: Any) -> bool:
    if not isinstance(output, tuple) or len(output) < 3:
        return False
    logits, weights, experts = output[:3]
    return (
        all(isinstance(one, torch.Tensor) for one in (logits, weights, experts))
        and logits.is_floating_point()
        and not experts.is_floating_point()
        and weights.shape == experts.shape
        and logits.shape[:-1] == experts.shape[:-1]
    )


def _explains(
    kind: Probabilities, logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> bool:
    """Whether weights are in the proportions of the probabilities of their experts.

    That of a single expert is its probability itself, or 1.
    """
    values = kind(logits.float())
    if kind is _given:  # each expert may have a scale of its own, so the weights say nothing
        return bool((values >= 0).all() and ((values.sum(-1) - 1).abs() < _ROUNDING).all())
    chosen, weights = values.gather(-1, experts), weights.float()
    if experts.shape[-1] > 1:
        chosen, weights = (part / part.sum(-1, keepdim=True) for part in (chosen, weights))
    elif bool((weights == 1).all()):
        return True
    return bool(((chosen - weights).abs() < _ROUNDING).all())
