"""The seam between a rollout and what samples its answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from unisono.base.causes import Verdict
from unisono.trainer.batches.table import TableSource
from unisono.trainer.model.engine import GeneratedAnswer
from unisono.trainer.model.forward import Forward

T = TypeVar("T")


@dataclass(frozen=True)
class EndTokens:
    """Tokens that end answers, or fill rows.

    Attributes:
        stop_ids: tokens that end an answer.
        pad_id: any token.
        of_pictures: those of stop_ids that stand for a feature of a picture: no model can read one
            that it wrote.
    """

    stop_ids: frozenset[int]
    pad_id: int
    of_pictures: frozenset[int] = frozenset()

    @classmethod
    def of(cls, prompts: TableSource, forward: Forward) -> Self:
        """Those of a model and the chat template of its prompts."""
        tokenizer = forward.loaded.tokenizer
        stop_ids = set(prompts.rows.table.stop_ids) | ({tokenizer.eos_token_id} - {None})
        pad_id = tokenizer.pad_token_id
        contents = prompts.rows.contents
        of_pictures = frozenset(() if contents is None else contents.loader.feature_ids)
        pad = next(iter(stop_ids), 0) if pad_id is None else pad_id
        return cls(of_pictures.union(stop_ids), pad, of_pictures)


class AnswerSampler(Protocol):
    """Answers of the present model."""

    def with_weights(self, version: int, use: Callable[[], T]) -> T:
        """The result of `use`, in which `sample` can be called, and samples with the present
        weights. All ranks must call it alike.

        Args:
            version: optimizer steps that the weights have made; the same version has the same
                weights.
            use: may call `sample` any number of times on each rank.

        Raises:
            SourceFailed: on all ranks, if the weights do not reach the sampler.
            SourceStopped: on all ranks, if a stop request came meanwhile.
        """

    def figures(self) -> dict[str, float]:
        """Figures of how the latest weights reached the sampler, for the metrics; empty if nothing
        was sent.
        """

    def sample(self, answers: Sequence[GeneratedAnswer]) -> Verdict | None:
        """Completes answers of this rank.

        Args:
            answers: none has begun. Those to the same prompt follow each other, with the places 0,
                1, … and the same sampling.

        Returns:
            why they cannot be sampled; None: all are complete.

        Raises:
            StopRequested: if a stop request came before they were.
        """

    def close(self) -> None:
        """Ends what the sampler has started."""
