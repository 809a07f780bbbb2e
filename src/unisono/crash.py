"""What an exception that nobody caught tells: its words, its place, and whether another rank's death made it.

It needs nothing but the standard library, because it is also used in ranks of somebody else's program.
"""

import traceback
from typing import Any

from unisono.text import one_line

_PEER_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket closed",
    "NCCL communicator was aborted",
    "remote process exited",
)
_OWN_TEXTS = ("failed to listen", "EADDRINUSE")
"""What torch raises in the same classes, of this rank alone."""


def told_of(error: BaseException) -> dict[str, Any]:
    """What the message `crashed` says: `error`, `where`, `traceback`, `peer_lost`."""
    return {
        "error": one_line(f"{type(error).__name__}: {error}"),
        "where": _innermost(error),
        "traceback": "".join(traceback.format_exception(error)),
        "peer_lost": is_peer_loss(error),
    }


def is_peer_loss(error: BaseException) -> bool:
    """Whether an exception is the consequence of another rank's death, as torch, gloo and NCCL tell it.

    Errors of the same words that no collective has raised (a download, a pipe of one's own) are not.
    """
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _PEER_ERRORS:
            return not any(text in str(seen) for text in _OWN_TEXTS)
        if isinstance(seen, RuntimeError) and any(text in str(seen) for text in _PEER_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _innermost(error: BaseException) -> str:
    """file:line where the exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
