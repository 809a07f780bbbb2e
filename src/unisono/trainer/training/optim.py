"""Optimizers over named parameters, and the norm of gradients."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from unisono.base import extensions
from unisono.base.errors import ConfigError
from unisono.base.text import one_line
from unisono.trainer.checkpoint.state import ParamGroup, refuse_unsaved
from unisono.trainer.config.optimizers import OPTIMIZERS, OTHER, OptimizerKind, optimizer_named
from unisono.trainer.config.own_code import execute, own_code_of, refusing
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.training_sections import OptimSection
from unisono.trainer.model import foreach
from unisono.trainer.model.kernels import AdamWFigures
from unisono.trainer.model.layers import kernels_of
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.model.multimodal import part_of, text_prefixes
from unisono.trainer.training.sharding import own_part, sharded_like

Bits = TypeVar("Bits", int, torch.Tensor)


class ShardAdamW(torch.optim.AdamW):
    """AdamW that updates this rank's shards as plain tensors: element by element it is the same,
    and DTensor's dispatch costs more than the update.

    Parameters and states stay DTensors, so checkpoints do not change.
    """

    def _init_group(self, group: ParamGroup, *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = map(own_part, tensors)
        return has_complex


class CompactAdamW(torch.optim.AdamW):
    """AdamW whose moments are bfloat16 between steps, so that they take half of the memory; the
    parameters are float32.

    An update computes in float32, and rounds the moments up or down at random, so that their mean
    stays (stochastic rounding, arXiv:2010.06192). Rounded to nearest, a second moment would no
    longer follow its gradients: with betas[1]: 0.999 it changes by less than half of the distance
    between two values of bfloat16. The direction is a hash of the step, the parameter and the
    element, so a resumed run makes the same updates, with any number of threads.
    """

    def __init__(
        self, groups: list[ParamGroup], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}

    def step(self, closure: None = None) -> None:
        """Updates every parameter that has a gradient."""
        assert closure is None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: ParamGroup) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        values, grad, first, second = (own_part(tensor).detach() for tensor in tensors if tensor is not None)
        kernels = kernels_of(values.device)
        update = adamw_by_torch if kernels is None else kernels.adamw
        figures = AdamWFigures(
            decay=1 - group["lr"] * group["weight_decay"],
            share1=1 - beta1,
            share2=1 - beta2,
            step_size=group["lr"] / (1 - beta1**step),
            scale=math.sqrt(1 - beta2**step),
            eps=group["eps"],
            seed=_hash(_hash(step) + self._numbers[parameter]) >> 1,
        )
        update(values.view(-1), grad.reshape(-1), (first.view(-1), second.view(-1)), figures)


def adamw_by_torch(
    values: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    figures: AdamWFigures,
) -> None:
    """An update of CompactAdamW in place, as `Kernels.adamw` makes it, by torch's operations."""
    at_once = 1 << 16 if values.device.type == "cpu" else 1 << 24  # a hash takes 8 bytes for each element
    for begin in range(0, len(values), at_once):
        part = slice(begin, begin + at_once)
        g, kept = grad[part], [moment[part] for moment in moments]
        first, second = (moment.float() for moment in kept)
        first += (g - first) * figures.share1
        second += (g * g - second) * figures.share2
        noise = _hash(torch.arange(begin, begin + len(g), device=g.device) ^ figures.seed)
        for moment, wide, bits in zip(kept, (first, second), (noise & 0xFFFF, noise >> 16), strict=True):
            rounded = (wide.view(torch.int32) + bits.int()) >> 16
            moment.copy_(rounded.to(torch.int16).view(torch.bfloat16))
        root = second.sqrt_().div_(figures.scale).add_(figures.eps)
        values[part].mul_(figures.decay).addcdiv_(first, root, value=-figures.step_size)


