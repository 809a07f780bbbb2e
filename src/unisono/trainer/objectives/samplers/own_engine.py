"""The model of the rank as the sampler, with its own weights and layers: nothing has to be sent."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unisono.trainer.batches.source import SourceRank
from unisono.trainer.model.engine import Engine, GeneratedAnswer
from unisono.trainer.model.forward import Forward
from unisono.trainer.objectives.samplers.sampler import EndTokens

_ROWS = 512  # answers that are computed together
_PART_TOKENS = 8_192
_SHOWN_S = 5.0  # between two lines on a long rollout
T = TypeVar("T")


class OwnEngine:
    """See `sampler.AnswerSampler`."""

    def __init__(self, forward: Forward, rank: SourceRank, ends: EndTokens) -> None:
        """A sampler that is ready."""
        self._forward, self._rank, self._ends = forward, rank, ends
        self._model: Any = None  # while it is ready to generate

    def with_weights(self, version: int, use: Callable[[], T]) -> T:
        """The result of `use`: the weights are those that are trained."""
        del version
        with self._forward.ready_to_generate() as self._model:
            return self._forward.within(use, apart=True)  # each rank has other answers

    def figures(self) -> dict[str, float]:
        """None: nothing is sent."""
        return {}

    def sample(self, answers: Sequence[GeneratedAnswer]) -> None:
        """Completes answers."""
        engine = Engine(
            self._model,
            stop_ids=set(self._ends.stop_ids),
            pad_id=self._ends.pad_id,
            rows=_ROWS,
            part_tokens=_PART_TOKENS,
            with_log_probs=True,
        )
        rank, tokens, shown = self._rank, 0, time.monotonic()
        rank.enter("rollout", done=0)
        with engine.ready():
            for answer in sorted(answers, key=lambda answer: -len(answer.prompt)):
                engine.add(answer)
            while not engine.is_idle:
                engine.step()
                tokens += 1
                rank.enter("rollout", done=tokens)
                rank.end_if_stopped()
                if time.monotonic() - shown > _SHOWN_S:  # a rank that others may wait for
                    shown = time.monotonic()
                    ended = sum(answer.ended is not None for answer in answers)
                    rank.show("rollout", "sampling answers", done=ended, total=len(answers))

    def close(self) -> None:
        """Nothing was started."""
