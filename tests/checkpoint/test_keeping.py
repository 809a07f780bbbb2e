"""Which checkpoints stay, over all states that they can be in. Run: pytest tests/checkpoint/test_keeping.py"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.checkpoint.keeping import Candidate, Decision, Rules, decide
from unisono.checkpoint.record import note_verified, recorded_state
from unisono.checkpoint.store import CheckpointStore
from unisono.checkpoint.verify import inspect, read_through

Save = Callable[..., Path]
KEY = b"k" * 32

candidates = st.lists(
    st.builds(Candidate, st.integers(0, 40), st.sampled_from([True, True, False, None]), st.booleans()),
    max_size=14, unique_by=lambda one: one.step,
)  # fmt: skip
known = candidates.filter(lambda found: all(one.intact is not None for one in found))
rules = st.builds(
    Rules, st.integers(1, 4), st.none() | st.integers(1, 9), st.frozensets(st.integers(0, 40), max_size=2)
)


def _after(found: list[Candidate], decision: Decision) -> list[Candidate]:
    return [one for one in found if one.step not in decision.go]


@given(known, rules)
def test_as_many_of_the_newest_intact_ones_stay_as_are_asked_for(
    found: list[Candidate], asked: Rules
) -> None:
    good = sorted((one.step for one in found if one.intact and not one.foreign), reverse=True)
    stay = {one.step for one in _after(found, decide(found, asked))}
    assert set(good[: asked.keep]) <= stay


@given(known, rules)
def test_the_last_intact_one_is_never_deleted(found: list[Candidate], asked: Rules) -> None:
    def has_good(those: list[Candidate]) -> bool:
        return any(one.intact and not one.foreign for one in those)

    assert has_good(_after(found, decide(found, asked))) == has_good(found)


@given(known, rules)
def test_foreign_ones_the_best_and_those_for_ever_stay(found: list[Candidate], asked: Rules) -> None:
    gone = set(decide(found, asked).go)
    assert not gone & {one.step for one in found if one.foreign}
    assert not gone & set(asked.protect)
    if asked.every is not None:
        assert not [step for step in gone if step and step % asked.every == 0]


@given(known, rules)
def test_only_what_is_older_than_all_that_are_kept_goes(found: list[Candidate], asked: Rules) -> None:
    decision = decide(found, asked)
    if decision.go:
        assert decision.oldest_kept is not None
        assert max(decision.go) < decision.oldest_kept
        assert list(decision.go) == sorted(decision.go)


@given(known, rules)
def test_deciding_again_deletes_nothing_more(found: list[Candidate], asked: Rules) -> None:
    assert decide(_after(found, decide(found, asked)), asked).go == ()


@given(known, rules)
def test_with_no_rule_but_a_number_that_many_stay(found: list[Candidate], asked: Rules) -> None:
    plain = [one for one in found if one.intact and not one.foreign]
    stay = _after(plain, decide(plain, Rules(asked.keep)))
    assert len(stay) == min(asked.keep, len(plain))


@given(candidates, rules)
def test_nothing_goes_before_those_that_are_kept_are_known_to_be_intact(
    found: list[Candidate], asked: Rules
) -> None:
    decision = decide(found, asked)
    stay = [one for one in _after(found, decision) if one.intact and not one.foreign]
    if decision.go:
        assert len(stay) >= asked.keep
    if decision.ask is not None:
        assert decision.go == ()


@given(candidates, rules, st.data())
def test_asking_ends_and_asks_for_no_more_than_is_needed(
    found: list[Candidate], asked: Rules, data: st.DataObject
) -> None:
    by_step = {one.step: one for one in found}
    questions = []
    while (step := decide(by_step.values(), asked).ask) is not None:
        questions.append(step)
        by_step[step] = Candidate(step, intact=data.draw(st.booleans()))
    assert questions == sorted(set(questions), reverse=True)
    oldest = decide(by_step.values(), asked).oldest_kept
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
    note_verified(store.root, [read_through(store.path(3), key=KEY)])
    assert [path.name for path in store.prune(1)] == ["step-00000001"]
    assert _steps(store) == [2, 3]


def test_a_record_spares_reading_as_long_as_the_checkpoint_looks_the_same(
    store: CheckpointStore, save: Save
) -> None:
    for step in (1, 2):
        save(step)
    note_verified(store.root, [read_through(store.path(2), key=KEY)])
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
