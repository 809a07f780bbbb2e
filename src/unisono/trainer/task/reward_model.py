"""A process that rates answers with a reward model: `python -m …task.reward_model FD PID`.

The protocol is that of `objectives.rewards.child`, with one function, the model. Its values are
those of `unisono eval`: answers are rendered with the template of the model's own run, so that the
tokenizer of the policy does not matter. The answers to a prompt are computed together, and no
others, so that values do not depend on which prompts are rated at the same time.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unisono.base.events import Reporter
from unisono.trainer.config.data_sections import SourceSection
from unisono.trainer.config.reward_models import MOST_TOKENS
from unisono.trainer.data import (
    Completion,
    Example,
    Exchange,
    Message,
    Preference,
    RowError,
    Turn,
    grouped,
)
from unisono.trainer.data.build import make_encoder
from unisono.trainer.model.directory import locate_tokenizer
from unisono.trainer.objectives.rewards.builtin import UnusableValueError
from unisono.trainer.objectives.rewards.calls import Function, Text
from unisono.trainer.objectives.rewards.child import LoadedFunction, main
from unisono.trainer.objectives.sampled import rows_of
from unisono.trainer.plan.task_requests import RequestedModel
from unisono.trainer.readers import register_templates
from unisono.trainer.task.evaluation_rows import evaluation_config
from unisono.trainer.task.inference import InferenceModel, encode_prompt, open_requested

_SOURCE = SourceSection(path="prompts of the policy")
_STAND_IN = "an answer"


class ModelReward:
    """Rates answers."""

    def __init__(self, opened: InferenceModel) -> None:
        """With a loaded reward model.

        Raises:
            DataError: if its template is refused.
            ModelError: if its tokenizer is.
        """
        plan = opened.target.plan
        config = evaluation_config(opened, "unused")
        self._opened = opened
        self._encoder = make_encoder(config, opened.tokenizer, locate_tokenizer(config))
        self._is_plain = config.data.plain_texts or (
            opened.template is None if plan is None else plan.data.template.startswith("none")
        )

    def __call__(
        self, prompts: Sequence[Text], completions: Sequence[Text]
    ) -> list[float | UnusableValueError]:
        """The value of each answer, or why it has none."""
        encoded = [self.encoded(*pair) for pair in zip(prompts, completions, strict=True)]
        rows = [ids for ids in encoded if not isinstance(ids, UnusableValueError)]
        values = iter(self._values(rows))
        return [ids if isinstance(ids, UnusableValueError) else next(values) for ids in encoded]

    def _values(self, rows: Iterable[list[int]]) -> list[float]:
        values: list[float] = []
        with torch.no_grad():
            for group in grouped(((ids, len(ids)) for ids in rows), most=MOST_TOKENS):
                # Any split of a row into prompt and answer: the value is that of its last token.
                batch = rows_of([(ids[:-1], ids[-1:]) for ids in group], self._opened.device)
                values += self._opened.forward.scores(batch).tolist()
        return values

    def encoded(self, prompt: Text, completion: Text) -> list[int] | UnusableValueError:
        """The tokens of a prompt and an answer, as the rows of its training have them."""
        try:
            ids = self._ids(prompt, completion)
        except RowError as error:
            return UnusableValueError(f"{error.why}; {error.fix}" if error.fix else error.why)
        if len(ids) > self._opened.context:
            return UnusableValueError(
                f"it has {len(ids):,} tokens with its prompt, and the reward model reads {self._opened.context:,}"
            )
        return ids

    def _ids(self, prompt: Text, completion: Text) -> list[int]:
        *before, answer = [*_messages(prompt, "user"), *_messages(completion, "assistant")]
        # As training data, an empty answer is a mistake, and refused; a policy may give one.
        if not answer.get("tool_calls") and not str(answer.get("content") or "").strip():
            return self._ids_of_empty(prompt, before)
        if self._is_plain and isinstance(prompt, str) and isinstance(completion, str):
            return self._ids_of_pair(Preference([Completion(prompt, completion, plain=True)] * 2))
        return self._ids_of_pair(self._pair(before, answer))

    def _ids_of_pair(self, pair: Example) -> list[int]:
        """The tokens of a pair whose sides are the same answer."""
        (unit,) = self._encoder.encode_pairs([pair])
        if isinstance(unit, RowError):
            raise unit
        return list(map(int, unit.sides[0].ids))

    def _pair(self, before: Sequence[Message], answer: Message) -> Example:
        row: Mapping[str, Any] = {"messages": list(before), "chosen": answer, "rejected": answer}
        return self._encoder.read_row("preference", row, _SOURCE)

    def _ids_of_empty(self, prompt: Text, before: Sequence[Message]) -> list[int]:
        tokenizer = self._opened.tokenizer
        if self._is_plain and isinstance(prompt, str):
            return [*encode_prompt(tokenizer, prompt, special=True), tokenizer.eos_token_id]
        pair = self._pair(before, {"role": "assistant", "content": _STAND_IN})
        if isinstance(pair, Exchange):
            return self._ids_of_pair(replace(pair, answers=[Turn("assistant", "")] * 2))
        template, _ = self._opened.chat_template()
        return encode_prompt(
            tokenizer, template.render([*before, {"role": "assistant", "content": ""}]), special=False
        )


def _messages(text: Text, role: str) -> list[Any]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def _load(functions: Sequence[Function]) -> list[LoadedFunction]:
    (entry,) = functions
    assert "run" in entry
    torch.set_num_threads(entry["threads"])
    register_templates()
    report = Reporter(None, fallback=sys.stderr)
    opened = open_requested(RequestedModel(entry["run"], None), report, answers=False)
    return [LoadedFunction(ModelReward(opened), frozenset(("prompts", "completions")))]


if __name__ == "__main__":
    main(sys.argv[1:], _load)
