"""The task `serve` for models that write no answers: embeddings of texts, the scores of a reward
model, and the labels of a classifier.

Texts of several requests share a forward; each has the tokens that it has in training.
"""

import base64
import queue
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, normalize

from unisono.base.errors import UnisonoError
from unisono.base.events import Reporter
from unisono.trainer.data import grouped
from unisono.trainer.model.sentence_files import SentenceSettings, read_sentence_files
from unisono.trainer.objectives.rewards.builtin import UnusableValueError
from unisono.trainer.objectives.sampled import rows_of
from unisono.trainer.plan.talk_messages import (
    Ask,
    Drop,
    FailedAsk,
    Gives,
    Ping,
    Ready,
    RefusedAsk,
    TextsRequest,
    Valued,
    encode_news,
)
from unisono.trainer.task.inference import InferenceModel, TooManyTokens, encode_prompt
from unisono.trainer.task.prompts import (
    Prepared,
    PromptProcess,
    PromptReaders,
    RefusedPrompt,
    TextInputs,
    describe_failure,
)
from unisono.trainer.task.reward_model import ModelReward

_TOKENS = 8_192  # per forward, with those of other requests


@dataclass(frozen=True)
class ValueModel:
    """A loaded model that gives values of texts."""

    opened: InferenceModel

    @property
    def gives(self) -> Gives:
        """What it gives."""
        head = self.opened.target.head
        if head is None:
            return "embeddings"
        return "labels" if head.labels else "scores"

    @cached_property
    def most_tokens(self) -> int:
        """Of a text."""
        if self.gives != "embeddings":
            return self.opened.context
        return min(self.opened.context, self._settings.max_length)

    @cached_property
    def _settings(self) -> SentenceSettings:
        target = self.opened.target
        if target.plan is not None:
            return SentenceSettings(target.plan.config.embed, target.plan.config.data.max_length)
        return read_sentence_files(target.weights)

    @cached_property
    def _reward(self) -> ModelReward:
        return ModelReward(self.opened)

    def read(self, question: TextsRequest) -> TextInputs:
        """The tokens of the texts of a request.

        Raises:
            RefusedPrompt: if one has none, or too many.
        """
        try:
            if question.seconds and self.gives == "scores":
                rows = [
                    self._ids_of_pair(*pair) for pair in zip(question.texts, question.seconds, strict=True)
                ]
            else:
                texts = (*question.texts, *question.seconds)
                rows = [self._ids(number, text, question) for number, text in enumerate(texts)]
        except UnisonoError as error:
            raise RefusedPrompt("input", error.problems[0].what, error.problems[0].fix) from error
        return TextInputs(rows)

    def _ids_of_pair(self, text: Any, answer: str) -> list[int]:
        ids = self._reward.encoded(text, answer)
        if isinstance(ids, UnusableValueError):
            raise RefusedPrompt("text_2", str(ids))
        return ids

    def _ids(self, number: int, text: str | list[int], question: TextsRequest) -> list[int]:
        """The tokens of a text as `tokenizer(text)` gives them."""
        limit, cut = self.most_tokens, question.most_tokens
        if cut is not None:
            limit = limit if cut < 0 else min(cut, limit)
        ids = (
            self._ids_of_tokens(text) if isinstance(text, list) else self._ids_of_text(number, text, question)
        )
        if not ids:
            raise RefusedPrompt("input", f"text {number} has no tokens", "write a text")
        if len(ids) <= limit:
            return ids
        if cut is None:
            raise RefusedPrompt("length", self._too_long(number, str(len(ids))))
        if isinstance(text, list):
            return ids[:limit]
        # The tokenizer keeps the special tokens at the end of a text that it cuts.
        return list(self.opened.tokenizer(text, truncation=True, max_length=limit)["input_ids"])

    def _ids_of_text(self, number: int, text: str, question: TextsRequest) -> list[int]:
        section = self._settings.section if question.prefix is not None else None
        if section is not None:
            text = (section.query_prefix if question.prefix == "query" else section.document_prefix) + text
        most = self.most_tokens if question.most_tokens is None else None
        try:
            return encode_prompt(self.opened.tokenizer, text, special=True, most=most)
        except TooManyTokens as error:
            raise RefusedPrompt("length", self._too_long(number, f"more than {error.least}")) from None

    def _ids_of_tokens(self, ids: list[int]) -> list[int]:
        vocabulary = int(self.opened.forward.loaded.base.get_input_embeddings().weight.shape[0])
        odd = next((i for i in ids if not 0 <= i < vocabulary), None)
        if odd is not None:
            what = f"the model has no token {odd}"
            raise RefusedPrompt("input", what, f"its tokens are 0 to {vocabulary - 1}")
        return ids

    def _too_long(self, number: int, tokens: str) -> str:
        return (
            f"text {number} has {tokens} tokens, but the model reads {self.most_tokens};"
            " truncate_prompt_tokens: -1 cuts it"
        )

    def values(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """(R, E) float32 on the CPU: an embedding, a score, or probabilities of labels for each row
        of tokens.
        """
        forward, head = self.opened.forward, self.opened.target.head
        micro = rows_of([(ids[:-1], ids[-1:]) for ids in rows], self.opened.device)
        if head is None:
            section = self._settings.section
            values = forward.embeddings(micro, pooling=section.pooling).float()
            values = normalize(values, dim=-1) if section.normalize else values
        else:
            values = forward.row_values(micro).float()
            if head.labels:
                values = values.sigmoid() if head.multi_label else values.softmax(-1)
        return values.cpu()


@dataclass
class _Work:
    """A request whose tokens are known, and the values of its first texts."""

    id: int
    question: TextsRequest
    rows: list[list[int]]
    parts: list[torch.Tensor] = field(default_factory=list)
    begun: int = 0  # rows that have been given to the model

    def take(self, most: int) -> list[list[int]]:
        """The next rows, of at most so many tokens together, but at least one."""
        chosen = next(grouped(((ids, len(ids)) for ids in self.rows[self.begun :]), most=most))
        self.begun += len(chosen)
        return chosen

    def valued(self) -> Valued:
        """The values of all texts, or of pairs."""
        values = torch.cat(self.parts)
        count = len(self.question.texts)
        if self.question.seconds and len(values) > count:  # embeddings of both sides
            values = cosine_similarity(values[:count], values[count:])[:, None]
        texts = tuple(base64.b64encode(row.numpy().tobytes()).decode() for row in values)
        return Valued(self.id, texts, sum(map(len, self.rows)))


def serve_values(
    opened: InferenceModel, lines: "queue.SimpleQueue[Any]", report: Reporter
) -> Mapping[str, object]:
    """Answers requests with values until stdin ends."""
    model = ValueModel(opened)
    head = opened.target.head
    prompts = PromptProcess(PromptReaders({"": model}), lines)
    ready = Ready(
        opened.target.description,
        "",
        model.most_tokens,
        in_parts=True,
        gives=model.gives,
        labels=head.labels if head is not None else (),
        width=int(opened.forward.loaded.base.config.get_text_config().hidden_size),
    )
    report.send(encode_news(ready))
    desk = _ValueDesk(model, prompts, report)
    with torch.no_grad():
        while desk.take(lines):
            desk.step()
    prompts.close()
    return {"answers": desk.answered}


class _ValueDesk:
    """The requests, and the model that gives their values.

    Attributes:
        answered: number of complete requests.
    """

    def __init__(self, model: ValueModel, prompts: PromptProcess, report: Reporter) -> None:
        self._model = model
        self._prompts = prompts
        self._report = report
        self._unread: set[int] = set()
        self._works: deque[_Work] = deque()
        self.answered = 0

    def take(self, lines: "queue.SimpleQueue[Any]") -> bool:
        """Takes all messages that have arrived, after waiting for one if there is nothing to do;
        False at their end.
        """
        while True:
            try:
                message = lines.get(block=not self._works)
            except queue.Empty:
                return True
            match message:
                case None:
                    return False
                case Ping():
                    self._report.send({"kind": "pong"})
                case Drop():
                    self._unread.discard(message.id)
                    self._works = deque(work for work in self._works if work.id != message.id)
                case Ask():
                    self._unread.add(message.id)
                    self._prompts.submit(message)
                case Prepared() if message.ask.id in self._unread:
                    self._begin(message)

    def _begin(self, prepared: Prepared) -> None:
        self._unread.remove(prepared.ask.id)
        prompt, question = prepared.prompt, prepared.ask.question
        if isinstance(prompt, RefusedAsk | FailedAsk):
            self._report.send(encode_news(prompt))
            return
        assert isinstance(prompt, TextInputs)
        assert isinstance(question, TextsRequest)
        self._works.append(_Work(prepared.ask.id, question, prompt.rows))

    def step(self) -> None:
        """Computes one forward, and sends what is complete; a request of many texts takes turns
        with others.
        """
        works, rows, room = [], [], _TOKENS
        while self._works and room > 0:
            work = self._works.popleft()
            chosen = work.take(room)
            works.append((work, len(chosen)))
            rows += chosen
            room -= sum(map(len, chosen))
        try:
            values = self._model.values(rows)
        except Exception as error:  # noqa: BLE001 - the edge of requests: later ones continue
            torch.zeros(1, device=self._model.opened.device).item()  # raises if a GPU is unusable
            for work, _ in works:
                self._report.send(encode_news(describe_failure(work.id, error)))
            return
        for work, count in works:
            part, values = values[:count], values[count:]
            self._end(work, part)

    def _end(self, work: _Work, part: torch.Tensor) -> None:
        work.parts.append(part)
        if work.begun < len(work.rows):
            self._works.append(work)
            return
        if not all(bool(part.isfinite().all()) for part in work.parts):
            error = ArithmeticError("the model computes no finite value for a text")
            self._report.send(encode_news(describe_failure(work.id, error)))
            return
        self.answered += 1
        self._report.send(encode_news(work.valued()))
