"""Optimizers over named parameters, and the learning rate schedule."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from unisono.config.schema import OptimSection


@dataclass
class Optimizers:
    """One or two torch optimizers that step together.

    Attributes:
        parts: the optimizers by name, with the names of their parameters in order.
        settings: the config's hyperparameters for each parameter group: the full learning rate, weight decay, betas.
    """

    parts: dict[str, torch.optim.Optimizer]
    names: dict[str, list[str]]
    settings: dict[str, list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.settings = {
            name: [
                {key: value for key, value in group.items() if key != "params"} for group in part.param_groups
            ]
            for name, part in self.parts.items()
        }

    def take_settings(self) -> None:
        """Restores the config's hyperparameters: a checkpoint brings its own, which may differ from the config in allowed ways."""
        for name, part in self.parts.items():
            for group, settings in zip(part.param_groups, self.settings[name], strict=True):
                group.update(settings)

    def set_factor(self, factor: float) -> None:
        """Scales every learning rate."""
        for name, part in self.parts.items():
            for group, settings in zip(part.param_groups, self.settings[name], strict=True):
                group["lr"] = settings["lr"] * factor

    def step(self) -> None:
        """Makes one update."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)


def build_optimizers(
    section: OptimSection, trainable: dict[str, torch.nn.Parameter], *, not_matrices: set[int]
) -> Optimizers:
    """AdamW (arXiv:1711.05101), or Muon (Jordan et al., 2024) for the matrices and AdamW for the rest.

    Weight decay applies to matrices, not to norms and biases. The B matrices of an adapter may have a learning rate of their own (LoRA+,
    arXiv:2402.12354).

    Args:
        section: `optim` of the config.
        trainable: the parameters by name.
        not_matrices: ids of two-dimensional parameters that Muon is not for: embeddings and the head.
    """
    muon = {
        n: p
        for n, p in trainable.items()
        if section.kind == "muon" and p.ndim == 2 and id(p) not in not_matrices
    }
    rest = {n: p for n, p in trainable.items() if n not in muon}
    parts: dict[str, torch.optim.Optimizer] = {}
    names: dict[str, list[str]] = {}
    if muon:
        parts["muon"] = torch.optim.Muon(
            list(muon.values()),
            lr=section.muon_lr,
            weight_decay=section.weight_decay,
            adjust_lr_fn="match_rms_adamw" if section.muon_scale == "adamw" else "original",
        )
        names["muon"] = list(muon)
    if rest:
        groups, names["adamw"] = _groups(section, rest)
        parts["adamw"] = torch.optim.AdamW(
            groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True
        )
    return Optimizers(parts, names)


def _groups(
    section: OptimSection, parameters: dict[str, torch.nn.Parameter]
) -> tuple[list[dict[str, Any]], list[str]]:
    """AdamW's parameter groups, and the names of their parameters in order."""
    plus = {n for n in parameters if section.lora_b_ratio != 1 and _LORA_B in n}
    decay, lr = section.weight_decay, section.lr
    kinds = [
        ([n for n, p in parameters.items() if p.ndim >= 2 and n not in plus], decay, lr),
        ([n for n in parameters if n in plus], decay, lr * section.lora_b_ratio),
        ([n for n, p in parameters.items() if p.ndim < 2 and n not in plus], 0.0, lr),
    ]
    groups = [
        {"params": [parameters[n] for n in members], "weight_decay": decay, "lr": lr}
        for members, decay, lr in kinds
        if members
    ]
    return groups, [n for members, _, _ in kinds for n in members]


_LORA_B = ".lora_B."  # in the names of peft's parameters

Schedule = Literal["cosine", "linear", "constant", "wsd", "cosine_with_restarts", "polynomial"]

_WSD_DECAY = 0.2  # share of the run that is the decay of wsd (warmup, stable, decay: arXiv:2404.06395)


def lr_factor(
    step: int,
    *,
    total: int,
    warmup: int,
    schedule: Schedule,
    floor: float,
    start: int = 1,
    cycles: int = 1,
    power: float = 1.0,
) -> float:
    """The factor of the learning rate at an optimizer step: a pure function of the step, so resuming needs no state for it.

    With `start` 0 the formulas are those of transformers' `get_scheduler`, whose first step is at position 0.

    Args:
        step: from 1 to `total`.
        total: steps of the run.
        warmup: steps in which the factor rises, with `start` 1 from 1/(warmup + 1), with 0 from 0.
        schedule: the shape after the warmup.
        floor: the factor at the end.
        start: the position of step 1 in the schedule: 1, or 0.
        cycles: number of cosines of `cosine_with_restarts` (arXiv:1608.03983).
        power: exponent of `polynomial`.
    """
    place = step - 1 + start
    if place < warmup + start:
        return place / (warmup + start)
    done = (place - warmup) / max(1, total - warmup)  # 0 <= done <= 1
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - done)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case "cosine_with_restarts":
            in_cycle = cycles * done % 1.0 if done < 1 else 1.0
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * in_cycle))
        case "polynomial":
            return floor + (1 - floor) * (1 - done) ** power
        case "wsd":
            return 1.0 if done <= 1 - _WSD_DECAY else floor + (1 - floor) * (1 - done) / _WSD_DECAY
