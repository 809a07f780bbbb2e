"""Whatever lies in a directory of logs, diagnose answers.

Run: pytest tests/guard/diagnosis/test_arbitrary_files.py
"""

import gzip
import io
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.guard.diagnosis.reading import LimitedStream, LogContents, diagnose_logs, find_sources, read_all
from unisono.guard.diagnosis.scan import scan
from unisono.guard.diagnosis.timeline import draw

WORDS = (
    b"Traceback (most recent call last):\n", b'  File "train.py", line 3, in f\n', b"RuntimeError: CUDA out of memory", b"[rank3]: ", b"\r", b"\n", b"\x1b[2K", b" 3/10 [00:01<00:02, 1.0it/s]", b"\xff\xfe", b"\x00",
    b"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE", b"rank      : 3 (local_rank: 3)\n", b"exitcode  : -9 (pid: 12)\n", b"2026-11-22 04:00:00,000 ", "\u2028█".encode(),
    b"The above exception was the direct cause of the following exception:\n", b"***** Running training *****\n", b"99999999999999999999", b"host: node-1\n",
)  # fmt: skip
log_bytes = st.lists(st.one_of(st.sampled_from(WORDS), st.binary(max_size=20)), max_size=40).map(b"".join)


def read(*paths: Path) -> LogContents:
    return read_all(find_sources([str(path) for path in paths]))


@settings(deadline=None, max_examples=60)
@given(st.lists(log_bytes, min_size=1, max_size=3), st.integers(20, 120))
def test_any_bytes_give_a_verdict_and_a_drawing(logs: list[bytes], width: int) -> None:
    found = diagnose_logs([scan(f"rank_{number}.log", io.BytesIO(data)) for number, data in enumerate(logs)])
    assert found.verdict.summary
    assert found.verdict.lines()
    assert all(line.isprintable() for line in draw(found.facts, width=width))


@settings(deadline=None, max_examples=40)
@given(log_bytes, st.data())
def test_a_log_reports_the_same_however_it_comes_in_pieces(data: bytes, draw_: st.DataObject) -> None:
    size = draw_.draw(st.integers(1, 50))
    whole, pieces = scan("x", io.BytesIO(data)), scan("x", _Dripping(data, size))
    assert [event.text for event in whole.events] == [event.text for event in pieces.events]
    assert (whole.lines, whole.bytes) == (pieces.lines, pieces.bytes)


class _Dripping(io.BytesIO):
    """Gives a few bytes at a time, as a pipe does."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(self._size, size) if size is not None and size >= 0 else self._size)


def test_files_that_are_no_logs_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.log")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere.log").symlink_to(tmp_path / "missing")
    (tmp_path / "empty.log").touch()
    (tmp_path / "core.12").write_bytes(random.Random(0).randbytes(200_000))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s.log"))
        (tmp_path / "rank_0.log").write_text(
            '[rank0]: Traceback (most recent call last):\n[rank0]:   File "a.py", line 1, in f\n[rank0]:'
            " KeyError: 'x'\n"
        )
        found = read(tmp_path)
    assert diagnose_logs(found.scanned).verdict.cause == "user_code_error"


def test_a_file_that_may_not_be_read_is_reported_and_the_others_count(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    (tmp_path / "rank_1.log").symlink_to("/proc/self/mem")  # opens, and reading gives EIO
    found = read(tmp_path / "rank_0.log", tmp_path / "rank_1.log")
    assert [one.name for one in found.scanned if one.events] == ["rank_0.log"]


def test_of_a_gz_that_is_cut_short_what_is_there_counts_and_it_is_reported(tmp_path: Path) -> None:
    text = b"RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n" + random.Random(0).randbytes(
        50_000
    )
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(text)[:-20_000])
    found = read(tmp_path)
    assert diagnose_logs(found.scanned).verdict.cause == "cuda_oom"
    assert "a.log.gz: damaged after" in found.refused[0]


def test_a_gz_bomb_is_read_to_a_limit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.guard.diagnosis.reading.LEAST_UNPACKED_BYTES", 8 << 20)
    bomb = tmp_path / "bomb.log.gz"
    bomb.write_bytes(gzip.compress(bytes(64 << 20)))
    found = read(bomb)
    assert found.bytes <= max(8 << 20, 200 * bomb.stat().st_size) + (4 << 20)
    assert "GB were read, of a compressed file of" in found.refused[0]


def test_a_stream_reports_how_far_it_is() -> None:
    seen: list[tuple[int, int]] = []
    watched = LimitedStream(io.BytesIO(b"x" * 10), 10, lambda packed, given: seen.append((packed, given)))
    while watched.read(4):
        pass
    assert seen == [(4, 4), (8, 8), (10, 10), (10, 10)]


@pytest.mark.parametrize(
    "unit",
    [
        b"x",
        b"\xff",
        b"[rank0]: Error: ",
        b"a\r",
        b"1/9 [00:01<00:02, 1.0it/s]",
        b"://u:",
        b'File "a", line 1',
        b"(pid=1) ",
    ],
)
def test_an_endless_line_takes_neither_long_nor_much_memory(unit: bytes, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(
        unit * ((24 << 20) // len(unit)) + b"\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    )
    began = time.process_time()
    found = read(log)
    assert time.process_time() - began < 60
    assert diagnose_logs(found.scanned).verdict.cause == "cuda_oom"


def test_the_command_reads_from_a_pipe_in_flat_memory() -> None:
    lines = b"[rank0]: 2026-11-22 04:00:00,000 - INFO - step=17 loss=1.5 and some more words\n" * 50_000
    with subprocess.Popen(
        [sys.executable, "-m", "unisono", "diagnose", "-", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        for _ in range(20):  # 80 MB
            child.stdin.write(lines)
        status = Path(f"/proc/{child.pid}/status").read_text()
        child.stdin.write(
            b"[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
        )
        child.stdin.close()
        child.stdin = None
        assert b'"cuda_oom"' in child.communicate(timeout=120)[0]
    (peak,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 150 << 10  # KiB
