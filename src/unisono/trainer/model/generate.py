"""Generates answers to prompts: greedy, sampled or by beam search, in batches of similar length,
with generation and cache of transformers.

Letters: B rows of a batch, L tokens so far, V vocabulary.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from unisono.trainer.model.attention import FLAT_ATTENTION, attention_of, set_attention
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.plan.task_requests import SamplingParams

_ROWS = 64  # in a batch: more gain little on CPU, and all wait for the longest answer
_TOKENS = 65_536  # of prompts and answers in a batch, with padding: limits the cache

OnToken = Callable[[int], None]
IsDone = Callable[[int, Sequence[int]], bool]


GREEDY = SamplingParams()


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: set[int],
    pad_id: int,
    sampling: SamplingParams = GREEDY,
    on_token: OnToken | None = None,
    is_done: IsDone | None = None,
    on_answers: Callable[[int], None] | None = None,
    is_over: Callable[[], bool] | None = None,
    pictures: Sequence[PictureInputs | None] = (),
) -> list[list[int]]:
    """The answer to each prompt, as tokens, without the stop token.

    The same seed gives the same answers. Each prompt has its own random stream, keyed by (seed,
    index of the prompt), so the other prompts of a batch matter only through the rounding of
    logits. The model's training mode, attention and settings, and all global generators are
    unchanged afterwards.

    Args:
        model: a causal language model of transformers, or a peft model around one.
        prompts: tokens of each; none may be empty.
        max_new_tokens: maximum tokens of an answer.
        stop_ids: tokens that end an answer.
        pad_id: any token; it pads batches on the left and is masked.
        sampling: how tokens are chosen.
        on_token: called with each new token of the answer, with beams at its end; for a single
            prompt only.
        is_done: called with a prompt's index and its answer so far; True ends that answer; with
            beams at its end.
        on_answers: called with the number of answered prompts, after each batch.
        is_over: called after each token; True ends all answers as they are, and leaves those not
            yet started empty. Not with beams.
        pictures: those of each prompt; empty: none has any.
    """
    assert all(prompts), "a prompt has no tokens"
    assert on_token is None or len(prompts) == 1, "only one answer can be streamed"
    answers: list[list[int]] = [[] for _ in prompts]
    if max_new_tokens < 1 or not prompts:
        return answers
    done = 0
    with torch.no_grad(), undisturbed(model):
        for batch in _batches([len(prompt) for prompt in prompts], max_new_tokens, beams=sampling.beams):
            listener = _Listener(
                batch, stop_ids=stop_ids, on_token=on_token, is_done=is_done, is_over=is_over
            )
            inputs = _Inputs.of([prompts[i] for i in batch], pad_id=pad_id)
            if any(pictures):
                seen = [one for i in batch if (one := pictures[i]) is not None]
                inputs = replace(inputs, more=_picture_arguments(model, inputs.ids.to(model.device), seen))
            if sampling.beams > 1:
                _search(model, inputs, listener, sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
            else:
                _run(
                    model,
                    inputs,
                    listener,
                    _Draws(batch, length=max_new_tokens, sampling=sampling),
                    max_new_tokens=max_new_tokens,
                    penalty=sampling.repetition_penalty,
                )
            for index, answer in zip(batch, listener.answers, strict=True):
                answers[index] = answer
            if listener.is_over:
                break
            done += len(batch)
            if on_answers is not None:
                on_answers(done)
    return answers


@dataclass(frozen=True)
class _Inputs:
    """The prompts of a batch, padded on the left.

    Attributes:
        ids: (B, L).
        mask: (B, L), 1: a token.
        pad_id: the token of the padding.
        more: other arguments of the model, e.g. pictures.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    pad_id: int
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, prompts: list[Sequence[int]], *, pad_id: int) -> "_Inputs":
        longest = max(map(len, prompts))
        ids = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return cls(torch.tensor(ids), torch.tensor(mask), pad_id)


