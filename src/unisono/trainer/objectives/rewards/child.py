"""A process that calls reward functions: `python -m …rewards.child FD PID`.

It reads JSON lines from a socket and answers each with one: first a `Setup`, which it loads, then a
`CallRequest` in each line.

At SIGUSR1 and at a fatal signal it writes its stack to the socket instead, also while C code runs.
"""

import contextlib
import ctypes
import faulthandler
import functools
import inspect
import json
import math
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unisono.base.text import nearest, one_line, redact
from unisono.base.user_code import OwnCode, execute_source
from unisono.trainer.objectives.rewards.builtin import BUILT_IN, UnusableValueError
from unisono.trainer.objectives.rewards.calls import (
    CallFailed,
    CallReply,
    CallRequest,
    Function,
    OwnFunction,
    Reply,
    Setup,
)

if TYPE_CHECKING:
    import asyncio

MOST_BYTES = 1 << 24
"""Of an answer's line."""
_PR_SET_PDEATHSIG = 1
_MOST_TEXT = 500  # characters of an exception


@dataclass(frozen=True)
class LoadedFunction:
    """A function that can be called.

    Attributes:
        call: the function, or an instance of the class.
        names: of the arguments that it takes; None: all.
        path: of the user's file; empty for a built-in function.
        where: the function's line in it.
    """

    call: Callable[..., Any]
    names: frozenset[str] | None
    path: str = ""
    where: str = ""


class _Notes:
    """What a function gives beside its rewards: its `log_metric` and `log_extra`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Notes a value, of which the mean is logged; NaN and infinity are left out."""
        if math.isfinite(number := float(value)):
            self.metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Notes one value for each answer."""
        if len(values) != self._count:
            raise ValueError(f"log_extra got {len(values)} values for {self._count} answers")
        self.extras[str(column)] = list(values)


# ---- loading


def _load(functions: Sequence[Function]) -> list[LoadedFunction]:
    """Loads all functions; a file is executed once.

    Raises:
        ConfigError: if one cannot be loaded.
    """
    modules: dict[str, ModuleType] = {}
    return [_load_from_file(entry, modules) if "path" in entry else _built_in(entry) for entry in functions]


def _built_in(entry: Function) -> LoadedFunction:
    assert "settings" in entry  # models have a program of their own
    call = BUILT_IN[entry["use"]](entry["settings"])
    return LoadedFunction(call, _names(call))


def _load_from_file(entry: OwnFunction, modules: dict[str, ModuleType]) -> LoadedFunction:
    path = entry["path"]
    code = OwnCode("rewards", "reward", Path(path), entry["name"])
    if str(code.path.parent.absolute()) not in sys.path:
        sys.path.insert(0, str(code.path.parent.absolute()))
    with _refusing(code):
        if path not in modules:
            modules[path] = execute_source(code, entry["source"].encode("latin-1"))
        call = _member(modules[path], code)
        call = call() if inspect.isclass(call) else call
        if not callable(call):
            raise TypeError(f"{code.name} is {type(call).__name__}, and cannot be called")
        return LoadedFunction(call, _names(call), path, where_defined(call, path))


@contextlib.contextmanager
def _refusing(code: OwnCode) -> Iterator[None]:
    """Makes what the file raises a refusal with its line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        # Not at the top: with pydantic, it would take most of the time in which a process starts.
        from unisono.trainer.config.own_code import refusing

        with refusing(code, "fix the file: each process of the rewards loads it at its start"):
            raise error from None


