"""Videos of models with tokens of their own for videos: the family's own path through its processor.

Run: pytest tests/trainer/vision/test_video_tokens.py

It needs torchvision, with which transformers reads videos.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests import needs
from tests.trainer.vision import picture_rewards
from tests.trainer.vision.conftest import Gallery
from tests.trainer.vision.test_parity import by_hand
from tests.vision_models import COLORS, FAMILIES, SHAPES, draw
from unisono.base.errors import DataError
from unisono.trainer.data.pictures.store import read_pictures
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers

# Frames are decoded in processes; what reads videos is torchvision, which `dev` does not have.
pytestmark = [pytest.mark.processes, pytest.mark.long]

VIDEO_FAMILIES = [
    family
    for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "internvl", "gemma4", "smolvlm")
    if family in FAMILIES
]
_FRAMES = {"max": 8, "fps": 2.0}


def _row(videos: list[str], *turns: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages, **({"videos": videos} if videos else {}), **more}


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with a video, with two beside a picture, with a picture, and without any."""
    needs.package("torchvision")
    folder = tmp_path_factory.mktemp("films")
    rows = []
    for i in range(16):
        color, shape = COLORS[i % 4], SHAPES[i // 4 % 2]
        (folder / f"film-{i}").mkdir()
        for number in range(3 + i // 4 * 3):  # 3, 6, 9 or 12 frames, also odd numbers of them
            frame = draw(color, shape, size=(64, 48) if i % 2 else (40, 60))
            frame.putpixel((number, 0), (0, 0, 0))
            frame.save(folder / f"film-{i}" / f"{number:02}.png")
        draw(color, shape).save(folder / f"{i}.png")
        turns = ("<video>what is this?", f"a {color} {shape}")
        row = _row([f"film-{i}"], *turns)
        if i % 4 == 1:
            pair = [f"film-{i}", f"film-{i - 1}"]
            row = _row(
                pair, "<video>and <image>: what?", turns[1], "and <video>?", "the same", images=[f"{i}.png"]
            )
        elif i % 4 == 2:
            row = _row([], "<image>what is this?", turns[1], images=[f"{i}.png"])
        elif i % 4 == 3:
            row = _row([], "what is red?", "a color")
        rows.append(row)
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def _plan(gallery: Gallery, family: str, rows: Path, **more: Any) -> Any:
    data = {"train": str(rows), "frames": _FRAMES, "max_length": 2048, **more.pop("data", {})}
    return gallery.plan(family, data=data, **more)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "alone"])
def test_losses_are_those_of_transformers_with_videos_by_hand(
    gallery: Gallery, films: Path, family: str, *, packing: bool
) -> None:
    rows = films if family != "smolvlm" else _without_both(films)
    plan = _plan(gallery, family, rows, data={"packing": packing})

    losses = gallery.alone(plan).losses

    assert plan.data.ledger["pictures"] == 20 - 4 * (family == "smolvlm")
    # These processors take only videos with the same number of frames in one call.
    apart = family in ("internvl", "smolvlm")
    assert losses == pytest.approx(by_hand(plan, rows, apart=apart), abs=1e-5)


def _without_both(films: Path) -> Path:
    """The rows without pictures beside videos, of which SmolVLM's processor forgets the pictures if
    they are in one call.
    """
    file = films.with_name("apart.jsonl")
    text = films.read_text().replace("<video>and <image>", "<video>")
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        if row.get("videos"):
            row.pop("images", None)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_each_video_has_as_many_tokens_as_features(gallery: Gallery, films: Path, family: str) -> None:
    directory = Path(_plan(gallery, family, films).data.cache_dir)
    pictures, of_rows = read_pictures(directory), read_picture_numbers(directory)
    table = TokenTable.open(directory, "train")

    listed = json.loads((directory / "pictures.json").read_text())["image_ids"]
    for row in range(table.rows):
        stored = of_rows[int(table.columns["stored"][row])]
        ids, targets = table.row(row)
        features = [i for i, token in enumerate(ids.tolist()) if token in listed]
        assert len(features) == sum(pictures[number].features for number in stored)
        assert not targets[features].any()
    videos = [one for one in pictures if one.frames]
    assert {len(one.frames) for one in videos} == {3, 6, 8}
    assert all(one.seconds == len(list((films.parent / one.name).iterdir())) / 2 for one in videos)


