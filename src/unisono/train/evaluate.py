"""Evaluation: the loss on the held-out rows, answers as samples, and the share of answers that are exactly right."""

import time
from dataclasses import dataclass

import torch

from unisono.data.table import TokenTable
from unisono.model.generate import generate
from unisono.score import exact_match
from unisono.text import plain
from unisono.train.batches import evaluation_groups, load_rows
from unisono.train.run import Run

_TELL_EVERY_S = 2.0  # a short evaluation is told by its outcome alone


def evaluation_loss(run: Run) -> float | None:
    """Σ of the cross entropy / loss tokens over all evaluation rows; None where there are none."""
    table = run.eval_table
    if table is None:
        return None
    count = int(table.sequence_loss_tokens().sum())
    total = 0.0
    with torch.no_grad(), evaluating(run):
        done, told = 0, time.monotonic()
        for group in evaluation_groups(table, micro_batch=run.plan.micro_batch):
            rows, _ = load_rows(table, group, run.device)
            if len(rows.labels):
                total += float(run.forward.loss(rows, count=count))
            if run.stop.outcome:  # an evaluation is not worth the grace time; the caller drops it
                return None
            done += len(group)
            if time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                run.report.phase("evaluate", "evaluating", done=done, total=table.sequences)
    return total


class evaluating:  # noqa: N801 - read as `with evaluating(run)`
    """Puts the model into evaluation mode, and back into training mode."""

    def __init__(self, run: Run) -> None:
        self._model = run.forward.loaded.model

    def __enter__(self) -> None:
        self._model.eval()

    def __exit__(self, *error: object) -> None:
        self._model.train()


@dataclass(frozen=True)
class Question:
    """The last answer of a row, and what comes before it, as tokens."""

    prompt: list[int]
    answer: list[int]


def question_of(table: TokenTable, row: int) -> Question | None:
    """The last run of loss tokens of a row is its answer; None if nothing comes before it."""
    ids, targets = table.row(row)
    end = len(ids)
    while end > 0 and not targets[end - 1]:
        end -= 1
    start = end
    while start > 0 and targets[start - 1]:
        start -= 1
    if start == 0 or start == end:
        return None
    return Question(ids[:start].tolist(), ids[start:end].tolist())


def show_samples(run: Run, *, step: int) -> None:
    """Sends the answers to the first evaluation rows to the front."""
    section = run.plan.config.eval
    if run.eval_table is None or not section.samples:
        return
    rows = range(min(section.samples, run.eval_table.rows))
    for question, answer in _answers(run, rows, limit=section.sample_tokens):
        run.report.send(
            "sample",
            step=step,
            prompt=_text(run, question.prompt),
            text=answer,
            reference=_text(run, question.answer),
        )


def exact_match_share(run: Run) -> float | None:
    """The share of all evaluation rows whose generated answer is the written one; None if not asked for."""
    if run.eval_table is None or not run.plan.config.eval.exact_match:
        return None
    pairs = [
        (answer, _text(run, question.answer))
        for question, answer in _answers(run, range(run.eval_table.rows), limit=None)
    ]
    return exact_match(pairs) if pairs else None


def _answers(run: Run, rows: range, *, limit: int | None) -> list[tuple[Question, str]]:
    """Greedy answers to the questions of some rows. Without a limit, as long as the longest written answer and a little more."""
    assert run.eval_table is not None
    questions = [q for q in (question_of(run.eval_table, row) for row in rows) if q is not None]
    if not questions:
        return []
    longest = max(len(q.answer) for q in questions) + 8
    tokenizer = run.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad(), evaluating(run), run.forward.ready_to_generate() as model:
        answers = generate(
            model, [q.prompt for q in questions], max_new_tokens=min(limit or longest, longest), stop_ids=_stop_ids(run, questions),
            pad_id=pad or 0,
        )  # fmt: skip
    return [(question, _text(run, answer)) for question, answer in zip(questions, answers, strict=True)]


def _stop_ids(run: Run, questions: list[Question]) -> set[int]:
    """The end of text, and the token with which the written answers end."""
    special = set(run.tokenizer.all_special_ids)
    ends = {q.answer[-1] for q in questions} & special
    return ends | ({run.tokenizer.eos_token_id} - {None})


def _text(run: Run, ids: list[int]) -> str:
    return plain(
        run.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    ).strip()
