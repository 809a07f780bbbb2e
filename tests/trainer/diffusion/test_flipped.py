"""Mirrored pictures, and captions that change in each use, in a run: drawn by their place alone,
from a cache or without, and after a resume.

Run: pytest tests/trainer/diffusion/test_flipped.py
"""

import json
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.trainer.diffusion.conftest import Studio
from tests.trainer.diffusion.making import write_pictures, write_pipeline
from tests.trainer.ranks.conftest import Done
from unisono.base.errors import IntegrityError
from unisono.trainer.families.pictures.latents import PictureLoader, encode_pixels
from unisono.trainer.families.pictures.picture_folders import read_pixels
from unisono.trainer.families.pictures.pipeline import load_component
from unisono.trainer.families.pictures.pipeline_files import read_pipeline
from unisono.trainer.plan import RunPlan

needs.package("diffusers")
Image = needs.package("PIL.Image")

VARYING = {
    "flip": True, "shuffle_captions": True, "tag_dropout": 0.2, "wildcards": True, "keep_tokens_separator": "|||",
    "secondary_separator": ";;;", "caption_prefix": "aki |||", "tag_warmup": "4 steps",
}  # fmt: skip
LINES = "a {red|blue} tile, sky;;;cloud, wide, {{best}}\nits other line, of two\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("varying")
    for path in write_pictures(root / "2_tile", ["red", "blue"], ((32, 32), (48, 24))).glob("*.txt"):
        path.write_text(LINES)
    return root


@pytest.fixture(scope="module")
def varying(studio: Studio, folder: Path) -> Done:
    """A run of six steps with all of them."""
    return studio.alone(_plan(studio, folder))


def _plan(studio: Studio, folder: Path, diffusion: dict[str, Any] = VARYING, **more: Any) -> RunPlan:
    return studio.plan("diffusion", data={"train": str(folder)}, diffusion=diffusion, **more)


def _loader(plan: RunPlan) -> PictureLoader:
    return PictureLoader(plan.config, Path(plan.data.cache_dir), directory=Path(plan.model.directory), device=torch.device("cpu"), timesteps=100, total_steps=plan.total_steps)  # fmt: skip


def _entries(plan: RunPlan) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(plan.data.cache_dir) / "pictures.json").read_text())[
        "pictures"
    ]
    return found


def test_half_of_the_uses_are_those_of_the_mirrored_picture(studio: Studio, folder: Path) -> None:
    """With the same noise: the latents differ from those without `flip` by the difference of the
    two means, where their std is the same.
    """
    plans = [_plan(studio, folder, {"flip": flip}) for flip in (False, True)]
    plain, flipped = (_loader(plan).load([0] * 400, list(range(400)), [0] * 400).uses for plan in plans)
    entry, vae = _entries(plans[1])[0], load_component(read_pipeline(Path(plans[0].model.directory)), "vae")
    pixels = read_pixels(Path(entry["path"]), entry["digest"], tuple(entry["size"]))
    mirrored = encode_pixels(vae, pixels[:, ::-1].copy())
    upright = encode_pixels(vae, pixels)
    count = 0
    for one, other in zip(plain, flipped, strict=True):
        assert (one.caption, one.timestep) == (other.caption, other.timestep)
        assert torch.equal(one.noise, other.noise)
        if not torch.equal(one.latents, other.latents):
            count += 1
            drawn = (one.latents - upright["mean"]) / upright["std"]
            torch.testing.assert_close(
                other.latents, mirrored["mean"] + mirrored["std"] * drawn, atol=1e-4, rtol=1e-4
            )
    assert abs(count - 200) < 4 * math.sqrt(400 / 4)


def test_uses_have_the_lines_and_alternatives_of_the_file(studio: Studio, folder: Path) -> None:
    loader = _loader(_plan(studio, folder, VARYING | {"tag_dropout": 0.0, "caption_dropout": 0.0}))
    captions = {use.caption for use in loader.load([1] * 3000, list(range(3000)), [9] * 3000).uses}
    parts = ["sky,cloud", "wide", "{best}"]
    first = {", ".join(["aki", *order]) for color in ("red", "blue") for order in permutations([f"a {color} tile", *parts])}  # fmt: skip
    other = {"its other line, of two", "of two, its other line"}
    assert captions == first | other  # as in sd-scripts the prefix is before the first line only


