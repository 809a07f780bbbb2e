"""What torchrun does not hand to a rendezvous handler: how many ranks it starts here, and which node this is.

RendezvousParameters has neither. Both are in the calls that lead to us, in names of torch's that are not public: `launch_agent(config)` has
`config.nproc_per_node`, and `torch.distributed.run.run(args)` has `args.node_rank`. tests/run/test_torchrun.py would notice their change.
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
    config = _local_of(frame or sys._getframe(1), _LAUNCHER, "launch_agent", "config")  # noqa: SLF001 - see above
    nproc = getattr(config, "nproc_per_node", None)
    return nproc if isinstance(nproc, int) else None


def asked_node_rank(frame: FrameType | None = None) -> int | None:
    """The node's number, as torchrun was given it by `--node-rank` or PET_NODE_RANK; None where it was not started by its command."""
    args = _local_of(frame or sys._getframe(1), _RUN, "run", "args")  # noqa: SLF001 - see above
    rank = getattr(args, "node_rank", None)
    return rank if isinstance(rank, int) else None


def _local_of(frame: FrameType | None, module: str, function: str, name: str) -> Any:
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
