"""What torchrun does not hand to a rendezvous handler: how many ranks it starts here, how often anew, and which node this is.

RendezvousParameters has none of it. It is in the calls that lead to us, in names of torch's that are not public: `launch_agent(config)` has
`config.nproc_per_node` and `config.max_restarts`, and `torch.distributed.run.run(args)` has `args.node_rank`. tests/run/test_torchrun.py would notice their change.
"""

import sys
from types import FrameType
from typing import Any

_LAUNCHER = "torch.distributed.launcher.api"
_RUN = "torch.distributed.run"


def asked_nproc(frame: FrameType | None = None) -> int | None:
    """Ranks that the launcher is about to start on this node; None where it does not say.

    Args:
        frame: the innermost call; the default is the caller's.
    """
    return _of_config("nproc_per_node", frame or sys._getframe(1))  # noqa: SLF001 - see above


def asked_restarts(frame: FrameType | None = None) -> int | None:
    """How often the launcher starts its ranks anew when one dies; None where it does not say."""
    return _of_config("max_restarts", frame or sys._getframe(1))  # noqa: SLF001 - see above


def asked_node_rank(frame: FrameType | None = None) -> int | None:
    """The node's number, as torchrun was given it by `--node-rank` or PET_NODE_RANK; None where it was not started by its command."""
    args = _local_of(frame or sys._getframe(1), _RUN, "run", "args")  # noqa: SLF001 - see above
    rank = getattr(args, "node_rank", None)
    return rank if isinstance(rank, int) else None


def _of_config(name: str, frame: FrameType) -> int | None:
    value = getattr(_local_of(frame, _LAUNCHER, "launch_agent", "config"), name, None)
    return value if isinstance(value, int) else None


def _local_of(frame: FrameType | None, module: str, function: str, name: str) -> Any:
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
