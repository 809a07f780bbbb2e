"""Who was torn down by another rank's death is told from who died by itself.

Run: pytest tests/base/child/test_peer_loss.py
"""

import pytest

from unisono.base.events import is_peer_loss

_SEEN = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1742",
    "[enforce fail at pair.cc:547] . Read error [10.0.0.7]:40221: Connection reset by peer",
    "writev [127.0.0.1]:52034: Broken pipe",
    (
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv"
        " operation to complete"
    ),
]


class DistBackendError(RuntimeError):
    """Named as torch names it; torch itself is not needed to tell."""


@pytest.mark.parametrize("text", _SEEN)
def test_what_gloo_reports_of_a_lost_peer(text: str) -> None:
    assert is_peer_loss(RuntimeError(text))


def test_what_nccl_reports_of_a_lost_peer() -> None:
    assert is_peer_loss(
        DistBackendError("NCCL error in: ... remote process exited or there was a network error")
    )


def test_a_cause_below_counts() -> None:
    error = ValueError("the step failed")
    error.__cause__ = RuntimeError(_SEEN[0])
    assert is_peer_loss(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Connection closed by peer"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        RuntimeError("CUDA out of memory"),
        KeyError("rank"),
    ],
)
def test_errors_of_ones_own_are_not(error: Exception) -> None:
    assert not is_peer_loss(error)


def test_a_port_that_is_taken_is_not_a_lost_peer() -> None:
    text = (
        "The server socket has failed to listen on any local network address. port: 29500, code: -98, name:"
        " EADDRINUSE"
    )
    assert not is_peer_loss(type("DistNetworkError", (RuntimeError,), {})(text))
