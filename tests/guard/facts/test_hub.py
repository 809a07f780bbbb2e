"""What is told of a hub that does not speak as one. Run: pytest tests/guard/facts/test_hub.py"""

import socket
import threading

from unisono.guard.facts.environment import probe_url

_LIMIT_S = 60.0  # nobody waits for it: each of these answers at once


def answer_with(words: bytes) -> str:
    """What `probe_url` says of a server that answers every call with the same bytes."""

    def serve(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        with caller:
            caller.recv(4096)
            caller.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_LIMIT_S)
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        printed = probe_url(f"http://127.0.0.1:{listener.getsockname()[1]}", limit_s=_LIMIT_S)
        thread.join(_LIMIT_S)
    return printed


def test_any_http_answer_is_one() -> None:
    assert answer_with(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n") == ""


def test_server_of_a_different_kind_is_reported_as_such_and_not_as_silent() -> None:
    for words in (b"220 mail.example ESMTP\r\n", b"\r\n", b"HTTP/1.1 abc def\r\n\r\n"):
        printed = answer_with(words)
        assert printed, words
        assert "no answer" not in printed


def test_what_is_not_a_http_address_is_not_opened() -> None:
    assert probe_url("file:///etc/passwd", limit_s=1.0) == "not an http address"
