"""How much disk the checkpoints of a run take. Run: pytest tests/trainer/checkpoint/test_disk_space.py"""

from pathlib import Path

import pytest

from unisono.trainer.checkpoint.retention import Candidate, Rules, decide, max_on_disk, measure_disk_space
from unisono.trainer.checkpoint.store import CheckpointStore

KEY = b"k" * 32


def on_disk_at_once(there: list[int], due: list[int], rules: Rules, *, read_back: set[int]) -> int:
    """The same, by doing it."""
    now, most = set(there), len(there)
    for step in due:
        now.add(step)
        most = max(most, len(now))
        found = [Candidate(step, intact=True, read_back=step in read_back) for step in now]
        now -= set(decide(found, rules).go)
    return most


@pytest.mark.parametrize("keep", [1, 2, 3, 7])
@pytest.mark.parametrize("every", [None, 1, 10, 20, 30, 45])
@pytest.mark.parametrize("due", [[], [10], list(range(10, 61, 10)), [*range(10, 200, 10), 203]])
def test_it_is_what_saving_and_pruning_one_after_the_other_comes_to(
    keep: int, every: int | None, due: list[int]
) -> None:
    rules = Rules(keep, every)
    wanted = on_disk_at_once([1], due, rules, read_back={1})  # the rehearsal's, and nobody reads another one
    assert max_on_disk([1], due, rules, best=False) == wanted
    assert max_on_disk([1], due, rules, best=True) in (wanted, wanted + 1)
    assert wanted - 1 <= on_disk_at_once([1], due, rules, read_back=set()) <= wanted
    assert on_disk_at_once([1], due, rules, read_back={1, *due}) <= wanted


def test_own_files_count_as_room_for_the_run_and_a_strangers_do_not(tmp_path: Path) -> None:
    """Both are in the directory of checkpoints already."""
    root = tmp_path / "checkpoints"
    own, strange = CheckpointStore(root, key=KEY), CheckpointStore(root, key=b"other")

    def fill(directory: Path) -> None:
        (directory / "a").write_bytes(b"x" * 5000)

    facts = {"run_id": "r", "config_digest": "c", "world_size": 2, "threads": 1, "holder": "here"}
    own.save(7, fill, **facts)  # type: ignore[arg-type]
    strange.save(3, fill, **facts)  # type: ignore[arg-type]
    (root / "step-00000009.tmp-0a").mkdir()
    (root / "step-00000009.tmp-0a" / "b").write_bytes(b"x" * 300)
    (root / "step-00000002.aside-0a").mkdir()
    (root / "step-00000002.aside-0a" / "b").write_bytes(b"x" * 70_000)
    found = measure_disk_space(root, key=KEY)
    assert 5300 < found.own_bytes < 7000
    assert found.steps == (7,)
    assert found.bytes == found.free_bytes + found.own_bytes