def _picture_arguments(
    model: Any, ids: torch.Tensor, pictures: Sequence[PictureInputs]
) -> dict[str, torch.Tensor]:
    """The arguments of a model for the pictures of a batch (B, L), in its order."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    tensors = [one.tensors for one in pictures]
    seen = PictureInputs.of(tensors, pictures[0].image_ids if pictures else (), ids.device)
    return {} if seen is None else seen.arguments(ids, base)


def _run(
    model: Any,
    inputs: _Inputs,
    listener: "_Listener",
    draws: "_Draws",
    *,
    max_new_tokens: int,
    penalty: float,
) -> None:
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=inputs.pad_id,
        return_dict_in_generate=False,
    )
    model.generate(
        input_ids=inputs.ids.to(model.device),
        attention_mask=inputs.mask.to(model.device),
        **inputs.more,
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([listener]),
        logits_processor=LogitsProcessorList([*_penalties(penalty, inputs.mask.to(model.device)), draws]),
    )


def _search(
    model: Any,
    inputs: _Inputs,
    listener: "_Listener",
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    stop_ids: set[int],
) -> None:
    """Beam search; the listener gets the best answers at their end."""
    assert sampling.temperature == 0, "beam search does not sample"
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=sampling.beams,
        length_penalty=sampling.length_penalty,
        eos_token_id=sorted(stop_ids) or None,
        use_cache=True,
        pad_token_id=inputs.pad_id,
        return_dict_in_generate=False,
    )
    mask = inputs.mask.to(model.device)
    sequences = model.generate(
        input_ids=inputs.ids.to(model.device),
        attention_mask=mask,
        **inputs.more,
        generation_config=settings,
        logits_processor=LogitsProcessorList(
            _penalties(sampling.repetition_penalty, mask.repeat_interleave(sampling.beams, dim=0))
        ),
    )
    listener.take(sequences[:, inputs.ids.shape[1] :].tolist())


def _penalties(penalty: float, mask: torch.Tensor) -> list[LogitsProcessor]:
    return [_RepetitionPenalty(penalty, mask)] if penalty != 1 else []


def _batches(lengths: list[int], max_new_tokens: int, *, beams: int) -> Iterator[list[int]]:
    """Indices of the prompts, in batches of similar length."""
    most_rows, most_tokens = max(1, _ROWS // beams), _TOKENS // beams
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    first = 0
    while first < len(order):
        last = first + 1
        while last < min(len(order), first + most_rows):
            if (last + 1 - first) * (lengths[order[last]] + max_new_tokens) > most_tokens:
                break
            last += 1
        yield order[first:last]
        first = last


class _Listener(StoppingCriteria):
    """Collects the answer of each row, and decides when it ends.

    The end-of-text criterion of transformers is not used: here an answer ends in one place,
    whatever the reason.
    """

    def __init__(
        self,
        batch: list[int],
        *,
        stop_ids: set[int],
        on_token: OnToken | None,
        is_done: IsDone | None,
        is_over: Callable[[], bool] | None,
    ) -> None:
        self.is_over = False
        self._check_over = is_over
        self.answers: list[list[int]] = [[] for _ in batch]
        self._places = batch
        self._ended = [False] * len(batch)
        self._stop_ids = stop_ids
        self._on_token = on_token
        self._is_done = is_done

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """input_ids (B, L) with the newest token last → (B,) bool, True: the row has ended."""
        for row, token in enumerate(input_ids[:, -1].tolist()):  # waits for the device: the host decides
            if not self._ended[row]:
                self._add(row, token)
        self.is_over = self._check_over is not None and self._check_over()
        if self.is_over:
            self._ended = [True] * len(self._ended)
        return torch.tensor(self._ended, device=input_ids.device)

    def take(self, answers: list[list[int]]) -> None:
        """Takes whole answers, each with its stop token and padding behind it."""
        for row, answer in enumerate(answers):
            for token in answer:
                if not self._ended[row]:
                    self._add(row, token)

    def _add(self, row: int, token: int) -> None:
        if token in self._stop_ids:
            self._ended[row] = True
            return
        self.answers[row].append(token)
        if self._on_token is not None:
            self._on_token(token)
        if self._is_done is not None and self._is_done(self._places[row], self.answers[row]):
            self._ended[row] = True


class _Draws(LogitsProcessor):
    """Samples the token of each row with the row's own random numbers; the greedy search after it
    can only select that token.
    """

    def __init__(
        self,
        batch: list[int],
        *,
        length: int,
        sampling: SamplingParams,
    ) -> None:
        self._sampling = sampling
        self._step = 0
        # (B, length) float64 in [0, 1)
        self._numbers = (
            torch.stack([random_numbers(sampling.seed, number, length) for number in batch])
            if sampling.temperature > 0
            else None
        )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores (B, V) logits → unchanged if greedy, else -inf except for the sampled token."""
        if self._numbers is None:
            return scores
        number = self._numbers[:, self._step, None].to(scores.device)
        self._step += 1
        chosen = draw_tokens(scores, number, self._sampling)
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)


