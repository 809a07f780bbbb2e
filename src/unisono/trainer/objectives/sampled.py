"""Sampled answers, with all that is kept of them, and as rows of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Self

import torch

from unisono.trainer.model.forward import Rows
from unisono.trainer.objectives.rewards.calls import RewardCall, Scored


@dataclass(frozen=True)
class EnvironmentReward:
    """What an environment gives an answer.

    Attributes:
        name: of its class.
        value: None if it does not apply.
        weight: in the sum of rewards.
        leaves: whether the answer leaves its group, as a call of the environment failed.
    """

    name: str
    value: float | None
    weight: float
    leaves: bool


@dataclass
class SampledAnswer:
    """An answer that the model has sampled.

    Attributes:
        prompt: tokens.
        tokens: of the answer, with the stop token that ended it; with an environment those of all
            turns, and what tools gave between them.
        log_probs: of each token that the model wrote, when it was sampled, at the temperature of
            sampling.
        text: without special tokens.
        is_truncated: whether it reached the maximum length.
        rewards: by the name of the function; None where one does not apply.
        reward: their weighted sum; None if the answer has left its group.
        advantage: 0 without a reward.
        has_loss: whether its tokens count in the loss.
        is_sampled: of each token, whether the model wrote it; None: it wrote all.
        messages: of all turns and tools; None without an environment.
        turns: of the model.
        refused_calls: calls of tools that gave the model an error.
        environment: its reward; None without one.
    """

    prompt: Sequence[int]
    tokens: list[int]
    log_probs: list[float]
    text: str
    is_truncated: bool
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    advantage: float = 0.0
    has_loss: bool = True
    is_sampled: list[bool] | None = None
    messages: list[dict[str, Any]] | None = None
    turns: int = 1
    refused_calls: int = 0
    environment: EnvironmentReward | None = None

    @property
    def written(self) -> int:
        """The number of tokens that the model wrote."""
        return len(self.tokens) if self.is_sampled is None else sum(self.is_sampled)

    @classmethod
    def of(cls, prompt: Sequence[int], generated: Any, tokenizer: Any) -> Self:
        """From what the engine has generated; `tokenizer` of transformers."""
        stop = [] if generated.stop_token is None else [generated.stop_token]
        return cls(
            prompt,
            [*generated.tokens, *stop],
            generated.log_probs,
            tokenizer.decode(generated.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            is_truncated=generated.ended == "length",
        )


@dataclass
class AnswerGroup:
    """The answers to a prompt.

    Attributes:
        step: optimizer step that trains on them.
        place: of the prompt in the endless order.
        sequence: of the prompt.
        row: origin of the prompt, e.g. `train.jsonl:17`.
        prompt: tokens.
        record: of the row, see `data.token_table`.
        answers: in order.
        is_equal: whether all rewards are equal, so that nothing can be learned.
        draw: 0 for the prompt of that place; else the number of the prompt that was drawn instead,
            since all rewards to the one before were equal.
        is_replaced: whether another prompt was drawn, so that nothing is trained on these answers.
        stored: the row of the prompt in the file of tokens.
    """

    step: int
    place: int
    sequence: int
    row: str
    prompt: list[int]
    record: dict[str, Any]
    answers: list[SampledAnswer] = field(default_factory=list)
    is_equal: bool = False
    draw: int = 0
    is_replaced: bool = False
    stored: int = -1

    @property
    def is_same(self) -> bool:
        """Whether all answers are the same."""
        return all(answer.tokens == self.answers[0].tokens for answer in self.answers)

    def call(self) -> RewardCall:
        """What rewards get of it."""
        prompt, texts = self.record["prompt"], [answer.text for answer in self.answers]
        return RewardCall(
            row=self.row,
            prompt=prompt,
            completions=texts
            if isinstance(prompt, str) and self.answers[0].messages is None
            else [
                answer.messages or [{"role": "assistant", "content": answer.text}] for answer in self.answers
            ],
            completion_ids=[answer.tokens for answer in self.answers],
            columns=self.record["columns"],
        )

    def take(self, scored: Scored) -> None:
        """Gives the answers their rewards, with that of an environment."""
        pairs = zip(scored.rewards, scored.totals, strict=True)
        for number, (answer, (rewards, total)) in enumerate(zip(self.answers, pairs, strict=True)):
            extra, answer.rewards, answer.reward = answer.environment, rewards, total
            if extra is not None and extra.value is not None:
                answer.rewards = rewards | {extra.name: extra.value}
                answer.reward = (total or 0.0) + extra.weight * extra.value
            if number in scored.skipped or (extra is not None and extra.leaves):
                answer.reward = None


def rows_of(
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device,
    *,
    is_sampled: Sequence[Sequence[bool] | None] | None = None,
) -> Rows:
    """The rows of prompts with their answers.

    Args:
        answers: tokens of prompt and answer.
        device: of the tensors.
        is_sampled: of each token of an answer, whether it is a loss token; None: all are.
    """
    ids: list[int] = []
    positions: list[int] = []
    index: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    for number, (prompt, tokens) in enumerate(answers):
        start = len(ids)
        ids += [*prompt, *tokens]
        lengths.append(len(ids) - start)
        positions += range(lengths[-1])
        mask = None if is_sampled is None else is_sampled[number]
        predicted = range(start + len(prompt) - 1, len(ids) - 1)
        index += predicted if mask is None else compress(predicted, mask)
        counts.append(len(tokens) if mask is None else sum(mask))
    input_ids, label_index = torch.tensor(ids, device=device), torch.tensor(index, device=device)
    return Rows(
        input_ids,
        torch.tensor(positions, device=device),
        lengths,
        label_index,
        input_ids[label_index + 1],
        loss_counts=counts,
    )
