"""Disks that fail or hang under what a rank's main thread writes.

Run: pytest tests/trainer/training/test_storage_watch.py
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.nproc.disks import Disk, in_memory, on_a_device
from unisono.base.events import Reporter
from unisono.base.messages import SampleMessage
from unisono.trainer.track import TensorboardWriter

LIMIT_S = 30.0

KEEPS_A_LINE = """
import os, sys
from pathlib import Path
from unisono.base.events import Reporter
from unisono.guard.rundir.records import MetricsWriter
from unisono.trainer.training import front_io
front_io._REPORTED_AFTER_S, front_io._GIVEN_UP_AFTER_S = 1.0, 2.0
class Saver:
    last = None
path = Path(sys.argv[1])
metrics = MetricsWriter(path.with_name("before.jsonl"))
os.dup2(os.open(path, os.O_RDWR), metrics._fd)  # the writer itself opens nothing but plain files
with front_io.StorageWatch(Saver(), Reporter(1)) as watch:
    while True:
        with watch.ends_if_stuck("writing metrics.jsonl", path, only_files=True):
            metrics.append({"step": 1, "text": "x" * 4000})
"""


class Heard:
    """The front's end of a reporter's pipe."""

    def __init__(self) -> None:
        read_end, self.fd = os.pipe()
        self.messages: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        self._thread.start()

    def _read(self, fd: int) -> None:
        with os.fdopen(fd) as lines:
            self.messages.extend(map(json.loads, lines))

    def codes(self) -> list[str]:
        """Of the warnings, once nothing more comes."""
        os.close(self.fd)
        self._thread.join(LIMIT_S)
        return [message["code"] for message in self.messages if message["kind"] == "warning"]


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Disk]:
    """A disk that can hang."""
    with on_a_device(tmp_path / "disk", tmp_path / "image", size=16 << 20) as disk:
        yield disk


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.01)


def sample(step: int, text: str = "") -> SampleMessage:
    return {"kind": "sample", "step": step, "prompt": "", "text": text}


def test_events_are_kept_in_order_and_all_of_them(tmp_path: Path) -> None:
    heard, path = Heard(), tmp_path / "events.jsonl"
    report = Reporter(heard.fd, log_path=str(path))
    for number in range(500):
        report.send(sample(number))
        report.send({"kind": "step", "step": number})
    report.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(500))
    assert heard.codes() == []
    assert len(heard.messages) == 1000


def test_the_front_hears_all_where_the_events_disk_is_full(tmp_path: Path) -> None:
    with in_memory(tmp_path / "small", size=1 << 16) as disk:
        heard = Heard()
        report = Reporter(heard.fd, log_path=str(disk.path / "events.jsonl"))
        report.send(sample(0))
        until((disk.path / "events.jsonl").exists)
        disk.fill(leave=0)
        for number in range(1, 300):
            report.send(sample(number, "x" * 500))
        report.close()
        assert heard.codes() == ["events_log"]
    assert [m["step"] for m in heard.messages if m["kind"] == "sample"] == list(range(300))


def test_the_front_hears_all_where_the_events_disk_hangs(hung: Disk) -> None:
    heard = Heard()
    report = Reporter(heard.fd, log_path=str(hung.path / "events.jsonl"))
    report.send(sample(0))
    until((hung.path / "events.jsonl").exists)
    hung.hang()
    began = time.monotonic()
    for number in range(1, 3000):
        report.send(sample(number))
    report.close()
    assert time.monotonic() - began < 10
    assert heard.codes() == ["events_log"]
    assert [m["step"] for m in heard.messages if m["kind"] == "sample"] == list(range(3000))


@pytest.mark.slow
def test_curves_that_cannot_be_written_hold_up_no_step(hung: Disk) -> None:
    heard = Heard()
    board = TensorboardWriter(hung.path / "tensorboard", Reporter(heard.fd), purge_step=None)
    board.scalars(1, {"loss": 1.0})
    until(lambda: any(hung.path.glob("tensorboard/*")))
    hung.hang()
    began = time.monotonic()
    for step in range(2, 500):
        board.scalars(step, {"loss": 1.0})
    assert time.monotonic() - began < 5
    board.close()
    assert heard.codes() == ["tensorboard"]
    hung.answer()
    board.close()  # its own thread ends, too


@pytest.mark.slow
def test_untaken_line_ends_the_rank_even_if_the_kernel_passes_signals(
    tmp_path: Path,
) -> None:
    """As with FUSE. A pipe that nobody empties is such a file."""
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    keeps_open = os.open(path, os.O_RDWR)
    try:
        done = subprocess.run(
            [sys.executable, "-c", KEEPS_A_LINE, str(path)], capture_output=True, text=True, timeout=120, check=False
        )  # fmt: skip
    finally:
        os.close(keeps_open)
    assert done.returncode == 6, done.stderr
    blocked, refused = map(json.loads, done.stdout.splitlines())
    assert (blocked["code"], blocked["where"]) == ("storage_blocked", str(path))
    assert refused["kind"] == "refused"
    assert refused["problems"][0]["why"] == "the storage does not answer"