def draw_tokens(scores: torch.Tensor, numbers: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The token of each row that its random number selects: scores (B, V) logits, numbers (B, 1) in
    [0, 1) → (B, 1).
    """
    exact = scores.double()
    # The largest is 0, so that no temperature, however small, divides to infinity.
    exact = (exact - exact.amax(dim=-1, keepdim=True)).div_(sampling.temperature)
    if sampling.min_p:
        exact.masked_fill_(exact < math.log(sampling.min_p), -torch.inf)
    if not sampling.top_k and sampling.top_p == 1:
        edges = exact.exp_().cumsum(dim=-1)  # their sum need not be 1
        chosen = torch.searchsorted(edges, numbers * edges[:, -1:], right=True)
        # Rounding must not select a token behind the last one that has a probability.
        return torch.minimum(chosen, torch.searchsorted(edges, edges[:, -1:].contiguous()))
    ordered, tokens = torch.softmax(exact, dim=-1).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ordered[:, sampling.top_k :] = 0.0
        ordered /= ordered.sum(dim=-1, keepdim=True)  # top_p is a share of what top_k leaves
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill((before >= sampling.top_p) & (before > 0), 0.0)
    edges = ordered.cumsum(dim=-1)
    index = torch.searchsorted(edges, numbers * edges[:, -1:], right=True)
    last = (ordered > 0).sum(
        dim=-1, keepdim=True
    ) - 1  # rounding must not select a token beyond the allowed ones
    return tokens.gather(-1, torch.minimum(index, last).clamp(min=0))  # -1 among scores that are not finite


class _RepetitionPenalty(LogitsProcessor):
    """Makes the tokens of prompt and answer less likely.

    Unlike that of transformers it spares the token of the padding, which may be a stop token: an
    answer must not depend on the other prompts of its batch.
    """

    def __init__(self, penalty: float, mask: torch.Tensor) -> None:
        """For prompts with this mask (B, L), 1: a token."""
        self._penalty = penalty
        self._mask = mask.bool()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids (B, L), scores (B, V) logits → (B, V)."""
        length = self._mask.shape[1]
        prompt = input_ids[:, :length]
        # The last token of a prompt is never padding.
        seen = torch.cat([torch.where(self._mask, prompt, prompt[:, -1:]), input_ids[:, length:]], dim=1)
        return penalized(scores, seen, self._penalty)


def penalized(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """(B, V) logits in which the tokens `seen` (B, L) are less likely."""
    logits = scores.gather(1, seen)
    logits = torch.where(logits < 0, logits * penalty, logits / penalty)
    return scores.scatter(1, seen, logits)


def random_numbers(seed: int, number: int, length: int) -> torch.Tensor:
    """(length,) random numbers of one prompt, from a separate generator."""
    key = hashlib.sha256(f"unisono generate {seed} {number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
    return torch.rand(length, generator=generator, dtype=torch.float64)


@contextlib.contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Switches the model to evaluation mode with an attention that supports padding; restores it
    afterwards.

    Its generation_config is replaced, too: a repetition penalty in a file must not change greedy
    decoding.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    training = [module for module in model.modules() if module.training]
    attention = attention_of(base)
    settings = base.generation_config
    model.eval()
    base.generation_config = GenerationConfig()
    if attention == FLAT_ATTENTION:
        set_attention(base, "sdpa")
    try:
        yield
    finally:
        if attention == FLAT_ATTENTION:
            set_attention(base, attention)
        base.generation_config = settings
        for module in training:
            module.training = True
