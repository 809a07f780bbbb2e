"""Ports on which tests listen, or on which nobody does, though several test runs go on side by
side.
"""

import os
import random
import socket
from collections.abc import Iterator

_RANGE = range(12_000, 32_000)
"""Below those that the system gives by itself to whoever connects or asks for any: nobody comes in
between.
"""
_WORKERS = 8


def _own() -> Iterator[int]:
    """Those of this worker of pytest-xdist, each once before the first comes again: a port is often
    taken only seconds after it was given.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw") or _WORKERS - 1)
    mine = list(_RANGE[number % _WORKERS :: _WORKERS])
    random.SystemRandom().shuffle(mine)
    while True:
        yield from mine


_ports = _own()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now, and that nobody is given by chance."""
    for _, port in zip(range(100), _ports, strict=False):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port of {host} in {_RANGE}")
