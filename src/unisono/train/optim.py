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
        lrs: the full learning rate of each.
        settings: the config's hyperparameters for each parameter group: weight decay, betas.
    """

    parts: dict[str, torch.optim.Optimizer]
    names: dict[str, list[str]]
    lrs: dict[str, float]
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
            for group in part.param_groups:
                group["lr"] = self.lrs[name] * factor

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

    Weight decay applies to matrices, not to norms and biases.

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
            list(muon.values()), lr=section.muon_lr, weight_decay=section.weight_decay
        )
        names["muon"] = list(muon)
    if rest:
        decayed = {n: p for n, p in rest.items() if p.ndim >= 2}
        plain = {n: p for n, p in rest.items() if p.ndim < 2}
        groups = [
            {"params": list(members.values()), "weight_decay": decay}
            for members, decay in ((decayed, section.weight_decay), (plain, 0.0))
            if members
        ]
        parts["adamw"] = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, fused=True)
        names["adamw"] = [*decayed, *plain]
    return Optimizers(parts, names, {"muon": section.muon_lr, "adamw": section.lr})


Schedule = Literal["cosine", "linear", "constant", "wsd"]

_WSD_DECAY = 0.2  # share of the run that is the decay of wsd (warmup, stable, decay: arXiv:2404.06395)


def lr_factor(step: int, *, total: int, warmup: int, schedule: Schedule, floor: float) -> float:
    """The factor of the learning rate at an optimizer step: a pure function of the step, so resuming needs no state for it.

    Args:
        step: from 1 to `total`.
        total: steps of the run.
        warmup: steps in which the factor rises from 1/(warmup + 1) to 1.
        schedule: the shape after the warmup.
        floor: the factor at the end.
    """
    if step <= warmup:
        return step / (warmup + 1)
    done = (step - warmup) / max(1, total - warmup)  # 0 < done <= 1
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - done)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":
            return 1.0 if done <= 1 - _WSD_DECAY else floor + (1 - floor) * (1 - done) / _WSD_DECAY
