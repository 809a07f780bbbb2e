"""The tasks `eval` (loss, perplexity and scores of a file's rows) and `predict` (answers to the
rows of a LLaMA-Factory file with `do_predict`, and how close they are).
"""

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.base.files import write_json, write_text
from unisono.base.text import plain
from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.batches.table import PromptAnswer, TableRows, question_of
from unisono.trainer.config.heads import CLASSIFY, EMBED
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import PAIRS, PREFERENCE
from unisono.trainer.data import grouped
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families.vision.sight import probe_of
from unisono.trainer.model.directory import locate_model, locate_tokenizer
from unisono.trainer.model.engine import answer_prompts
from unisono.trainer.model.forward import Forward, choose_forward
from unisono.trainer.model.generate import GREEDY, generate
from unisono.trainer.model.load import DTYPES, LoadedModel, load_base, load_for_training
from unisono.trainer.model.quantization import quantized_load
from unisono.trainer.objectives import objective_of
from unisono.trainer.objectives.text_scores import bleu, exact_match, rouge_l, similarity
from unisono.trainer.plan.task_requests import (
    Evaluated,
    EvaluateRequest,
    LabelFigures,
    Predicted,
    PredictRequest,
    SamplingParams,
)
from unisono.trainer.task.classification import classification_figures
from unisono.trainer.task.evaluation_rows import evaluation_config, prepared_rows, require_rows, table_rows
from unisono.trainer.task.inference import InferenceModel, decode, open_requested
from unisono.trainer.task.metric_evaluation import EvaluatedMetrics, requested_metrics
from unisono.trainer.task.similarity import similarity_figures

_TOKENS = 8_192  # per forward


def run(request: EvaluateRequest, report: Reporter) -> Evaluated:
    """Evaluates; `figures` has rows, tokens, loss_tokens, loss, perplexity, questions, exact_match,
    rouge_l, bleu, and `metric_` with the name of each metric.
    """
    require_rows(request.data)
    opened = open_requested(request.model, report, answers=False)
    config = evaluation_config(opened, request.data)
    data, table = prepared_rows(config, request.cache_dir, report)
    sequences = list(range(min(request.limit or table.sequences, table.sequences)))
    if data.pictures is not None and opened.processor is None:
        opened = open_requested(request.model, report, answers=False, sees=True)
    of_table = table_rows(opened, data, table)
    labels: list[LabelFigures] = []
    if config.objective == CLASSIFY:
        figures, rows, labels = classification_figures(opened, table, sequences, report, each=request.each)
    elif config.objective == EMBED:
        assert opened.target.plan is not None
        batch = opened.target.plan.config.rows_per_step
        figures, rows = similarity_figures(opened, config, table, sequences, report, batch=batch)
    elif config.objective in PREFERENCE:
        figures, rows = preference_figures(opened, config, of_table, sequences, report, each=request.each)
    else:
        metrics = requested_metrics(request, opened, config, report)
        figures, rows = answer_figures(opened, of_table, sequences, report, metrics=metrics)
    result: Evaluated = {
        "description": opened.target.description,
        "ledger": data.ledger,
        "formats": data.formats,
        "figures": figures,
        "rows": rows,
    }
    return {**result, "labels": labels} if labels else result


def answer_figures(
    opened: InferenceModel,
    of_table: TableRows,
    sequences: Sequence[int],
    report: Reporter,
    *,
    metrics: EvaluatedMetrics | None,
) -> tuple[dict[str, float | None], list[Mapping[str, object]]]:
    """Loss and scores of answers, and the answers."""
    table = of_table.table
    figures = losses(opened, of_table, sequences, report)
    rows = [int(row) for sequence in sequences for row in table.rows_of(sequence)]
    questions = _questions(of_table, rows)
    tokens = answer_all(opened, [question for _, question in questions], report)
    answers = [text_of(opened, ids) for ids in tokens]
    references = [text_of(opened, question.answer) for _, question in questions]
    pairs = list(zip(answers, references, strict=True))
    figures |= {"questions": len(pairs), "exact_match": None, "rouge_l": None, "bleu": None}
    if pairs:
        figures |= {"exact_match": exact_match(pairs), "rouge_l": rouge_l(pairs), "bleu": bleu(pairs)}
    prompts = [decode(opened.tokenizer, question.prompt) for _, question in questions]
    ids = [table.row_id(row) for row, _ in questions]
    lines: list[dict[str, object]] = [
        {
            "row": row,
            "prompt": prompt,
            "answer": answer,
            "reference": reference,
            "exact_match": answer == reference,
        }
        for row, prompt, (answer, reference) in zip(ids, prompts, pairs, strict=True)
    ]
    if metrics is not None:
        figures |= metrics.measure(lines, tokens)
    return figures, list(lines)


