"""Continuous batching: answers of different age share each forward, and join and leave between two
tokens.

The answer to a prompt is that of `model.generate`: the same tokens in float32, whatever else is
computed beside it. A long prompt is read in parts, with a token of every running answer between two
of them (as in Sarathi, arXiv:2308.16369), so that a prompt delays a stream only by one part.
Answers to the same prompt that begin together read it once. A prompt with pictures is read alone
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
from typing import Any, Literal

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
from unisono.trainer.plan.task_requests import SamplingParams

_TOKENS = 65_536  # in the cache of a batch, with padding
_RESERVED = 1_024  # tokens of an answer for which a place in the cache is kept when it begins
_PROMPT_TOKENS = (
    2_048  # of prompts that are read together, with padding: a short one does not wait for a long one
)
_COPIED = 1 << 24  # logits in a copy for drawing tokens
_ROWS = 64  # of `answer_prompts`: more gain little on CPU
_FIRST_PART = 64  # tokens of the first part of a prompt, before the speed is known
_PART_TOKENS = 8_192  # at most, with padding
_PART_S = 1.0  # of a part that delays nobody: how soon a request that comes meanwhile can begin
_DELAY_S = 0.1  # of a part that delays running answers


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
        """
        self._with_log_probs = with_log_probs
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
        if self._reading:
            moved += self._attempt(self._reading.popleft(), partial(self._read, since=since))
        return moved

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

    def _read(self, batch: "_Batch", *, since: float) -> list[GeneratedAnswer]:
        """Reads the next part of the prompts of a batch; the batches take turns.

        Returns its answers if that was the last part.

        Args:
            batch: taken from those that are being read.
            since: when this step began, by time.perf_counter.
        """
        # A part may take as long as the token of the running answers, which it delays.
        most_s = max(_DELAY_S, time.perf_counter() - since) if self._batches else _PART_S
        columns = max(1, self._part_tokens(most_s) // len(batch.unread))
        began, moved = time.perf_counter(), []
        is_whole = columns >= batch.unread.shape[1] or batch.pictures is not None
        tokens = len(batch.unread) * (batch.unread.shape[1] if is_whole else columns)
        if not is_whole:
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
        read = 0
        for answer in self.waiting:
            longest = max(longest, len(answer.prompt) + min(answer.max_new_tokens, _RESERVED))
            count = len(running) + len(begun) + 1
            read = max(read, len(answer.prompt))
            is_first = not running and not begun
            if not is_first and (count > self._rows or count * longest > _TOKENS):
                break
            prompts.add(tuple(answer.prompt))
            if begun and len(prompts) * read > _PROMPT_TOKENS:
                break
            if self._together and begun and not _share_pictures(begun[-1], answer):
                break
            begun.append(answer)
        self.waiting = self.waiting[len(begun) :]
        if not self._together:
            return [_Batch.of([answer], self._pad_id, self._base) for answer in begun]
        return [_Batch.of(begun, self._pad_id, self._base)] if begun else []

    def _advance(self, batch: "_Batch") -> list[GeneratedAnswer]:
        """Computes one token of each answer of a batch."""
        logits = batch.next_logits(self._base, self._takes)
        chosen, finite = _choose(logits, batch.answers)
        if self.on_failure is not None:
            chosen = chosen.where(finite, -1)
        batch.unread = chosen[:, None].clamp(min=0)
        if self._with_log_probs:
            for answer, value in zip(batch.answers, _log_probs(logits, batch), strict=True):
                answer.log_probs.append(value)
        for answer, token in zip(batch.answers, chosen.tolist(), strict=True):  # waits for the device
            if token < 0:
                self._fail(
                    [answer], ArithmeticError("the model computes no finite number for the next token")
                )
                continue
            if token in self._stop_ids:
                answer.ended, answer.stop_token = "stop", token
                continue
            answer.tokens.append(token)
            if len(answer.tokens) >= answer.max_new_tokens:
                answer.ended = "length"
        return batch.answers


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
    """

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
        self.shifts = mask.new_zeros(len(mask))
        self._cache = cache
        self._prompts: list[int] | None = prompts  # None: they have been read

    @classmethod
    def of(cls, answers: list[GeneratedAnswer], pad_id: int, base: Any) -> "_Batch":
        """A batch of answers that have not begun."""
        prompts = {prompt: row for row, prompt in enumerate(dict.fromkeys(_prompt(one) for one in answers))}
        longest = max(map(len, prompts))
        ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        cache = DynamicCache() if _keeps_all_tokens(base) else DynamicCache(config=base.config)
        device = base.device
        return cls(
            answers,
            torch.tensor(mask, device=device),
            torch.tensor(ids, device=device),
            cache,
            [prompts[_prompt(answer)] for answer in answers],
        )

    def read(self, base: Any, takes: Any, columns: int) -> None:
        """Moves so many columns of what is unread into the cache."""
        unread = self.unread[:, columns:]
        self.unread = self.unread[:, :columns]
        self.forward(base, takes)[0, 0].item()  # waits for the device: the time is measured
        self.unread = unread

    def next_logits(self, base: Any, takes: Any) -> torch.Tensor:
        """(B, V) float32: logits of the next token of each answer."""
        logits = self.forward(base, takes)
        if self._prompts is None:
            return logits
        rows, self._prompts = self._prompts, None
        if rows == [*range(len(self.mask))]:
            return logits
        index = torch.tensor(rows, device=self.mask.device)
        self.mask, self.shifts = self.mask[index], self.shifts[index]
        for layer in self.layers():
            layer.keys, layer.values = layer.keys[index], layer.values[index]
        return logits[index]

    def forward(self, base: Any, takes: Any) -> torch.Tensor:
        """(B, V) float32: logits after what is unread, (P, V) while prompts are read."""
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
            inputs["logits_to_keep"] = 1
        return base(**inputs, past_key_values=self._cache, use_cache=True).logits[:, -1].float()

    def _first_inputs(self, base: Any, takes: Any) -> dict[str, torch.Tensor]:
        """The pictures of the prompt, and positions as the model counts them."""
        assert self.pictures is not None
        inputs = self.pictures.arguments(self.unread, takes)
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


def _choose(logits: torch.Tensor, answers: Sequence[GeneratedAnswer]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, V) logits → (B,) tokens, and (B,) whether the largest logit is finite, which it is not
    where any is NaN.
    """
    for row, answer in enumerate(answers):
        if answer.sampling.repetition_penalty != 1:
            seen = torch.tensor([[*answer.prompt, *answer.tokens]], device=logits.device)
            logits[row : row + 1] = penalized(logits[row : row + 1], seen, answer.sampling.repetition_penalty)
    largest, chosen = logits.max(dim=-1)
    for rows in (part for alike in _rows_by_sampling(answers) for part in _parts(alike, logits)):
        numbers = [_random_number(answers[row]) for row in rows]
        number = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None]
        chosen[rows] = draw_tokens(logits[rows], number, answers[rows[0]].sampling)[:, 0]
    return chosen, largest.isfinite()


def _rows_by_sampling(answers: Sequence[GeneratedAnswer]) -> list[list[int]]:
    """The rows that are sampled, those with equal settings together."""
    rows: dict[tuple[float, float, int], list[int]] = {}
    for row, answer in enumerate(answers):
        sampling = answer.sampling
        if sampling.temperature > 0:
            rows.setdefault((sampling.temperature, sampling.top_p, sampling.top_k), []).append(row)
    return list(rows.values())


def _random_number(answer: GeneratedAnswer) -> float:
    """The number in [0, 1) that selects the next token of an answer."""
    if answer.numbers is None:
        numbers = random_numbers(answer.sampling.seed, answer.place, answer.max_new_tokens)
        answer.numbers = numbers.tolist()
    return answer.numbers[len(answer.tokens)]
