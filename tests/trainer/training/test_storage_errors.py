"""What the storage does wrong in a rank is the storage's fault, whichever call meets it.

Run: pytest tests/trainer/training/test_storage_errors.py
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fuse
from tests.conftest import training_in
from unisono.base.errors import storage_failure
from unisono.base.events import Reporter
from unisono.guard.rundir.records import read_metrics
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.data.token_table import TokenTable

Train = Callable[..., Any]
save = CheckpointStore.save
EVERY_2 = {"duration": "6 steps", "checkpoint": {"every": "2 steps"}}


@pytest.fixture
def mounted() -> Iterator[list[Path]]:
    """Places on which a file system was mounted."""
    places: list[Path] = []
    yield places
    for place in places:
        fuse.unmount(place)


def move_aside(path: Path) -> None:
    path.rename(path.with_name("moved-by-somebody"))


def strike(monkeypatch: pytest.MonkeyPatch, step: int, how: Callable[[Path], None]) -> None:
    """Something happens to a checkpoint in the moment after it was published."""

    def saving(self: CheckpointStore, number: int, *arguments: Any, **more: Any) -> Path:
        path = save(self, number, *arguments, **more)
        if number == step and not path.with_name("moved-by-somebody").exists():
            how(path)
        return path

    monkeypatch.setattr(CheckpointStore, "save", saving)


def warnings_of(run: Any) -> list[str]:
    return [message["code"] for message in run.messages if message["kind"] == "warning"]


def saved(run: Any) -> list[int]:
    return [message["step"] for message in run.messages if message["kind"] == "checkpoint"]


@pytest.mark.parametrize(("step", "reported"), [(2, [4, 6]), (6, [2, 4, 6])])
def test_checkpoint_moved_away_when_reported_warns_and_the_last_is_remade(
    train_here: Train, monkeypatch: pytest.MonkeyPatch, step: int, reported: list[int]
) -> None:
    strike(monkeypatch, step, move_aside)
    run = train_here(**EVERY_2)
    assert run.result["outcome"] == "completed"
    assert warnings_of(run) == ["checkpoint_gone"]
    assert saved(run) == reported
    assert Path(run.result["checkpoint"]).name == "step-00000006"
    assert Path(run.result["checkpoint"]).is_dir()


@pytest.mark.skipif(bool(fuse.why_unavailable()), reason=fuse.why_unavailable())
def test_network_disk_failing_when_a_checkpoint_is_reported_only_warns(
    train_here: Train, monkeypatch: pytest.MonkeyPatch, mounted: list[Path]
) -> None:
    def lose_the_server(path: Path) -> None:
        device = fuse.mount(path)
        mounted.append(path)
        os.close(device)  # from here on who asks for anything in it gets an error

    strike(monkeypatch, 2, lose_the_server)
    run = train_here(**EVERY_2)
    assert run.result["outcome"] == "completed"
    assert warnings_of(run)[0] == "checkpoint_unread"
    assert set(warnings_of(run)) <= {"checkpoint_unread", "prune_failed"}
    assert saved(run) == [2, 4, 6]


def test_no_save_ends_with_an_error_of_the_storage(train_here: Train, tmp_path: Path) -> None:
    """A file where the directory of checkpoints belongs: each save fails, and says so; none
    raises.
    """
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoints").write_text("a file")
    run = train_here(directory=out, **EVERY_2)
    assert run.result["outcome"] == "completed"
    assert run.result["checkpoint"] is None
    assert set(warnings_of(run)) == {"checkpoint_failed"}


def test_damaged_metrics_line_is_kept_aside_and_reported_on_resume(train_here: Train, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = train_here(directory=out, **EVERY_2)
    metrics = out / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b":", b";", 1)
    metrics.write_bytes(b"".join(lines))
    before = metrics.read_bytes()
    run = train_here(
        directory=out, resume=(4, Path(first.result["checkpoint"]).with_name("step-00000004")), **EVERY_2
    )
    (warning,) = [message for message in run.messages if message.get("code") == "metrics_damaged"]
    assert "line 2 is damaged" in warning["text"]
    assert (out / "metrics.jsonl.damaged-1").read_bytes() == before
    assert [line["step"] for line in read_metrics(metrics)] == [1, 3, 4, 5, 6]


def test_a_torn_last_event_takes_no_event_of_the_next_start_with_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(b'{"kind": "phase", "ti')
    reporter = Reporter(None, log_path=str(path))
    reporter.phase("start", "loading torch")
    reporter.phase("train", "training")
    reporter.close()
    torn, *lines = path.read_text().splitlines()
    assert torn == '{"kind": "phase", "ti'
    assert [json.loads(line)["phase"] for line in lines] == ["start", "train"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, rows_file: Path) -> Path:
    """Rows as a run has prepared them."""
    train = training_in(tmp_path_factory.mktemp("prepared"), model_dir=model_dir, rows_file=rows_file)
    return Path(train(duration="1 steps").plan.data.cache_dir)


@pytest.mark.parametrize("how", ["gone", "cut", "empty", "a directory", "other bytes"])
@pytest.mark.parametrize("name", ["meta.json", "tokens.arrow", "train-rows.arrow"])
def test_unreadable_prepared_data_is_a_storage_failure_with_the_path(
    prepared: Path, tmp_path: Path, how: str, name: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(prepared, folder)
    file = folder / name
    content = file.read_bytes()
    file.unlink()
    if how == "a directory":
        file.mkdir()
    elif how != "gone":
        file.write_bytes(
            {"cut": content[: len(content) // 2], "empty": b"", "other bytes": b"\xff" * len(content)}[how]
        )
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its path is looked at below
        TokenTable.open(folder, "train")
    failure = storage_failure(caught.value)
    assert failure is not None
    assert str(folder) in failure.lines()[0]


_CHILD = """
import sys
from pathlib import Path
from unisono.base.child import parse_child_arguments, run_child

