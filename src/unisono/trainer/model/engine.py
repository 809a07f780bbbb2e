"""Continuous batching: answers of different age share each forward, and join and leave between two
tokens.

The answer to a prompt is that of `model.generate`: the same tokens in float32, whatever else is
computed beside it. A long prompt is read in parts, with a token of every running answer between two
of them (as in Sarathi, arXiv:2308.16369), so that a prompt delays a stream only by one part.
Answers to the same prompt that begin together read it once; with a cache of prompts, a beginning
that was read before is not read again, and a prompt waits for one with the same beginning that is
being read. A prompt with pictures is read alone
and as a whole, since what the model makes of its pictures may depend on all of it; answers to it
share the object of its pictures.

Letters: B answers of a batch, P their different prompts, L tokens so far of the longest, V
vocabulary.
"""

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.generate import (
    GREEDY,
    IsDone,
    draw_tokens,
    generate,
    penalized,
    random_numbers,
    undisturbed,
)
from unisono.trainer.model.prompt_cache import LEAST, KeptPrompt, PromptCache, beginnings, common_tokens
from unisono.trainer.plan.task_requests import SamplingParams

_TOKENS = 65_536  # in the cache of a batch, with padding
_RESERVED = 1_024  # tokens of an answer for which a place in the cache is kept when it begins
_PROMPT_TOKENS = (
    2_048  # of prompts that are read together, with padding: a short one does not wait for a long one
)
_SIMILAR = 0.75  # of the longest prompt of a batch: the length of its shortest
_COPIED = 1 << 24  # logits in a copy for drawing tokens
_SCORED = 1 << 26  # logits of a part of a prompt whose tokens are scored
_ROWS = 64  # of `answer_prompts`: more gain little on CPU
_FIRST_PART = 64  # tokens of the first part of a prompt, before the speed is known
_PART_TOKENS = 8_192  # at most, with padding
_PART_S = 1.0  # of a part that delays nobody: how soon a request that comes meanwhile can begin
_DELAY_S = 0.1  # of a part that delays running answers


class TokenGrammar(Protocol):
    """What the next token of an answer may be."""

    def take(self, token: int) -> None:
        """Continues after a token.

        Raises:
            ValueError: if it was not allowed.
        """

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely a token was, by the logits of the model alone.

    Attributes:
        token: its id.
        log_prob: its own.
        top: the most likely tokens in its place, with their log-probabilities.
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class GeneratedAnswer:
    """An answer while it is generated.

    Attributes:
        prompt: tokens; not empty.
        max_new_tokens: maximum tokens of the answer.
        sampling: how tokens are chosen; without beams.
        place: with the seed, the key of its random numbers.
        tokens: the answer so far, without the stop token.
        ended: why it has ended; None while it is generated. A caller that sets it ends the answer.
        stop_token: the token that ended it, if one did.
        log_probs: of each token, and of the stop token, at the temperature of the sampling; if the
            engine has them.
        pictures: of the prompt; None: it has none.
        grammar: selects among its tokens; None: all.
        top: most likely tokens in each place that `scores` have; None: there are no scores.
        scores: of each token, and of the stop token.
        prompt_scores: of each token of the prompt but the first, which get them if this is a list;
            None: they get none.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams
    place: int = 0
    tokens: list[int] = field(default_factory=list)
    ended: Literal["stop", "length", "dropped", "failed"] | None = None
    numbers: list[float] | None = None
    stop_token: int | None = None
    log_probs: list[float] = field(default_factory=list)
    pictures: PictureInputs | None = None
    grammar: TokenGrammar | None = None
    top: int | None = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] | None = None


@dataclass(frozen=True)
class KnownPrompts:
    """The prompts of one adapter in a cache that several share; `owner`: its name."""

    cache: PromptCache
    owner: str

    def find(self, answer: GeneratedAnswer) -> tuple[int, KeptPrompt | None]:
        """How many tokens of an answer's prompt are known, and where they are."""
        if answer.pictures is not None or answer.prompt_scores is not None:
            return 0, None
        return self.cache.find(self.owner, np.asarray(answer.prompt))


