"""An objective that trains on answers which the model samples during the step, by their rewards
(REINFORCE).
"""

from collections.abc import Sequence
from typing import Any

import torch

import unisono
from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.batches.source import BatchSource, Counts, MicroBatch, RankSum, StepBatches, agree_on
from unisono.trainer.model.forward import Forward, Rows
from unisono.trainer.model.generate import generate
from unisono.trainer.plan.task_requests import SamplingParams

TOKENS = 6  # of an answer
Sampled = tuple[
    MicroBatch, list[int], list[int], float
]  # a prompt of the data, its tokens, the answer, its reward


class Rollouts(BatchSource):
    """Samples an answer to each prompt with the present weights, and keeps those that begin with an
    even token.
    """

    def __init__(self, prompts: BatchSource, forward: Forward, group: RankSum) -> None:
        self._prompts, self._forward, self._group, self._baseline = prompts, forward, group, 0.0

    def step(self, step: int) -> StepBatches:
        prompts = self._prompts.step(step)
        sampled = [self._sample(micro) for micro in prompts.micros]
        rewards = torch.tensor([sum(reward for *_, reward in sampled), len(sampled)], dtype=torch.float64)
        self._group.sum(rewards)
        kept = [self._micro(one) for one in sampled if one[2][0] % 2 == 0]
        self._baseline += 0.5 * (float(rewards[0] / rewards[1]) - self._baseline)
        tokens = sum(micro.load((0,)).tokens for micro in kept)
        counts = Counts(len(kept), TOKENS * len(kept), tokens)
        mine = StepBatches(step, prompts.sequences, kept, len(kept), tokens, counts)
        return agree_on(mine, self._group, torch.device("cpu"))

    def _sample(self, micro: MicroBatch) -> Sampled:
        rows = micro.load((0,)).rows
        prompt = rows.input_ids[: rows.lengths[0] - rows.loss_counts[0]].tolist()
        how: Any = {"max_new_tokens": TOKENS, "stop_ids": set(), "pad_id": 0}
        how["sampling"] = SamplingParams(temperature=1.0, seed=stream_seed(0, "rollouts", micro.places[0]))
        with self._forward.ready_to_generate() as model:
            (answer,) = self._forward.within(lambda: generate(model, [prompt], **how))
        return micro, prompt, answer, sum(token % 3 == 0 for token in answer) / TOKENS

    def _micro(self, sampled: Sampled) -> MicroBatch:
        micro, prompt, answer, reward = sampled
        ids = torch.tensor(prompt + answer)
        index = torch.arange(len(prompt) - 1, len(ids) - 1)
        rows = Rows(ids, torch.arange(len(ids)), [len(ids)], index, ids[index + 1], loss_counts=[TOKENS])
        columns = {"advantage": torch.tensor([reward - self._baseline])}
        loaded = unisono.Micro(rows, 1, self.row_ids(micro.sequences), columns)
        return MicroBatch(micro.sequences, micro.places, [1], lambda sides: loaded)

    def longest(self, sides: Sequence[int], *, padded: bool = False) -> MicroBatch:
        return self._micro(self._sample(self._prompts.longest(sides, padded=padded)))

    def shortest(self) -> MicroBatch:
        return self._prompts.shortest()

    def row_ids(self, sequences: Sequence[int]) -> list[str]:
        return self._prompts.row_ids(sequences)

    def examples(self) -> list[list[int]]:
        return self._prompts.examples()

    def state(self) -> dict[str, Any]:
        return {"baseline": self._baseline}

    def restore(self, state: dict[str, Any]) -> None:
        self._baseline = state["baseline"]


class Reinforce(unisono.Objective):
    """The baseline is a running mean of rewards; answers of the data, in an evaluation, have the
    advantage 1.
    """

    def source(self, rows: BatchSource, forward: Forward, group: RankSum) -> BatchSource:
        return Rollouts(rows, forward, group)

    def loss(
        self, forward: Forward, micro: unisono.Micro, *, counts: Counts, known: float = 0.0
    ) -> unisono.Part:
        log_probs = micro.rows.sums(forward.log_probs(micro.rows))
        advantages = micro.columns.get("advantage", torch.ones_like(log_probs))
        loss = -(advantages * log_probs).sum() / counts.units
        return unisono.Part(loss, loss.new_zeros(0))
