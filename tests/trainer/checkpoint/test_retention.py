"""Which checkpoints stay, over all states that they can be in.

Run: pytest tests/trainer/checkpoint/test_retention.py
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.checkpoint.retention import (
    Candidate,
    RetentionPlan,
    Rules,
    decide,
    record_verified,
    recorded_state,
)
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.verify import inspect, read_through

Save = Callable[..., Path]
KEY = b"k" * 32

candidates = st.lists(
    st.builds(
        Candidate, st.integers(0, 40), st.sampled_from([True, True, False, None]), st.booleans(), st.sampled_from([True, False, None])
    ),
    max_size=14, unique_by=lambda one: one.step,
)  # fmt: skip
known = st.lists(
    st.builds(Candidate, st.integers(0, 40), st.sampled_from([True, True, False]), st.booleans(), st.booleans()),
    max_size=14, unique_by=lambda one: one.step,
).map(lambda found: [replace(one, read_back=bool(one.intact and one.read_back)) for one in found])  # fmt: skip
rules = st.builds(
    Rules, st.integers(1, 4), st.none() | st.integers(1, 9), st.frozensets(st.integers(0, 40), max_size=2)
)


def _after(found: list[Candidate], decision: RetentionPlan) -> list[Candidate]:
    return [one for one in found if one.step not in decision.go]


@given(known, rules)
def test_as_many_of_the_newest_intact_ones_stay_as_are_requested(
    found: list[Candidate], retention: Rules
) -> None:
    good = sorted((one.step for one in found if one.intact and not one.foreign), reverse=True)
    stay = {one.step for one in _after(found, decide(found, retention))}
    assert set(good[: retention.keep]) <= stay


@given(known, rules)
def test_the_last_intact_one_is_never_deleted(found: list[Candidate], retention: Rules) -> None:
    def has_good(those: list[Candidate]) -> bool:
        return any(one.intact and not one.foreign for one in those)

    assert has_good(_after(found, decide(found, retention))) == has_good(found)


@given(known, rules)
def test_foreign_ones_the_best_and_those_for_ever_stay(found: list[Candidate], retention: Rules) -> None:
    gone = set(decide(found, retention).go)
    assert not gone & {one.step for one in found if one.foreign}
    assert not gone & set(retention.protect)
    if retention.every is not None:
        assert not [step for step in gone if step and step % retention.every == 0]


@given(known, rules)
def test_only_what_is_older_than_all_that_are_kept_goes(found: list[Candidate], retention: Rules) -> None:
    decision = decide(found, retention)
    if decision.go:
        assert decision.oldest_kept is not None
        assert max(decision.go) < decision.oldest_kept
        assert list(decision.go) == sorted(decision.go)


@given(known, rules)
def test_deciding_again_deletes_nothing_more(found: list[Candidate], retention: Rules) -> None:
    assert decide(_after(found, decide(found, retention)), retention).go == ()


@given(known, rules)
def test_with_no_rule_but_a_number_that_many_stay(found: list[Candidate], retention: Rules) -> None:
    plain = [replace(one, read_back=False) for one in found if one.intact and not one.foreign]
    stay = _after(plain, decide(plain, Rules(retention.keep)))
    assert len(stay) == min(retention.keep, len(plain))


@given(known, rules)
def test_the_newest_that_was_read_back_stays_and_no_other_stays_for_that(
    found: list[Candidate], retention: Rules
) -> None:
    unread = set(decide([replace(one, read_back=False) for one in found], retention).go)
    last = max((one.step for one in found if one.read_back and not one.foreign), default=None)
    assert set(decide(found, retention).go) == unread - {last}


@given(candidates, rules)
def test_nothing_goes_before_those_that_are_kept_are_known_to_be_intact(
    found: list[Candidate], retention: Rules
) -> None:
    decision = decide(found, retention)
    stay = [one for one in _after(found, decision) if one.intact and not one.foreign]
    if decision.go:
        assert len(stay) >= retention.keep
    if decision.is_open:
        assert decision.go == ()


@given(candidates, rules, st.data())
def test_asking_ends_and_asks_for_no_more_than_is_needed(
    found: list[Candidate], retention: Rules, data: st.DataObject
) -> None:
    by_step = {one.step: one for one in found}
    questions = []
    while (step := decide(by_step.values(), retention).ask) is not None:
        questions.append(step)
        intact = data.draw(st.booleans())
        by_step[step] = Candidate(step, intact, read_back=intact and data.draw(st.none() | st.booleans()))
    assert questions == sorted(set(questions), reverse=True)
    recalled = []
    while (step := decide(by_step.values(), retention).recall) is not None:
        recalled.append(step)
        by_step[step] = replace(by_step[step], read_back=data.draw(st.booleans()))
    assert recalled == sorted(set(recalled), reverse=True)
    assert not decide(by_step.values(), retention).is_open
    oldest = decide(by_step.values(), retention).oldest_kept
    if oldest is not None:
        assert all(step >= oldest for step in questions)


def _flip(path: Path) -> None:
    """One bit, as a disk that rots turns it: size and time stay."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _steps(store: CheckpointStore) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.list()]


