"""Evaluation: loss and metrics on the held-out rows, answers as samples, the share of answers that
are exactly right, and other scores.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from unisono.base.text import plain
from unisono.trainer.batches.source import Counts, Micro, SourceStopped
from unisono.trainer.batches.table import EvaluationRows, PromptAnswer
from unisono.trainer.config.named_templates import named_template
from unisono.trainer.families.family import Sampler
from unisono.trainer.model.generate import generate
from unisono.trainer.training.front_io import STOP_FLAGS, flags_of, outcome_of
from unisono.trainer.training.run import Run
from unisono.trainer.training.thumbnails import SampleThumbnails, drawn_thumbnail

if TYPE_CHECKING:
    from unisono.base.messages import SampleMessage

_AGREE_EVERY_TOKENS = 8
_REPORT_EVERY_S = 2.0  # a short evaluation reports its result only
# last characters of an unfinished answer: parts of a character or of a control sequence, which
# further tokens may change
_UNSETTLED = 8


def evaluate_rows(run: Run) -> dict[str, float] | None:
    """`loss` and the objective's metrics over all evaluation rows; None if there are none, or after
    a stop request.

    All ranks must call it; each takes its groups, and the result is bit-identical on all.
    """
    evaluation, objective = run.evaluation, run.objective
    if evaluation is None:
        return None
    if run.source.measures:
        run.beats.enter("evaluate")
        with torch.no_grad(), evaluating(run):
            try:
                return dict(run.source.measure(evaluation))
            except SourceStopped as stop:
                run.agreed_stop = outcome_of(stop.flags)
                return None
    counts = evaluation.rows.counts(range(evaluation.sequences))
    known = 0.0
    with torch.no_grad(), evaluating(run):
        if objective.first_sides:
            sides = objective.first_sides
            first = _summed(run, evaluation, lambda group: [first_sum(run, _loaded(run, group, sides))])
            if first is None:
                return None
            known = float(first[0]) / counts.units
        totals = _summed(
            run, evaluation, lambda group: evaluation_part(run, group, counts=counts, known=known)
        )
    if totals is None:
        return None
    return {"loss": float(totals[0]), **objective.figures(totals[1:].tolist(), known=known)}


def _summed(
    run: Run, evaluation: EvaluationRows, part_of: Callable[[list[int]], list[float]]
) -> npt.NDArray[np.float64] | None:
    """The sum of the parts of all groups of all ranks, float64; None after a stop request.

    All ranks must call it.
    """
    sequences = evaluation.sequences
    run.beats.enter("evaluate", total=sequences)
    total = np.zeros(())
    done, reported = 0, time.monotonic()
    for group in evaluation.rounds():
        # All ranks take part in each sum, also those without a group in the last round.
        for hook in run.hooks:
            hook.work_begins("evaluate", run.state.step, lambda: None)
        part = [*part_of(group), *flags_of(run.stop.outcome)]
        summed = torch.tensor(part, dtype=torch.float64, device=run.device)
        run.group.sum(summed)
        figures = run.group.figures(summed)
        total = total + np.array(figures[: -len(STOP_FLAGS)])
        run.agreed_stop = outcome_of(figures[-len(STOP_FLAGS) :])
        if run.stopping:  # an evaluation is not worth the grace period; the caller drops it
            return None
        done = min(done + evaluation.at_once, sequences)
        run.beats.enter("evaluate", done=done, total=sequences)
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            run.report.phase("evaluate", "evaluating", done=done, total=sequences)
    return total


def evaluation_part(run: Run, group: list[int], *, counts: Counts, known: float = 0.0) -> list[float]:
    """The loss of one group of evaluation sequences, divided by `counts`, and its sums of metrics;
    zeros for an empty group.

    With sharded weights all ranks must call it equally often, with rows or without.
    """
    for micro, is_counted in _loaded(run, group, run.objective.sides):
        if len(micro.rows.labels) or run.gradient_sync.needs_equal_rounds:
            part = run.objective.loss(run.forward, micro, counts=counts, known=known)
            if is_counted:
                return [float(part.loss), *part.sums.tolist()]
    return [0.0] * (1 + 2 * len(run.objective.metrics))


def _loaded(run: Run, group: list[int], sides: Sequence[int]) -> Iterator[tuple[Micro, bool]]:
    """The micro batch of a group of evaluation sequences, and whether its loss counts.

    Nothing for an empty group, unless this rank takes part in a collective forward.
    """
    assert run.evaluation is not None
    if group or run.gradient_sync.needs_equal_rounds:
        yield run.evaluation.rows.load(group or [0], sides), bool(group)


def first_sum(run: Run, micros: Iterable[tuple[Micro, bool]]) -> float:
    """The sum over some micro batches of what the objective needs before its loss; without gradient
    and dropout.

    With sharded weights all ranks must call it with equally many; one that does not count only
    takes part in the collective forward.
    """
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    with torch.no_grad(), evaluating(run):
        for micro, is_counted in micros:
            part = run.objective.first(run.forward, micro)
            total += part.double() if is_counted else 0.0
    return float(total)


class evaluating:  # noqa: N801 - read as `with evaluating(run)`
    """Switches the model to evaluation mode, and back to training mode."""

    def __init__(self, run: Run) -> None:
        self._model = run.forward.loaded.model
        self._sharded = run.sharded

    def __enter__(self) -> None:
        self._was_training = self._model.training
        self._model.eval()

    def __exit__(self, *error: object) -> None:
        self._model.train(self._was_training)
        if self._sharded is not None:
            self._sharded.reshard()


def show_samples(run: Run, *, step: int) -> None:
    """Sends answers to the first evaluation rows to the front.

    Rank 0 does it; with sharded weights all ranks take part.
    """
    section = run.plan.config.eval
    if run.sampler is not None:
        with torch.no_grad(), evaluating(run):
            _draw_samples(run, run.sampler, step=step)
        return
    if run.evaluation is None or not section.samples or not run.plan.answers:
        return
    if not run.group.is_main and run.sharded is None:
        return
    questions = list(islice(run.evaluation.questions(), section.samples))
    answers = _answers(run, questions, among=questions, limit=section.sample_tokens)
    has_pictures = run.group.is_main and any(question.stored >= 0 for question in questions)
    thumbnails = (
        SampleThumbnails(Path(run.plan.data.cache_dir), run.files.thumbnails) if has_pictures else None
    )
    for question, answer in answers:
        message: SampleMessage = {
            "kind": "sample",
            "step": step,
            "prompt": _text(run, question.prompt),
            "text": answer,
            "reference": _text(run, question.answer),
        }
        if thumbnails is not None and question.stored >= 0:
            message["pictures"] = thumbnails.of(question.stored)
        run.report.send(message)


def wants_exact_match(run: Run) -> bool:
    """Whether the config asks for the share of exact matches."""
    return run.evaluation is not None and run.plan.config.eval.exact_match and run.plan.answers


def exact_match_share(run: Run) -> float | None:
    """The share of evaluation rows whose generated answer equals the reference; None if not
    configured, or after a stop request.

    All ranks must call it. Replicas take questions in turn; with sharded weights all ranks answer
    all questions together.
    """
    if run.evaluation is None or not wants_exact_match(run):
        return None
    questions = list(run.evaluation.questions())
    if not questions:
        return None
    own = questions if run.sharded else questions[run.group.rank :: run.group.world_size]
    answers = _answers(run, own, among=questions, limit=None, only_matches=True)
    pairs = [(answer, _text(run, question.answer)) for question, answer in answers]
    matches = round(exact_match(pairs) * len(pairs)) if pairs else 0
    counts = [matches, len(pairs), *flags_of(run.stop.outcome)]
    summed = torch.tensor(counts, dtype=torch.float64, device=run.device)
    run.group.sum(summed)
    all_matches, total, *flags = run.group.figures(summed)
    run.agreed_stop = outcome_of(flags)
    return all_matches / total if run.stopping is None and total else None


def _answers(
    run: Run,
    questions: list[PromptAnswer],
    *,
    among: list[PromptAnswer],
    limit: int | None,
    only_matches: bool = False,
) -> list[tuple[PromptAnswer, str]]:
    """Greedy answers to some of the questions of all ranks; none after a stop request.

    Without a limit an answer may be as long as the longest reference of all, plus a few tokens.
    With `only_matches` an answer ends where it differs from its reference: before training that is
    after a few tokens.
    """
    if not questions:
        return []
    stop = _StopCheck(run)
    longest = max(len(q.answer) for q in among) + 8
    tokenizer = run.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    run.beats.enter("sample")
    with torch.no_grad(), evaluating(run), run.forward.ready_to_generate() as model:
        answers = run.forward.within(
            lambda: generate(
                model,
                [q.prompt for q in questions],
                max_new_tokens=min(limit or longest, longest),
                stop_ids=_stop_ids(run, among),
                pad_id=pad or 0,
                is_over=stop,
                pictures=[q.pictures for q in questions],
                is_done=(lambda i, answer: differs(run.tokenizer, answer, questions[i].answer))
                if only_matches
                else None,
            )
        )
    if stop.is_requested:
        return []
    return [(question, _text(run, answer)) for question, answer in zip(questions, answers, strict=True)]


def differs(tokenizer: Any, answer: Sequence[int], reference: Sequence[int]) -> bool:
    """Whether the beginning of an answer rules out that its text will be that of the reference,
    which may have other tokens.
    """
    if list(answer) == list(reference[: len(answer)]):
        return False
    return not text_of(tokenizer, reference).startswith(text_of(tokenizer, answer)[:-_UNSETTLED])


class _StopCheck:
    """Whether generation must end because of a stop request; called after each token.

    With sharded weights each token needs all ranks, so they agree on it at the same tokens.
    """

    def __init__(self, run: Run) -> None:
        self.is_requested = False
        self._run = run
        self._tokens = 0

    def __call__(self) -> bool:
        own = self._run.stop.outcome is not None
        self._tokens += 1
        self._run.beats.enter("sample", done=self._tokens)
        if self._run.sharded is None:
            self.is_requested = own
        elif self._tokens % _AGREE_EVERY_TOKENS == 0:
            self.is_requested = self._run.group.any(own)
        return self.is_requested


def _stop_ids(run: Run, questions: list[PromptAnswer]) -> set[int]:
    """The end-of-sequence token, the stop words of a template, and the special tokens with which
    the references end.
    """
    special = set(run.tokenizer.all_special_ids)
    ends = {q.answer[-1] for q in questions} & special
    named = named_template(run.plan.config.data.template)
    if named is not None:
        ends |= named.stop_ids(run.tokenizer)
    return ends | ({run.tokenizer.eos_token_id} - {None})


def _text(run: Run, ids: list[int]) -> str:
    return text_of(run.tokenizer, ids)


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens as it is shown and compared: without special tokens, control characters
    and blanks at its ends.
    """
    return plain(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()


__all__ = ["Pair", "bleu", "exact_match", "rouge_l"]


Pair = tuple[str, str]
"""An answer and its reference."""

# Runs of letters and digits; in scripts without spaces between words every character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")


# ---- scores of answers against references


def exact_match(pairs: Sequence[Pair]) -> float:
    """The share of answers, 0 to 1, that equal their reference up to white space at the ends."""
    assert pairs
    return sum(answer.strip() == reference.strip() for answer, reference in pairs) / len(pairs)


def rouge_l(pairs: Sequence[Pair]) -> float:
    """The mean over pairs, 0 to 1, of the F1 of the longest common subsequence of words (ROUGE-L,
    no stemming).

    On ASCII text it equals rouge-score; letters of other scripts, which rouge-score drops, count as
    words, too.
    """
    from rouge_score.rouge_scorer import RougeScorer

    assert pairs
    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    return sum(_rouge_l(scorer, answer, reference) for answer, reference in pairs) / len(pairs)


def bleu(pairs: Sequence[Pair]) -> float:
    """BLEU of the corpus, 0 to 100, by sacrebleu (13a tokens, exponential smoothing).

    A corpus without any answer of four words scores 0, as BLEU counts n-grams of up to four words.
    """
    from sacrebleu import corpus_bleu

    assert pairs
    score: float = corpus_bleu([answer for answer, _ in pairs], [[reference for _, reference in pairs]]).score
    return min(score, 100.0)  # rounding can exceed it slightly


def similarity(pairs: Sequence[Pair]) -> dict[str, float]:
    """The mean over pairs, 0 to 100, of sentence BLEU-4 of characters and of the F1 of ROUGE-1,
    ROUGE-2 and ROUGE-L of words.

    These are the scores that LLaMA-Factory's prediction writes. BLEU is that of NIST's smoothing
    (Chen and Cherry 2014, method 3), with blanks as characters. A Chinese character is a word here;
    LLaMA-Factory cuts Chinese text into words by jieba.
    """
    from rouge_score.rouge_scorer import RougeScorer

    assert pairs
    names = {"rouge-1": "rouge1", "rouge-2": "rouge2", "rouge-l": "rougeL"}
    scorer = RougeScorer(list(names.values()), tokenizer=_Words())
    scores = [scorer.score(reference, answer) for answer, reference in pairs]
    rouge = {ours: sum(100 * one[name].fmeasure for one in scores) for ours, name in names.items()}
    bleu4 = sum(_character_bleu(answer, reference) for answer, reference in pairs)
    return {name: value / len(pairs) for name, value in {"bleu-4": bleu4, **rouge}.items()}


def _character_bleu(answer: str, reference: str) -> float:
    """BLEU-4 of one answer, 0 to 100.

    An n-gram order without a match counts as half of a match, the next one as a quarter, and so on.
    """
    shared = [_shared_ngrams(answer, reference, n) for n in range(1, 5)]
    if not shared[0]:
        return 0.0
    logarithm, misses = 0.0, 0
    for n, count in enumerate(shared, 1):
        misses += not count
        logarithm += math.log((count or 0.5**misses) / max(1, len(answer) - n + 1)) / 4
    brevity = min(0.0, 1 - len(reference) / len(answer))
    return 100 * math.exp(logarithm + brevity)


def _shared_ngrams(answer: str, reference: str, n: int) -> int:
    """The number of n-grams of characters in both texts."""
    counts = [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in (answer, reference)]
    return (counts[0] & counts[1]).total()


class _Words:
    """The tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        """Words in lower case."""
        return _WORD.findall(text.lower())


def _rouge_l(scorer: "object", answer: str, reference: str) -> float:
    if answer.strip() == reference.strip():
        return 1.0  # also for texts without words, e.g. `{}`
    value: float = scorer.score(reference, answer)["rougeL"].fmeasure  # type: ignore[attr-defined]
    return value


def _draw_samples(run: Run, sampler: Sampler, *, step: int) -> None:
    """Draws the sample pictures of an image model into the run's directory: of the prompts of the
    config, and of captions of evaluation pictures.
    """
    config = run.plan.config
    contents = run.evaluation.rows.contents if run.evaluation is not None else None
    prompts = sampler.prompts(contents.first(config.eval.samples) if contents is not None else [])
    if not prompts:
        return
    run.beats.enter("sample")

    def is_over(number: int) -> bool:
        run.beats.enter("sample", done=number)
        return run.stop.outcome is not None

    for prompt, file in sampler.draw_all(
        prompts, run.files.samples, step=step, seed=config.seed, name=run.files.root.name, is_over=is_over
    ):
        message: SampleMessage = {
            "kind": "sample",
            "step": step,
            "prompt": plain(prompt),
            "text": str(file),
            "reference": "",
        }
        thumbnail = drawn_thumbnail(file, run.files.thumbnails)
        if thumbnail is not None:
            message["drawn"] = thumbnail
        run.report.send(message)