def _questions(of_table: TableRows, rows: Sequence[int]) -> list[tuple[int, PromptAnswer]]:
    """The rows with a question.

    A row that counts in the loss as a whole, e.g. plain text, has none.
    """
    pairs = ((row, of_table.question(row)) for row in rows)
    return [(row, question) for row, question in pairs if question is not None and len(question.prompt) > 1]


def losses(
    opened: InferenceModel, rows: TableRows, sequences: Sequence[int], report: Reporter
) -> dict[str, float | None]:
    """Σ of the cross entropy over the loss tokens / their number, with perplexity, rows and
    tokens.
    """
    table = rows.table
    count = int(table.sequence_loss_tokens()[list(sequences)].sum())
    tokens = int(table.sequence_tokens()[list(sequences)].sum())
    total, done = 0.0, 0
    with torch.no_grad():
        for group in _groups(table, sequences):
            micro = rows.load(group)
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


def preference_figures(
    opened: InferenceModel,
    config: RunConfig,
    rows: TableRows,
    sequences: Sequence[int],
    report: Reporter,
    *,
    each: bool,
) -> tuple[dict[str, float | None], list[Mapping[str, object]]]:
    """Loss and metrics of a preference objective, as a run's evaluation has them; and if `each`
    those of every pair or rated answer.
    """
    objective, table = objective_of(config), rows.table
    counts = rows.counts(sequences)
    groups = [[sequence] for sequence in sequences] if each else list(_groups(table, sequences))
    unit = "pairs" if config.objective in PAIRS else "rows"
    total, sums, known, done = 0.0, [0.0] * (2 * len(objective.metrics)), 0.0, 0
    figures_of_rows: list[Mapping[str, object]] = []
    with torch.no_grad():
        if objective.uses_reference:
            rows.reference = _reference_values(opened, rows, sequences, report)
        if objective.first_sides:
            sides = objective.first_sides
            firsts = (rows.load(group, sides) for group in groups)
            known = sum(float(objective.first(opened.forward, micro)) for micro in firsts) / counts.units
        for group in groups:
            micro = rows.load(group, objective.sides)
            part = objective.loss(opened.forward, micro, counts=counts, known=known)
            total += float(part.loss)
            terms = part.sums.tolist()
            sums = [one + other for one, other in zip(sums, terms, strict=True)]
            if each:
                row = table.row_id(int(table.rows_of(group[0])[0]))
                loss = float(part.loss) * counts.units
                figures_of_rows.append({"row": row, "loss": loss, **objective.figures(terms, known=known)})
            done += len(group)
            report.phase("evaluate", "measuring the loss", done=done, total=len(sequences))
    figures: dict[str, float | None] = {
        unit: counts.units,
        "tokens": int(table.sequence_tokens()[list(sequences)].sum()),
        "loss_tokens": counts.loss_tokens,
        "loss": total,
        **objective.figures(sums, known=known),
    }
    return figures, figures_of_rows


def _reference_values(
    opened: InferenceModel, rows: TableRows, sequences: Sequence[int], report: Reporter
) -> torch.Tensor:
    """(rows of the table, 2) float32: the reference's log-probability of the answer of each
    side.
    """
    values = torch.zeros(rows.table.rows, 2)
    done = 0
    with _reference_forward(opened, report) as forward:
        for group in _groups(rows.table, sequences):
            micro = rows.load(group, (0, 1))
            sums = micro.rows.sums(forward.log_probs(micro.rows))
            values[rows.units_of(group)] = sums.view(-1, 2).cpu()
            done += len(group)
            report.phase(
                "reference", "computing the reference's log-probabilities", done=done, total=len(sequences)
            )
    return values


