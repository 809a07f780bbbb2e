"""GRPO and its kin: the model samples groups of answers, and those with higher rewards than others
of their group become likelier (arXiv:2402.03300).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from unisono.trainer.batches.source import BatchSource, Counts, Micro, SourceRank
from unisono.trainer.batches.table import TableSource
from unisono.trainer.config.rollout_sections import GrpoSection, RolloutSection
from unisono.trainer.model.forward import Forward
from unisono.trainer.model.load import uses_dropout
from unisono.trainer.objectives.environments.episodes import player_in
from unisono.trainer.objectives.environments.pool import EnvironmentPool
from unisono.trainer.objectives.objective import Objective, Part, sums_of
from unisono.trainer.objectives.policy import (
    POLICY_METRICS,
    PolicyBatch,
    correction_weights,
    k3,
    limited,
    policy_loss,
)
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.objectives.rollouts import RolloutSource
from unisono.trainer.objectives.samplers.own_engine import OwnEngine
from unisono.trainer.objectives.samplers.sampler import AnswerSampler, EndTokens
from unisono.trainer.objectives.samplers.vllm_checks import check_server
from unisono.trainer.objectives.samplers.vllm_sampler import VllmSampler
from unisono.trainer.objectives.signs import Sign, policy_signs
from unisono.trainer.objectives.starting_model import starting_model
from unisono.trainer.plan import RunPlan

_SAMPLER = ("sampler_difference", "sampler_kl", "correction", "effective_samples")


@dataclass(frozen=True)
class Grpo(Objective):
    """The loss of sampled answers by their advantages.

    Metrics besides those of `policy`, means over the tokens of answers that have a part in the
    gradient: how far the log-probabilities of the sampler are from those of the training forward,
    their divergence (k3), the weights of the correction, and the share of effective samples, (Σ
    w)² / (n Σ w²), which is 1 for equal weights. Those that compare the sampler with the training
    are absent with a model that has dropout, which is off while it samples.
    """

    rollout: RolloutSection
    section: GrpoSection
    metrics = (*_SAMPLER, *POLICY_METRICS)

    def check(self, plan: RunPlan, *, rank: int) -> None:
        """Asks the server that samples what it can do, if there is one."""
        if rank == 0 and self.rollout.engine == "vllm":
            check_server(plan)

    def source(self, rows: BatchSource, forward: Forward, group: SourceRank) -> BatchSource:
        """Sampled answers to the prompts of the data."""
        assert isinstance(rows, TableSource)
        config = group.plan.config
        waited, is_loaded = 0, False

        def show_wait(phase: str, text: str) -> None:
            nonlocal waited
            waited += 1  # each call has a deadline, so waiting is progress
            group.enter(phase, done=waited)
            group.show(phase, f"waiting for {text}")
            if is_loaded:  # before, the ranks do not yet agree on an end: the first step does
                group.end_if_stopped()

        digests, threads = group.plan.code_digests, group.plan.threads
        pool = RewardPool(config.rewards, digests, partial(show_wait, "reward"), threads=threads)
        ends = EndTokens.of(rows, forward)
        sampler: AnswerSampler = (
            VllmSampler(forward, group, rows, ends)
            if self.rollout.engine == "vllm"
            else OwnEngine(forward, group, ends)
        )
        pool.start()
        player = None
        if self.rollout.environment is not None:
            environment = EnvironmentPool(self.rollout.environment, digests, partial(show_wait, "rollout"))
            player = player_in(
                environment, config, forward.loaded.tokenizer, stop_ids=ends.stop_ids, table=rows.rows.table
            )
        is_loaded = True
        reference = starting_model(group) if self.section.beta else None
        return RolloutSource(rows, forward, group, pool, sampler, player, reference)

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        rows, columns, temperature = micro.rows, micro.columns, self.rollout.temperature
        new = forward.log_probs(rows, temperature=temperature)
        reference = columns.get("reference")
        if self.section.beta and reference is None:
            with torch.no_grad(), forward.without_adapter():
                reference = forward.log_probs(rows, temperature=temperature)
        sampled, section = columns["sampled"], self.section
        log_ratios, weights = new.detach() - sampled, None
        if section.correction != "none":
            weights = correction_weights(
                log_ratios, rows.loss_counts, kind=section.correction, cap=section.correction_cap
            )
        batch = PolicyBatch(
            new,
            # In the only step of a rollout the weights are those that sampled.
            sampled if self.rollout.steps > 1 else new.detach(),
            reference,
            columns["advantage"],
            rows.loss_counts,
            columns["has_loss"],
            weights,
        )
        part = policy_loss(
            batch,
            section,
            answers=counts.units,
            loss_tokens=counts.loss_tokens,
            max_new_tokens=self.rollout.max_new_tokens,
        )
        none = log_ratios[:0]
        weights = none if weights is None else weights
        compared = none if uses_dropout(forward.loaded) else log_ratios
        of_sampler = sums_of(compared.abs(), k3(limited(compared)), weights, weights.square())
        return Part(part.loss, torch.cat([of_sampler, part.sums]))

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """The metrics of a step."""
        means = super().figures(sums, known=known)
        if square := means.pop("effective_samples", 0.0):
            means["effective_samples"] = means["correction"] ** 2 / square
        return means

    def signs(self, figures: Mapping[str, float]) -> Sequence[Sign]:
        """Rewards without a signal, answers without an end, a policy that collapses or explodes."""
        return policy_signs(figures, self.rollout)
