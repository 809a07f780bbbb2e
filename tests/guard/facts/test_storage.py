"""Output folders that can be written, that cannot, and that hang.

Run: pytest tests/guard/facts/test_storage.py
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fuse
from tests.needs import small_disk
from unisono.guard.facts.path_probes import file_system_of, is_network
from unisono.guard.facts.storage import is_nonce, leave_nonce, probe_storage, remove_nonce, sees_nonce


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    found = probe_storage(tmp_path)
    assert (found.writable, found.trouble, found.shared) == (True, "", None)
    assert (found.free_bytes or 0) > 0
    # After a chroot the table of mounts may have no entry for the root directory.
    mount_points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    assert found.file_system or "/" not in mount_points
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_tried_by_its_parent(tmp_path: Path) -> None:
    assert probe_storage(tmp_path / "runs" / "new").writable is True
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_reported(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    found = probe_storage(tmp_path / "runs" / "new")
    assert found.writable is False
    assert "not a directory" in found.trouble


def test_a_read_only_file_system_is_reported() -> None:
    found = probe_storage(Path("/proc/sys"))
    assert found.writable is False
    assert found.trouble
    assert found.file_system == "proc"


_LIMITED = """
import resource, sys
from pathlib import Path
from unisono.guard.facts.storage import probe_storage
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
print(probe_storage(Path(sys.argv[1])).trouble)
"""


def test_a_limit_of_the_file_size_is_named_with_its_value(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "File too large" in printed
    assert "the file size limit is 500000 bytes, `ulimit -f unlimited` raises it" in printed
    assert list(tmp_path.iterdir()) == []


def test_the_heads_file_is_seen_in_its_folder_alone(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a", tmp_path / "b"
    ours.mkdir()
    theirs.mkdir()
    name = leave_nonce(ours)
    assert is_nonce(name)
    (tmp_path / "link").symlink_to(ours)
    assert sees_nonce(ours, name) is True
    assert sees_nonce(tmp_path / "link", name) is True
    assert sees_nonce(theirs, name) is False
    assert sees_nonce(tmp_path / "none", name) is False
    remove_nonce(ours, name)
    remove_nonce(ours, name)
    assert sees_nonce(ours, name) is False
    assert list(ours.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["", "../../etc/passwd", ".unisono-head-", ".unisono-head-../x", ".unisono-head-" + "g" * 16]
)
def test_invalid_nonce_is_neither_looked_for_nor_removed(tmp_path: Path, name: str) -> None:
    """The head never gives such a name."""
    assert not is_nonce(name)
    assert sees_nonce(tmp_path, name) is None
    remove_nonce(tmp_path, name)


def test_what_was_known_when_the_storage_fell_silent_is_kept(tmp_path: Path) -> None:
    slow = (
        sys.executable,
        "-c",
        'import time; print(\'{"file_system": "nfs4"}\', flush=True); time.sleep(60)',
    )
    began = time.monotonic()
    found = probe_storage(tmp_path, limit_s=1.0, program=slow)
    assert time.monotonic() - began < 20
    assert (found.writable, found.file_system) == (None, "nfs4")
    assert "does not answer" in found.trouble


def test_a_probe_that_breaks_is_unknown_and_reports_why(tmp_path: Path) -> None:
    found = probe_storage(tmp_path, program=(sys.executable, "-c", "raise SystemExit('out of order')"))
    assert (found.writable, found.trouble) == (None, "out of order")


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system that never answers: FUSE, with nobody who serves it."""
    if fuse.why_unavailable():
        pytest.skip(fuse.why_unavailable())
    folder = tmp_path / "hangs"
    folder.mkdir()
    try:
        device = fuse.mount(folder)
    except OSError as error:
        pytest.skip(f"needs mounts: {error}")
    yield folder
    os.close(device)  # the kernel then answers all who wait with an error
    fuse.unmount(folder)


def test_storage_that_hangs_is_named_and_hangs_nobody(hanging: Path) -> None:
    before = threading.active_count()
    began = time.monotonic()
    found = probe_storage(hanging / "runs", limit_s=1.0)
    assert time.monotonic() - began < 20
    assert found.writable is None
    assert "does not answer" in found.trouble
    assert found.file_system == "fuse.test"
    assert threading.active_count() <= before + 1, "one thread waits for the child that the kernel holds"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "size=64k") as folder:
        yield folder


def test_a_full_disk_is_reported_and_nothing_is_left_on_it(small: Path) -> None:
    found = probe_storage(small)
    assert found.writable is False
    assert "No space left" in found.trouble
    assert (found.free_bytes, found.file_system) == (64 * 1024, "tmpfs")
    assert list(small.iterdir()) == []


TABLE = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
40 22 0:50 / /data\\040sets rw shared:3 - nfs4 server:/x rw
41 22 0:51 / /data\\040sets/inner rw - tmpfs tmpfs rw
42 22 0:52 / /data\\040sets/inner rw - fuse.sshfs a:/b rw
torn
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/u/runs", "ext4"), ("/data sets/runs", "nfs4"), ("/data sets", "nfs4"), ("/data setsX", "ext4"),
        ("/data sets/inner/x", "fuse.sshfs"), ("/data sets/../proc/x", "proc"),
    ],
)  # fmt: skip
def test_the_innermost_and_last_mount_counts(tmp_path: Path, path: str, kind: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert file_system_of(Path(path), table=table) == kind


def test_file_systems_of_several_machines_are_known() -> None:
    assert all(map(is_network, ("nfs4", "lustre", "cifs", "fuse.sshfs", "fuse.juicefs", "9p")))
    assert not any(map(is_network, ("ext4", "xfs", "tmpfs", "overlay", "fuse.fuseblk", "")))


def test_a_name_that_appears_late_on_a_network_file_system_is_still_seen(tmp_path: Path) -> None:
    """As with NFS, whose clients keep for seconds what they knew of a folder."""
    from unisono.guard.facts.path_probes import wait_for_file

    def late() -> None:
        with contextlib.suppress(OSError):
            (tmp_path / ".unisono-head-0").write_text("")

    timer = threading.Timer(0.5, late)
    timer.start()
    assert wait_for_file(tmp_path, ".unisono-head-0", patience_s=20)
    timer.join()
