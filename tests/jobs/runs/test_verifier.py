"""Checkpoints are read again while the run goes on. Run: pytest tests/jobs/runs/test_verifier.py"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import front_server
from unisono.base.messages import Message
from unisono.jobs.remote_checkpoint.verification import ReadingRate, ReadThrottle, Verifier, next_due
from unisono.trainer.checkpoint.store import CheckpointStore

KEY = b"k" * 32
READY: Message = {"kind": "ready", "facts": {}}
HURRY = ReadingRate(bytes_per_s=1e12, look_every_s=0.01, again_after_s=3600.0)


class Clock:
    """A clock that a test sets, and that waiting moves."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += max(0.0, seconds)
        return False


times = st.lists(st.none() | st.integers(0, 100).map(float), max_size=8)


@given(times, st.integers(0, 120).map(float), st.integers(1, 50).map(float))
def test_newest_unread_comes_first_then_the_one_read_longest_ago(
    read: list[float | None], now: float, again: float
) -> None:
    seen = [(Path(f"step-{n:08d}"), at) for n, at in enumerate(read)]
    found = next_due(seen, now=now, again_after_s=again)
    unread = [path for path, at in seen if at is None or at > now + again]
    due = {path: at for path, at in seen if at is not None and now - at >= again}
    if unread:
        assert found == unread[-1]
    elif due:
        assert found in due
        assert due[found] == min(due.values())
    else:
        assert found is None


@given(
    st.lists(st.integers(1, 10**7), min_size=1, max_size=30),
    st.lists(st.floats(0, 2), min_size=30, max_size=30),
)
def test_the_rate_is_never_passed_however_long_the_reads_take(sizes: list[int], reads: list[float]) -> None:
    clock = Clock()
    pace = ReadThrottle(1e6, clock, clock.wait)
    began = clock.now
    for size, seconds in zip(sizes, reads, strict=False):
        clock.now += seconds
        pace(size)
    assert clock.now - began >= sum(sizes) / 1e6 * 0.999


def test_nothing_is_read_while_a_checkpoint_is_being_written() -> None:
    clock = Clock()
    saving = iter([True, True, True, False])
    pace = ReadThrottle(1e12, clock, clock.wait, lambda: next(saving))
    began = clock.now
    pace(1)
    assert clock.now - began > 0.5


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", key=KEY)


def save(store: CheckpointStore, step: int) -> Path:
    def write(directory: Path) -> None:
        (directory / "weights.safetensors").write_bytes(os.urandom(100_000))

    return store.save(step, write, run_id="r", config_digest="c", world_size=1, threads=1, holder="a")


