"""CPU seconds of tests, with all processes that they start: a plugin of pytest, one test at a time,
as root on Linux with control groups of version 1.

    mkdir /sys/fs/cgroup/cpuacct/tests PYTHONPATH=$PWD/bench OMP_NUM_THREADS=1 python -m pytest -p
    suite_cpu -m "not long and not gpu" tests/front/cli tests/board

Seconds of the clock say little on a machine that others use; CPU seconds of a whole group also
count servers that fork what a test starts. At the end it prints the folders, the files and the
tests that took the most. Several at once, each over its own folders: SUITE_CPU=NAME for each, with
a group of that name under /sys/fs/cgroup/cpuacct; SUITE_CPU_OUT=FILE gets the seconds of every test
as JSON.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

_GROUP = Path("/sys/fs/cgroup/cpuacct", os.environ.get("SUITE_CPU", "tests"))
_SHOWN = 25
_seconds: defaultdict[str, float] = defaultdict(float)
(_GROUP / "cgroup.procs").write_text(str(os.getpid()))


def _used_s() -> float:
    return int((_GROUP / "cpuacct.usage").read_text()) / 1e9


def _measured(item: pytest.Item) -> Generator[None, None, None]:
    before = _used_s()
    try:
        return (yield)
    finally:
        _seconds[item.nodeid] += _used_s() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """A fixture counts for the test that made it."""
    return (yield from _measured(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """The test itself."""
    return (yield from _measured(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """What its fixtures leave."""
    return (yield from _measured(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the sums."""
    if out := os.environ.get("SUITE_CPU_OUT"):
        Path(out).write_text(json.dumps(_seconds, indent=0))
    folders: defaultdict[str, float] = defaultdict(float)
    files: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, float] = defaultdict(float)
    for nodeid, seconds in _seconds.items():
        file = nodeid.partition("::")[0]
        folders[str(Path(file).parent)] += seconds
        files[file] += seconds
        tests[nodeid.partition("[")[0]] += seconds
    for name, found in (("folders", folders), ("files", files), ("tests", tests)):
        terminalreporter.section(f"CPU seconds of {name}")
        for key, seconds in sorted(found.items(), key=lambda item: -item[1])[:_SHOWN]:
            terminalreporter.write_line(f"{seconds:8.1f} {key}")