@pytest.mark.ranks
@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_two_ranks_give_the_losses_of_one_with_videos(gallery: Gallery, films: Path, family: str) -> None:
    alone = gallery.alone(_plan(gallery, family, films))

    (together,) = gallery.together([_plan(gallery, family, films, world=2, strategy="ddp")])

    assert together.losses == pytest.approx(alone.losses, abs=1e-6)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_rows_with_videos_that_share_a_sequence_give_the_losses_of_rows_alone(
    gallery: Gallery, films: Path, family: str
) -> None:
    rows = films.read_text().splitlines()[:4]
    file = films.with_name("four.jsonl")
    file.write_text("\n".join(rows))
    alone = _plan(gallery, family, file, data={"packing": False})
    packed = _plan(gallery, family, file, batch={"global": 1, "micro": 1})

    assert packed.total_sequences == packed.total_steps
    assert gallery.alone(packed).losses == pytest.approx(gallery.alone(alone).losses, abs=1e-6)


def test_a_processor_that_stacks_videos_is_refused_by_name(gallery: Gallery, films: Path) -> None:
    with pytest.raises(DataError) as caught:
        _plan(gallery, "llava_onevision", films)

    why = caught.value.problems[0].why
    assert "LlavaOnevisionProcessor gives videos as a stack, in which all need the same number" in why


def test_frames_of_different_sizes_make_a_bad_row(gallery: Gallery, films: Path, tmp_path: Path) -> None:
    for number, size in enumerate([(40, 40), (50, 40)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(_row([["0.png", "1.png"]], "<video>what?", "it")))  # type: ignore[list-item]

    with pytest.raises(DataError) as caught:
        _plan(gallery, "qwen3_vl", file)

    assert "its frames have 40 × 40 and 50 × 40 pixels" in caught.value.problems[0].why


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_answers_to_prompts_with_videos_are_sampled_and_trained(
    gallery: Gallery, films: Path, tmp_path: Path, family: str
) -> None:
    read = [json.loads(line) for line in films.read_text().splitlines()]
    prompts = [
        {
            "prompt": row["messages"][0]["content"],
            "videos": [str(films.parent / name) for name in row["videos"]],
        }
        for row in read
        if len(row.get("videos", ())) == 1
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    plan = _plan(
        gallery,
        family,
        file,
        objective="grpo",
        rewards=[f"{picture_rewards.__file__}:first_byte"],
        data={"packing": False},
        batch={"global": 8, "micro": 2},
        rollout={"group": 4, "max_new_tokens": 5},
        grpo={"truncated": "keep"},
        optim={"lr": 1e-3},
        duration="2 steps",
    )

    done = gallery.alone(plan)

    differences = [line["sampler_difference"] for line in done.metrics if "sampler_difference" in line]
    assert len(differences) == 2
    assert max(differences) < 1e-5
    record = TokenTable.open(Path(plan.data.cache_dir), "train").record(0)
    assert "<video>" in json.dumps(record["prompt"])
    columns = record["columns"]
    assert isinstance(columns, dict)
    assert columns["videos"] == [str(films.parent / "film-0")]


def test_pairs_with_videos_begin_at_the_loss_of_equal_answers(
    gallery: Gallery, films: Path, tmp_path: Path
) -> None:
    pair = {
        "prompt": "<video>what is this?",
        "chosen": "a red square",
        "rejected": "a dog",
        "videos": [str(films.parent / "film-0")],
    }
    file = tmp_path / "pairs.jsonl"
    file.write_text(f"{json.dumps(pair)}\n" * 4)

    done = gallery.alone(_plan(gallery, "qwen3_vl", file, objective="dpo"))

    assert done.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert done.losses[-1] < 0.5