def _hash(x: Bits) -> Bits:
    """The finalizer of MurmurHash3, 32 bits."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _WORD
    return x ^ (x >> 16)


_WORD = 0xFFFFFFFF


class ShardMuon(torch.optim.Muon):
    """Muon that also updates sharded matrices: the momentum is that of each rank's shard, and the
    update is orthogonalized as a full matrix, which every rank gathers. All ranks must step.
    """

    def step(self, closure: None = None) -> None:
        """Updates every matrix that has a gradient."""
        assert closure is None
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            super().step()
            return
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: DTensor, group: ParamGroup) -> None:
        """As torch's step; of its functions (torch 2.13: by no public name) those of a full
        matrix.
        """
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        grad, mean = own_part(gradient), own_part(state["momentum_buffer"])
        mean.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        full = DTensor.from_local(
            update,
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()  # all ranks participate
        full = _zeropower_via_newtonschulz(full, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        values = own_part(parameter)
        values.mul_(1 - group["lr"] * group["weight_decay"])
        values.add_(own_part(sharded_like(parameter, full)), alpha=-rate)


@dataclass
class Optimizers:
    """One or two torch optimizers that step together.

    Attributes:
        parts: the optimizers by name, with the names of their parameters in order.
        set_by_config: the hyperparameters that the config sets; None: all. The others are state of
            an optimizer of a library or of the user's own.
        is_known: whether its state is known to be what a checkpoint can hold.
        settings: the config's hyperparameters for each parameter group: the full learning rate,
            weight decay, betas.
    """

    parts: dict[str, torch.optim.Optimizer]
    names: dict[str, list[str]]
    set_by_config: frozenset[str] | None = None
    is_known: bool = True
    settings: dict[str, list[ParamGroup]] = field(init=False)

    def __post_init__(self) -> None:
        self.settings = {
            name: [
                {key: value for key, value in group.items() if self._is_setting(key)}
                for group in part.param_groups
            ]
            for name, part in self.parts.items()
        }

    def _is_setting(self, key: str) -> bool:
        return key != "params" and (self.set_by_config is None or key in self.set_by_config)

    def take_settings(self) -> None:
        """Restores the config's hyperparameters: a checkpoint brings its own, which may differ from
        the config in allowed ways.
        """
        for name, part in self.parts.items():
            for group, settings in zip(part.param_groups, self.settings[name], strict=True):
                group.update(settings)

    def page_state(self) -> None:
        """Moves state that was read from a checkpoint to memory that a GPU pages, with the paged
        optimizers of bitsandbytes.
        """
        for part in self.parts.values():
            if not getattr(part, "is_paged", False):
                continue
            for parameter, state in part.state.items():
                for key in ("state1", "state2"):
                    if key in state:
                        paged = cast("Any", part).get_state_buffer(parameter, dtype=state[key].dtype)
                        state[key] = paged.copy_(state[key])

    def set_factor(self, factor: float) -> None:
        """Scales every learning rate."""
        for name, part in self.parts.items():
            for group, settings in zip(part.param_groups, self.settings[name], strict=True):
                group["lr"] = settings["lr"] * factor

    def step(self, factor: torch.Tensor | None = None) -> None:
        """Makes one update with the gradients times `factor`.

        Small parameters are updated by one thread: torch would wake the others for each of them.

        Gradients in bfloat16 are float32 only while their own parameters are updated, and are
        dropped afterwards.
        """
        threads = torch.get_num_threads()
        try:
            for part in self.parts.values():
                torch.set_num_threads(1 if _has_small_parameters(part) else threads)
                _update(part, factor)
            if not self.is_known:
                for name, part in self.parts.items():
                    refuse_unsaved(part, self.names[name])
        finally:
            torch.set_num_threads(threads)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it, parameters have the values to use, where they are not those that are trained:
        with schedule_free. Afterwards they have the same bits as before.
        """
        parts: list[Any] = [part for part in self.parts.values() if _has_averages(part)]
        trained = [(p, p.detach().clone()) for part in parts for g in part.param_groups for p in g["params"]]
        for part in parts:
            part.eval()
        try:
            yield
        finally:
            for part in parts:
                part.train()
            with torch.no_grad():
                for parameter, values in trained:
                    parameter.copy_(values)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)


OptimizerClass = Callable[..., torch.optim.Optimizer]


def build_optimizers(
    section: OptimSection,
    trainable: dict[str, torch.nn.Parameter],
    *,
    not_matrices: set[int],
    rates: Mapping[str, float] | None = None,
    own: OptimizerClass | None = None,
) -> Optimizers:
    """The optimizers that a config names.

    Weight decay applies to matrices, not to norms and biases. The B matrices of an adapter may have
    a learning rate of their own (LoRA+, arXiv:2402.12354).

    Args:
        section: `optim` of the config.
        trainable: the parameters by name.
        not_matrices: ids of two-dimensional parameters that Muon is not for: embeddings and the
            head.
        rates: learning rates of parameters that do not have `optim.lr`, by name.
        own: of `load_own_optimizer`.

    Raises:
        ConfigError: if a class does not take the parameters and options.
    """
    kind = OPTIMIZERS.get(section.kind, OTHER)
    builder = own or resolve_name(kind.builder)
    if own is not None or isinstance(builder, type):
        return _build_class(section, trainable, builder, rates, kind=kind)
    made: Optimizers = builder(section, trainable, not_matrices=not_matrices, rates=rates)
    return made


