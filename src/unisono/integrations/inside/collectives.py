"""A sign of life at each collective that is called from Python, and again when it comes back."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unisono.integrations.inside.here import Here
from unisono.watch.beat import KINDS

_NAMES = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "broadcast": ("broadcast", "broadcast_object_list"),
    "barrier": ("barrier", "monitored_barrier"),
    "all_gather": (
        "all_gather", "all_gather_single", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced", "all_gather_object",
    ),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"),
    "reduce": ("reduce",),
    "gather": ("gather", "gather_object"),
    "scatter": ("scatter", "scatter_object_list"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "send": ("send", "send_object_list"),
    "recv": ("recv", "recv_object_list"),
    "other": ("new_group", "split_group"),
}  # fmt: skip
"""Functions of torch.distributed.distributed_c10d by what they are; those that a torch does not have are left out."""
_PLAIN = ("Tensor", "Parameter")  # of others, as tensors that are only traced, the size may be no number


def wrap_collectives(module: ModuleType, here: Here) -> list[str]:
    """Replaces the collectives in torch.distributed.distributed_c10d; gives the names of those that were found.

    Args:
        module: torch's.
        here: this process.
    """
    found = []
    for kind, names in _NAMES.items():
        for name in names:
            function = getattr(module, name, None)
            if function is not None:
                setattr(module, name, beating(function, KINDS.index(kind), here))
                found.append(name)
    return found


def beating(function: Callable[..., Any], kind: int, here: Here) -> Callable[..., Any]:
    """The function with a sign of life at both its ends, where the main thread calls it, and not from within another one.

    One that fails leaves the record as it is: it is where the rank ends, and its last sign of life says which it was.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if here.inside or not here.is_main_thread():
            return function(*args, **kwargs)
        here.inside = True
        beats = here.beats
        try:
            first = args[0] if args else None
            elements = first.numel() if type(first).__name__ in _PLAIN else 0  # type: ignore[union-attr]
            if here.loop.collective(kind, elements):
                beats.take_batch()
            before = beats.wait_in(kind, elements)
            found = function(*args, **kwargs)
            beats.come_back(before)
            return found
        finally:
            here.inside = False

    return call
