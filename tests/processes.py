"""Which tests start processes: `make test-fast` runs the others, and fails one of these that starts
a process after all.
"""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

_STARTERS = frozenset({"subprocess", "multiprocessing", "pexpect", "pty", "psutil", "tests.front_server"})
"""Modules through which tests start processes, or look at those that they have started."""
_OURS = ("tests.", "unisono.")
_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"})
_here: dict[str, str] = {}  # the test that runs now
_starting: set[types.CodeType] = set()  # code that reaches a module that starts processes
_without: set[types.CodeType] = set()  # code that does not


def starts_processes(item: pytest.Function) -> bool:
    """Whether the code of a test or of one of its fixtures reaches a module that starts processes,
    through functions and classes of the tests.
    """
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(map(_starts, [item.function, *(definitions[-1].func for definitions in fixtures)]))


@functools.cache  # parametrized tests share their function, and most tests some fixtures
def _starts(function: Any) -> bool:
    seen = set(_without)
    if _reaches(function, seen):
        return True
    _without.update(seen)  # the search has come to its end without finding one
    return False


def _reaches(function: Any, seen: set[types.CodeType]) -> bool:
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    if code in _starting:
        return True
    if code is None or code in seen:
        return False
    seen.add(code)
    variables = function.__globals__
    found = any(_is_starter(variables.get(name), seen) for name in _names(code))
    if found:
        _starting.add(code)
    return found


def _is_starter(value: Any, seen: set[types.CodeType]) -> bool:
    if isinstance(value, types.ModuleType):
        return not _STARTERS.isdisjoint({value.__name__, value.__name__.partition(".")[0]})
    if not str(getattr(value, "__module__", "")).startswith(_OURS):
        return False
    members = [
        member
        for one in (value.__mro__ if isinstance(value, type) else ())
        if one.__module__.startswith(_OURS)
        for member in vars(one).values()
    ]
    plain = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members]
    return any(_reaches(one, seen) for one in [value, *plain])


def _names(code: types.CodeType) -> Iterator[str]:
    """Of globals and attributes in a function, also in what is defined within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def mark(items: list[pytest.Item]) -> None:
    """Gives the marker `processes` to the tests that need it and do not have it."""
    for item in items:
        slow = any(item.get_closest_marker(name) for name in ("slow", "ranks", "long", "gpu"))
        if slow or (isinstance(item, pytest.Function) and starts_processes(item)):
            item.add_marker("processes")


def refuse_processes() -> None:
    """From here on a test without the marker that starts a process fails, in this process of the
    session.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and (name := _here.get("test")) is not None:
            raise RuntimeError(
                f"{name} starts a process ({event}, {arguments[:1]}): mark it with `processes`"
            )

    sys.addaudithook(hook)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Keeps which test runs."""
    if item.get_closest_marker("processes") is None:
        _here["test"] = item.nodeid
    try:
        return (yield)
    finally:
        _here.pop("test", None)
