"""Checkpoints appear whole, are verified, kept and pruned.

Run: pytest tests/trainer/checkpoint/test_store.py
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import fuse, needs
from unisono.base.errors import IntegrityError
from unisono.jobs.runs.preparation import require_intact, resume_point
from unisono.jobs.runs.start_decision import StartDecision
from unisono.trainer.checkpoint import verify
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.writer import StorageFailed, StorageFull

if TYPE_CHECKING:
    from unisono.trainer.checkpoint.verify import Damage

Save = Callable[..., Path]
WRITING = {"run_id": "run-a", "config_digest": "c", "world_size": 1, "threads": 1, "holder": "host-a"}


def _names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def _steps(store: CheckpointStore) -> list[int]:
    return [int(path.name[5:]) for path in store.list()]


def test_a_checkpoint_is_there_only_when_it_is_complete(store: CheckpointStore) -> None:
    with store.writing(
        5, run_id="run-a", config_digest="c", world_size=1, threads=2, holder="h"
    ) as directory:
        (directory / "a").write_bytes(b"1")
        assert store.list() == []
        assert store.newest_intact() is None
    found = store.newest_intact()
    assert found is not None
    assert (found.step, found.manifest.threads, found.manifest.holder) == (5, 2, "h")
    assert found.manifest.files["a"].bytes == 1
    assert _names(store) == ["step-00000005"]


def test_directories_are_private(store: CheckpointStore, save: Save) -> None:
    assert save(1).stat().st_mode & 0o777 == 0o700
    assert store.root.stat().st_mode & 0o777 == 0o700


def fill(size: int) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / "weights").write_bytes(b"\1" * size)

    return write


@pytest.mark.processes
def test_leftovers_of_a_failed_save_are_removed_with_the_next_checkpoint(
    store: CheckpointStore, save: Save
) -> None:
    held = contextlib.ExitStack()

    def break_off(directory: Path) -> None:
        held.enter_context(needs.small_disk(directory / "held", "size=4k"))
        raise KeyError("ours")

    with held, pytest.raises(KeyError, match="ours"):
        store.save(1, break_off, **WRITING)  # type: ignore[arg-type]
    assert [name.split("-")[0] for name in _names(store)] == ["step"]
    assert not store.list()
    save(2)
    store.prune(1)
    assert _names(store) == ["step-00000002"]


def test_an_error_while_writing_leaves_nothing_and_passes_through(store: CheckpointStore, save: Save) -> None:
    save(1)

    def break_off(directory: Path) -> None:
        (directory / "half").write_bytes(b"x")
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        store.save(2, break_off, **WRITING)  # type: ignore[arg-type]
    assert _names(store) == ["step-00000001"]


def test_the_same_step_saved_twice_keeps_the_first(store: CheckpointStore, save: Save) -> None:
    first = (save(1, text="first") / "weights.safetensors").read_bytes()
    assert (save(1, text="second") / "weights.safetensors").read_bytes() == first
    with store.writing(1, **WRITING) as directory:  # type: ignore[arg-type]
        (directory / "weights.safetensors").write_bytes(b"third")
    assert (store.path(1) / "weights.safetensors").read_bytes() == first
    assert _names(store) == ["step-00000001"]


def test_a_damaged_one_is_set_aside_when_its_step_is_saved_again(store: CheckpointStore, save: Save) -> None:
    _flip(save(1) / "weights.safetensors")
    save(1)
    found = store.newest_intact()
    assert found is not None
    assert found.step == 1
    aside = [name for name in _names(store) if ".aside-" in name]
    assert len(aside) == 1
    for step in (2, 3):
        save(step)
    store.verify(store.path(3))  # the first one was read back, and so would stay
    store.prune(2)
    assert _names(store) == ["step-00000002", "step-00000003"]


def test_another_runs_checkpoint_of_the_same_step_is_set_aside(store: CheckpointStore, save: Save) -> None:
    save(1, run_id="run-b")
    save(1, run_id="run-a")
    found = store.newest_intact(run_id="run-a")
    assert found is not None
    assert sum(".aside-" in name for name in _names(store)) == 1


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _zero_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\0" * 4096)


def _take_from_step_1(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000001" / path.name, path)


def _link(path: Path) -> None:
    kept = path.with_name("elsewhere")
    path.rename(path.parent.parent / kept.name)
    path.symlink_to(path.parent.parent / kept.name)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "a flipped bit": ("weights.safetensors", _flip, "content", "its content has changed"),
    "a zeroed page": ("weights.safetensors", _zero_page, "content", "its content has changed"),
    "a truncated file": ("weights.safetensors", _cut, "size", "truncated: 9999 bytes of 10000"),
    "a longer file": ("weights.safetensors", _grow, "size", "too long"),
    "a missing file": ("state.json", Path.unlink, "missing", "it is missing"),
    "a file of another step": ("weights.safetensors", _take_from_step_1, "step", "the file of step 1"),
    "a link in place of a file": ("weights.safetensors", _link, "content", "it is a link"),
    "a damaged manifest": ("manifest.json", _flip, "manifest", "it is damaged"),
    "a truncated manifest": ("manifest.json", _cut, "manifest", "it is damaged"),
    "a missing manifest": ("manifest.json", Path.unlink, "missing", "it is missing"),
    "a manifest of another step": ("manifest.json", _take_from_step_1, "step", "the manifest of step 1"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_last_intact_one_is_found(
    name: str, store: CheckpointStore, save: Save
) -> None:
    file, damage, kind, words = DAMAGES[name]
    for step in (1, 2, 3):
        save(step)
    damage(store.path(3) / file)
    reported: list[tuple[Path, Damage]] = []
    found = store.newest_intact(lambda path, finding: reported.append((path, finding)))
    assert found is not None
    assert found.step == 2
    assert reported[0][0] == store.path(3)
    assert reported[0][1].file == file
    assert reported[0][1].kind == kind
    assert words in str(reported[0][1])
    assert store.verify(store.path(3))[0] == reported[0][1]
    assert store.verify(store.path(2)) == []


def test_a_file_is_read_only_where_its_size_does_not_say_all(store: CheckpointStore, save: Save) -> None:
    save(1, text="of more bytes")
    file = save(2) / "weights.safetensors"
    read: list[int] = []

    def damage() -> str:
        read.clear()
        _, (found,) = verify.inspect(store.path(2), key=b"k" * 32, pace=read.append)
        return str(found)

    _take_from_step_1(file)
    assert "the file of step 1" in damage(), "a size that this file has in another step"
    assert sum(read) > file.stat().st_size
    file.write_bytes(b"\0" * (len(file.read_bytes()) + 1))
    assert "too long" in damage()
    assert sum(read) == (store.path(2) / "state.json").stat().st_size


def test_a_directory_under_a_different_steps_name_is_damage(store: CheckpointStore, save: Save) -> None:
    shutil.copytree(save(1), store.path(7))
    found = store.newest_intact()
    assert found is not None
    assert found.step == 1


def test_an_extra_file_is_reported_and_harmless(store: CheckpointStore, save: Save) -> None:
    (save(1) / ".nfs0001").write_text("left by a file system")
    [finding] = store.verify(store.path(1))
    assert finding.kind == "extra"
    assert store.newest_intact() is not None


def test_a_strangers_checkpoint_is_not_damaged_and_not_read_unless_trusted(
    store: CheckpointStore, save: Save
) -> None:
    save(1)
    save(2, by=CheckpointStore(store.root, key=b"s" * 32))
    assert [finding.kind for finding in store.verify(store.path(2))] == ["foreign"]
    found, trusted = store.newest_intact(), store.newest_intact(trust=True)
    assert found is not None
    assert trusted is not None
    assert (found.step, found.is_foreign) == (1, False)
    assert (trusted.step, trusted.is_foreign) == (2, True)


def test_another_runs_checkpoint_is_not_gone_on_from(store: CheckpointStore, save: Save) -> None:
    save(1)
    save(2, run_id="run-b")
    found = store.newest_intact(run_id="run-a")
    assert found is not None
    assert found.step == 1


def test_a_run_without_checkpoints_has_none_to_require(store: CheckpointStore) -> None:
    assert require_intact(store) is None


def test_the_reason_of_a_start_reports_where_it_continues(store: CheckpointStore, save: Save) -> None:
    resume = StartDecision("resume", "run-a", "unfinished")
    assert resume_point(store, StartDecision("fresh", "run-a", "fresh")) == (None, "fresh")
    point, reason = resume_point(store, resume)
    assert point is None
    assert reason == "unfinished; it ended before its first checkpoint, so it starts at step 1"
    with pytest.raises(IntegrityError, match="no checkpoint to extend it from"):
        resume_point(store, StartDecision("extend", "run-a", "extends", 100))
    save(3)
    point, reason = resume_point(store, resume)
    assert point is not None
    assert (point.step, point.path, reason) == (3, str(store.path(3)), "unfinished; from step 3")


def test_where_none_is_intact_all_damage_is_reported_with_a_remedy(
    store: CheckpointStore, save: Save
) -> None:
    for step in (1, 2):
        _flip(save(step) / "weights.safetensors")
    with pytest.raises(IntegrityError, match="none of the run's 2 checkpoints is intact") as caught:
        require_intact(store)
    assert caught.value.exit_code == 7
    problem = caught.value.problems[0]
    assert "step-00000001: weights.safetensors" in problem.why
    assert "step-00000002: weights.safetensors" in problem.why
    assert "--fresh" in problem.fix


def test_where_all_are_foreign_the_remedy_names_the_key(store: CheckpointStore, save: Save) -> None:
    save(1, by=CheckpointStore(store.root, key=b"s" * 32))
    with pytest.raises(IntegrityError) as caught:
        require_intact(store)
    assert "checkpoint.key" in caught.value.problems[0].fix


def test_requiring_a_damaged_one_names_the_file(store: CheckpointStore, save: Save) -> None:
    path = save(1)
    assert store.require(path).step == 1
    _flip(path / "weights.safetensors")
    with pytest.raises(IntegrityError, match="its content has changed") as caught:
        store.require(path)
    assert caught.value.problems[0].where == str(path / "weights.safetensors")
    with pytest.raises(IntegrityError, match="there is no checkpoint"):
        store.require(store.path(9))


def test_pruning_keeps_the_newest_and_the_protected(store: CheckpointStore, save: Save) -> None:
    for step in range(1, 7):
        save(step)
    assert {path.name for path in store.prune(2, protect={1})} == {f"step-0000000{n}" for n in (2, 3, 4)}
    assert _steps(store) == [1, 5, 6]
    assert _names(store) == ["step-00000001", "step-00000005", "step-00000006"]


def test_pruning_never_counts_a_damaged_one_as_kept(store: CheckpointStore, save: Save) -> None:
    for step in range(1, 5):
        save(step)
    for step in (3, 4):
        _flip(store.path(step) / "weights.safetensors")
    CheckpointStore(store.root, key=b"k" * 32).prune(1)
    assert _steps(store) == [2, 3, 4]
    found = store.newest_intact()
    assert found is not None
    assert found.step == 2


def test_pruning_sees_damage_that_came_after_it_has_read_a_file(store: CheckpointStore, save: Save) -> None:
    save(1)
    save(2)
    _flip(store.path(2) / "weights.safetensors")
    store.prune(1)
    assert _steps(store) == [1, 2]


def test_pruning_leaves_what_is_not_ours(store: CheckpointStore, save: Save) -> None:
    save(1, by=CheckpointStore(store.root, key=b"s" * 32))
    for step in (2, 3):
        save(step)
    store.prune(1)
    assert _steps(store) == [1, 3]


def test_sweeping_removes_what_the_dead_left_and_not_what_is_being_written(
    store: CheckpointStore, save: Save
) -> None:
    save(1)
    (store.root / "step-00000002.tmp-abcd1234").mkdir()
    (store.root / "step-00000002.tmp-abcd1234" / "half").write_bytes(b"x")
    (store.root / ".trash-00000000-abcd1234").mkdir()
    (store.root / "mine").mkdir()
    other = CheckpointStore(store.root, key=b"k" * 32)
    with store.writing(3, **WRITING):  # type: ignore[arg-type]
        assert {path.name for path in other.sweep()} == {
            "step-00000002.tmp-abcd1234",
            ".trash-00000000-abcd1234",
        }
    assert _names(store) == ["mine", "step-00000001", "step-00000003"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with needs.small_disk(tmp_path / "disk", "size=256k") as place:
        yield place


@pytest.mark.processes
def test_a_full_disk_costs_the_new_checkpoint_and_nothing_else(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", key=b"k" * 32)

    store.save(1, fill(100_000), **WRITING)  # type: ignore[arg-type]
    with pytest.raises(StorageFull) as caught:
        store.save(2, fill(200_000), **WRITING)  # type: ignore[arg-type]
    assert caught.value.exit_code == 6
    assert caught.value.path == store.path(2)
    assert caught.value.missing_bytes > 0
    assert str(store.path(2)) in caught.value.problems[0].where
    assert _names(store) == ["step-00000001"]
    assert store.verify(store.path(1)) == []
    store.save(3, fill(1000), **WRITING)  # type: ignore[arg-type]
    found = store.newest_intact()
    assert found is not None
    assert found.step == 3


@pytest.mark.processes
def test_no_room_for_the_manifest_is_a_full_disk_too(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", key=b"k" * 32)
    store.save(1, fill(1), **WRITING)  # type: ignore[arg-type]

    def fill_up(directory: Path) -> None:
        with (directory / "a").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(b"x" * 4096)
                except OSError:
                    return

    with pytest.raises(StorageFull):
        store.save(2, fill_up, **WRITING)  # type: ignore[arg-type]
    assert _names(store) == ["step-00000001"]


def test_storage_that_fails_otherwise_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in its place")
    store = CheckpointStore(tmp_path / "checkpoints", key=b"k" * 32)
    with pytest.raises(StorageFailed, match="cannot be written") as caught:
        store.save(1, lambda directory: None, **WRITING)  # type: ignore[arg-type]
    assert not isinstance(caught.value, StorageFull)
    assert caught.value.exit_code == 6


@pytest.fixture
def gone(tmp_path: Path) -> Iterator[Path]:
    """A mount whose server is gone: whoever asks for anything in it gets an error, as from a stale
    handle of NFS.
    """
    if fuse.why_unavailable():
        pytest.skip(fuse.why_unavailable())
    folder = tmp_path / "gone"
    folder.mkdir()
    try:
        os.close(fuse.mount(folder))
    except OSError as error:
        pytest.skip(f"needs mounts: {error}")
    yield folder
    fuse.unmount(folder)


def test_storage_that_errs_when_only_asked_costs_a_checkpoint(gone: Path) -> None:
    store = CheckpointStore(gone, key=b"k" * 32)
    with pytest.raises(
        StorageFailed, match="cannot be written: Transport endpoint is not connected"
    ) as caught:
        store.save(1, lambda directory: None, **WRITING)  # type: ignore[arg-type]
    assert not isinstance(caught.value, StorageFull)


def test_one_that_its_run_prunes_while_it_is_read_is_passed_over(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    path = save(2)
    read = verify.digest_file

    def prune_meanwhile(fd: int, pace: verify.Pace | None = None) -> tuple[int, str]:
        if path.exists():
            path.rename(store.root / ".trash-00000002-00000000")
        return read(fd, pace)

    monkeypatch.setattr(verify, "digest_file", prune_meanwhile)
    found = store.newest_intact()
    assert found is not None
    assert found.step == 1
