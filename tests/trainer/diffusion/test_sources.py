"""Sources of pictures with settings of their own: sizes, captions, regularization and held-out
pictures.

Run: pytest tests/trainer/diffusion/test_sources.py
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import needs
from tests.trainer.diffusion.conftest import Studio
from tests.trainer.diffusion.making import write_pictures
from unisono.base.errors import ConfigError, DataError
from unisono.base.events import Reporter
from unisono.trainer.config import RunConfig
from unisono.trainer.families.pictures.latents import PictureLoader
from unisono.trainer.families.pictures.pipeline_files import read_pipeline
from unisono.trainer.families.pictures.prepare import PictureRows, gather

needs.package("diffusers")
needs.package("PIL")

BUCKETS = {"bucket_step": 8, "min_side": 16, "max_side": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    write_pictures(root / "aki", ["red", "blue"], ((32, 32), (48, 24)))
    write_pictures(root / "reg", ["grey"], ((32, 32), (24, 48)))
    write_pictures(root / "other", ["green"], ((32, 32), (48, 24), (40, 32), (24, 48), (64, 32)))
    write_pictures(root / "aki" / "9_inside", ["green"])
    return root


def _config(folders: Path, sources: list[dict[str, Any]], **more: Any) -> RunConfig:
    train = [{**source, "path": str(folders / source["path"])} for source in sources]
    raw = {
        "objective": "diffusion", "model": "x", "adapter": {"kind": "lora"}, "output_dir": "o", "seed": 3,
        "data": {"train": train, "resolution": 32, **more.pop("data", {})}, "diffusion": {**BUCKETS, **more.pop("diffusion", {})}, **more,
    }  # fmt: skip
    return RunConfig.model_validate(raw)


def _gather(config: RunConfig, pipeline_dir: Path, folder: Path) -> PictureRows:
    return gather(config, read_pipeline(pipeline_dir), folder / "cache", Reporter(None))


def _uses(rows: PictureRows) -> Counter[tuple[str, bool, tuple[int, int]]]:
    """How often the pictures of a folder are used in an epoch, by their size."""
    pictures = [rows.train[i] for i in rows.sequences]
    return Counter((Path(p.path).parent.name, p.is_prior, p.size) for p in pictures)


def test_one_folder_at_two_resolutions(folders: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    config = _config(
        folders,
        [
            {"path": "aki", "weight": 3, "pictures": {"flat": True}},
            {"path": "aki", "pictures": {"flat": True, "resolution": [64, 64], "buckets": False}},
        ],
    )
    rows = _gather(config, pipeline_dir, tmp_path)
    assert _uses(rows) == {
        ("aki", False, (32, 32)): 6,
        ("aki", False, (40, 24)): 6,
        ("aki", False, (64, 64)): 4,
    }


def test_a_flat_folder_has_only_its_own_pictures(folders: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    flat, deep = (
        _gather(
            _config(folders, [{"path": "aki", "pictures": {"flat": flat}}]),
            pipeline_dir,
            tmp_path / str(flat),
        )
        for flat in (True, False)
    )
    assert {Path(picture.path).parent.name for picture in flat.train} == {"aki"}
    assert [lost.why for lost in flat.scan.lost if lost.name.endswith(".png")] == [
        "it is in a folder inside, and `flat` takes none of them"
    ]
    assert len(deep.sequences) == len(flat.sequences) + 9


def test_regularization_pictures_fill_up_those_of_their_resolution(
    folders: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    """Three sources: 4 pictures twice at 32, their 2 regularization pictures, and 5 at 64, which
    have none.
    """
    config = _config(
        folders,
        [
            {"path": "aki", "weight": 2, "pictures": {"flat": True}},
            {"path": "reg", "pictures": {"prior": True}},
            {"path": "other", "pictures": {"resolution": 64}},
        ],
        diffusion={"prior_weight": 0.5},
    )
    rows = _gather(config, pipeline_dir, tmp_path)
    counts = Counter((Path(p.path).parent.name, p.is_prior) for p in (rows.train[i] for i in rows.sequences))
    assert counts == {("aki", False): 8, ("reg", True): 8, ("other", False): 5}


def test_a_share_of_one_source_is_held_out(folders: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    def held(seed: int | None, share: float) -> tuple[set[str], set[str]]:
        sources: list[dict[str, Any]] = [
            {"path": "aki", "pictures": {"flat": True}},
            {"path": "other", "weight": 5, "pictures": {"eval": share}},
        ]
        config = _config(folders, sources, diffusion={"eval_seed": seed})
        rows = _gather(config, pipeline_dir, tmp_path)
        assert all(picture.repeats == 1 for picture in rows.eval)
        return {picture.relative for picture in rows.eval}, {picture.relative for picture in rows.train}

    taken, kept = held(None, 0.4)
    assert len(taken) == 2
    assert len(kept) == 7
    assert not taken & kept
    assert held(3, 0.4)[0] == taken  # null is the seed of the run
    assert any(held(seed, 0.4)[0] != taken for seed in (4, 5, 6))
    assert len(held(None, 1.0)[0]) == 5


def test_the_same_pictures_are_held_out_at_each_resolution(
    folders: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    sources = [{"path": "other", "pictures": {"eval": 0.4, **more}} for more in ({}, {"resolution": 64})]
    rows = _gather(_config(folders, sources), pipeline_dir, tmp_path)
    assert len(rows.eval) == 4
    held = {picture.relative for picture in rows.eval}
    assert len(held) == 2
    assert not held & {picture.relative for picture in rows.train}


def test_a_share_takes_at_least_one_and_not_the_only_one(
    folders: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    write_pictures(tmp_path / "one", ["red"])
    sources = [
        {"path": "other", "pictures": {"eval": 0.01}},
        {"path": str(tmp_path / "one"), "pictures": {"eval": 0.9}},
    ]
    rows = _gather(_config(folders, sources), pipeline_dir, tmp_path)
    assert [len(rows.eval), len(rows.train)] == [1, 5]


def test_nothing_is_left_where_all_is_held_out(folders: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    config = _config(folders, [{"path": "other", "pictures": {"eval": 1.0}}])
    with pytest.raises(DataError, match="no picture is left to train on"):
        _gather(config, pipeline_dir, tmp_path)


def test_captions_of_a_source(folders: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    config = _config(
        folders,
        [
            {
                "path": "aki",
                "pictures": {"flat": True, "caption": "hoge girl", "caption_extensions": [".none"]},
            },
            {"path": "other", "pictures": {"caption": "unused"}},
            {"path": "reg", "pictures": {"caption": "", "caption_extensions": [".caption"]}},
        ],
    )
    rows = _gather(config, pipeline_dir, tmp_path)
    captions = {Path(p.path).parent.name: p.caption for p in rows.train}
    assert captions["aki"] == "hoge girl"
    assert captions["other"].startswith("a green tile")
    assert captions["reg"] == ""
    why = [lost.why for lost in rows.scan.lost if lost.name.endswith(".txt") and lost.is_picture]
    assert (
        why
        == ["captions are read from .none files (caption_extensions)"] * 4
        + ["captions are read from .caption files (caption_extensions)"] * 2
    )


def test_captions_get_their_prefix_and_suffix(folders: Path, pipeline_dir: Path, tmp_path: Path) -> None:
    own = {"flat": True, "caption": "", "caption_extensions": [".none"], "caption_suffix": ", sky"}
    config = _config(
        folders,
        [{"path": "aki", "pictures": own}, {"path": "reg", "pictures": {"caption_prefix": ""}}],
        diffusion={"caption_prefix": "best,"},
    )
    captions = {Path(p.path).parent.name: p.caption for p in _gather(config, pipeline_dir, tmp_path).train}
    assert captions["aki"] == "best, , sky"
    assert captions["reg"].startswith("a grey tile")


@pytest.mark.parametrize(
    ("sources", "more", "words"),
    [
        (
            [{"path": "aki", "pictures": {"prior": True, "eval": 0.5}}],
            {},
            "regularization pictures are not evaluated",
        ),
        (
            [{"path": "aki", "pictures": {"eval": 0.5}}],
            {"data": {"eval": 2}},
            "data.eval already takes a share",
        ),
        ([{"path": "aki", "pictures": {"colour": 1}}], {}, "Extra inputs"),
        ([{"path": "aki", "rows": 3}], {}, "a source of pictures is a folder"),
        (
            [{"path": "aki", "pictures": {}}],
            {"objective": "sft", "diffusion": {}},
            "objective sft does not use it; remove it .accepted by: diffusion",
        ),
    ],
)
def test_contradictions_of_a_source(folders: Path, sources: Any, more: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _config(folders, sources, **more)


def test_a_resolution_that_latents_cannot_have_is_refused(
    folders: Path, pipeline_dir: Path, tmp_path: Path
) -> None:
    config = _config(folders, [{"path": "aki", "pictures": {"resolution": 33}}])
    with pytest.raises(ConfigError, match=r"data\.resolution is 33"):
        _gather(config, pipeline_dir, tmp_path)


def test_a_run_on_two_resolutions_with_captions_of_their_own(studio: Studio, folders: Path) -> None:
    """Its steps have one size each; captions of the second source are shuffled, those of the first
    are not.
    """
    for path in (folders / "other").glob("*.txt"):
        path.write_text("a, b, c, d, e, f\n")
    sources = [
        {"path": str(folders / "aki"), "weight": 2, "pictures": {"flat": True, "buckets": False}},
        {"path": str(folders / "other"), "pictures": {"resolution": 64, "buckets": False, "shuffle_captions": True, "keep_tokens": 1}},
    ]  # fmt: skip
    plan = studio.plan(
        "diffusion",
        data={"train": sources},
        diffusion={"caption_dropout": 0.0},
        batch={"global": 2, "micro": 2},
    )
    loader = PictureLoader(plan.config, Path(plan.data.cache_dir), directory=Path(plan.model.directory), device=torch.device("cpu"), timesteps=100, total_steps=plan.total_steps)  # fmt: skip
    uses = loader.load([0, 4, 4, 4], [1, 2, 3, 4], [0] * 4).uses
    assert uses[0].caption.startswith("a blue tile, 32 wide")
    assert all(use.caption.startswith("a, ") for use in uses[1:])
    assert {use.caption for use in uses[1:]} != {"a, b, c, d, e, f"}
    assert all(sorted(use.caption) == sorted("a, b, c, d, e, f") for use in uses[1:])
    assert [use.latents.shape[-1] * 2 for use in uses] == [32, 64, 64, 64]
    done = studio.alone(plan)
    assert done.result["outcome"] == "completed"
