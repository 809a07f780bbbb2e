"""A path that does not answer on one node, while the others see what is there; as with a network
mount whose client is stuck.

python tests/jobs/nodes/hanging_paths.py FOLDER     as root, in a node's mounts: FUSE with nobody who serves it lies over FOLDER until stdin ends
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fuse
from tests.jobs.nodes.fronts import Front


@contextlib.contextmanager
def hanging(front: Front, folder: Path) -> Iterator[None]:
    """As long as it lasts, whoever asks for `folder` on that front's node waits in the kernel.

    What is open already stays so.
    """
    if fuse.why_unavailable():
        pytest.skip(fuse.why_unavailable())
    inside = ("nsenter", "--target", str(front.pid), "--mount")
    process = subprocess.Popen(
        (*inside, sys.executable, str(Path(__file__)), str(folder)),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        reported = process.stdout.readline()
        if reported.startswith("cannot mount"):
            pytest.skip(f"needs mounts: {reported.strip()}")
        assert reported == "hangs\n", reported + process.stdout.read()
        yield
    finally:
        process.stdin.close()
        assert process.wait(30) == 0
        process.stdout.close()


def _hang(folder: Path) -> int:
    try:
        device = fuse.mount(folder)
    except OSError as error:
        print(f"cannot mount: {error}", flush=True)
        return 1
    print("hangs", flush=True)
    sys.stdin.read()
    fuse.unmount(folder)  # first: who asks from now on sees what is there
    os.close(device)  # the kernel answers all who wait with an error
    return 0


if __name__ == "__main__":
    sys.exit(_hang(Path(sys.argv[1])))
