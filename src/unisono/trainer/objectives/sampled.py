"""Sampled answers, with all that is kept of them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from unisono.trainer.objectives.rewards.calls import RewardCall, Scored


@dataclass
class SampledAnswer:
    """An answer that the model has sampled.

    Attributes:
        prompt: tokens.
        tokens: of the answer, with the stop token that ended it.
        log_probs: of each of them, when it was sampled, at the temperature of sampling.
        text: without special tokens.
        is_truncated: whether it reached the maximum length.
        rewards: by the name of the function; None where one does not apply.
        reward: their weighted sum; None if the answer has left its group.
        advantage: 0 without a reward.
        has_loss: whether its tokens count in the loss.
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
            if isinstance(prompt, str)
            else [[{"role": "assistant", "content": text}] for text in texts],
            completion_ids=[answer.tokens for answer in self.answers],
            columns=self.record["columns"],
        )

    def take(self, scored: Scored) -> None:
        """Gives the answers their rewards."""
        for answer, rewards, total in zip(self.answers, scored.rewards, scored.totals, strict=True):
            answer.rewards, answer.reward = rewards, total
