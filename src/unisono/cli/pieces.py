"""Writes an answer to stdout as it comes, piece by piece."""

import sys

from unisono.cli.output import silence


def write_piece(text: str) -> None:
    """Writes a piece of a model's answer, without what would steer a terminal. A reader that is gone is not our death."""
    from unisono.text import plain

    encoding = sys.stdout.encoding or "ascii"
    try:
        sys.stdout.write(plain(text).encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
