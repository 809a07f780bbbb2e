"""The task `eval`: loss and perplexity over the loss tokens of a file's rows, and scores of generated answers.

Request: target, step (or null), data (file), limit (or null), cache_dir. The rows are prepared as in training, with the settings of the run
if the target is one. Result: description, figures, ledger, formats, rows (one for each answer).
"""

import glob
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.config.schema import DataSection, ModelSection, RunConfig
from unisono.data.token_table import TokenTable
from unisono.errors import DataError
from unisono.events import Reporter
from unisono.inputs import expand, fault_of
from unisono.model.generate import generate
from unisono.task import data_tasks
from unisono.task.inference import InferenceModel, decode, open_requested
from unisono.text import plain
from unisono.train.evaluation import Question, bleu, exact_match, question_of, rouge_l
from unisono.train.run import load_micro

_TOKENS = 8_192  # per forward


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Evaluates; `figures` has rows, tokens, loss_tokens, loss, perplexity, questions, exact_match, rouge_l, bleu."""
    file = request["data"]
    fault = fault_of(expand(file), file)
    if fault is not None and "://" not in file and not (fault.is_missing and glob.has_magic(file)):
        raise DataError.of(fault.what, where="--data", why=fault.why, fix=fault.fix)
    opened = open_requested(request, report)
    config = evaluation_config(opened, file)
    body = {
        "config": config.model_dump(mode="json", by_alias=True),
        "cache_dir": request["cache_dir"],
        "output_dir": None,
    }
    prepared = data_tasks.prepare(body, report)["data"]
    table = TokenTable.open(Path(prepared["cache_dir"]), "train")
    sequences = list(range(min(request.get("limit") or table.sequences, table.sequences)))
    figures = losses(opened, table, sequences, report)
    rows = [int(row) for sequence in sequences for row in table.rows_of(sequence)]
    found = _questions(table, rows)
    answers = answer_all(opened, [question for _, question in found], report)
    references = [text_of(opened, question.answer) for _, question in found]
    pairs = list(zip(answers, references, strict=True))
    figures |= {"questions": len(pairs), "exact_match": None, "rouge_l": None, "bleu": None}
    if pairs:
        figures |= {"exact_match": exact_match(pairs), "rouge_l": rouge_l(pairs), "bleu": bleu(pairs)}
    return {
        "description": opened.target.description,
        "figures": figures,
        "ledger": prepared["ledger"],
        "formats": prepared["formats"],
        "rows": [
            {
                "row": table.row_id(row),
                "prompt": decode(opened.tokenizer, question.prompt),
                "answer": answer,
                "reference": reference,
                "exact_match": answer == reference,
            }
            for (row, question), (answer, reference) in zip(found, pairs, strict=True)
        ],
    }


def _questions(table: TokenTable, rows: Sequence[int]) -> list[tuple[int, Question]]:
    """The rows with a question. A row that counts in the loss as a whole, e.g. plain text, has none."""
    found = ((row, question_of(table, row)) for row in rows)
    return [(row, question) for row, question in found if question is not None and len(question.prompt) > 1]


def evaluation_config(opened: InferenceModel, file: str) -> RunConfig:
    """The config for preparing the rows: every row is a sequence of its own, with the loss mask of the run."""
    plan, target = opened.target.plan, opened.target
    tokenizer = opened.tokenizer.name_or_path or str(target.base)
    if plan is None:
        data = DataSection(train=file, packing=False, max_length=max(8, opened.context))
        model = ModelSection(path=str(target.base), tokenizer=tokenizer)
        return RunConfig(model=model, adapter=None, data=data, output_dir="unused")
    settings = plan.config.data.model_copy(update={"train": file, "eval": None, "packing": False})
    model = plan.config.model.model_copy(
        update={"path": str(target.base), "tokenizer": tokenizer, "weights": "pretrained"}
    )
    if target.source == "checkpoint":
        model = plan.config.model
    return RunConfig(
        model=model,
        adapter=None,
        data=settings,
        objective=plan.config.objective,
        seed=plan.config.seed,
        output_dir="unused",
    )


def losses(
    opened: InferenceModel, table: TokenTable, sequences: Sequence[int], report: Reporter
) -> dict[str, Any]:
    """Σ of the cross entropy over the loss tokens / their number, with perplexity, rows and tokens."""
    count = int(table.sequence_loss_tokens()[list(sequences)].sum())
    tokens = int(table.sequence_tokens()[list(sequences)].sum())
    total, done = 0.0, 0
    with torch.no_grad():
        for group in _groups(table, sequences):
            micro, _ = load_micro(table, group, opened.device)
            if len(micro.rows.labels):
                total += float(opened.forward.loss(micro.rows, count=count))
            done += len(group)
            report.phase("evaluate", "measuring the loss", done=done, total=len(sequences))
    known = count > 0
    return {
        "rows": len(sequences),
        "tokens": tokens,
        "loss_tokens": count,
        "loss": total if known else None,
        "perplexity": (math.exp(total) if total < 700 else math.inf) if known else None,
    }


def _groups(table: TokenTable, sequences: Sequence[int]) -> Iterator[list[int]]:
    """Sequences in order, in groups of up to `_TOKENS` tokens and at least one sequence."""
    lengths = table.sequence_tokens()
    group: list[int] = []
    size = 0
    for sequence in sequences:
        length = int(lengths[sequence])
        if group and size + length > _TOKENS:
            yield group
            group, size = [], 0
        group.append(sequence)
        size += length
    if group:
        yield group


def answer_all(opened: InferenceModel, questions: Sequence[Question], report: Reporter) -> list[str]:
    """Greedy answers, up to twice as long as the longest reference."""
    if not questions:
        return []
    limit = 2 * max(len(question.answer) for question in questions) + 8
    special = set(opened.tokenizer.all_special_ids)
    stops = opened.stops(opened.template) | ({question.answer[-1] for question in questions} & special)
    room = [opened.context - len(question.prompt) for question in questions]
    usual = [i for i, left in enumerate(room) if left >= limit]
    answers: list[list[int]] = [[] for _ in questions]
    # Questions with less room in the model's context get separate batches: some models have no positions beyond it.
    batches = [(usual, limit), *(([i], left) for i, left in enumerate(room) if left < limit)]
    with opened.ready() as model:
        for places, most in batches:
            found = generate(
                model,
                [questions[i].prompt for i in places],
                max_new_tokens=most,
                stop_ids=stops,
                pad_id=opened.pad_id,
                on_answers=lambda done: report.phase(
                    "generate", "answering", done=done, total=len(questions)
                ),
            )
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
    return [text_of(opened, answer) for answer in answers]


def text_of(opened: InferenceModel, ids: Sequence[int]) -> str:
    """The text of an answer in the form that scores compare."""
    return plain(decode(opened.tokenizer, ids)).strip()