def load_own_optimizer(config: RunConfig, *, digest: str) -> OptimizerClass | None:
    """The optimizer of a file of the user's own, which is executed, or of another package; None if
    the config names one of ours.

    Args:
        digest: of the file, as the plan has it.

    Raises:
        ConfigError: if it is not a torch.optim.Optimizer.
    """
    kind = config.optim.kind
    if kind in OPTIMIZERS:
        return None
    for own in own_code_of(config):
        if own.key == "optim.kind":
            with refusing(own, _FIX):
                made, _ = execute(own, digest)
                if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
                    raise TypeError(f"{own.name} is not a subclass of torch.optim.Optimizer")
                return made
    entry = extensions.extensions(extensions.OPTIMIZERS)[kind]
    return cast("OptimizerClass", extensions.load_extension(entry))


_FIX = "write `class NAME(torch.optim.Optimizer)` with `__init__(self, groups, lr, …)`"


def _build_class(
    section: OptimSection,
    trainable: dict[str, torch.nn.Parameter],
    made: OptimizerClass,
    rates: Mapping[str, float] | None,
    *,
    kind: OptimizerKind,
) -> Optimizers:
    """An optimizer of a class that gets parameter groups, `lr`, the keys that it uses, and
    `optim.options`.
    """
    groups, names = _groups(section, trainable, rates)
    options = {key: getattr(section, key) for key in kind.keys if key in ("betas", "eps")}
    options |= kind.arguments
    options |= {
        key: tuple(value) if isinstance(value, list) else value for key, value in section.options.items()
    }
    try:
        part = made(groups, lr=section.lr, **options)
    except Exception as error:  # the code of others may raise anything
        raise ConfigError.of(
            f"the optimizer {section.kind} cannot be made: {one_line(f'{type(error).__name__}: {error}', limit=300)}",
            where="optim.kind",
            why=f"it is called with parameter groups, lr and optim.options: {', '.join(options) or 'none'}",
            fix=f"set optim.options to what it takes; {_FIX}",
        ) from error
    if _has_averages(part):
        part.train()
    if getattr(part, "is_paged", False):  # the plan has said so
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
    settings = frozenset({"lr", "weight_decay", *options})
    name = section.kind if kind is not OTHER else "own"
    return Optimizers({name: part}, {name: names}, set_by_config=settings, is_known=kind is not OTHER)


def _has_averages(part: Any) -> bool:
    """Whether an optimizer of the package schedulefree, or one like it, trains other values than
    those to use: its `eval` sets the parameters to these, its `train` sets them back.
    """
    return all(callable(getattr(part, name, None)) for name in ("train", "eval"))


def build_adamw(
    section: OptimSection,
    trainable: dict[str, torch.nn.Parameter],
    *,
    not_matrices: Collection[int] = (),
    rates: Mapping[str, float] | None = None,
) -> Optimizers:
    """AdamW (arXiv:1711.05101). The arguments are those of `build_optimizers`."""
    del not_matrices
    groups, names = _groups(section, trainable, rates)
    rates, betas = {"lr": section.lr, "eps": section.eps}, section.betas
    if section.state_dtype == "bfloat16":
        part = CompactAdamW(groups, betas=betas, **rates)
    else:
        part = ShardAdamW(groups, betas=betas, **rates, fused=True)
    return Optimizers({"adamw": part}, {"adamw": names})


def build_muon(
    section: OptimSection,
    trainable: dict[str, torch.nn.Parameter],
    *,
    not_matrices: Collection[int] = (),
    rates: Mapping[str, float] | None = None,
) -> Optimizers:
    """Muon (Jordan et al., 2024) for the matrices and AdamW for the rest.

    The arguments are those of `build_optimizers`.
    """
    matrices = {n: p for n, p in trainable.items() if p.ndim == 2 and id(p) not in not_matrices}
    others = {n: p for n, p in trainable.items() if n not in matrices}
    parts: dict[str, torch.optim.Optimizer] = {}
    names: dict[str, list[str]] = {}
    if matrices:
        parts["muon"] = ShardMuon(
            list(matrices.values()),
            lr=section.muon_lr,
            weight_decay=section.weight_decay,
            adjust_lr_fn="match_rms_adamw" if section.muon_scale == "adamw" else "original",
        )
        names["muon"] = list(matrices)
    if others:
        adamw = build_adamw(section, others, rates=rates)
        parts, names = parts | adamw.parts, names | adamw.names
    return Optimizers(parts, names)