def _member(module: ModuleType, code: OwnCode) -> Any:
    if hasattr(module, code.name):
        return getattr(module, code.name)
    names = [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    from unisono.base.errors import ConfigError

    near = nearest(code.name, names)
    raise ConfigError.of(
        f"the file of the reward has no function {code.name}",
        where=str(code.path),
        why=f"its functions and classes are {', '.join(names)}" if names else "it has no function",
        fix=f"did you mean `{code.path.name}:{near}`?"
        if near
        else "name a function of the file, as FILE.py:FUNCTION",
    )


def _names(call: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(call).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def where_defined(call: Callable[..., Any], path: str) -> str:
    """`FILE.py:LINE` of a function, or the file if that is not known."""
    function = call if inspect.isroutine(call) else type(call).__call__
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{path}:{code.co_firstlineno}" if code is not None and code.co_filename == path else path


# ---- calling


def _reply(function: LoadedFunction, request: CallRequest) -> CallReply | CallFailed:
    """What comes of one call."""
    count = len(request["completions"])
    notes = _Notes(count)
    arguments = {
        **{name: [value] * count for name, value in request["columns"].items()},
        "prompts": [request["prompt"]] * count,
        "completions": request["completions"],
        "completion_ids": request["completion_ids"],
        "log_metric": notes.log_metric,
        "log_extra": notes.log_extra,
    }
    names = function.names
    try:
        result = function.call(
            **{name: value for name, value in arguments.items() if names is None or name in names}
        )
        return {"values": _values(result_of(result), count), "metrics": notes.metrics, "extras": notes.extras}
    except UnusableValueError as error:
        return {"kind": "value", "text": str(error), "where": function.where}
    except BaseException as error:  # noqa: BLE001 - sys.exit in the function must not end the process
        return failure_in(error, path=function.path, where=function.where)


def result_of(value: Any) -> Any:
    """What a function gives, or the awaitable that it gives."""
    return _runner().run(_awaited(value)) if inspect.isawaitable(value) else value


@functools.cache
def _runner() -> "asyncio.Runner":
    """The event loop of all calls: clients that are kept between calls belong to it."""
    import asyncio  # not at the top: it takes half as long as all other modules

    return asyncio.Runner()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def failure_in(error: BaseException, *, path: str, where: str) -> CallFailed:
    """What an exception says, with the line in a file of the user's own, or else `where`."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    # Unlike str(), it does not fail if the exception's own __str__ does.
    words = redact("".join(traceback.format_exception_only(error)))
    return {
        "kind": "memory" if isinstance(error, MemoryError) else "error",
        "text": one_line(words, limit=_MOST_TEXT),
        "where": f"{path}:{lines[-1]}" if lines else where,
    }


def _values(result: Any, count: int) -> list[float | str | None]:
    """The rewards as numbers, or what is wrong with one.

    Raises:
        UnusableValueError: if it is not a list of so many.
    """
    if isinstance(result, str | bytes | dict | set) or not hasattr(type(result), "__iter__"):
        raise UnusableValueError(f"it gives {type(result).__name__}, not a list of {count} numbers")
    values = list(result)
    if len(values) != count:
        raise UnusableValueError(f"it gives {len(values)} values for {count} answers")
    return [number_of(value) for value in values]


def number_of(value: Any) -> float | str | None:
    """A reward as a number; None: it does not apply; or what is wrong with it."""
    if value is None:
        return None
    if isinstance(value, UnusableValueError):
        return str(value)
    shown = one_line(repr(value), limit=60)
    if type(value).__name__ in ("bool", "bool_"):  # numpy's, too
        return f"it gives {shown}: give 1.0 or 0.0"
    if not hasattr(value, "__float__"):
        return f"it gives {shown}, where a number is expected"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return f"it gives {shown}, where a number is expected: {error}"
    return number if math.isfinite(number) else f"it gives {number}"


# ---- the process


def _encoded(reply: Reply) -> bytes:
    line = json.dumps(reply, default=str).encode() + b"\n"
    if len(line) <= MOST_BYTES:
        return line
    text = f"it gives {len(line):,} bytes with log_extra, more than {MOST_BYTES:,}"
    return _encoded({"kind": "value", "text": text, "where": ""})


def bound_memory(spare_bytes: int) -> None:
    """Bounds the address space, unless 0 is to be spare; and should the machine's memory end, the
    kernel ends this process rather than the rank.
    """
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("500")
    if not spare_bytes:
        return
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = pages * resource.getpagesize() + spare_bytes
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def end_with(parent: int) -> None:
    """Has the kernel end this process with its parent, as `unisono.base.child.end_with_front`,
    whose module takes long to import.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def main(
    words: Sequence[str], load: Callable[[Sequence[Function]], Sequence[LoadedFunction]] = _load
) -> None:
    """Answers until the socket is closed.

    Args:
        words: of the command line.
        load: gives the functions of a setup.
    """
    fd, parent = map(int, words)
    os.set_inheritable(fd, False)
    end_with(parent)
    connection = socket.socket(fileno=fd)
    requests = connection.makefile("rb")
    setup: Setup = json.loads(requests.readline())
    try:
        functions = load(setup["functions"])
    except Exception as error:  # a refusal is sent; any other is a defect, and ends this process
        from unisono.base.errors import UnisonoError  # not at the top: it takes long

        if not isinstance(error, UnisonoError):
            raise
        connection.sendall(_encoded({"refused": [asdict(problem) for problem in error.problems]}))
        return
    # After loading: a reward model that a file loads does not count.
    bound_memory(setup["memory_bytes"])
    faulthandler.enable(file=fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=False)
    connection.sendall(_encoded({"ready": [function.where for function in functions]}))
    for line in requests:
        request: CallRequest = json.loads(line)
        connection.sendall(_encoded(_reply(functions[request["function"]], request)))


if __name__ == "__main__":
    main(sys.argv[1:])
