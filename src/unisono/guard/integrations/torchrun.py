"""The rendezvous backend `unisono` of torchrun: the launchers of all nodes agree on what they are
about to start.

torchrun finds it by the entry point `torchrun.handlers`. Under `unisono run` the front's
environment asks for it (PET_RDZV_BACKEND), so that programs that start torchrun by themselves are
caught, too; by hand: `torchrun --rdzv-backend unisono --rdzv-endpoint HOST:PORT --nnodes 2
--node-rank R --nproc-per-node N train.py`. Nothing is imported from torch before torchrun asks for
a handler.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """The entry point that torchrun calls to create a handler."""
    from unisono.guard.integrations.torchrun_handler import create

    return create
