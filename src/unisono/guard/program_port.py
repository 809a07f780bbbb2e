"""The port on node 0 for a program that binds MASTER_PORT by itself; our rendezvous binds its own."""

import socket
from types import TracebackType
from typing import Self

from unisono.causes import Verdict

PORT_TRIES = 3
"""Ports that a program gets one after the other, if somebody else takes each before it does."""
CAUSE = "port_in_use"


class ReservedPort:
    """A port that is bound here without listening, until the context ends.

    The program binds the port long after its start. Until then the kernel does not assign it to other processes, and only a server with
    SO_REUSEADDR that requests this very port can bind it, as torch's store does.

    Attributes:
        number: of the port.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = int(self._socket.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def is_taken(self) -> bool:
        """Whether a different process listens on it. Only once the program has ended: the port is no longer reserved afterwards."""
        try:
            self._socket.listen()
        except OSError:  # EADDRINUSE
            return True
        return False


def may_be_taken(verdict: Verdict | None, framework: str) -> bool:
    """Whether a program may have ended for its port before it has done anything.

    Args:
        verdict: on the program.
        framework: that the program trains with; known after its first step.
    """
    return verdict is not None and verdict.cause == CAUSE and not framework