class Engine:
    """The answers that a model generates at present.

    Attributes:
        waiting: answers that have not begun, in order.
        on_failure: gets answers that have ended because an exception was raised for them, and the
            exception; without it, `step` raises it.
    """

    on_failure: Callable[[Sequence[GeneratedAnswer], Exception], None] | None = None

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: set[int],
        pad_id: int,
        rows: int,
        together: bool = True,
        part_tokens: int | None = None,
        with_log_probs: bool = False,
        allow: Callable[[torch.Tensor, Sequence[TokenGrammar]], None] | None = None,
        known: KnownPrompts | None = None,
    ) -> None:
        """An engine for a model, which the caller has put into `ready`.

        Args:
            model: a causal language model of transformers, or a peft model around one.
            stop_ids: tokens that end an answer.
            pad_id: any token; it pads batches on the left and is masked.
            rows: maximum number of answers that are computed together.
            together: whether answers may share a forward.
            part_tokens: of a prompt in one forward, so that the same answers are always computed in
                the same way; None: what measured times allow.
            with_log_probs: whether answers get the log-probabilities of their tokens.
            allow: removes what their grammars do not allow from logits (R, V), in place; only
                answers with a grammar need it.
            known: prompts that were read before; None: each is read from its first token.
        """
        self._known = known
        self._with_log_probs = with_log_probs
        self._allow = allow
        self._base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._stop_ids = stop_ids
        self._pad_id = pad_id
        self._rows = rows
        self._together = together and _keeps_all_tokens(self._base) and not _has_long_rope(self._base)
        self._batches: list[_Batch] = []
        self._reading: deque[_Batch] = deque()
        self._fixed_part_tokens = part_tokens
        self._token_s: float | None = None  # of the latest part of a prompt
        self._latest_part = _FIRST_PART // 2
        self._takes = inspect.signature(self._base.forward).parameters
        self._vocabulary = int(self._base.get_input_embeddings().weight.shape[0])
        self.waiting: list[GeneratedAnswer] = []

    @contextmanager
    def ready(self) -> Iterator[None]:
        """A context in which `step` can be called; the model's mode and settings are restored at
        its end.
        """
        with torch.no_grad(), undisturbed(self._base):
            yield

    def add(self, answer: GeneratedAnswer) -> None:
        """Queues an answer; it begins with the next step that has room for it."""
        assert answer.prompt, "the prompt has no tokens"
        assert answer.sampling.beams == 1, "the engine does not search with beams"
        self.waiting.append(answer)

    @property
    def in_parts(self) -> bool:
        """Whether long prompts are read in parts."""
        return self._together

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to generate."""
        return not self.waiting and not any(answer.ended is None for answer in self._running())

    def _running(self) -> list[GeneratedAnswer]:
        return [answer for batch in (*self._batches, *self._reading) for answer in batch.answers]

    def step(self) -> list[GeneratedAnswer]:
        """Generates one token of each answer whose prompt has been read, and reads a part of one
        prompt; returns the answers that got a token or ended.

        Answers that the caller ended before leave their place first.
        """
        self.waiting = [answer for answer in self.waiting if answer.ended is None]
        self._batches = [batch for batch in self._batches if batch.keep_running()]
        self._reading = deque(batch for batch in self._reading if batch.keep_running())
        begun = self._begin()
        since = time.perf_counter()
        moved = [answer for batch in self._batches for answer in self._attempt(batch, self._advance)]
        if not self._together:
            self._batches += begun
            return moved + [answer for batch in begun for answer in self._attempt(batch, self._advance)]
        self._reading.extend(begun)
        return moved + self._read_prompts(since)

    def _attempt(
        self, batch: "_Batch", work: Callable[["_Batch"], list["GeneratedAnswer"]]
    ) -> list[GeneratedAnswer]:
        """The result of work on a batch.

        If it raises an exception, the answers of the batch end, and of one that it has joined in
        part.
        """
        try:
            return work(batch)
        except Exception as error:  # of any kind: it must not end the answers of other batches
            if self.on_failure is None:
                raise
            spoiled = [one for one in self._batches if set(one.answers) & set(batch.answers)]
            self._fail([answer for one in (*spoiled, batch) for answer in one.answers], error)
            return []

    def _fail(self, answers: Sequence[GeneratedAnswer], error: Exception) -> None:
        failed = [answer for answer in dict.fromkeys(answers) if answer.ended is None]
        for answer in failed:
            answer.ended = "failed"
        assert self.on_failure is not None
        self.on_failure(failed, error)

    def _read_prompts(self, since: float) -> list[GeneratedAnswer]:
        """Reads the next parts of prompts; gives the answers whose prompts have been read.

        The batches take turns. Several short ones are read in the time of one part: each step
        computes a token of the running answers, which takes nearly as long for few of them.

        Args:
            since: when this step began, by time.perf_counter.
        """
        # A part may take as long as the token of the running answers, which it delays.
        most_s = max(_DELAY_S, time.perf_counter() - since) if self._batches else _PART_S
        limit = left = self._part_tokens(most_s) if self._reading else 0
        moved: list[GeneratedAnswer] = []
        while self._reading and (left > limit // 2 or self._reading[0].unread.numel() <= left):
            batch = self._reading.popleft()
            columns = self._columns(batch, left)
            left -= len(batch.unread) * columns
            moved += self._attempt(batch, partial(self._read, columns=columns))
            if moved and self._fixed_part_tokens is None and most_s == _PART_S:
                break  # they have a first token to show
        return moved

    def _columns(self, batch: "_Batch", tokens: int) -> int:
        """Columns of a batch's next part, which has about so many tokens."""
        rows, columns = batch.unread.shape
        if batch.pictures is not None:
            return columns
        if batch.scores_prompts:
            tokens = min(tokens, _SCORED // self._vocabulary)
        return min(columns, max(1, tokens // rows))

    def _read(self, batch: "_Batch", *, columns: int) -> list[GeneratedAnswer]:
        """Reads the next part of a batch's prompts; gives its answers if that was the last one.

        Args:
            batch: taken from those that are being read.
            columns: of the part.
        """
        began, moved = time.perf_counter(), []
        tokens = len(batch.unread) * columns
        if columns < batch.unread.shape[1]:
            batch.read(self._base, self._takes, columns)
            self._reading.append(batch)
        else:
            moved = self._advance(batch)
        self._token_s = (time.perf_counter() - began) / tokens
        if moved and batch.keep_running():
            self._join(batch)
        return moved

    def _part_tokens(self, most_s: float) -> int:
        """Tokens of a part that takes about so long, by the time of the latest part."""
        if self._fixed_part_tokens is not None:
            return self._fixed_part_tokens
        fitting = _FIRST_PART if self._token_s is None else int(most_s / self._token_s)
        # One that was fast by chance must not make the next one long.
        most = min(_PART_TOKENS, 2 * self._latest_part)
        self._latest_part = max(_FIRST_PART // 4, min(most, fitting))
        return self._latest_part

    def _join(self, batch: "_Batch") -> None:
        if self._batches and self._batches[0].keep_running():
            self._batches[0].join(batch)
        else:
            self._batches = [batch]

    def _begin(self) -> list["_Batch"]:
        """Batches of the waiting answers for which there is room."""
        running = self._running()
        longest = max((len(answer.prompt) + len(answer.tokens) for answer in running), default=0)
        begun: list[GeneratedAnswer] = []
        prompts: set[tuple[int, ...]] = set()
        read, has_known = 0, False
        for answer in self.waiting:
            longest = max(longest, len(answer.prompt) + min(answer.max_new_tokens, _RESERVED))
            count = len(running) + len(begun) + 1
            is_first = not running and not begun
            if not is_first and (count > self._rows or count * longest > _TOKENS):
                break
            known = self._known_tokens(answer)
            if tuple(answer.prompt) not in prompts and self._is_read_soon(answer, begun, known=known):
                break
            if begun and bool(known) != has_known:
                break  # all rows have as many columns to read
            has_known = bool(known)
            read = max(read, len(answer.prompt) - known)
            prompts.add(tuple(answer.prompt))
            if begun and len(prompts) * read > _PROMPT_TOKENS:
                break
            if self._together and begun and not _share_pictures(begun[-1], answer):
                break
            if begun and (answer.prompt_scores is None) != (begun[-1].prompt_scores is None):
                break  # all logits of a prompt are a lot
            begun.append(answer)
        self.waiting = self.waiting[len(begun) :]
        if not self._together:
            return [_Batch.of([answer], self._pad_id, self._base) for answer in begun]
        return [_Batch.of(group, self._pad_id, self._base, self._known) for group in self._alike(begun)]

    def _alike(self, answers: list[GeneratedAnswer]) -> list[list[GeneratedAnswer]]:
        """Answers in groups with prompts of similar length, as padding costs as much as tokens; the
        shortest first, as long ones make others wait.
        """
        unread = {answer: len(answer.prompt) - self._known_tokens(answer) for answer in answers}
        groups: list[list[GeneratedAnswer]] = []
        for answer in sorted(answers, key=lambda one: -unread[one]):
            if not groups or unread[answer] < _SIMILAR * unread[groups[-1][0]]:
                groups.append([])
            groups[-1].append(answer)
        return groups[::-1]

    def _known_tokens(self, answer: GeneratedAnswer) -> int:
        return 0 if self._known is None or not self._together else self._known.find(answer)[0]

    def _is_read_soon(self, answer: GeneratedAnswer, begun: Sequence[GeneratedAnswer], *, known: int) -> bool:
        """Whether more of a prompt will be known once those have been read that are being read."""
        if self._known is None or not self._together:
            return False
        ids = np.asarray(answer.prompt)
        reading = [one for batch in self._reading for one in batch.answers]
        return any(
            common_tokens(np.asarray(one.prompt), ids) >= known + LEAST
            and list(one.prompt) != list(answer.prompt)
            for one in (*reading, *begun)
        )

    def _advance(self, batch: "_Batch") -> list[GeneratedAnswer]:
        """Computes one token of each answer of a batch."""
        logits = batch.next_logits(self._base, self._takes)
        scored = [row for row, answer in enumerate(batch.answers) if answer.top is not None]
        raw = logits[scored] if scored else logits  # a copy
        adjust_logits(logits, batch.answers)
        self._apply_grammars(logits, batch.answers)
        chosen, finite = _choose(logits, batch.answers)
        if self.on_failure is not None:
            chosen = chosen.where(finite, -1)
        batch.unread = chosen[:, None].clamp(min=0)
        self._score(batch, scored, raw)
        if self._with_log_probs:
            for answer, value in zip(batch.answers, _log_probs(logits, batch), strict=True):
                answer.log_probs.append(value)
        for answer, token in zip(batch.answers, chosen.tolist(), strict=True):  # waits for the device
            if answer.max_new_tokens == 0:  # only its prompt is scored
                answer.ended = "length"
                continue
            if token < 0:
                self._fail(
                    [answer], ArithmeticError("the model computes no finite number for the next token")
                )
                continue
            self._follow_grammar(answer, token)
            if answer.ended == "failed":
                continue
            if token in self._stop_ids:
                answer.ended, answer.stop_token = "stop", token
                continue
            answer.tokens.append(token)
            if answer.ended is None and len(answer.tokens) >= answer.max_new_tokens:
                answer.ended = "length"
        return batch.answers

    @staticmethod
    def _score(batch: "_Batch", rows: list[int], logits: torch.Tensor) -> None:
        """Gives answers, the rows of a batch, the scores of their next tokens by logits (R, V)."""
        if not rows:
            return
        answers = [batch.answers[row] for row in rows]
        tops = [answer.top or 0 for answer in answers]
        for answer, score in zip(answers, token_scores(logits, batch.unread[rows, 0], tops), strict=True):
            if answer.max_new_tokens:
                answer.scores.append(score)

    def _apply_grammars(self, logits: torch.Tensor, answers: Sequence[GeneratedAnswer]) -> None:
        """Removes from logits (B, V) what the grammars of their answers do not allow."""
        rows, grammars = [], []
        for row, answer in enumerate(answers):
            if answer.grammar is not None:
                rows.append(row)
                grammars.append(answer.grammar)
        if not rows:
            return
        assert self._allow is not None, "the engine has no grammars"
        allowed = logits[rows]
        self._allow(allowed, grammars)
        logits[rows] = allowed

    def _follow_grammar(self, answer: GeneratedAnswer, token: int) -> None:
        if answer.grammar is None:
            return
        try:
            answer.grammar.take(token)
        except ValueError as error:
            if self.on_failure is None:
                raise
            self._fail([answer], error)
        else:
            if answer.grammar.is_over:
                answer.ended = "stop"


def answer_prompts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    stop_ids: set[int],
    pad_id: int,
    sampling: SamplingParams = GREEDY,
    together: bool = True,
    is_done: IsDone | None = None,
    on_answers: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The answers of `model.generate`, sooner: a place in the batch that becomes free is taken by
    the next prompt.

    Args:
        model: as for `Engine`.
        prompts: tokens of each; none may be empty.
        limits: maximum tokens of each answer; without any, it is empty.
        stop_ids: tokens that end an answer.
        pad_id: any token.
        sampling: how tokens are chosen; with beams, `generate` itself is used.
        together: whether answers may share a forward.
        is_done: called with a prompt's index and its answer so far; True ends that answer.
        on_answers: called with the number of complete answers, whenever it has grown.
    """
    if sampling.beams > 1:
        return _search(
            model,
            prompts,
            limits,
            on_answers,
            stop_ids=stop_ids,
            pad_id=pad_id,
            sampling=sampling,
            is_done=is_done,
        )
    answers = [
        GeneratedAnswer(prompt, limit, sampling, place=number)
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    # In an order that does not depend on times, and with neighbors of similar length: the cache of
    # a batch is as long as its longest row.
    engine = Engine(
        model, stop_ids=stop_ids, pad_id=pad_id, rows=_ROWS, together=together, part_tokens=_PART_TOKENS
    )
    with engine.ready():
        for answer in sorted(answers, key=lambda answer: -len(answer.prompt)):
            if answer.max_new_tokens > 0:
                engine.add(answer)
        done = len(answers) - len(engine.waiting)
        while not engine.is_idle:
            moved = engine.step()
            for answer in moved:
                if is_done is not None and answer.tokens and is_done(answer.place, answer.tokens):
                    answer.ended = "stop"
            ended = sum(answer.ended is not None for answer in moved)
            if ended and on_answers is not None:
                done += ended
                on_answers(done)
    return [answer.tokens for answer in answers]


def _search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    on_answers: Callable[[int], None] | None,
    *,
    is_done: IsDone | None,
    **options: Any,
) -> list[list[int]]:
    """Answers by beam search, those with the same limit together."""
    answers: list[list[int]] = [[] for _ in prompts]
    for limit in sorted({limit for limit in limits if limit > 0}, reverse=True):
        places = [number for number, prompt_limit in enumerate(limits) if prompt_limit == limit]
        results = generate(
            model,
            [prompts[number] for number in places],
            max_new_tokens=limit,
            on_answers=on_answers,
            is_done=None if is_done is None else _placed(is_done, places),
            **options,
        )
        for number, answer in zip(places, results, strict=True):
            answers[number] = answer
    return answers


def _placed(is_done: IsDone, places: Sequence[int]) -> IsDone:
    """`is_done` for some of the prompts, by their number among them."""
    return lambda number, answer: is_done(places[number], answer)


class _Batch:
    """Answers that share a cache, padded on the left.

    Attributes:
        answers: B of them.
        mask: (B, L), 1: a token, of the cache and what is unread of prompts; (P, L) while these are
            read.
        unread: (B, n) tokens that the cache does not have; (P, n) while prompts are read.
        pictures: of the only prompt, until it has been read; else None.
        shifts: (B,), or (P,) while prompts are read: what is added to the place of a token for its
            position. Pictures have fewer positions than tokens in some models.
        scores_prompts: whether the tokens of prompts are scored, until they have been read.
        known: where prompts are kept that have been read.
    """

    known: KnownPrompts | None = None

    def __init__(
        self,
        answers: list[GeneratedAnswer],
        mask: torch.Tensor,
        unread: torch.Tensor,
        cache: Any,
        prompts: list[int],
    ) -> None:
        """A batch of answers, each with the row of its prompt."""
        self.answers = answers
        self.mask = mask
        self.unread = unread
        self.pictures = answers[0].pictures
        self.scores_prompts = answers[0].prompt_scores is not None
        self.shifts = mask.new_zeros(len(mask))
        self._cache = cache
        self._prompts: list[int] | None = prompts  # None: they have been read

    @classmethod
    def of(
        cls, answers: list[GeneratedAnswer], pad_id: int, base: Any, known: KnownPrompts | None = None
    ) -> "_Batch":
        """A batch of answers that have not begun."""
        prompts = {prompt: row for row, prompt in enumerate(dict.fromkeys(_prompt(one) for one in answers))}
        first = {_prompt(answer): answer for answer in answers}
        kept = [known.find(first[prompt]) if known is not None else (0, None) for prompt in prompts]
        # Every row has as many columns to read: of a shorter prompt, or one of which more is known,
        # some are read again.
        read = max(len(prompt) - count for prompt, (count, _) in zip(prompts, kept, strict=True))
        kept = [(max(0, len(prompt) - read), one) for prompt, (_, one) in zip(prompts, kept, strict=True)]
        columns = max(count for count, _ in kept)
        ids = [[pad_id] * (read - len(prompt)) + list(prompt[-read:]) for prompt in prompts]
        mask = [[0] * (columns + read - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        cache = DynamicCache() if _keeps_all_tokens(base) else DynamicCache(config=base.config)
        if columns:
            for number, (keys, values) in beginnings(kept, columns).items():
                cache.update(keys, values, number)
        device = base.device
        batch = cls(
            answers,
            torch.tensor(mask, device=device),
            torch.tensor(ids, device=device),
            cache,
            [prompts[_prompt(answer)] for answer in answers],
        )
        batch.known = known
        return batch

    def read(self, base: Any, takes: Any, columns: int) -> None:
        """Moves so many columns of what is unread into the cache."""
        unread = self.unread[:, columns:]
        self.unread = self.unread[:, :columns]
        # Waits for the device: the time is measured.
        self.forward(base, takes, following=unread[:, :1])[0, 0].item()
        self.unread = unread

    def next_logits(self, base: Any, takes: Any) -> torch.Tensor:
        """(B, V) float32: logits of the next token of each answer."""
        logits = self.forward(base, takes)
        if self._prompts is None:
            return logits
        rows, self._prompts = self._prompts, None
        self.scores_prompts = False
        if self.known is not None:
            self._keep_prompts(self.known, rows)
        if rows == [*range(len(self.mask))]:
            return logits
        index = torch.tensor(rows, device=self.mask.device)
        self.mask, self.shifts = self.mask[index], self.shifts[index]
        for layer in self.layers():
            layer.keys, layer.values = layer.keys[index], layer.values[index]
        return logits[index]

    def _keep_prompts(self, known: KnownPrompts, rows: list[int]) -> None:
        """Keeps the prompts that have been read, of the answers with these rows, except those of
        which nearly all was known.
        """
        for row, answer in dict(zip(rows, self.answers, strict=True)).items():
            length = len(answer.prompt)
            if answer.pictures is not None or length < LEAST or length - known.find(answer)[0] < LEAST:
                continue
            layers = {
                number: (layer.keys[row, :, -length:], layer.values[row, :, -length:])
                for number, layer in enumerate(self._cache.layers)
                if layer.is_initialized
            }
            known.cache.keep(known.owner, np.asarray(answer.prompt), layers)

    def forward(self, base: Any, takes: Any, *, following: torch.Tensor | None = None) -> torch.Tensor:
        """(B, V) float32: logits after what is unread, (P, V) while prompts are read.

        Args:
            base: the model.
            takes: its arguments.
            following: (P, 1) tokens after a part of prompts; None: it is the last.
        """
        length = self._length + self.unread.shape[1]
        if self.mask.shape[1] < length:
            self.mask = torch.nn.functional.pad(self.mask, (0, self.unread.shape[1]), value=1)
        mask = self.mask[:, :length]
        inputs: dict[str, Any] = {"input_ids": self.unread, "attention_mask": mask}
        if self.pictures is not None:
            inputs |= self._first_inputs(base, takes)
        elif "position_ids" in takes:
            places = (mask.cumsum(-1) - 1 + self.shifts[:, None]).clamp(min=0)
            inputs["position_ids"] = places[:, -self.unread.shape[1] :]
        if "logits_to_keep" in takes:
            inputs["logits_to_keep"] = 0 if self.scores_prompts else 1
        logits = base(**inputs, past_key_values=self._cache, use_cache=True).logits
        if self.scores_prompts:
            self._score_part(logits, following)
        return logits[:, -1].float()

    def _score_part(self, logits: torch.Tensor, following: torch.Tensor | None) -> None:
        """Gives the answers scores of the prompts' tokens after each of a part, by its logits
        (P, n, V).
        """
        assert self._prompts is not None
        tokens = self.unread[:, 1:] if following is None else torch.cat([self.unread[:, 1:], following], 1)
        first = self._length - self.unread.shape[1]
        for row in set(self._prompts):
            answers = [answer for answer, its in zip(self.answers, self._prompts, strict=True) if its == row]
            gap = max(0, int(self.mask[row].argmax()) - first)
            top = max(answer.top or 0 for answer in answers)
            count = tokens.shape[1] - gap
            if count < 1:
                continue
            scores = token_scores(logits[row, gap : gap + count].float(), tokens[row, gap:], [top] * count)
            for answer in answers:
                assert answer.prompt_scores is not None
                answer.prompt_scores += scores

    def _first_inputs(self, base: Any, takes: Any) -> dict[str, torch.Tensor]:
        """The pictures of the prompt, and positions as the model counts them."""
        assert self.pictures is not None
        inputs = self.pictures.arguments(self.unread, base)
        self.pictures = None
        if "position_ids" in takes:
            # Of transformers 5: models whose pictures have positions of their own override it.
            prepare = base._prepare_position_ids_for_generation  # noqa: SLF001 - there is no public way
            positions = prepare(self.unread, {"attention_mask": self.mask, **inputs})
            # (1, T), or (axes, 1, T), which are the same at the last token, but for a first axis
            # that counts tokens.
            self.shifts = positions.flatten(0, -2)[-1, -1:] + 1 - self.unread.shape[1]
            inputs["position_ids"] = positions
        return inputs

    @property
    def _length(self) -> int:
        return int(self._cache.get_seq_length())

    def keep_running(self) -> bool:
        """Removes the answers that have ended, with their place in the cache; whether any is
        left.
        """
        kept = [row for row, answer in enumerate(self.answers) if answer.ended is None]
        if len(kept) == len(self.answers):
            return bool(kept)
        self.answers = [self.answers[row] for row in kept]
        if not kept:
            return False
        if self._prompts is not None:
            self._prompts = [self._prompts[row] for row in kept]
            return True
        rows = torch.tensor(kept, device=self.mask.device)
        self.mask, self.unread, self.shifts = self.mask[rows], self.unread[rows], self.shifts[rows]
        gap = int(self.mask.argmax(dim=1).min())  # columns that are padding in every row
        self.mask = self.mask[:, gap:]
        self.unread = self.unread[:, max(0, gap - self._length) :]
        for layer in self.layers():
            layer.keys, layer.values = layer.keys[rows, :, gap:], layer.values[rows, :, gap:]
        return True

    def join(self, other: "_Batch") -> None:
        """Takes the answers of another batch with all that its cache has."""
        length, added = self.mask.shape[1], other.mask.shape[1]
        longest = max(length, added)
        self.answers = [*self.answers, *other.answers]
        self.unread = torch.cat([self.unread, other.unread])
        self.shifts = torch.cat([self.shifts, other.shifts])
        self.mask = torch.cat(
            [_pad_left(self.mask, longest - length), _pad_left(other.mask, longest - added)]
        )
        for mine, theirs in zip(self.layers(), other.layers(), strict=True):
            for name in ("keys", "values"):
                both = (getattr(mine, name), getattr(theirs, name))
                gaps = (longest - length, longest - added)
                parts = [
                    torch.nn.functional.pad(part, (0, 0, gap, 0))
                    for part, gap in zip(both, gaps, strict=True)
                ]
                setattr(mine, name, torch.cat(parts))

    def layers(self) -> list[Any]:
        """The layers that have something in the cache: some models share that of a different
        layer.
        """
        return [layer for layer in self._cache.layers if layer.is_initialized]


def _share_pictures(one: GeneratedAnswer, other: GeneratedAnswer) -> bool:
    """Whether neither has pictures, or both have the same prompt with them."""
    if one.pictures is None or other.pictures is None:
        return one.pictures is other.pictures
    return one.pictures is other.pictures and list(one.prompt) == list(other.prompt)


def _prompt(answer: GeneratedAnswer) -> tuple[int, ...]:
    return tuple(answer.prompt)


def _pad_left(mask: torch.Tensor, gap: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (gap, 0))


def _keeps_all_tokens(base: Any) -> bool:
    """Whether attention is all that a model keeps of its past, so that rows of its cache can be
    padded and put together.

    A sliding window needs no special cache: the mask hides older tokens.
    """
    layers = DynamicCache(config=base.config).layers
    return all(type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer") for layer in layers)


def _has_long_rope(base: Any) -> bool:
    """Whether positions depend on the longest row and the last token of a forward (LongRoPE,
    arXiv:2402.13753).
    """
    return any(getattr(module, "rope_type", None) == "longrope" for module in base.modules())


def _log_probs(logits: torch.Tensor, batch: "_Batch") -> list[float]:
    """Those of the tokens that were chosen from logits (B, V), each at its temperature."""
    temperatures = [answer.sampling.temperature or 1.0 for answer in batch.answers]
    divisors = torch.tensor(temperatures, device=logits.device)[:, None]
    parts = []
    for rows in _parts([*range(len(logits))], logits):
        scaled = logits[rows] / divisors[rows]
        parts.append(scaled.gather(1, batch.unread[rows, -1:])[:, 0] - scaled.logsumexp(dim=-1))
    values: list[float] = torch.cat(parts).tolist()
    return values


def _parts(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Rows of logits (B, V), so many together that a copy of theirs stays small."""
    size = max(1, _COPIED // logits.shape[1])
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def token_scores(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> list[TokenScore]:
    """Scores of tokens (R,) by logits (R, V) float32, with so many of the most likely ones in each
    row.
    """
    if not len(tokens):
        return []
    norms = logits.logsumexp(dim=-1, keepdim=True)
    own = (logits.gather(1, tokens[:, None]) - norms)[:, 0].tolist()
    best = torch.topk(logits, min(max(tops), logits.shape[1]), dim=-1)
    values, ids = (best.values - norms).tolist(), best.indices.tolist()
    return [
        TokenScore(token, own[row], tuple(zip(ids[row][:top], values[row][:top], strict=True)))
        for row, (token, top) in enumerate(zip(tokens.tolist(), tops, strict=True))
    ]


def adjust_logits(logits: torch.Tensor, answers: Sequence[GeneratedAnswer]) -> None:
    """Applies the biases and penalties of answers to their logits (B, V), in place."""
    for row, answer in enumerate(answers):
        sampling = answer.sampling
        if sampling.logit_bias:
            tokens, biases = zip(*sampling.logit_bias, strict=True)
            index = torch.tensor(tokens, device=logits.device)
            logits[row, index] += torch.tensor(biases, device=logits.device)
        if sampling.repetition_penalty != 1:
            seen = torch.tensor([[*answer.prompt, *answer.tokens]], device=logits.device)
            logits[row : row + 1] = penalized(logits[row : row + 1], seen, sampling.repetition_penalty)
        if (sampling.presence_penalty or sampling.frequency_penalty) and answer.tokens:
            index = torch.tensor(answer.tokens, device=logits.device)
            counts = torch.zeros_like(logits[row]).index_add_(
                0, index, torch.ones_like(index, dtype=torch.float)
            )
            logits[row] -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _choose(logits: torch.Tensor, answers: Sequence[GeneratedAnswer]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, V) logits → (B,) tokens, and (B,) whether the largest logit is finite, which it is not
    where any is NaN.
    """
    largest, chosen = logits.max(dim=-1)
    for rows in (part for alike in _rows_by_sampling(answers) for part in _parts(alike, logits)):
        numbers = [_random_number(answers[row]) for row in rows]
        number = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None]
        chosen[rows] = draw_tokens(logits[rows], number, answers[rows[0]].sampling)[:, 0]
    return chosen, largest.isfinite()


def _rows_by_sampling(answers: Sequence[GeneratedAnswer]) -> list[list[int]]:
    """The rows that are sampled, those with equal settings together."""
    rows: dict[tuple[float, ...], list[int]] = {}
    for row, answer in enumerate(answers):
        sampling = answer.sampling
        if sampling.temperature > 0:
            key = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
            rows.setdefault(key, []).append(row)
    return list(rows.values())


def _random_number(answer: GeneratedAnswer) -> float:
    """The number in [0, 1) that selects the next token of an answer."""
    if answer.numbers is None:
        numbers = random_numbers(answer.sampling.seed, answer.place, answer.max_new_tokens)
        answer.numbers = numbers.tolist()
    return answer.numbers[len(answer.tokens)]