def state_before_a_step(section: OptimSection, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of about the size of the state that the first step makes for a parameter."""
    kind = optimizer_named(section.kind)
    if kind.is_factored:
        return []
    size = int(kind.state_bytes(section.state_dtype) / kind.state_values)  # bytes of a value
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}[size]
    return [torch.zeros_like(parameter, dtype=dtype) for _ in range(kind.state_values)]


def _groups(
    section: OptimSection, parameters: dict[str, torch.nn.Parameter], rates: Mapping[str, float] | None
) -> tuple[list[ParamGroup], list[str]]:
    """AdamW's parameter groups, and the names of their parameters in order."""
    plus = {n for n in parameters if section.lora_b_ratio != 1 and _LORA_B in n}
    own = {n: rate for n, rate in (rates or {}).items() if n in parameters}
    decay, lr = section.weight_decay, section.lr
    usual = [n for n in parameters if n not in own]
    kinds = [([n for n in usual if parameters[n].ndim >= 2 and n not in plus], decay, lr)]
    for rate in dict.fromkeys(own.values()):
        members = [n for n, of_name in own.items() if of_name == rate]
        large = {n for n in members if parameters[n].ndim >= 2}
        kinds += [([n for n in members if n in large - plus], decay, rate)]
        kinds += [([n for n in members if n not in large | plus], 0.0, rate)]
        kinds += [([n for n in members if n in plus], decay, rate * section.lora_b_ratio)]
    kinds += [
        ([n for n in usual if n in plus], decay, lr * section.lora_b_ratio),
        ([n for n in usual if parameters[n].ndim < 2 and n not in plus], 0.0, lr),
    ]
    groups = [
        {"params": [parameters[n] for n in members], "weight_decay": decay, "lr": lr}
        for members, decay, lr in kinds
        if members
    ]
    return groups, [n for members, _, _ in kinds for n in members]


def rates_of(config: RunConfig, loaded: LoadedModel) -> dict[str, float]:
    """The learning rates of parameters that do not have `optim.lr`, by name: of the text encoders
    of an image model, and of parts of a vision-language model.
    """
    text_lr, by_part = config.diffusion.text_lr, config.optim.part_lr
    if text_lr is not None:
        return {name: text_lr for name in loaded.trainable if name.startswith(_TEXT)}
    if not by_part:
        return {}
    inside = text_prefixes(loaded.base)
    parts = {name: part_of(name, inside) for name in loaded.trainable}
    return {name: by_part[part] for name, part in parts.items() if part in by_part}


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, float32, as torch.nn.utils.get_total_norm gives it, for gradients
    in bfloat16, too.

    A norm depends on its own tensor alone, so it is the same for blocks of gradients, of which one
    at a time is float32.
    """
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms: list[torch.Tensor] = []
    for block in _blocks(gradients):
        norms += foreach.norms([gradient.float() for gradient in block])
    return torch.linalg.vector_norm(torch.stack(norms))


def clipping_factor(norm: torch.Tensor, limit: float | None) -> torch.Tensor | None:
    """What clips a gradient of this norm to the norm `limit`, as torch.nn.utils.clip_grad_norm_;
    None without a limit.
    """
    return None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def _update(optimizer: torch.optim.Optimizer, factor: torch.Tensor | None) -> None:
    groups = optimizer.param_groups
    reached = [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
    if all(parameter.grad.dtype == parameter.dtype for parameter in reached):
        _scale([parameter.grad for parameter in reached], factor)
        optimizer.step()
        return
    try:
        for group in groups:
            for block in _blocks(group["params"]):
                optimizer.param_groups = [group | {"params": block}]
                _widen(block)
                _scale([parameter.grad for parameter in block if parameter.grad is not None], factor)
                optimizer.step()
                for parameter in block:
                    parameter.grad = None
    finally:
        optimizer.param_groups = groups


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor | None) -> None:
    if factor is not None and gradients:
        foreach.multiply_([own_part(gradient) for gradient in gradients], factor)


def _widen(parameters: Iterable[torch.Tensor]) -> None:
    """Converts gradients to their parameter's dtype."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(parameter.dtype)


_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are converted at a time: 4 MiB stay in a processor's cache, and a GPU needs few
kernels.
"""


def _blocks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, in lists of at most that many elements, or of one tensor."""
    block: list[torch.Tensor] = []
    for tensor in tensors:
        limit = _BLOCK_ELEMENTS.get(tensor.device.type, 1 << 20)
        if block and sum(t.numel() for t in block) + tensor.numel() > limit:
            yield block
            block = []
        block.append(tensor)
    if block:
        yield block


def _has_small_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update of its parameters on a CPU takes a thread no longer than waking it, on
    average.
    """
    sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
    return sum(sizes) < _ELEMENTS_OF_A_THREAD * len(sizes)


_ELEMENTS_OF_A_THREAD = 32768
_LORA_B = ".lora_B."  # in the names of peft's parameters
_TEXT = "text_encoder"  # the beginning of the names of the text encoders of an image model