def flip(path: Path) -> None:
    """One bit, as a disk that rots turns it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def until(condition: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.01)


def read_since_written(store: CheckpointStore) -> dict[str, Any]:
    """What verified.json says, by checkpoint."""
    try:
        found: dict[str, Any] = json.loads((store.root / "verified.json").read_text())["verified"]
    except (FileNotFoundError, ValueError):
        return {}
    return found


def test_a_flipped_bit_is_found_reported_once_and_recorded(store: CheckpointStore) -> None:
    printed: list[Any] = []
    clock = Clock()
    verifier = Verifier(store.root, KEY, printed.append, HURRY, clock)
    for step in (10, 20):
        save(store, step)
    verifier.on_message(0, READY)
    until(lambda: set(read_since_written(store)) == {"step-00000010", "step-00000020"})
    verifier.look()
    assert printed == []
    flip(store.path(10) / "weights.safetensors")
    for _ in range(2):
        before = read_since_written(store)["step-00000010"]["at"]
        clock.now += 3601
        until(lambda at=before: read_since_written(store)["step-00000010"]["at"] != at)  # type: ignore[misc]
    verifier.finish()
    (warning,) = printed
    assert (warning["kind"], warning["code"]) == ("warning", "checkpoint_damaged")
    assert (
        "step-00000010 was damaged after it was written: weights.safetensors: its content" in warning["text"]
    )
    assert str(store.path(10)) in warning["text"]
    assert "the run continues" in warning["fix"]
    assert read_since_written(store)["step-00000010"]["intact"] is False
    assert read_since_written(store)["step-00000020"]["intact"] is True


def test_what_was_read_a_while_ago_is_not_read_at_every_start(store: CheckpointStore) -> None:
    save(store, 10)
    first = Verifier(store.root, KEY, print, HURRY)
    first.on_message(0, READY)
    until(lambda: bool(read_since_written(store)))
    first.finish()
    at = read_since_written(store)["step-00000010"]["at"]
    save(store, 20)
    second = Verifier(store.root, KEY, print, HURRY)
    second.on_message(0, READY)
    until(lambda: "step-00000020" in read_since_written(store))
    second.finish()
    assert read_since_written(store)["step-00000010"]["at"] == at


def test_it_begins_with_the_training_and_ends_at_once_amid_a_reading(
    store: CheckpointStore,
) -> None:
    until(lambda: "verifier" not in [thread.name for thread in threading.enumerate()])  # of tests before
    save(store, 10)
    verifier = Verifier(store.root, KEY, print, ReadingRate(bytes_per_s=1.0, look_every_s=0.01))
    verifier.on_message(0, {"kind": "phase", "text": ""})
    verifier.on_message(1, READY)
    assert "verifier" not in [thread.name for thread in threading.enumerate()]
    verifier.on_message(0, READY)
    until(lambda: "verifier" in [thread.name for thread in threading.enumerate()])
    began = time.monotonic()
    verifier.finish()
    assert time.monotonic() - began < 10, "the reading itself would take minutes"
    until(lambda: "verifier" not in [thread.name for thread in threading.enumerate()])
    assert read_since_written(store) == {}


def test_missing_directory_and_unwritable_record_end_nothing(
    store: CheckpointStore,
) -> None:
    printed: list[Any] = []
    verifier = Verifier(store.root, KEY, printed.append, HURRY)
    verifier.on_message(0, READY)  # there is no such directory yet
    apart = CheckpointStore(store.root.parent / "apart", key=KEY)
    save(apart, 10)
    (apart.root / "verified.json").mkdir()
    flip(apart.path(10) / "weights.safetensors")
    apart.root.rename(store.root)  # at once: it reads a checkpoint once an hour

    def is_reported() -> bool:
        verifier.look()
        return bool(printed)

    until(is_reported)
    verifier.finish()
    assert [message["code"] for message in printed] == ["checkpoint_damaged"]


def _listed(front: Any) -> str:
    command = [sys.executable, "-m", "unisono", "checkpoint", "ls", str(front.out)]
    return front_server.run(command, env=front.environment, timeout=60).stdout


@pytest.mark.slow
def test_a_run_reports_that_a_checkpoint_of_its_has_rotted_and_continues(
    front: Any, model_dir: Path, rows_file: Path
) -> None:
    """With the real worker; a byte of step 20 is flipped while it trains."""
    front.config(
        train=str(rows_file), model={"path": str(model_dir), "dtype": "float32"}, adapter={"rank": 2, "dropout": 0.0},
        duration="100000 steps", checkpoint={"every": "20 steps", "keep_every": "20 steps"},
    )  # fmt: skip
    hurry = {"look_every_s": 0.05, "again_after_s": 0.2}
    process = front.start(faults={"real": True, "rhythm": hurry})
    try:
        lines: list[str] = []
        file = front.out / "checkpoints" / "step-00000020" / "trainable.safetensors"
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("checkpoint at step 20"):
                flip(file)
            if line.startswith("warning: checkpoint"):
                break
        assert lines[-1].startswith(
            "warning: checkpoint step-00000020 was damaged after it was written: trainable.safetensors: "
        ), "".join(lines)
        assert str(file.parent) in lines[-1]
        reached = max(front.steps())
        until(lambda: max(front.steps()) > reached)
        (row,) = [line for line in _listed(front).splitlines() if line.split()[0] == "20"]
        assert "DAMAGED" in row
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        process.communicate(timeout=60)
        assert process.returncode == 75
        assert time.monotonic() - began < 30
    finally:
        process.kill()
