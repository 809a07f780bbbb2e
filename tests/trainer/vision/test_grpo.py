"""Answers to prompts with pictures: the sampler and the training see the same pixels, and rewards
teach what is in a picture.

Run: pytest tests/trainer/vision/test_grpo.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.trainer.objectives.environments import shop
from tests.trainer.ranks.conftest import Done
from tests.trainer.vision import picture_rewards
from tests.trainer.vision.conftest import Gallery
from tests.vision_models import COLORS, FAMILIES, draw, processor_of
from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.task_requests import EvaluateRewardsRequest, RequestedModel
from unisono.trainer.task import reward_evaluation

pytestmark = pytest.mark.processes  # pictures are decoded in them, and rewards computed


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions about pictures of one size, about two of them, and one of text."""
    folder = tmp_path_factory.mktemp("prompts")
    rows: list[dict[str, Any]] = []
    for i in range(12):
        draw(COLORS[i % 2], "square", size=(96, 64)).save(folder / f"{i}.png")
        row = {"prompt": "<image>what is this?", "images": [f"{i}.png"], "color": COLORS[i % 2]}
        if i % 6 == 4:
            row |= {"prompt": "<image>and <image>what is this?", "images": [f"{i}.png", f"{i - 1}.png"]}
        if i % 6 == 5:
            row = {"prompt": "what is red?", "color": "red"}
        rows.append(row)
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def plan_of(gallery: Gallery, family: str, rows: Path, **more: Any) -> RunPlan:
    """The plan of a run on prompts."""
    sections: dict[str, Any] = {
        "objective": "grpo", "rewards": [f"{picture_rewards.__file__}:first_byte"], "batch": {"global": 8, "micro": 2},
        "rollout": {"group": 4, "max_new_tokens": 5}, "grpo": {"truncated": "keep"}, "optim": {"lr": 1e-3},
        "duration": "3 steps",
    }  # fmt: skip
    return gallery.plan(family, **{**sections, "data": {"train": str(rows), "packing": False}, **more})


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sampler_has_the_probabilities_of_the_training(
    gallery: Gallery, prompts: Path, family: str
) -> None:
    done = gallery.alone(plan_of(gallery, family, prompts))

    differences = [line["sampler_difference"] for line in done.metrics if "sampler_difference" in line]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def _answers(done: Done) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted(done.directory.glob("rollouts/*.parquet"))
        for row in pq.read_table(file).to_pylist()
    ]


def test_a_token_of_a_picture_ends_an_answer_and_is_predicted(gallery: Gallery, prompts: Path) -> None:
    """A random model writes some."""
    image_id = PictureProcessor(gallery.model("qwen2_5_vl")).image_ids[0]

    done = gallery.alone(
        plan_of(
            gallery,
            "qwen2_5_vl",
            prompts,
            rollout={"group": 16, "max_new_tokens": 24},
            batch={"global": 32, "micro": 8},
        )
    )

    ending = [row["ids"] for row in _answers(done) if image_id in row["ids"]]
    assert ending
    assert all(ids.index(image_id) == len(ids) - 1 for ids in ending)
    assert max(line["sampler_difference"] for line in done.metrics if "loss" in line) < 1e-5


def test_each_answer_is_that_to_its_own_picture(gallery: Gallery, prompts: Path) -> None:
    """Prompts with the same tokens and different pictures; plain transformers has the same
    probabilities.
    """
    plan = plan_of(gallery, "llava", prompts, duration="1 step")

    rows = _answers(gallery.alone(plan))

    directory = Path(plan.model.directory)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    processor = processor_of(directory)
    given = [json.loads(line) for line in prompts.read_text().splitlines()]
    pictures = []
    for row in rows:
        question = given[int(row["row"].rpartition(":")[2]) - 1]
        images = [Image.open(prompts.parent / name).convert("RGB") for name in question.get("images", ())]
        pictures.append(question.get("images"))
        inputs = (
            {"pixel_values": processor.image_processor(images, return_tensors="pt")["pixel_values"]}
            if images
            else {}
        )
        ids = torch.tensor([row["prompt_ids"] + row["ids"]])
        with torch.no_grad():
            log_probs = model(input_ids=ids, **inputs).logits[0].log_softmax(-1)
        first = len(row["prompt_ids"])
        own = [float(log_probs[first + i - 1, token]) for i, token in enumerate(row["ids"])]
        assert row["log_probs"] == pytest.approx(own, abs=1e-4)
        assert ("<image>" in row["prompt"]) is bool(images)
    assert len({json.dumps(names) for names in pictures}) == 2


def test_rewards_teach_what_is_in_a_picture(gallery: Gallery, prompts: Path) -> None:
    more: dict[str, Any] = {
        "rewards": [f"{picture_rewards.__file__}:by_picture"], "optim": {"lr": 3e-3}, "duration": "40 steps",
        "rollout": {"group": 16, "max_new_tokens": 1}, "batch": {"global": 96, "micro": 96},
        "train_parts": ["language", "projector", "vision"], "adapter": None, "checkpoint": {"every": "40 steps"},
    }  # fmt: skip
    done = gallery.alone(plan_of(gallery, "llava", prompts, **more))

    rewards = [line["reward"] for line in done.metrics if "loss" in line]
    assert sum(rewards[:3]) / 3 < 0.65
    assert sum(rewards[-3:]) / 3 > 0.8


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_ranks_give_the_losses_of_one(gallery: Gallery, prompts: Path, way: str) -> None:
    more: dict[str, Any] = {
        "train_parts": ["language", "projector", "vision"],
        "grpo": {"truncated": "keep", "beta": 0.1},
    }
    one = gallery.alone(plan_of(gallery, "qwen3_vl", prompts, **more))

    (two,) = gallery.together([plan_of(gallery, "qwen3_vl", prompts, world=2, strategy=way, **more)])

    assert two.losses == pytest.approx(one.losses, abs=1e-6)
    assert [line["reward"] for line in two.metrics if "loss" in line] == pytest.approx(
        [line["reward"] for line in one.metrics if "loss" in line], abs=1e-6
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"engine": "vllm", "url": "http://127.0.0.1:1"}, "rollout.engine: vllm gets prompts of text"),
        ({"environment": f"{shop.__file__}:Shop"}, "conversations in rollout.environment are of text"),
    ],
)  # fmt: skip
def test_samplers_that_get_text_refuse_pictures(
    gallery: Gallery, prompts: Path, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(DataError) as caught:
        plan_of(gallery, "llava", prompts, rollout={"group": 4, "max_new_tokens": 5, **more})

    assert why in caught.value.problems[0].why


def test_eval_of_rewards_gives_what_the_run_measured(gallery: Gallery, prompts: Path, tmp_path: Path) -> None:
    data = {"train": str(prompts), "packing": False, "eval": str(prompts)}
    done = gallery.alone(plan_of(gallery, "llava", prompts, data=data, optim={"lr": 1e-2}))
    model = RequestedModel(str(done.directory), None)
    request = EvaluateRewardsRequest(
        model=model, data=str(prompts), cache_dir=tmp_path / "cache", trust_code=True
    )

    result = reward_evaluation.run(request, Reporter(None, fallback=sys.stderr))

    assert result["figures"]["reward"] == pytest.approx(done.result["eval"]["reward"], abs=1e-6)