def test_a_store_keeps_those_at_the_multiples_for_ever(store: CheckpointStore, save: Save) -> None:
    for step in range(1, 11):
        save(step)
        store.prune(2, every=4)
    assert _steps(store) == [4, 8, 9, 10]


def test_what_a_reader_has_recorded_as_damaged_does_not_count_as_kept(
    store: CheckpointStore, save: Save
) -> None:
    """The store wrote it, and it looks the same since: only somebody who has read it can know."""
    for step in (1, 2, 3):
        save(step)
    _flip(store.path(3) / "weights.safetensors")
    record_verified(store.root, [read_through(store.path(3), key=KEY)])
    assert [path.name for path in store.prune(1)] == ["step-00000001"]
    assert _steps(store) == [2, 3]


def test_the_last_one_that_was_read_back_stays_until_a_newer_one_was(
    store: CheckpointStore, save: Save
) -> None:
    """The store has written step 2 whole; whether the disk gives it back nobody knows before it was
    read.
    """
    save(1)
    record_verified(store.root, [read_through(store.path(1), key=KEY)])
    save(2)
    assert store.prune(1) == []
    save(3)
    assert store.prune(1) == [store.path(2)]
    assert _steps(store) == [1, 3]
    record_verified(store.root, [read_through(store.path(3), key=KEY)])
    assert store.prune(1) == [store.path(1)]
    assert _steps(store) == [3]


def test_the_one_that_a_run_continues_from_counts_as_read_back(store: CheckpointStore, save: Save) -> None:
    save(1)
    again = CheckpointStore(store.root, key=KEY)
    assert again.newest_intact() is not None
    save(2, by=again)
    again.prune(1)
    assert _steps(again) == [1, 2]


def test_who_has_to_read_the_newest_to_know_it_lets_the_older_one_go(
    store: CheckpointStore, save: Save
) -> None:
    """As `checkpoint prune` does, which has written nothing itself."""
    for step in (1, 2):
        save(step)
    record_verified(store.root, [read_through(store.path(1), key=KEY)])
    assert CheckpointStore(store.root, key=KEY).prune(1) == [store.path(1)]


def test_verified_checkpoint_that_changed_since_is_not_kept_for_that(
    store: CheckpointStore, save: Save
) -> None:
    save(1)
    record_verified(store.root, [read_through(store.path(1), key=KEY)])
    os.utime(store.path(1) / "weights.safetensors")
    save(2)
    assert store.prune(1) == [store.path(1)]


def test_a_record_spares_reading_as_long_as_the_checkpoint_looks_the_same(
    store: CheckpointStore, save: Save
) -> None:
    for step in (1, 2):
        save(step)
    record_verified(store.root, [read_through(store.path(2), key=KEY)])
    _flip(store.path(2) / "weights.safetensors")  # unseen: it would be found by reading
    other = CheckpointStore(store.root, key=KEY)
    assert [path.name for path in other.prune(1)] == ["step-00000001"]
    save(3)
    manifest, _ = inspect(store.path(2), key=KEY, contents=False)
    assert manifest is not None
    assert recorded_state(store.path(2), manifest) is True
    os.utime(store.path(2) / "weights.safetensors")
    assert recorded_state(store.path(2), manifest) is None
    assert other.prune(2) == []
    assert _steps(store) == [2, 3]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "verified": {"step-00000002": 7}}'])
def test_a_record_that_cannot_be_read_is_none(store: CheckpointStore, save: Save, text: str) -> None:
    for step in (1, 2):
        save(step)
    _flip(store.path(2) / "weights.safetensors")
    (store.root / "verified.json").write_text(text)
    CheckpointStore(store.root, key=KEY).prune(1)
    assert _steps(store) == [1, 2]
