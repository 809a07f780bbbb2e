"""The task `predict`: answers to the rows of a LLaMA-Factory file with `do_predict`, and how similar they are to the references.

Request: target, base, template and thinking (as for `requested_target`), config (a RunConfig as JSON, whose data.train are the rows), generation (max_tokens,
temperature, top_p, top_k, seed, skip_special_tokens), cache_dir, out (a directory). It writes into `out`, as LLaMA-Factory does:

    generated_predictions.jsonl   {prompt, predict, label} for each row, in the order of the rows
    predict_results.json          the mean scores of all rows, 0 to 100

Result: description, out, files, rows, figures, ledger.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.config.schema import RunConfig
from unisono.data.token_table import TokenTable
from unisono.errors import DataError
from unisono.events import Reporter
from unisono.files import write_json, write_text
from unisono.model.generate import Sampling, generate
from unisono.task import data_tasks
from unisono.task.inference import InferenceModel, open_requested
from unisono.train.evaluation import Question, question_of, similarity

PREDICTIONS, RESULTS = "generated_predictions.jsonl", "predict_results.json"


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Answers all rows, and writes both files.

    Raises:
        DataError: if no row has a question and an answer.
        UnfitError: if the files cannot be written.
    """
    config = RunConfig.model_validate(request["config"])
    body = {
        "config": config.model_dump(mode="json", by_alias=True),
        "cache_dir": request["cache_dir"],
        "output_dir": None,
    }
    prepared = data_tasks.prepare(body, report)["data"]
    table = TokenTable.open(Path(prepared["cache_dir"]), "train")
    questions = [question for row in range(table.rows) if (question := question_of(table, row)) is not None]
    if not questions:
        raise DataError.of(
            "no row has a question and an answer",
            where="eval_dataset",
            why="the rows count in the loss as a whole",
            fix="use rows with a prompt and a response",
        )
    opened = open_requested(request, report)
    started = time.monotonic()
    sampling = request["generation"]
    answers = _answers(opened, questions, sampling, report)
    seconds = time.monotonic() - started
    rows = _rows(opened.tokenizer, questions, answers, skip_special=sampling["skip_special_tokens"])
    out = Path(request["out"])
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / PREDICTIONS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    report.phase("score", "comparing answers with references")
    figures = _figures(rows, seconds=seconds)
    write_json(out / RESULTS, figures)
    return {
        "description": opened.target.description,
        "out": str(out),
        "files": [PREDICTIONS, RESULTS],
        "rows": len(rows),
        "figures": figures,
        "ledger": prepared["ledger"],
    }


def _answers(
    opened: InferenceModel, questions: Sequence[Question], sampling: dict[str, Any], report: Reporter
) -> list[list[int]]:
    """The tokens of each answer; questions that leave less room in the context get shorter answers, in batches of their own."""
    room = [min(sampling["max_tokens"], opened.context - len(question.prompt)) for question in questions]
    stops = opened.stops(opened.template)
    answers: list[list[int]] = [[] for _ in questions]
    with opened.ready() as model:
        for limit in sorted({length for length in room if length > 0}, reverse=True):
            places = [i for i, length in enumerate(room) if length == limit]
            found = generate(
                model,
                [questions[i].prompt for i in places],
                max_new_tokens=limit,
                stop_ids=stops,
                pad_id=opened.pad_id,
                sampling=Sampling.of(sampling),
                on_answers=lambda done: report.phase(
                    "generate", "answering", done=done, total=len(questions)
                ),
            )
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
    return answers


def _rows(
    tokenizer: Any, questions: Sequence[Question], answers: Sequence[list[int]], *, skip_special: bool
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
    """The scores, and the speed, under the names of LLaMA-Factory's file."""
    scores = similarity([(row["predict"], row["label"]) for row in rows])
    return {f"predict_{name}": round(value, 4) for name, value in scores.items()} | {
        "predict_runtime": round(seconds, 4),
        "predict_samples_per_second": round(len(rows) / seconds, 3),
    }