def test_evaluation_has_the_picture_and_the_first_caption(studio: Studio, folder: Path) -> None:
    plan = studio.plan("diffusion", data={"train": str(folder), "eval": 1}, diffusion=VARYING)
    entry = _entries(plan)[-1]
    assert "flipped" not in entry
    loader = _loader(plan)
    number = len(_entries(plan)) - 1
    assert {use.caption for use in loader.load_evaluation([number], [5]).uses} == {
        "aki, a red tile, sky,cloud, wide, {best}"
    }
    assert loader.sample(number)[0] == entry["caption"] == "aki, a red tile, sky,cloud, wide, {best}"


def test_a_line_that_is_cut_or_lacks_the_prefix_is_told(studio: Studio, tmp_path: Path) -> None:
    for name, text in (("a", "short\n" + "long " * 30), ("b", "one line {of|among} three")):
        Image.new("RGB", (32, 32), (70, 70, len(name))).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(text)
    found = "\n".join(_plan(studio, tmp_path).data.warnings)
    assert "1 captions are cut, e.g. of " in found
    assert "a.png: 120 tokens, of which the text encoder reads 75" in found
    assert (
        "1 captions have more than one line; as in sd-scripts caption_prefix is before the first one only"
        in found
    )


def test_latents_of_both_are_in_the_cache_and_verified(studio: Studio, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), (7, 70, 170)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    plans = [_plan(studio, tmp_path, {"flip": flip}) for flip in (False, True, True)]
    assert [plan.data.cache_hit for plan in plans] == [False, False, True]
    assert "1 latents and embeddings were computed" in plans[1].data.cache_reason
    assert plans[0].data.cache_dir != plans[1].data.cache_dir
    assert plans[0].data.rows_digest != plans[1].data.rows_digest
    entry = _entries(plans[1])[0]
    pattern = f"*/pictures/latents/*/{entry['digest']}-32x32-flipped.safetensors"
    (file,) = Path(plans[1].data.cache_dir).parents[2].glob(pattern)
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    with pytest.raises(IntegrityError, match="damaged"):
        _loader(plans[1]).load([0] * 20, list(range(20)), [0] * 20)


@pytest.mark.parametrize("change", [{"batch": {"global": 6, "micro": 6}}, {"diffusion": {"cache": False}}])
def test_neither_micro_batch_nor_cache_changes_what_is_drawn(
    studio: Studio, folder: Path, varying: Done, change: dict[str, Any]
) -> None:
    more = change | {"diffusion": VARYING | change.get("diffusion", {})}
    other = studio.alone(_plan(studio, folder, **more))
    assert other.losses == pytest.approx(varying.losses, rel=1e-5)


def test_a_resumed_run_draws_the_same(studio: Studio, folder: Path, varying: Done) -> None:
    resumed = studio.alone(_plan(studio, folder, resume=varying.directory / "checkpoints" / "step-00000003"))
    assert resumed.losses == varying.losses[3:]


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_draw_the_same(studio: Studio, folder: Path, varying: Done) -> None:
    (other,) = studio.together([_plan(studio, folder, world=2)])
    assert other.losses == pytest.approx(varying.losses, rel=1e-5)


def test_the_parts_of_a_caption_grow_with_the_steps(studio: Studio, folder: Path) -> None:
    section = {"tag_warmup": "50%", "caption_prefix": "x,", "keep_tokens": 1, "caption_dropout": 0.0}
    loader = _loader(_plan(studio, folder, section, duration="8 steps"))
    captions = [use.caption for use in loader.load([0] * 8, [3] * 8, list(range(8))).uses]
    parts = [len(caption.split(", ")) for caption in captions]
    assert parts == [2, 2, 3, 4, 5, 5, 5, 5]


def test_sdxl_is_told_the_left_of_the_mirrored_cut(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of its 43 columns 11 are cut: 5 at the left and 6 at the right, and the other way round in
    the mirrored picture.
    """
    Image.new("RGB", (44, 33), (200, 30, 70)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    pipeline = write_pipeline(tmp_path_factory.mktemp("xl"), xl=True)
    studio = Studio(pipeline, {"sft": tmp_path}, tmp_path_factory.mktemp("studio-xl"))
    plan = _plan(studio, tmp_path, {"flip": True, "buckets": False}, duration="2 steps")
    uses = _loader(plan).load([0] * 40, list(range(40)), [0] * 40).uses
    upright, mirrored = sorted({use.time_ids for use in uses})
    assert upright == (33, 44, 0, 5, 32, 32)
    assert mirrored == (33, 44, 0, 6, 32, 32)
    assert studio.alone(plan).result["outcome"] == "completed"
