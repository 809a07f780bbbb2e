"""Binds a rank's device before its process group, where the program has not: unbound ranks of a node all take the first one, and hang."""

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from unisono.integrations.inside.here import Here, here

_SETTERS = {"torch.cuda": "set_device", "torch.accelerator": "set_device_index"}


class _Chosen:
    """Whether the program has chosen a device by itself."""

    by_program = False


def hook(module: ModuleType) -> None:
    """Changes torch.cuda or torch.accelerator: a device that the program chooses is its own choice."""
    if here() is not None:
        name = _SETTERS[module.__name__]
        setattr(module, name, _choosing(getattr(module, name)))


def _choosing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _Chosen.by_program = True

    return choose


def bind_device(at: Here, environment: Mapping[str, str]) -> int | None:
    """Binds the device of LOCAL_RANK, and says so; gives the index of the one that is bound, None without a GPU or if it is not to be known."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_available():
        return None
    local_rank = environment.get("LOCAL_RANK", "")
    if not _Chosen.by_program:
        index = device_for(local_rank, cuda.device_count())
        if index is None:
            return None
        cuda.set_device(index)
        _Chosen.by_program = False
        at.note(
            f"bound device cuda:{index} before the process group was made: the program had not chosen one"
        )
    return int(cuda.current_device())


def device_for(local_rank: str, count: int) -> int | None:
    """Which device belongs to a rank of this node; None where that cannot be said.

    Args:
        local_rank: LOCAL_RANK, as it is set or empty.
        count: devices that the rank sees; where it sees one, that is its own.
    """
    if count == 1:
        return 0
    return int(local_rank) if local_rank.isdigit() and int(local_rank) < count else None


def uuid_of() -> str:
    """The current device's, as the driver writes it; empty without a GPU."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return ""
    uuid = str(getattr(cuda.get_device_properties(cuda.current_device()), "uuid", ""))
    return f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid
