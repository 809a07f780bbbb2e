"""Runs the body of a process that a front started: ties it to the front's life, and reports how it
ended.
"""

import argparse
import atexit
import contextlib
import ctypes
import gc
import hashlib
import inspect
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from unisono.base.errors import UnisonoError, storage_failure, unusable_path
from unisono.base.events import Reporter, describe_crash, is_peer_loss
from unisono.base.files import write_text

_PR_SET_PDEATHSIG = 1
TEMPLATE_HAS_NO_END = signal.SIGVTALRM
"""What the kernel ends a process with whose chat template cannot be interrupted (data.template);
its front knows it by that.
"""
TOKENIZER_HAS_NO_END = signal.SIGPROF
"""The same for a tokenizer that exceeds its CPU time (data.text_encoder)."""

forked_by: int | None = None
"""The fork server (unisono.trainer.worker.fork_server) that this process was forked by; None in a process
that exec has begun.
"""


def parse_child_arguments(argv: list[str], *, named: bool) -> argparse.Namespace:
    """The command line of a worker (`plan.json`) or, with `named`, of a task (`NAME
    request.json`).
    """
    parser = argparse.ArgumentParser(description="Started by unisono's front; see `unisono --help`.")
    if named:
        parser.add_argument("name")
    parser.add_argument("file", type=Path, help="plan.json of a worker, request.json of a task")
    parser.add_argument(
        "--report-fd", type=int, default=None, help="where messages for the front go; else lines on stderr"
    )
    if not named:
        parser.add_argument(
            "--snapshot-fd",
            type=int,
            default=None,
            help="memory of the front, in which this rank keeps its newest step",
        )
        parser.add_argument(
            "--beat-fds",
            default=None,
            metavar="N,N,N",
            help="memory of the front: this rank's signs of life, its stacks, its answers",
        )
    parser.add_argument("--events", default=None, help="a file that keeps the messages, too")
    parser.add_argument("--front-pid", type=int, default=None, help="the front, with which this process ends")
    return parser.parse_args(argv)


def end_with_front(front_pid: int | None) -> None:
    """Has the kernel end this process when its front dies, also by kill -9 (prctl(2), Linux).

    A process that was forked ends with the fork server, which ends with the front.
    """
    if front_pid is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != (forked_by or front_pid):  # it died before the call above
        os._exit(1)