@contextlib.contextmanager
def _reference_forward(opened: InferenceModel, report: Reporter) -> Iterator[Forward]:
    """The model that the run compares with: its model without the adapter, the model that it
    started from, or one that its config names.
    """
    plan = opened.target.plan
    assert plan is not None
    config, adapter = plan.config, plan.config.adapter
    named, merged = config.preference.reference, adapter is not None and bool(adapter.merge)
    # PiSSA moves components from the base into the adapter, and the stored adapter contains merged
    # ones.
    switches_off = adapter is not None and adapter.init != "pissa"
    if named == "auto" and switches_off and not merged:
        with opened.forward.without_adapter():
            yield opened.forward
        return
    report.phase("reference", f"loading the reference {config.model.path if named == 'auto' else named}")
    loaded = _starting_model(opened, config) if named == "auto" else _named_model(opened, named, config)
    if named != "auto":
        loaded.model.requires_grad_(False)  # the fast layers are those of a frozen model
    loaded.model.eval()
    forward = choose_forward(
        loaded,
        dtype=opened.dtype,
        quick_adapter=False,
        gradient_checkpointing=False,
        trains=False,
        pictures=None if opened.processor is None else probe_of(opened.processor, opened.device),
    )
    loaded.model.eval()
    with forward.without_adapter() if named == "auto" and switches_off else contextlib.nullcontext():
        yield forward


def _starting_model(opened: InferenceModel, config: RunConfig) -> LoadedModel:
    """The model as it was before the first step."""
    with torch.random.fork_rng():
        seed_torch(config.seed, "weights")
        return load_for_training(
            config,
            directory=locate_model(config.model.path, config.model.revision),
            tokenizer_directory=locate_tokenizer(config),
            dtype=opened.dtype,
            device=opened.device,
            keeps_parts=opened.processor is not None,
        )


def _named_model(opened: InferenceModel, named: str, config: RunConfig) -> LoadedModel:
    directory = locate_model(named, key="preference.reference")
    base = load_base(
        directory,
        dtype=DTYPES[opened.dtype],
        trust_remote_code=config.model.trust_remote_code,
        quantized=quantized_load(None, directory, dtype=opened.dtype, device=opened.device),
        keeps_parts=opened.processor is not None,
    ).to(opened.device)
    return LoadedModel(base, base, opened.tokenizer, {}, base.num_parameters())


def _groups(table: TokenTable, sequences: Sequence[int]) -> Iterator[list[int]]:
    """Sequences in order, in groups of up to `_TOKENS` tokens and at least one sequence."""
    lengths = table.sequence_tokens()
    return grouped(((sequence, int(lengths[sequence])) for sequence in sequences), most=_TOKENS)


def answer_all(
    opened: InferenceModel, questions: Sequence[PromptAnswer], report: Reporter
) -> list[list[int]]:
    """Greedy answers, as tokens, up to twice as long as the longest reference."""
    if not questions:
        return []
    limit = 2 * max(len(question.answer) for question in questions) + 8
    special = set(opened.tokenizer.all_special_ids)
    stops = opened.stops(opened.template) | ({question.answer[-1] for question in questions} & special)
    limits = [max(0, min(limit, opened.context - len(question.prompt))) for question in questions]
    return _generate(opened, questions, limits, stops, GREEDY, report)


def _generate(
    opened: InferenceModel,
    questions: Sequence[PromptAnswer],
    limits: Sequence[int],
    stops: set[int],
    sampling: SamplingParams,
    report: Reporter,
) -> list[list[int]]:
    """The tokens of each answer."""

    def on_answers(done: int) -> None:
        report.phase("generate", "answering", done=done, total=len(questions))

    pictures = [question.pictures for question in questions]
    with opened.ready() as model:
        if any(pictures):
            answers = generate(
                model,
                [question.prompt for question in questions],
                max_new_tokens=max(limits),
                stop_ids=stops,
                pad_id=opened.pad_id,
                sampling=sampling,
                on_answers=on_answers,
                pictures=pictures,
            )
            return [answer[:limit] for answer, limit in zip(answers, limits, strict=True)]
        return answer_prompts(
            model,
            [question.prompt for question in questions],
            limits=limits,
            stop_ids=stops,
            pad_id=opened.pad_id,
            sampling=sampling,
            together=not opened.forward.rows_apart,
            on_answers=on_answers,
        )


