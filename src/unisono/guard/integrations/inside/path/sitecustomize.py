"""Python loads this at its start, because its folder is first in PYTHONPATH under `unisono run`.

It hooks some modules of torch, so that they are changed if the program imports them; then it runs
the sitecustomize that it hides. Every Python process of the program runs this file, so it imports
only what is already loaded, and never fails.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # of typing, whose import takes longer than all of this
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

HOOKS = {
    "torch.cuda": "process_groups.hook_devices",
    "torch.accelerator": "process_groups.hook_devices",
    "torch.distributed.distributed_c10d": "process_groups.hook_process_groups",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": "process_groups.hook_rendezvous",
    "torch.optim.optimizer": "loaders.hook_optimizers",
    "torch.utils.data.dataloader": "loaders.hook_loaders",
}
"""The function of unisono.guard.integrations.inside that is given each module, once it is
loaded.
"""

# pathlib takes ten times as long as this whole file.
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
_HOME = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 4))  # noqa: PTH100, PTH118
# collectives that torch's flight recorder keeps; it reads this when it is loaded, and keeps one
# without it
_RECORDED = "200"


class _Home:
    """Finds the unisono that guards, if the program's Python has a different one or none."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return PathFinder.find_spec(name, [_HOME], target) if name == "unisono" else None


class _Finder:
    """Finds a hooked module with the finders after it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in HOOKS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else getattr(finder, "find_spec", _nothing)(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Loads a module with its own loader, then changes it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # the program sees the original loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _nothing(*_: Any) -> None:
    return None


def _change(module: ModuleType) -> None:
    """Calls the module's hook.

    Errors are reported only to the front: the program continues, unguarded.
    """
    try:
        part, _, function = HOOKS[module.__name__].partition(".")
        getattr(__import__(f"unisono.guard.integrations.inside.{part}", fromlist=[function]), function)(
            module
        )
    except Exception as error:  # noqa: BLE001 - also of a Python or a torch that is not known here
        _print_line(
            f"this process is not guarded: {module.__name__} could not be hooked: {type(error).__name__}:"
            f" {error}"
        )


def _print_line(text: str) -> None:
    """Does what border.Presence.emit does, which may be what cannot be imported."""
    import json
    import time

    folder = os.path.dirname(os.environ["UNISONO_GUARD"])  # noqa: PTH120, TID251
    line = json.dumps({"kind": "unguarded", "time": time.time(), "text": text}) + "\n"
    try:
        with open(os.path.join(folder, f"events-{os.getpid()}.jsonl"), "a") as file:  # noqa: PTH118, PTH123
            file.write(line)
    except OSError:
        pass  # the front is gone


def _run_the_other() -> None:
    """Runs the sitecustomize that this one hides; Python reports its errors as usual."""
    indices = [at for at, entry in enumerate(sys.path) if os.path.abspath(entry) == _HERE]  # noqa: PTH100
    hidden = [(at, sys.path.pop(at)) for at in reversed(indices)]
    this = sys.modules.pop(__name__, None)
    try:
        if PathFinder.find_spec("sitecustomize", sys.path) is not None:
            __import__("sitecustomize")
    finally:
        for at, entry in reversed(hidden):
            sys.path.insert(at, entry)
        if this is not None:
            sys.modules.setdefault(__name__, this)


if os.environ.get("UNISONO_GUARD"):  # noqa: TID251
    sys.meta_path[:0] = [_Finder(), _Home()]
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)  # noqa: TID251
_run_the_other()
