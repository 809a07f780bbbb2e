"""Files of LLaMA-Factory with pictures: its templates, its dataset_info.json, and its keys.

Run: pytest tests/trainer/vision/test_llamafactory.py

The texts that stand for a picture are those which LLaMA-Factory's own tests/data/test_mm_plugin.py
expects, with the number of tokens of the processors here.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import draw
from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.config import RunConfig
from unisono.trainer.config.data_sections import sources_of as sources_of_data
from unisono.trainer.data import PICTURE
from unisono.trainer.data.pictures.picture_template import media_marks
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.plan.task_requests import RequestedModel
from unisono.trainer.readers.llamafactory.reader import read_llamafactory
from unisono.trainer.task.generation import ids_with_pictures
from unisono.trainer.task.inference import open_requested
from unisono.trainer.task.prompt_pictures import expansions_of, marked, see_file, sources_of

pytestmark = [pytest.mark.processes]
QUESTION, ANSWER = "what is this?", "a red square"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    draw("red", "square").save(tmp_path / "a.png")
    row = {
        "messages": [
            {"role": "user", "content": f"<image>{QUESTION}"},
            {"role": "assistant", "content": ANSWER},
        ],
        "images": ["a.png"],
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return file


@pytest.mark.parametrize(
    ("family", "template", "before", "token", "after"),
    [
        ("llava", "llava", "", "<image>", ""),
        ("qwen2_5_vl", "qwen2_vl", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        ("qwen3_vl", "qwen3_vl_nothink", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    ],
)
def test_a_picture_is_what_llama_factory_expects(
    gallery: Gallery, rows: Path, family: str, template: str, before: str, token: str, after: str
) -> None:
    config = {"train": str(rows), "template": f"lf:{template}"}
    plan = gallery.plan(family, data=config, batch={"global": 1, "micro": 1})
    processor = PictureProcessor(gallery.model(family))
    ids, loss = TokenTable.open(Path(plan.data.cache_dir), "train").row(0)[:2]
    text = processor.processor.tokenizer.decode(ids)
    count = text.count(token)
    assert count > 1
    assert f"{before}{token * count}{after}{QUESTION}" in text
    assert not any(
        token_id in processor.image_ids for token_id, counts in zip(ids, loss, strict=True) if counts
    )


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gemma3", "\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\n"),
        ("llava", 16 * "<image>"),
    ],
)
def test_the_text_of_a_picture_in_the_middle_of_a_template(gallery: Gallery, family: str, text: str) -> None:
    processor = PictureProcessor(gallery.model(family))
    mark = media_marks(processor)[PICTURE].text
    assert mark.replace(processor.placeholder, processor.expansion((64, 64))) == text


def test_a_run_with_its_template_trains(gallery: Gallery, rows: Path) -> None:
    data = {"template": "lf:qwen2_vl", "on_bad_row": "skip", "too_long": "balanced"}
    done = gallery.alone(gallery.plan("qwen2_5_vl", data=data, duration="3 steps"))
    assert done.losses[-1] < done.losses[0]


def test_a_trained_model_is_question_ids_as_its_rows_ask(gallery: Gallery, rows: Path) -> None:
    data = {"train": str(rows), "template": "lf:qwen2_vl"}
    plan = gallery.plan("qwen2_5_vl", data=data, batch={"global": 1, "micro": 1}, duration="2 steps")
    run = gallery.alone(plan).directory
    opened = open_requested(RequestedModel(str(run), None), Reporter(None, fallback=sys.stderr), sees=True)
    assert opened.processor is not None
    (source,) = sources_of([str(rows.with_name("a.png"))], where="--image")
    seen = see_file(source, opened.processor, opened.pixels, where="--image")
    messages: list[Any] = [{"role": "user", "content": marked(QUESTION, 1)}]
    question_ids = ids_with_pictures(opened, opened.chat_template()[0], messages, expansions_of([seen]))
    trained = TokenTable.open(Path(plan.data.cache_dir), "train").row(0)[0].tolist()
    assert question_ids == trained[: len(question_ids)]
    assert len(trained) - len(question_ids) < 12  # the answer


def test_a_picture_is_not_cut_by_its_cut(gallery: Gallery, rows: Path) -> None:
    data = {"train": str(rows), "template": "lf:qwen2_vl", "too_long": "balanced", "max_length": 24}
    with pytest.raises(DataError) as error:
        gallery.plan("qwen2_5_vl", data=data, batch={"global": 1, "micro": 1})
    assert any("a picture would be cut" in f"{one.what} {one.why}" for one in error.value.problems)


def llamafactory(folder: Path, **keys: Any) -> Path:
    columns = {"messages": "messages", "images": "images"}
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entries = {
        "shapes": {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags},
        "texts": {"file_name": "texts.jsonl"},
        "films": {
            "file_name": "films.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "videos": "videos"},
            "tags": tags,
        },
    }
    pairs = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected", "images": "images"}
    entries["pairs"] = {
        "file_name": "pairs.jsonl", "formatting": "sharegpt", "ranking": True, "columns": pairs,
    }  # fmt: skip
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    (folder / "films.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "<video>?"}], "videos": ["a.mp4"]})
    )
    (folder / "texts.jsonl").write_text(json.dumps({"instruction": "a", "output": "b"}) + "\n")
    values = {
        "model_name_or_path": "some/model", "stage": "sft", "do_train": True, "finetuning_type": "lora",
        "dataset": "shapes", "dataset_dir": str(folder), "template": "qwen2_vl", "output_dir": "out",
    }  # fmt: skip
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump(values | keys))
    return file


@pytest.mark.parametrize(
    ("keys", "pixels", "parts"),
    [
        ({}, (1024, 589824), ["language"]),
        ({"image_max_pixels": 262144, "image_min_pixels": 256}, (256, 262144), ["language"]),
        ({"freeze_vision_tower": False}, None, ["language", "vision"]),
        ({"freeze_multi_modal_projector": False}, None, ["language", "projector"]),
        (
            {"freeze_multi_modal_projector": False, "freeze_language_model": True, "finetuning_type": "full"},
            None,
            ["projector"],
        ),
    ],
)
def test_keys_of_pictures_are_carried(
    rows: Path, keys: dict[str, Any], pixels: tuple[int, int] | None, parts: list[str]
) -> None:
    config = RunConfig.model_validate(read_llamafactory(llamafactory(rows.parent, **keys)).config)
    assert config.train_parts == parts
    assert config.data.media_dir == str(rows.parent)
    if pixels is not None:
        assert (config.data.pixels.min, config.data.pixels.max) == pixels


def test_keys_of_videos_are_carried(rows: Path) -> None:
    folder = rows.parent
    config = RunConfig.model_validate(read_llamafactory(llamafactory(folder, dataset="films")).config)
    frames = config.data.frames
    assert (frames.fps, frames.max, frames.pixels.min, frames.pixels.max) == (2.0, 128, 256, 65536)
    assert [source.columns.get("videos") for _, source in sources_of_data(config.data)] == ["videos"]
    keys = {"video_fps": 1.0, "video_maxlen": 8, "video_max_pixels": 999, "video_min_pixels": 99}

    config = RunConfig.model_validate(read_llamafactory(llamafactory(folder, dataset="films", **keys)).config)

    frames = config.data.frames
    assert (frames.fps, frames.max, frames.pixels.min, frames.pixels.max) == (1.0, 8, 99, 999)
    file = read_llamafactory(llamafactory(folder, **keys))
    assert {key.key for key in file.keys if key.fate == "ignored"} >= keys.keys()


def test_keys_of_pictures_have_no_effect_on_texts(rows: Path) -> None:
    keys = {"dataset": "texts", "image_max_pixels": 99, "freeze_vision_tower": False}
    file = read_llamafactory(llamafactory(rows.parent, **keys))
    config = RunConfig.model_validate(file.config)
    assert config.train_parts == ["language"]
    assert config.data.pixels.max is None
    assert {key.key for key in file.keys if key.fate == "ignored"} >= {
        "image_max_pixels",
        "freeze_vision_tower",
    }


def test_its_pairs_with_pictures_train_by_its_own_file(gallery: Gallery, rows: Path) -> None:
    pairs = [
        {
            "conversations": [{"from": "human", "value": f"<image>{QUESTION}"}],
            "chosen": {"from": "gpt", "value": ANSWER},
            "rejected": {"from": "gpt", "value": "a dog"},
            "images": ["a.png"],
        }
    ] * 4
    (rows.parent / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in pairs))
    config: Any = read_llamafactory(llamafactory(rows.parent, dataset="pairs", stage="dpo")).config
    assert not read_llamafactory(llamafactory(rows.parent, dataset="pairs", stage="dpo")).problems
    data = {
        "train": config["data"]["train"],
        "template": config["data"]["template"],
        "media_dir": config["data"]["media_dir"],
    }

    done = gallery.alone(gallery.plan("qwen2_5_vl", objective=config["objective"], data=data))

    assert done.plan.config.objective == "dpo"
    assert done.plan.data.ledger["pictures"] == 4
    assert done.losses[-1] < done.losses[0]
    (problem,) = read_llamafactory(llamafactory(rows.parent, dataset="pairs", stage="rm")).problems
    assert "stages sft, dpo and kto" in problem.why


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"crop_to_patches": True}, "crop_to_patches"),
        ({"image_do_pan_and_scan": True}, "image_do_pan_and_scan"),
        ({"freeze_language_model": True}, "nothing is trained"),
        ({"use_audio_in_video": True, "dataset": "films"}, "the sound of videos is not read"),
    ],
)
def test_what_cannot_be_carried_is_refused(rows: Path, keys: dict[str, Any], what: str) -> None:
    problems = read_llamafactory(llamafactory(rows.parent, **keys)).problems
    assert any(what in f"{problem.what} {problem.why}" for problem in problems)