def text_of(opened: InferenceModel, ids: Sequence[int]) -> str:
    """The text of an answer in the form that scores compare."""
    return plain(decode(opened.tokenizer, ids)).strip()


PREDICTIONS, RESULTS = "generated_predictions.jsonl", "predict_results.json"


def run_predict(request: PredictRequest, report: Reporter) -> Predicted:
    """Answers all rows, and writes both files.

    Raises:
        DataError: if no row has a question and an answer.
        UnfitError: if the files cannot be written.
    """
    data, table = prepared_rows(request.config, request.cache_dir, report)
    if data.pictures is not None:
        raise DataError.of(
            "the rows have pictures",
            where="eval_dataset",
            why="predictions are made for rows of text",
            fix="measure them with `unisono eval RUN --data FILE`",
        )
    questions = [question for row in range(table.rows) if (question := question_of(table, row)) is not None]
    if not questions:
        raise DataError.of(
            "no row has a question and an answer",
            where="eval_dataset",
            why="the rows count in the loss as a whole",
            fix="use rows with a prompt and a response",
        )
    opened = open_requested(request.model, report)
    started = time.monotonic()
    answers = _answers(opened, questions, request, report)
    seconds = time.monotonic() - started
    rows = _rows(opened.tokenizer, questions, answers, skip_special=request.skip_special_tokens)
    out = Path(request.out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / PREDICTIONS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    report.phase("score", "comparing answers with references")
    figures = _figures(rows, seconds=seconds)
    write_json(out / RESULTS, figures)
    return {
        "description": opened.target.description,
        "rouge": "LLaMA-Factory's" if find_spec("jieba") and find_spec("rouge_chinese") else "ours",
        "out": str(out),
        "files": [PREDICTIONS, RESULTS],
        "rows": len(rows),
        "figures": figures,
        "ledger": data.ledger,
    }


def _answers(
    opened: InferenceModel, questions: Sequence[PromptAnswer], request: PredictRequest, report: Reporter
) -> list[list[int]]:
    """The tokens of each answer; questions that leave less room in the context get shorter
    answers.
    """
    limits = [
        max(0, min(request.max_tokens, opened.context - len(question.prompt))) for question in questions
    ]
    stops = opened.stops(opened.template)
    return _generate(opened, questions, limits, stops, request.sampling, report)


def _rows(
    tokenizer: Any, questions: Sequence[PromptAnswer], answers: Sequence[list[int]], *, skip_special: bool
) -> list[dict[str, str]]:
    def text(ids: Sequence[int], *, skip: bool) -> str:
        decoded: str = tokenizer.decode(
            list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return decoded

    return [
        {
            "prompt": text(question.prompt, skip=False),
            "predict": text(answer, skip=skip_special),
            "label": text(question.answer, skip=skip_special),
        }
        for question, answer in zip(questions, answers, strict=True)
    ]


def _figures(rows: list[dict[str, str]], *, seconds: float) -> dict[str, float]:
    """The scores, and the speed, under the names of LLaMA-Factory's file.

    ROUGE is LLaMA-Factory's own where its packages are installed.
    """
    pairs = [(row["predict"], row["label"]) for row in rows]
    scores = similarity(pairs) | (llamafactory_rouge(pairs) or {})
    return {f"predict_{name}": round(value, 4) for name, value in scores.items()} | {
        "predict_runtime": round(seconds, 4),
        "predict_samples_per_second": round(len(rows) / seconds, 3),
    }


def llamafactory_rouge(pairs: Sequence[tuple[str, str]]) -> dict[str, float] | None:
    """ROUGE as LLaMA-Factory computes it, 0 to 100: of words by jieba, with rouge-chinese; None if
    one of these is not installed.
    """
    try:
        import jieba
        from rouge_chinese import Rouge
    except ImportError:
        return None
    jieba.setLogLevel(logging.ERROR)
    totals = dict.fromkeys(("rouge-1", "rouge-2", "rouge-l"), 0.0)
    for answer, reference in pairs:
        words = [" ".join(jieba.cut(text)) for text in (answer, reference)]
        if not all(text.split() for text in words):
            continue  # 0, as there
        for name, score in Rouge().get_scores(*words)[0].items():
            totals[name] += round(100 * score["f"], 4)
    return {name: total / len(pairs) for name, total in totals.items()}