@contextlib.contextmanager
def loading_modules(cache: Path | None = None) -> Iterator[None]:
    """Python's garbage collector rests while modules are imported, and never looks at what they
    left.

    Nearly all that an import makes stays; scanning it again at each threshold took a fifth of the
    seconds that torch, transformers and peft cost, and later made each full collection within
    training longer.

    Args:
        cache: a folder that keeps the names in transformers' models for later starts.
    """
    gc.disable()
    # On CPUs bitsandbytes 0.50 reports a kernel that it can do without, in every process.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        with without_bitsandbytes(), models_scanned_once(cache), _places_without_source():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """peft finds no bitsandbytes here.

    It imports what is installed, and bitsandbytes imports torch's compiler, for runs that quantize
    nothing.
    """
    name = "bitsandbytes"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to say that a module cannot be imported
    try:
        yield
    finally:
        if sys.modules.get(name, "") is None:
            del sys.modules[name]
        for module, functions in _REMEMBERED:
            for function in functions:
                found = getattr(sys.modules.get(module), function, None)
                if found is not None:
                    found.cache_clear()


_REMEMBERED = (
    ("peft.import_utils", ("is_bnb_available", "is_bnb_4bit_available")),
    ("transformers.utils.import_utils", ("is_bitsandbytes_available",)),
)
"""Functions that remember whether bitsandbytes is installed."""


@contextlib.contextmanager
def _places_without_source() -> Iterator[None]:
    """`inspect.getframeinfo` does not read source files here, unless its caller wants lines of
    them.

    torch keeps the place of each registration of an operator, a file and a number; for a line of
    source that nobody reads, Python searches its modules and reads the file, which was a tenth of a
    second of CPU time.
    """
    whole = inspect.getframeinfo
    inspect.getframeinfo = lambda frame, context=0: whole(frame, context)
    try:
        yield
    finally:
        inspect.getframeinfo = whole


@contextlib.contextmanager
def models_scanned_once(cache: Path | None = None) -> Iterator[None]:
    """transformers 5 reads the sources of all models for the names in them, twice: for itself and
    for `transformers.models`.

    Here the second is given what the first has found, and both what an earlier process kept in
    `cache`, which saves up to half a second of CPU time.
    """
    if any(isinstance(finder, _ModelsFinder) for finder in sys.meta_path):
        yield
        return
    finder = _ModelsFinder(cache)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.restore()


Names = dict[frozenset[str], dict[str, set[str]]]
"""Of a folder of models: what is needed, and with it the names in each module."""


class _ModelsFinder:
    """Finds no module, but sees when the function is there with which transformers reads its
    models, and replaces it for a while.
    """

    def __init__(self, cache: Path | None) -> None:
        self._cache = cache
        self._utils: Any = None
        self._scan: Any = None
        self._tables: dict[Path, Names] = {}

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        """Replaces transformers' function before `transformers` or `transformers.models` uses
        it.
        """
        if self._scan is None and name.startswith("transformers."):
            self._utils = sys.modules.get("transformers.utils.import_utils")
            self._scan = getattr(self._utils, _SCAN, None)
            if self._scan is not None:
                setattr(self._utils, _SCAN, self._names)

    def restore(self) -> None:
        """Gives transformers its function back."""
        if self._scan is not None:
            setattr(self._utils, _SCAN, self._scan)

    def _names(self, path: Any, *rest: Any, **more: Any) -> Any:
        prefix = more.get("prefix")
        models = Path(path) if prefix else Path(path).parent
        if rest or set(more) - {"prefix"} or prefix not in {None, "models"} or models.name != "models":
            return self._scan(path, *rest, **more)
        try:
            return self._table(models, f"{prefix}." if prefix else "")
        except (TypeError, ValueError, AttributeError):  # of a version that gives names differently
            return self._scan(path, **more)

    def _table(self, models: Path, start: str) -> Names:
        """A copy, as transformers adds its other modules to the table that it is given.

        Each module's name begins with `start`.
        """
        if models not in self._tables:
            cache = self._cache and self._cache / "transformers"
            self._tables[models] = kept_names(models, lambda: self._scan(models / "__init__.py"), cache)
        return {
            needed: {start + module: set(names) for module, names in own.items()}
            for needed, own in self._tables[models].items()
        }


_SCAN = "define_import_structure"


def kept_names(models: Path, scan: Callable[[], Names], cache: Path | None) -> Names:
    """The names in a folder of models, from `cache` if no file of the folder has changed since;
    else as `scan` finds them.
    """
    if cache is None:
        return scan()
    file = cache / f"{hashlib.sha256(os.fsencode(models)).hexdigest()[:16]}.json"
    state = _state_of_files(models)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        kept = json.loads(file.read_bytes())
        if kept["files"] == state:
            return {
                frozenset(needed): {module: set(names) for module, names in own.items()}
                for needed, own in kept["names"]
            }
    found = scan()
    names = [
        [sorted(needed), {module: sorted(all_) for module, all_ in own.items()}]
        for needed, own in found.items()
    ]
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({"files": state, "names": names}))
    return found


def _state_of_files(folder: Path) -> str:
    """A digest of the names, sizes, and times of change of all Python files below a folder."""
    found = []
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    status = entry.stat()
                    found.append(f"{entry.path} {status.st_size} {status.st_mtime_ns}")
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    return hashlib.sha256("\n".join(sorted(found)).encode(errors="surrogateescape")).hexdigest()


def run_child(body: Callable[[Reporter], dict[str, Any]], arguments: argparse.Namespace) -> int:
    """Runs `body`, and reports its result, its refusal, or its crash. Gives the exit code.

    The last message is `result` (with what `body` gave), `refused` or `crashed`. An error of the
    storage that nobody foresaw is a refusal with exit code 6.
    """
    end_with_front(arguments.front_pid)
    reporter = Reporter(arguments.report_fd, fallback=sys.stderr, log_path=arguments.events)
    try:
        return _ended(body, reporter, is_task="name" in arguments)
    finally:
        reporter.close()


def leave(code: int, *, orderly: bool = True) -> NoReturn:
    """Ends this process with its exit code, once everything has been reported, without finalizing
    the interpreter.

    While that is done, a thread or a static object of torch's may abort the process ("terminate
    called without an active exception", torch 2.13, one end in some fifty on a busy machine); a
    rank that had reported its result then counted as crashed.

    Args:
        code: of the exit.
        orderly: whether what was registered with atexit is called: not where something that it
            waits for may hang.
    """
    if orderly:
        _keep_compile_times_to_themselves()
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no public way to call them without the rest
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _keep_compile_times_to_themselves() -> None:
    """At exit, torch._dynamo makes a table of compile times for its log, which is usually off, and
    imports 30 modules for it.
    """
    dump = getattr(sys.modules.get("torch._dynamo.utils"), "dump_compile_times", None)
    if dump is not None and not logging.getLogger("torch._dynamo.utils").isEnabledFor(logging.INFO):
        atexit.unregister(dump)


def _ended(body: Callable[[Reporter], dict[str, Any]], reporter: Reporter, *, is_task: bool) -> int:
    try:
        result = body(reporter)
    except UnisonoError as error:
        reporter.send("refused", **error.to_json())
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the edge of a process: recorded, and reported to the front
        crash = describe_crash(error)
        # A task has its paths from a person; those of a rank were usable when its run began.
        failure = unusable_path(error, has_started=not is_task) or (
            None if is_peer_loss(error) else storage_failure(error)
        )
        if failure is not None:
            reporter.send("refused", **failure.to_json())
        else:
            reporter.send("crashed", exit_code=5, **crash)
        # The log keeps it also where the front is gone; last, for its disk may hang.
        with contextlib.suppress(OSError):
            sys.stderr.write(crash["traceback"])
        return failure.exit_code if failure is not None else 5
    reporter.send("result", **result)
    return int(result.get("exit_code", 0))
