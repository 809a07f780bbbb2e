"""What is read of a run is a plain file of bounded size and depth, and nothing waits for a pipe.

Run: pytest tests/files
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.base import files
from unisono.base.files import (
    MOST_BYTES,
    MOST_DEPTH,
    iterate_lines,
    open_given,
    open_plain,
    parse_json,
    read_bytes,
    read_json,
    read_object,
)
from unisono.guard.control.protocol import Malformed, decode

DEEP = "[" * 2000 + "]" * 2000
READERS: tuple[Callable[[Path], object], ...] = (
    open_plain,
    read_bytes,
    read_json,
    lambda path: list(iterate_lines(path)),
)


@pytest.mark.parametrize("read", READERS)
def test_no_reader_waits_for_the_writer_of_a_pipe(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    with pytest.raises(OSError, match="it is a named pipe, not a regular file"):
        read(tmp_path / "f")
    assert read_object(tmp_path / "f") == {}


@pytest.mark.parametrize("read", READERS)
def test_directories_and_devices_are_refused_by_their_kind(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    with pytest.raises(OSError, match="it is a device"):
        read(Path(os.devnull))


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(OSError, match="more than 268,435,456 bytes"):
        read_json(path)
    assert len(read_bytes(path, most_bytes=MOST_BYTES + 1)) == MOST_BYTES + 1


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        '{"a":' * 2000 + "1" + "}" * 2000,
        "[" * 10_000_000,
        "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1),
    ],
)
def test_json_that_is_nested_too_deeply_is_a_value_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="levels of nested"):
        parse_json(text)
    (tmp_path / "f").write_text(text)
    assert read_object(tmp_path / "f") == {}


def test_what_unisono_writes_is_far_from_the_limit_of_depth() -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH)


def test_a_frame_that_is_nested_too_deeply_is_malformed() -> None:
    for depth in (MOST_DEPTH, 2_000, 1_000_000):
        with pytest.raises(Malformed):
            decode(b'{"t": "beat", "x": ' + b"[" * depth + b"]" * depth + b"}")


def test_a_pipe_that_a_person_names_is_read_while_somebody_writes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    writer = threading.Thread(target=(tmp_path / "f").write_bytes, args=(b"first\n" * 100_000,))
    writer.start()
    with open_given(tmp_path / "f") as file:
        assert file.read() == b"first\n" * 100_000
    writer.join()


def test_a_pipe_that_a_person_names_and_nobody_writes_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WRITER_S", 0.2)
    os.mkfifo(tmp_path / "f")
    with open_given(tmp_path / "f") as file, pytest.raises(OSError, match="a named pipe without a writer"):
        file.read()
