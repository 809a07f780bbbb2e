"""Ports on which tests listen, or on which nobody does, though several test runs go on side by side."""

import random
import socket

_RANGE = range(12_000, 32_000)
"""Below those that the system gives by itself to whoever connects or asks for any: nobody comes in between."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now, and that nobody is given by chance."""
    for port in random.SystemRandom().sample(_RANGE, 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port of {host} in {_RANGE}")
