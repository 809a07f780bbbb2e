"""A model of ours as lm-eval asks it: log-likelihoods and greedy or sampled continuations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from unisono.base.errors import UsageError
from unisono.trainer.data import grouped
from unisono.trainer.model.engine import answer_prompts
from unisono.trainer.objectives.sampled import rows_of
from unisono.trainer.plan.task_requests import SamplingParams
from unisono.trainer.task.inference import InferenceModel, StopStrings

_TOKENS = 4096  # of a forward
_MOST_NEW_TOKENS = 256  # lm-eval's own default
_SAMPLING = {"do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "until", "max_gen_toks"}

Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context and of its continuation."""


class HarnessModel(TemplateLM):
    """An open model as lm-eval's models are, with their tokens, truncation and arithmetic.

    Attributes:
        tokenizer: of the model, with its chat template.
        on_progress: called with what is done, how much of it, and of how much.
    """

    def __init__(self, opened: InferenceModel, on_progress: Callable[[str, int, int], None]) -> None:
        super().__init__()
        self.tokenizer = opened.tokenizer
        self._opened = opened
        self._on_progress = on_progress

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: the first token of texts if it exists."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches of chats."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: FBT001 - lm-eval's
        """The tokens of a text, with the special ones of the tokenizer unless it has them."""
        if add_special_tokens is None:
            has_first = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = not has_first
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001 - lm-eval's
    ) -> str:
        """The text of a conversation."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: FBT001
        """The log-likelihood of each whole text, in windows as long as the context."""
        del disable_tqdm
        pairs: list[Pair] = []
        windows_of = []
        for (text,) in [request.args for request in requests]:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._opened.context,
                context_len=1,
            )
            first = len(pairs)
            pairs += map(make_disjoint_window, windows)
            windows_of.append(range(first, len(pairs)))
        scores = self._scores(pairs)
        return [sum(scores[window][0] for window in windows) for windows in windows_of]

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests])

    def _scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether it is the most probable one."""
        rows = [self._cut(pair) for pair in pairs]
        order = sorted(range(len(rows)), key=lambda i: -sum(map(len, rows[i])))
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        done = 0
        lengths = ((i, sum(map(len, rows[i]))) for i in order)
        with torch.no_grad():
            for group in grouped(lengths, most=_TOKENS):
                micro = rows_of([rows[i] for i in group], self._opened.device)
                logits = self._opened.forward.logits(micro)
                picked = logits.log_softmax(-1).gather(-1, micro.labels[:, None])[:, 0]
                is_greedy = logits.argmax(-1) == micro.labels
                parts = zip(picked.split(micro.loss_counts), is_greedy.split(micro.loss_counts), strict=True)
                for i, (values, greedy) in zip(group, parts, strict=True):
                    scores[i] = float(values.double().sum()), bool(greedy.all())
                done += len(group)
                self._on_progress("scoring continuations", done, len(rows))
        return scores

    def _cut(self, pair: Pair) -> Pair:
        """The last tokens that fit the model, with one of the context at least."""
        context, continuation = list(pair[0]), list(pair[1])
        room = self._opened.context + 1 - len(continuation)  # the last token is only predicted
        return context[-max(room, 1) :], continuation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: FBT001
        """The continuation of each context, up to a stop text."""
        del disable_tqdm
        answers = [""] * len(requests)
        by_settings: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_settings.setdefault(repr(request.args[1]), []).append(i)
        done = 0
        for group in by_settings.values():
            settings = normalize_gen_kwargs(requests[group[0]].args[1], _MOST_NEW_TOKENS)
            texts = [requests[i].args[0] for i in group]
            for i, text in zip(group, self._continued(texts, settings, done, len(requests)), strict=True):
                answers[i] = text
            done += len(group)
        return answers

    def _continued(self, texts: Sequence[str], settings: Any, done: int, total: int) -> list[str]:
        refuse_settings(settings)
        most, stops = settings["max_gen_toks"], [stop for stop in settings.get("until") or [] if stop]
        room = self._opened.context - most
        if room < 1:
            raise UsageError.of(
                f"a task asks for answers of {most} tokens",
                where="--tasks",
                why=f"the model reads {self._opened.context} tokens",
                fix="use a different task, or set max_gen_toks in its file",
            )
        sampling = SamplingParams(
            settings.get("temperature") or 0.0,
            settings.get("top_p") or 1.0,
            settings.get("top_k") or 0,
            settings.get("repetition_penalty") or 1.0,
            seed=0,
        )
        with self._opened.ready() as model:
            answers = answer_prompts(
                model,
                [self.tok_encode(text)[-room:] for text in texts],
                limits=[most] * len(texts),
                stop_ids={self.eot_token_id},
                pad_id=self._opened.pad_id,
                sampling=sampling,
                together=not self._opened.forward.rows_apart,
                is_done=StopStrings(self.tokenizer, stops) if stops else None,
                on_answers=lambda number: self._on_progress("answering", done + number, total),
            )
        decoded = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [postprocess_generated_text(text, stops, None) for text in decoded]


def refuse_settings(settings: Any) -> None:
    """Refuses settings of generation that would not be applied.

    Raises:
        UsageError: if there is one.
    """
    others = sorted(set(settings) - _SAMPLING)
    if others:
        raise UsageError.of(
            f"a task generates with {', '.join(others)}",
            where="--tasks",
            why=f"supported are {', '.join(sorted(_SAMPLING))}",
            fix="remove it from generation_kwargs in your own task file",
        )
