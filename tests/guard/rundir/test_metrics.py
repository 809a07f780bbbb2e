"""metrics.jsonl: exact, whole lines, each step once. Run: pytest tests/guard/rundir/test_metrics.py"""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.rundir.records import (
    MetricsWriter,
    Truncation,
    best_evaluated,
    read_metrics,
    truncate_after,
    without_nan,
)


def _write(path: Path, steps: range) -> None:
    writer = MetricsWriter(path)
    for step in steps:
        writer.append({"step": step, "loss": 1 / (step + 1)})
    writer.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_to_the_same_bits(number: float) -> None:
    again = json.loads(json.dumps(without_nan({"x": number})))["x"]
    assert repr(again) == repr(number)


def test_lines_are_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    assert read_metrics(path) == [{"step": n, "loss": 1 / (n + 1)} for n in (1, 2, 3)]
    assert path.read_bytes().count(b"\n") == 3


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.append({"step": 1, "loss": math.nan, "nested": {"a": [math.inf, 1.5]}})
    writer.close()
    assert path.read_text() == '{"step": 1, "loss": null, "nested": {"a": [null, 1.5]}}\n'


def test_cutting_leaves_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 7, "eval_loss": 1.0}\n{"step": 8, "lo')
    assert truncate_after(path, 5) == Truncation(later=4)
    _write(path, range(6, 8))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]


def test_an_evaluation_that_is_due_again_is_cut_and_its_step_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2}\n{"step": 2, "eval_loss": 1.0}\n{"step": 3}\n{"step": 3, "eval_loss": 1.0}\n{"step": 4}\n'
    )
    assert truncate_after(path, 3, evaluated=False) == Truncation(later=2)
    assert path.read_text() == '{"step": 2}\n{"step": 2, "eval_loss": 1.0}\n{"step": 3}\n'


def test_what_stays_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,  "loss":1e-07}\n{"step": 2}\n')
    assert truncate_after(path, 1) == Truncation(later=1)
    assert path.read_bytes() == b'{"step":1,  "loss":1e-07}\n'


@given(cut=st.integers(0, 200))
def test_a_file_torn_anywhere_loses_at_most_its_last_line(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    _write(path, range(1, 5))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    lines = whole[:cut].count(b"\n")
    truncate_after(path, 4)
    assert [line["step"] for line in read_metrics(path)] == list(range(1, lines + 1))
    _write(path, range(lines + 1, 5))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b'{"step": 3, "lo\x80\n', "not JSON"),
        (b"\0" * 40 + b"\n", "zeros"),
        (b"[1, 2]\n", "not an object"),
        (b'{"loss": 0.5}\n', "without a step"),
        (b'{"step": 8, "loss": 0.5}\n', "a later step, out of place"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b'{"step": 3, "x": "' + b"x" * (3 << 20) + b'"}\n', "longer than any line"),
    ],
)
def test_damaged_middle_line_is_kept_aside_by_number_and_no_other_is_lost(
    tmp_path: Path, bad: bytes, what: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 8))
    lines = path.read_bytes().splitlines(keepends=True)
    before = b"".join([*lines[:2], bad, *lines[3:], b'{"step": 8, "lo'])
    path.write_bytes(before)
    cut = truncate_after(path, 5)
    aside = tmp_path / "metrics.jsonl.damaged-1"
    assert cut == Truncation(later=3, damaged=1, numbers=(3,), aside=aside), what
    assert aside.read_bytes() == before
    assert path.read_bytes() == b"".join([*lines[:2], *lines[3:5]])
    warning = cut.warning()
    assert warning is not None
    assert "line 3 is damaged" in warning["text"]
    assert warning["where"] == f"{aside}:3"
    assert truncate_after(path, 5) == Truncation()


def test_file_without_a_readable_line_is_kept_aside_beside_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "metrics.jsonl.damaged-1").write_text("of an earlier start")
    path.write_bytes(b"\xff\n" * 20)
    cut = truncate_after(path, 5)
    assert (cut.damaged, cut.numbers) == (20, (1, 2, 3, 4, 5, 6, 7, 8))
    assert cut.aside == tmp_path / "metrics.jsonl.damaged-2"
    assert cut.aside.read_bytes() == b"\xff\n" * 20
    assert path.read_bytes() == b""


def test_readers_pass_over_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "eval_loss": 0.5}\n'
    path.write_bytes(good + b"[" * 100_000 + b'\n{"step": 1' + b"0" * 400 + b"}\n\xff\n" + good)
    assert [line["step"] for line in read_metrics(path)] == [1, 1]
    assert best_evaluated(path, [1], metric="eval_loss") == (1, {"step": 1, "eval_loss": 0.5})


def test_the_best_step_by_accuracy_is_the_first_with_the_highest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.95)):
        with path.open("a") as file:
            print(json.dumps({"step": step, "eval_loss": 1.0, "eval_reward_accuracy": accuracy}), file=file)
    found = best_evaluated(path, [1, 2, 3], metric="reward_accuracy")
    assert found is not None
    assert found[0] == 2


def test_a_file_that_needs_no_cut_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 3))
    before = path.stat()
    assert truncate_after(path, 2) == Truncation()
    assert path.stat().st_ino == before.st_ino


def test_no_file_is_not_a_lines(tmp_path: Path) -> None:
    assert truncate_after(tmp_path / "metrics.jsonl", 3) == Truncation()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_full_disk_delays_lines_and_loses_none(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs mounts")
    try:
        writer = MetricsWriter(disk / "metrics.jsonl")
        writer.append({"step": 1, "text": "x" * 100})
        (disk / "other").write_bytes(b"x" * 57344)
        for step in range(2, 60):
            writer.append({"step": step, "text": "x" * 1000})
        assert writer.waiting > 0
        with pytest.raises(OSError, match="No space left"):
            writer.sync()  # a checkpoint does not come before its lines
        assert all(line.endswith(b"}") for line in (disk / "metrics.jsonl").read_bytes().splitlines())
        (disk / "other").unlink()
        writer.append({"step": 60})
        assert writer.waiting == 0 or [line["step"] for line in read_metrics(disk / "metrics.jsonl")] != []
        writer.close()
        found = [line["step"] for line in read_metrics(disk / "metrics.jsonl")]
        assert found == list(range(1, len(found) + 1))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


_LIMITED = """
import resource, sys
from pathlib import Path
from unisono.guard.rundir.records import MetricsWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
writer = MetricsWriter(Path(sys.argv[1]))
for step in range(1, 60):
    writer.append({"step": step, "text": "x" * 50})
try:
    writer.sync()
except OSError as error:
    print(error.errno, error.filename, writer.waiting)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(writer.close())
"""


def test_a_limit_of_the_file_size_is_called_so_and_the_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path)], check=True, capture_output=True, text=True
    )
    first, second = done.stdout.splitlines()
    assert first.split()[:2] == ["27", str(path)]
    assert int(first.split()[2]) > 40
    assert second == "None"
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 60))


@pytest.mark.parametrize("what", ["the file", "its directory"])
def test_file_removed_while_it_is_written_returns_with_all_its_lines(tmp_path: Path, what: str) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    path.parent.mkdir()
    writer = MetricsWriter(path)
    writer.append({"step": 1, "loss": 0.1})
    if what == "the file":
        path.unlink()
    else:
        shutil.rmtree(path.parent)
        with pytest.raises(FileNotFoundError):  # which is not made again behind its front's back
            writer.sync()
        path.parent.mkdir()
    writer.append({"step": 2, "loss": 0.2})
    writer.sync()
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    writer.append({"step": 3, "loss": 0.3})
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
