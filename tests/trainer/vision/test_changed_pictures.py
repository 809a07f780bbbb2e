"""A picture that is removed, truncated or replaced while a run reads its rows ends the run with
its file, row, rank and fix.

Run: pytest tests/trainer/vision/test_changed_pictures.py
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.vision.conftest import Gallery
from tests.vision_models import draw
from unisono.base.errors import DataError

pytestmark = pytest.mark.processes  # pictures are decoded in them

_PICTURE = "pictures/9.png"  # of one row, and of no short one, which are read before the first step


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:60])


def _replace(file: Path) -> None:
    draw("red", "circle", size=(33, 44)).save(file)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (Path.unlink, "No such file or directory"),
    "truncated": (_truncate, "it has changed since its row was prepared"),
    "replaced": (_replace, "it has changed since its row was prepared"),
}


def _copied(picture_rows: Path, folder: Path) -> Path:
    shutil.copytree(picture_rows.parent / "pictures", folder / "pictures")
    return Path(shutil.copy(picture_rows, folder / "rows.jsonl"))


def _sections(rows: Path) -> dict[str, Any]:
    return {"data": {"train": str(rows), "packing": False}, "duration": "12 steps"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_picture_ends_the_run_by_name(
    gallery: Gallery, picture_rows: Path, tmp_path: Path, damage: str
) -> None:
    rows = _copied(picture_rows, tmp_path)
    plan = gallery.plan("llava", **_sections(rows))
    change, why = DAMAGES[damage]
    change(tmp_path / _PICTURE)

    with pytest.raises(DataError) as caught:
        gallery.alone(plan)

    (problem,), verdict = caught.value.problems, caught.value.verdict
    assert problem.what == f"the picture {_PICTURE} of {rows}:10 cannot be read any more"
    assert problem.where == str(tmp_path / _PICTURE)
    assert why in problem.why
    assert problem.fix
    assert verdict is not None
    assert (verdict.cause, verdict.ranks) == ("picture_changed", (0,))
    assert (Path(plan.output_dir) / "metrics.jsonl").read_text(), "steps were made before"


@pytest.mark.ranks
def test_the_rank_that_reads_it_is_named(gallery: Gallery, picture_rows: Path, tmp_path: Path) -> None:
    rows = _copied(picture_rows, tmp_path)
    plan = gallery.plan("llava", world=2, strategy="ddp", **_sections(rows))
    (tmp_path / _PICTURE).unlink()

    ended = gallery.one(plan).ended

    refused = {rank: ended.last(rank) for rank in range(2) if ended.codes[rank] == DataError.exit_code}
    assert len(refused) == 1
    (rank, message) = next(iter(refused.items()))
    assert message["verdict"]["ranks"] == [rank]
    assert f"the picture {_PICTURE} of {rows}:10" in message["verdict"]["summary"]
