"""Evaluation: loss and metrics on the held-out rows, answers as samples, and the share of answers
that are exactly right.
"""

import time
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
from unisono.trainer.objectives.text_scores import exact_match
from unisono.trainer.training.answer_metrics import GeneratedRow
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
    for question, ids in answers:
        message: SampleMessage = {
            "kind": "sample",
            "step": step,
            "prompt": _text(run, question.prompt),
            "text": _text(run, ids),
            "reference": _text(run, question.answer),
        }
        if thumbnails is not None and question.stored >= 0:
            message["pictures"] = thumbnails.of(question.stored)
        run.report.send(message)


def metric_figures(run: Run) -> dict[str, float] | None:
    """The means of `eval.metrics` over generated answers to the evaluation rows; empty if there are
    none, None after a stop request.

    All ranks must call it, as `exact_match_share`.

    Raises:
        SourceFailed: on all ranks, if a function failed whose `on_error` is `error`.
    """
    evaluation, metrics = run.evaluation, run.answer_metrics
    questions = list(evaluation.questions()) if evaluation is not None and metrics is not None else []
    if evaluation is None or metrics is None or not questions:
        return {}
    turn = slice(run.group.rank, None, run.group.world_size)
    answered = _answers(run, questions if run.sharded else questions[turn], among=questions, limit=None)
    table = evaluation.rows.table
    rows = [
        GeneratedRow(
            table.row_id(question.row),
            _text(run, question.prompt),
            _text(run, ids),
            ids,
            _text(run, question.answer),
        )
        for question, ids in (answered[turn] if run.sharded else answered)
    ]
    try:
        return metrics.means(rows, is_cut_short=not answered and run.stop.outcome is not None)
    except SourceStopped as stop:
        run.agreed_stop = outcome_of(stop.flags)
        return None


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
    pairs = [(_text(run, ids), _text(run, question.answer)) for question, ids in answers]
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
) -> list[tuple[PromptAnswer, list[int]]]:
    """Greedy answers, as tokens, to some of the questions of all ranks; none after a stop request.

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
    return list(zip(questions, answers, strict=True))


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
