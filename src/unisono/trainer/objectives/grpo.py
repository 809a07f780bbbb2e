"""GRPO and its kin: the model samples groups of answers, and those with higher rewards than others
of their group become likelier (arXiv:2402.03300).
"""

from dataclasses import dataclass

import torch

from unisono.trainer.batches.source import BatchSource, Counts, Micro, SourceRank
from unisono.trainer.batches.table import TableSource
from unisono.trainer.config.rollout_sections import GrpoSection, RolloutSection
from unisono.trainer.model.forward import Forward
from unisono.trainer.objectives.objective import Objective, Part, sums_of
from unisono.trainer.objectives.policy import POLICY_METRICS, PolicyBatch, policy_loss
from unisono.trainer.objectives.rewards.pool import RewardPool
from unisono.trainer.objectives.rollouts import RolloutSource
from unisono.trainer.objectives.samplers.own_engine import OwnEngine
from unisono.trainer.objectives.samplers.sampler import EndTokens, Sampler
from unisono.trainer.objectives.samplers.vllm_sampler import VllmSampler, check_server
from unisono.trainer.plan import RunPlan

_DIFFERENCE = "sampler_difference"


@dataclass(frozen=True)
class Grpo(Objective):
    """The loss of sampled answers by their advantages.

    Metrics besides those of `policy`: how far the log-probabilities of the sampler are from those
    of the training forward, a mean over tokens. All are those of answers that have a part in the
    gradient.
    """

    rollout: RolloutSection
    section: GrpoSection
    metrics = (_DIFFERENCE, *POLICY_METRICS)

    def check(self, plan: RunPlan, *, rank: int) -> None:
        """Asks the server that samples what it can do, if there is one."""
        if rank == 0 and self.rollout.engine == "vllm":
            check_server(plan)

    def source(self, rows: BatchSource, forward: Forward, group: SourceRank) -> BatchSource:
        """Sampled answers to the prompts of the data."""
        assert isinstance(rows, TableSource)
        config = group.plan.config
        waited = 0

        def show_wait(text: str) -> None:
            nonlocal waited
            waited += 1  # each call has a deadline, so waiting is progress
            group.enter("reward", done=waited)
            group.show("reward", f"waiting for {text}")

        pool = RewardPool(config.rewards, group.plan.code_digests, on_wait=show_wait)
        ends = EndTokens.of(rows, forward)
        sampler: Sampler = (
            VllmSampler(forward, group, rows, ends)
            if self.rollout.engine == "vllm"
            else OwnEngine(forward, group, ends)
        )
        return RolloutSource(rows, forward, group, pool.start(), sampler)

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """The micro batch's part of the loss."""
        del known
        rows, columns, temperature = micro.rows, micro.columns, self.rollout.temperature
        new = forward.log_probs(rows, temperature=temperature)
        reference = None
        if self.section.beta:
            with torch.no_grad(), forward.without_adapter():
                reference = forward.log_probs(rows, temperature=temperature)
        sampled = columns["sampled"]
        batch = PolicyBatch(
            new,
            # In the only step of a rollout the weights are those that sampled.
            sampled if self.rollout.steps > 1 else new.detach(),
            reference,
            columns["advantage"],
            rows.loss_counts,
            columns["has_loss"],
        )
        part = policy_loss(
            batch,
            self.section,
            answers=counts.units,
            loss_tokens=counts.loss_tokens,
            max_new_tokens=self.rollout.max_new_tokens,
        )
        difference = sums_of((new.detach() - sampled).abs())
        return Part(part.loss, torch.cat([difference, part.sums]))
