"""An output that cannot be written where the user wants it is refused in true words.

Run: pytest tests/front/cli/test_outputs.py
"""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import front_server
from tests.needs import small_disk
from unisono.base.errors import storage_failure, storage_reason, storage_remedy

CONFIG = (
    "model: builtin:tiny\ndata: {train: rows.jsonl}\nadapter: {rank: 4}\nduration: 1 steps\ndevice: cpu\n"
)
COMMANDS = {
    "board": ["board", "done", "--out", "OUT.html"],
    "init": ["init", "--out", "OUT.yaml"],
    "export": ["export", "builtin:tiny", "OUT"],
    "checkpoint export": ["checkpoint", "export", "builtin:tiny", "OUT", "--format", "gguf"],
    "generate": ["generate", "builtin:tiny", "a", "--out", "OUT"],
    "eval": ["eval", "builtin:tiny", "--data", "rows.jsonl", "--out", "OUT"],
    "doctor": ["doctor", "--report", "OUT"],
    "run": ["run", "--output-dir", "OUT", "--", "true"],
    "plan": ["train", "c.yaml", "output_dir=OUT", "--dry-run"],
    "train": ["train", "c.yaml", "output_dir=OUT"],
}
PLACES = {
    "/proc": "does not take new files",
    "/sys": "does not take new files",
    "/dev/null": "a file",
    "rows.jsonl": "a file",
    "read-only": "read-only" if os.geteuid() == 0 else "permission",
}
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With rows, a config, a run, and a directory in which nobody can make a file."""
    root = tmp_path_factory.mktemp("outputs")
    (root / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (root / "c.yaml").write_text(CONFIG)
    (root / "done").mkdir()
    (root / "done" / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    closed = root / "read-only"
    if os.geteuid() == 0:  # root may write everywhere else
        with small_disk(closed, "ro"):
            yield root
        return
    closed.mkdir(mode=0o500)
    yield root


@pytest.fixture
def cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def answer(folder: Path, command: str, out: str) -> tuple[int, str]:
    words = [word.replace("OUT", out) for word in COMMANDS[command]]
    done = front_server.run([sys.executable, "-m", "unisono", *words], cwd=folder, timeout=LIMIT_S)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_output_is_refused_with_the_reason_before_the_work(cached: Path, command: str) -> None:
    before = sorted(cached.iterdir())
    for place, reason in PLACES.items():
        code, said = answer(cached, command, f"{place}/x")
        assert code == 2, said
        assert reason in said, (place, said)
        assert place in said
        assert not any(
            wrong in said for wrong in ("renamed", "free space", "storage failed", "Traceback", ".tmp-")
        )
    assert sorted(cached.iterdir()) == before


@pytest.mark.parametrize("command", ["board", "init", "export", "run", "train"])
def test_an_output_on_a_full_disk_is_refused_with_free_space_as_the_fix(cached: Path, command: str) -> None:
    with small_disk(cached / "full", "size=16k") as disk:
        with pytest.raises(OSError, match="No space"):
            (disk / "x").write_bytes(b"x" * 65536)
        code, said = answer(cached, command, "full/y")
    assert code in (2, 6), said
    assert "the disk or the quota is full" in said
    assert "fix:   free space there" in said
    assert "full/y" in said


def test_errors_of_a_directory_are_told_from_those_of_a_file_that_is_gone(tmp_path: Path) -> None:
    def reasons(path: str, number: int) -> tuple[str, str]:
        error = OSError(number, os.strerror(number), path)
        return storage_reason(error), storage_remedy(error)

    assert reasons("/proc/x", errno.ENOENT)[0] == "that directory does not take new files"
    assert "removed, renamed or replaced" in reasons(str(tmp_path / "x"), errno.ENOENT)[0]
    for number in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR):
        reason, remedy = reasons(str(tmp_path / "x"), number)
        assert reason != "the storage failed"
        assert remedy.startswith("name a directory")
    assert reasons(str(tmp_path / "x"), errno.ENOSPC)[1].startswith("free space")
    failure = storage_failure(OSError(errno.EROFS, "Read-only file system", str(tmp_path / "x")))
    assert failure is not None
    assert "read-write" in failure.problems[0].fix
