"""Which tests go to the same process when several run side by side (`pytest -n`): those of a file,
files that share dear runs, some rooms.
"""

import sys
import time
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_FIRST, _PATIENCE_S = "gw0", 120.0

_TOGETHER = {
    "tests/docs/test_search.py": "tests/docs/test_site.py",
    "tests/docs/test_site_in_browser.py": "tests/docs/test_site.py",
    "tests/jobs/damage/test_user_path.py": "tests/jobs/damage/test_damages.py",
    "tests/jobs/runs/test_trust.py": "tests/jobs/runs/test_changed_settings.py",
    "tests/trainer/ranks/test_resume.py": "tests/trainer/ranks/test_equality.py",
}
"""A file, and the other with which it goes: session fixtures make their runs once in a process."""
_ROOMS = ("tests/jobs/ray/", "tests/jobs/slurm/")
"""All files of such a room go together: two clusters at a time would be more than a small machine
can carry.
"""
_LONG = (
    "tests/examples/test_demo.py",
    *_ROOMS,
    "tests/trainer/ranks/test_equality.py",
    "tests/trainer/ranks/test_resume.py",
)
"""What takes a process the longest by itself; it begins first, and the others are done beside
it.
"""


def is_long(nodeid: str) -> bool:
    """Whether a test belongs to what begins first."""
    return nodeid.startswith(_LONG)


class Sharing(LoadFileScheduling):
    """Gives out whole files, in the order of their collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        room = next((room for room in _ROOMS if file.startswith(room)), None)
        return room or _TOGETHER.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """On a fresh clone, no test is compiled yet.

    Where no bytecode is kept, each process has to compile them all, and to wait would gain nothing.
    """
    node.workerinput["compiled"] = (
        sys.dont_write_bytecode or (Path(__file__).parent / "guard" / "agree" / "__pycache__").exists()
    )


def wait_for_bytecode(config: pytest.Config) -> None:
    """Returns at once, except on a fresh clone: all processes would compile the same tests at the
    same moment, so that the others wait for the first one.
    """
    given = getattr(config, "workerinput", None)
    if given is None or given["compiled"] or given["workerid"] == _FIRST:
        return
    end = time.monotonic() + _PATIENCE_S
    while not _collected(config).exists() and time.monotonic() < end:
        time.sleep(0.1)


def announce_bytecode(config: pytest.Config) -> None:
    """Lets the others begin, after the first one has collected, or failed to."""
    given = getattr(config, "workerinput", None)
    if given is not None and given["workerid"] == _FIRST:
        _collected(config).touch()


def _collected(config: pytest.Config) -> Path:
    # Each process has a folder in one that they share.
    return Path(config.getoption("basetemp")).parent / "collected"