def body(report):
    {body}

sys.exit(run_child(body, parse_child_arguments(["x.json", "--report-fd", "1"], named=False)))
"""


@pytest.mark.parametrize(
    ("body", "code", "cause", "words"),
    [
        ("open('/nowhere/at/all')", 6, None, "/nowhere/at/all"),
        ("Path('/dev/full').open('w', buffering=1).write('x\\n')", 6, "disk_full", "the disk or the quota is full"),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)); open('here', 'wb', buffering=0).write(b'x' * 20) and"
            " open('here', 'ab', buffering=0).write(b'x')",
            6, "ulimit", "the file size limit is 10 bytes",
        ),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); kept = [open('/dev/null') for _ in range(40)]",
            6, "ulimit", "the open file limit is 20",
        ),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", 5, None, "ConnectionRefusedError"),
        ("open('relative.txt')", 5, None, "FileNotFoundError"),
        ("raise ValueError('a row')", 5, None, "a row"),
    ],
)  # fmt: skip
def test_unforeseen_storage_error_is_a_refusal_and_another_error_a_crash(
    tmp_path: Path, body: str, code: int, cause: str | None, words: str
) -> None:
    """The exit code of a refusal is 6."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(body=body)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["kind"] == ("refused" if code == 6 else "crashed")
    assert words in json.dumps(last)
    assert ((last.get("verdict") or {}).get("cause")) == cause
    assert "Traceback" in done.stderr, "the rank's log keeps where it was met"


def test_an_error_of_safetensors_counts_by_its_number() -> None:
    class SafetensorError(Exception):
        pass

    full = storage_failure(
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    )
    assert full is not None
    assert full.verdict is not None
    assert full.verdict.cause == "disk_full"
    assert storage_failure(SafetensorError("invalid header")) is None
    assert storage_failure(OSError("Can't load tokenizer for 'x'")) is None
    assert storage_failure(OSError(errno.ESTALE, os.strerror(errno.ESTALE))) is not None
