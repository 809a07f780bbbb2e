"""Whatever happens to a checkpoint's files is found and named before they are used.

Run: pytest tests/jobs/damage/test_damages.py
"""

import random
import shutil
from pathlib import Path

import pytest

from tests.jobs.damage.damages import (
    IN_PLACE,
    OF_A_DIRECTORY,
    OF_A_FILE,
    POINTERS,
    How,
    Injected,
    Specimen,
    damage,
    files_of,
    is_named,
    kind_of_file,
    look,
    names_its_tensors,
)
from unisono.trainer.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


_WHOLE = {"manifest", "state", "trainable", "optimizer"}
_SHARDS = {"manifest", "state", "trainable shard", "optimizer shard"}


@pytest.fixture(params=["of_shards", "of_adapter"])
def specimen(request: pytest.FixtureRequest) -> Specimen:
    """All kinds of file are in the two together."""
    made: Specimen = request.getfixturevalue(request.param)
    return made


def _is_found(specimen: Specimen, root: Path, injected: Injected) -> None:
    found = look(specimen, root)
    newest = sorted(path.name for path in root.glob("step-*"))
    assert is_named(injected, found), (injected, found)
    assert names_its_tensors(injected, found), (injected, found)
    assert found.used == newest[-2], (injected, found)
    assert found.is_as_written


@pytest.mark.parametrize("how", [*OF_A_FILE, *OF_A_DIRECTORY, *IN_PLACE])
def test_each_damage_of_each_file_kind_is_named_and_last_intact_one_taken(
    specimen: Specimen, how: How, tmp_path: Path
) -> None:
    newest = max(specimen.root.glob("step-*")).name
    kinds = {kind_of_file(name): name for name in files_of(specimen.root / newest)}
    assert set(kinds) in (_SHARDS, _WHOLE)
    for number, name in enumerate(kinds.values()):
        root = specimen.copy(tmp_path / str(number))
        _is_found(specimen, root, damage(specimen, root / newest, name, how, random.Random(number)))


def test_random_damages_are_all_found(specimen: Specimen, tmp_path: Path) -> None:
    chance = random.Random(1)
    for number in range(10):
        root = specimen.copy(tmp_path / str(number))
        path = max(root.glob("step-*"))
        how = chance.choice([*OF_A_FILE, *OF_A_DIRECTORY])
        _is_found(specimen, root, damage(specimen, path, chance.choice(files_of(path)), how, chance))


def test_whole_checkpoint_of_a_different_run_is_named_and_not_taken(
    specimen: Specimen, tmp_path: Path
) -> None:
    root = specimen.copy(tmp_path / "copy")
    newest = max(root.glob("step-*"))
    shutil.rmtree(newest)
    shutil.copytree(specimen.other / newest.name, newest)
    found = look(specimen, root)
    assert "run" in {finding.kind for finding in found.findings[newest.name]}
    assert found.used != newest.name
    assert found.is_as_written


def test_whole_checkpoint_of_a_different_step_is_named_and_not_taken(
    specimen: Specimen, tmp_path: Path
) -> None:
    root = specimen.copy(tmp_path / "copy")
    older, newest = sorted(root.glob("step-*"))[-2:]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    found = look(specimen, root)
    assert {finding.kind for finding in found.findings[newest.name]} == {"step"}
    assert found.used == older.name


@pytest.mark.parametrize("name", POINTERS)
def test_no_pointer_could_be_stale_and_a_strangers_is_ignored(
    specimen: Specimen, name: str, tmp_path: Path
) -> None:
    """Which checkpoint is the newest is read off the directories themselves."""
    assert {path.name for path in specimen.root.iterdir() if not path.name.startswith("step-")} <= {
        "verified.json"
    }
    root = specimen.copy(tmp_path / "copy")
    oldest, *_, newest = sorted(path.name for path in root.glob("step-*"))
    (root / name).write_text(oldest)
    (root / f"{name}-link").symlink_to(root / oldest)
    found = look(specimen, root)
    assert (found.used, found.findings) == (newest, {})


def test_nothing_that_is_damaged_counts_as_kept_when_older_ones_are_pruned(
    specimen: Specimen, tmp_path: Path
) -> None:
    root = specimen.copy(tmp_path / "copy")
    *_, newest = sorted(root.glob("step-*"))
    damage(specimen, newest, files_of(newest)[-1], "flipped bit", random.Random(0))
    CheckpointStore(root, key=specimen.key).prune(1)
    assert look(specimen, root).used is not None
