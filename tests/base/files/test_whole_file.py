"""A file is there whole, as it was or as it was to become: under kill -9, on a full disk, and after
an error.

Run: pytest tests/files
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import needs
from unisono.base.files import make_private_dir, read_json, whole_file, write_json, write_text

KILLS = 12
WRITER = """
import sys
from pathlib import Path
from unisono.base.files import write_text
path, texts = Path(sys.argv[1]), [letter * 300_000 for letter in "ab"]
write_text(path, texts[0])
print("ready", flush=True)
while True:
    for text in texts:
        write_text(path, text)
"""


def leftovers(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir() if ".tmp-" in entry.name]


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for kill in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(0.003 * kill)  # not a wait for anything: the moment of the kill
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        text = path.read_text()
        assert len(text) == 300_000
        assert set(text) in ({"a"}, {"b"})
    assert len(leftovers(tmp_path)) <= KILLS
    write_text(path, "c")
    assert path.read_text() == "c"


LIMITED = """
import resource, signal, sys
from pathlib import Path
from unisono.base.files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    write_text(Path(sys.argv[1]), "new" * 10_000)
except OSError as error:
    sys.exit(42)
"""


def test_a_file_that_does_not_fit_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    assert subprocess.run([sys.executable, "-c", LIMITED, str(path)], check=False).returncode == 42
    assert path.read_text() == "old"
    assert leftovers(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 kB."""
    with needs.small_disk(tmp_path / "disk", "size=64k") as disk:
        yield disk


@pytest.mark.processes
def test_a_full_disk_leaves_the_old_file_and_no_rubbish(small_disk: Path) -> None:
    path = small_disk / "f"
    path.write_text("old")
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "x" * 200_000)
    assert path.read_text() == "old"
    assert leftovers(small_disk) == []
    write_text(path, "new")  # there is room again
    assert path.read_text() == "new"


def write_half(path: Path) -> None:
    with whole_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert path.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_the_mode_is_that_requested_from_the_first_moment(tmp_path: Path) -> None:
    with whole_file(tmp_path / "f", mode=0o600) as temporary:
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_two_writers_do_not_meet_in_one_temporary_file(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        names = {stack.enter_context(whole_file(tmp_path / "f")) for _ in range(5)}
    assert len(names) == 5


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(alphabet=st.characters(exclude_categories=["Cs"])),
)
def test_json_reads_back_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, number: float, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, {"number": number, "text": text})
    back = read_json(path)
    assert back["number"].hex() == number.hex()
    assert back["text"] == text


def test_a_private_directory_is_nobody_elses(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        make_private_dir(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
