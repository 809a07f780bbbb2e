"""Answers about pictures beside others.

Run: pytest tests/trainer/vision/test_engine.py
"""

from pathlib import Path
from typing import Any

import pytest

from tests.vision_models import FAMILIES, draw
from unisono.base.events import Reporter
from unisono.trainer.model.engine import Engine, GeneratedAnswer
from unisono.trainer.model.forward import PictureInputs
from unisono.trainer.model.generate import generate
from unisono.trainer.plan.task_requests import RequestedModel, SamplingParams
from unisono.trainer.task.generation import ids_with_pictures
from unisono.trainer.task.inference import InferenceModel, open_requested

pytestmark = pytest.mark.processes  # pictures are decoded in them

QUESTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("what is red?", ()),
    ("\ue010what is this?", (draw("red", "circle"),)),
    ("\ue010and\ue010 are?", (draw("blue", "square", size=(70, 130)), draw("green", "circle"))),
    ("a long question about what is blue and what is green in the picture", ()),
    ("\ue010what is this?", (draw("black", "square"),)),
)


def read(
    opened: InferenceModel, text: str, images: tuple[Any, ...]
) -> tuple[list[int], PictureInputs | None]:
    """The tokens of a question, and its pictures."""
    assert opened.processor is not None
    assert opened.template is not None
    sizes = [image.size for image in images]
    expansions = [opened.processor.expansion(size) for size in sizes]
    ids = ids_with_pictures(opened, opened.template, [{"role": "user", "content": text}], expansions)
    parts = [opened.processor.inputs(image) for image in images]
    return ids, PictureInputs.of(parts, opened.processor.image_ids, opened.device)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_share_forwards_are_those_alone(family: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path / family)
    opened = open_requested(RequestedModel(str(tmp_path / family)), Reporter(None), sees=True)
    questions = [read(opened, text, images) for text, images in QUESTIONS]
    samplings = [SamplingParams(temperature=0.7 * (i % 2), seed=i) for i in range(len(questions))]
    options: dict[str, Any] = {"stop_ids": opened.stops(opened.template), "pad_id": opened.pad_id}

    with opened.ready() as model:
        alone = [
            generate(model, [ids], max_new_tokens=10, sampling=sampling, pictures=[seen], **options)[0]
            for (ids, seen), sampling in zip(questions, samplings, strict=True)
        ]
        engine = Engine(model, rows=8, part_tokens=7, **options)
        answers = [
            GeneratedAnswer(ids, 10, sampling, pictures=seen)
            for (ids, seen), sampling in zip(questions, samplings, strict=True)
        ]
        largest = 0
        with engine.ready():
            for answer in answers:
                engine.add(answer)
            while not engine.is_idle:
                largest = max(largest, len(engine.step()))

    assert [answer.tokens for answer in answers] == alone
    assert largest >= 3  # they did share forwards
    assert len(set(map(tuple, alone))) > 2
