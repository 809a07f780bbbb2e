"""The routers of a mixture of experts in a step: their losses, over all tokens of the global batch,
and the load of experts.

The load balancing loss needs the load of the global batch before the backward of any part of it
(`Decisions.load_balancing`). If each rank has one micro batch, its forward gives its load, which is
summed over the ranks between forward and backward. With several micro batches a forward of all of
them comes first, without gradients, and with the same dropout.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.batches.source import Micro, MicroBatch, StepBatches
from unisono.trainer.config.training_sections import RouterLossSection
from unisono.trainer.model.routers import Routers
from unisono.trainer.training.process_group import Group
from unisono.trainer.training.run import Run, TrainState

_NO_LOSS = RouterLossSection()
STARVED_STEPS = 100
"""So many steps without a token; a single one of few tokens says nothing."""
_SHOWN = 8


class RouterStep:
    """The routers in one step. All ranks of the group must call the methods alike.

    Args:
        run: the run.
        tokens: input tokens of the global batch that the objective's loss is computed of.
        group: the ranks that share the batch.

    Attributes:
        sums: (2 + L · E,) float32, of this rank: parts of the load balancing loss and of the z-loss
            without their coefficients, and how many tokens each expert of each layer has. Empty
            without experts.
    """

    def __init__(self, run: Run, *, tokens: int, group: Group) -> None:
        self.sums = torch.zeros(sums_of_routers(run.forward.routers), device=run.device)
        self._run = run
        self._section = run.plan.config.optim.router_loss or _NO_LOSS
        self._tokens, self._group = tokens, group
        self._load: torch.Tensor | None = None

    @property
    def has_loss(self) -> bool:
        """Whether tokens that do not count in the objective's loss count in those of routers."""
        return bool(self._section.load_balancing or self._section.z_loss)

    def count_first(
        self,
        batches: StepBatches,
        micros: Sequence[tuple[MicroBatch, bool]],
        load: Callable[[MicroBatch], Micro],
    ) -> None:
        """Counts the load of the global batch, if that needs a forward of all before any backward.

        Args:
            batches: of the step.
            micros: those of this rank, each with whether it counts.
            load: gives the units of a micro batch.
        """
        run, routers = self._run, self._run.forward.routers
        if routers is None or not self._section.load_balancing or batches.rounds == 1:
            return
        rank_load = torch.zeros(len(routers.numbers), routers.experts, device=run.device)
        for group, is_counted in micros:
            run.beats.enter("compute")
            seed_torch(run.plan.config.seed, "dropout", group.places[0])
            run.generator_watch.torch_was_seeded()
            with torch.no_grad():
                run.objective.loss(run.forward, load(group), counts=batches.counts)
            decisions = routers.take()
            rank_load += decisions.load() * is_counted if decisions is not None else 0.0
        if run.sharded is not None:
            run.sharded.reshard()
        self._load = self._summed(rank_load)

    def added_to(self, loss: torch.Tensor, *, is_counted: bool) -> torch.Tensor:
        """The loss of a micro batch whose forward was just computed, with the losses of routers.

        Args:
            loss: of the objective.
            is_counted: whether its tokens count.
        """
        routers, section = self._run.forward.routers, self._section
        decisions = None if routers is None else routers.take()
        if decisions is None:
            return loss
        rank_load = decisions.load() * is_counted
        self.sums[2:] += rank_load.flatten()
        if section.load_balancing:
            if self._load is None:
                self._load = self._summed(rank_load)
            balancing = decisions.load_balancing(
                self._load, tokens=self._tokens, together=section.layers == "together"
            )
            loss = loss + section.load_balancing * balancing
            self.sums[0] += balancing.detach() * is_counted
        if section.z_loss:
            z_loss = decisions.z_loss(tokens=self._tokens)
            loss = loss + section.z_loss * z_loss
            self.sums[1] += z_loss.detach() * is_counted
        return loss

    def finish(self) -> torch.Tensor:
        """The sums, after the last micro batch. A rank without any adds its load, of 0, to that of
        the others.
        """
        routers = self._run.forward.routers
        if routers is not None and self._section.load_balancing and self._load is None:
            self._load = self._summed(
                torch.zeros(len(routers.numbers), routers.experts, device=self._run.device)
            )
        return self.sums

    def _summed(self, load: torch.Tensor) -> torch.Tensor:
        load = load.clone()
        self._group.sum(load)  # all ranks participate
        return load


def step_tokens(run: Run, batches: StepBatches) -> int:
    """The input tokens of a global batch on the sides that the objective's loss is computed of."""
    return batches.counts.first_tokens if len(run.objective.sides) == 1 else batches.tokens


def sums_of_routers(routers: Routers | None) -> int:
    """The number of sums that a step has for routers."""
    return 0 if routers is None else 2 + len(routers.numbers) * routers.experts


def router_figures(run: Run, sums: Sequence[float]) -> dict[str, float]:
    """The router losses of a step, without coefficients; of each layer and of all the load of the
    expert with the most tokens, as a multiple of the mean of its layer; and how many experts have
    none.
    """
    if not sums:
        return {}
    section = run.plan.config.optim.router_loss or _NO_LOSS
    figures = {"router_load_balancing": sums[0]} if section.load_balancing else {}
    if section.z_loss:
        figures["router_z_loss"] = sums[1]
    most = {
        f"expert_load.{layer}": max(load) * len(load) / max(1.0, sum(load))
        for layer, load in _loads(run, sums).items()
    }
    idle = float(list(sums[2:]).count(0.0))
    return {**figures, "expert_load_max": max(most.values()), "experts_idle": idle, **most}


def _loads(run: Run, sums: Sequence[float]) -> dict[int, Sequence[float]]:
    """How many tokens each expert had, by layer."""
    routers = run.forward.routers
    if routers is None:
        return {}
    starts = range(2, len(sums), routers.experts)
    return {
        layer: sums[start : start + routers.experts]
        for layer, start in zip(routers.numbers, starts, strict=True)
    }


def warn_of_starved_experts(run: Run, sums: Sequence[float]) -> None:
    """Warns once for each layer if some of its experts have had no token for many steps."""
    for layer, experts in newly_starved(run.state, _loads(run, sums)).items():
        shown = ", ".join(map(str, experts[:_SHOWN])) + (", …" if len(experts) > _SHOWN else "")
        run.report.warning(
            "starved_experts",
            f"experts without a token for {STARVED_STEPS} steps in layer {layer}: {len(experts)} ({shown})",
            fix="set optim.router_loss.load_balancing to 0.01, or raise it",
        )


def newly_starved(state: TrainState, loads: Mapping[int, Sequence[float]]) -> dict[int, list[int]]:
    """The starved experts of layers in which there were none until this step; the state notes them.

    Args:
        state: of the run.
        loads: how many tokens each expert had in a step, by layer.
    """
    before = state.idle_experts
    state.idle_experts = {
        (name := f"{layer}.{expert}"): before.get(name, 0) + 1
        for layer, load in loads.items()
        for expert, tokens in enumerate(load)
        if tokens == 0
    }
    starved: dict[int, list[int]] = {}
    for name, steps in state.idle_experts.items():
        layer, expert = map(int, name.split("."))
        if steps >= STARVED_STEPS and layer not in state.starved_layers:
            starved.setdefault(layer, []).append(expert)
    state.starved_layers += starved
    return starved
