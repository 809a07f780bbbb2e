"""What a node says of a head that does not answer, or of whoever answers in its place.

Run: pytest tests/guard/control/test_dialing.py
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.ports import free_port
from unisono.base.errors import Disagreed, UsageError
from unisono.guard.control.channel_ends import NodeLink
from unisono.guard.control.protocol import ANSWERS, Greeting, fresh_nonce, preamble

if TYPE_CHECKING:
    from tests.guard.control.conftest import Room

Listener = Callable[[Callable[[socket.socket], None]], tuple[str, int]]


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Somebody else's program on a port: does what it is told with each caller, then hangs up."""
    opened: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(server: socket.socket, answer: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):  # the caller may have gone
                answer(sock)

    def listen(answer: Callable[[socket.socket], None]) -> tuple[str, int]:
        server = socket.create_server(("127.0.0.1", 0))
        opened.append(server)
        threads.append(threading.Thread(target=serve, args=(server, answer), daemon=True))
        threads[-1].start()
        host, port = server.getsockname()
        return host, port

    yield listen
    for server in opened:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    for thread in threads:
        thread.join(20)


def until_closed(sock: socket.socket) -> None:
    try:
        while sock.recv(65536):
            pass
    except OSError:
        return


def refused(room: "Room", address: tuple[str, int], **options: Any) -> tuple[str, str]:
    """The cause and the summary with which a call fails."""
    with pytest.raises(Disagreed) as caught:
        room.node(address, **options)
    verdict = caught.value.verdict
    assert verdict is not None
    assert verdict.fix
    return verdict.cause, verdict.summary


def test_a_head_that_is_not_there_is_called_until_the_time_is_over(room: "Room") -> None:
    waits: list[tuple[str, float]] = []
    address = ("127.0.0.1", free_port())
    began = time.monotonic()
    cause, summary = refused(room, address, timeout_s=3.0, on_wait=lambda *reported: waits.append(reported))
    assert 2.8 < time.monotonic() - began < 15
    assert cause == "head_unreachable"
    assert summary.startswith(
        f"node 1 (host1) cannot reach the head at 127.0.0.1:{address[1]}: connection refused: nothing listens there"
    )
    assert len(waits) >= 2
    assert all(
        f"127.0.0.1:{address[1]}: connection refused: nothing listens there" in who for who, _ in waits
    )
    assert waits[-1][1] > waits[0][1]


def test_a_head_that_comes_later_is_found(room: "Room") -> None:
    port = free_port()
    tried = threading.Event()
    thread = threading.Thread(target=lambda: tried.wait(20) and room.head(port=port))
    thread.start()
    room.node(("127.0.0.1", port), on_wait=lambda _who, _since: tried.set())
    thread.join(20)


@pytest.mark.parametrize("banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\0"])
def test_a_stranger_that_answers_is_named_at_once(room: "Room", listener: Listener, banner: bytes) -> None:
    def answer(sock: socket.socket) -> None:
        sock.sendall(banner)
        until_closed(sock)

    address = listener(answer)
    began = time.monotonic()
    cause, summary = refused(room, address)
    assert time.monotonic() - began < 5
    assert cause == "port_in_use"
    assert f"127.0.0.1:{address[1]}" in summary
    assert repr(banner)[2:-1][:8] in summary


def test_an_echo_is_a_stranger(room: "Room", listener: Listener) -> None:
    def answer(sock: socket.socket) -> None:
        while data := sock.recv(4096):
            sock.sendall(data)

    assert refused(room, listener(answer))[0] == "port_in_use"


@pytest.mark.slow
def test_who_accepts_and_reports_nothing_is_a_stranger(room: "Room", listener: Listener) -> None:
    began = time.monotonic()
    cause, summary = refused(room, listener(until_closed), timeout_s=60)
    assert time.monotonic() - began < 30
    assert cause == "port_in_use"
    assert "accepts the connection but sends nothing for 3 s" in summary


def test_who_hangs_up_is_called_again_until_the_time_is_over(room: "Room", listener: Listener) -> None:
    cause, summary = refused(room, listener(lambda sock: None), timeout_s=1.0)
    assert cause == "head_unreachable"
    assert "closes it" in summary or "broke" in summary


def test_a_head_of_a_different_release_is_named(room: "Room", listener: Listener) -> None:
    def answer(sock: socket.socket) -> None:
        sock.sendall(ANSWERS + b"\x63")
        until_closed(sock)

    cause, summary = refused(room, listener(answer))
    assert cause == "version_mismatch"
    assert "speaks version 99 of the control protocol" in summary


def test_a_head_that_stops_in_the_middle_of_the_handshake_is_called_again(
    room: "Room", listener: Listener
) -> None:
    def answer(sock: socket.socket) -> None:
        from unisono.guard.control.protocol import Seal, encode

        greeting = Greeting(fresh_nonce(), "run1", 0)
        sock.sendall(preamble(ANSWERS) + Seal(b"", sends=b"<").close(encode(greeting.to_body())))
        sock.recv(4096)

    cause, _ = refused(room, listener(answer), timeout_s=1.0)
    assert cause == "head_unreachable"


def test_a_name_without_an_address_has_its_own_cause(room: "Room") -> None:
    cause, summary = refused(room, ("no-such-host.invalid", 29500), timeout_s=0.5)
    assert cause == "dns_failure"
    assert "node 1 (host1) cannot resolve the head's name `no-such-host.invalid`" in summary


def test_a_taken_port_names_its_holder(room: "Room") -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(Disagreed) as caught:
        room.head(port=holder.getsockname()[1])
    verdict = caught.value.verdict
    assert verdict is not None
    assert verdict.cause == "port_in_use"
    assert f"process {os.getpid()} (" in verdict.summary
    assert verdict.fix[0].endswith(f"kill {os.getpid()}")


def test_an_address_of_a_different_machine_is_refused(room: "Room") -> None:
    with pytest.raises(Disagreed, match="no interface of this machine has this address"):
        room.head(host="192.0.2.1")
    with pytest.raises(Disagreed, match="cannot resolve its own name"):
        room.head(host="no-such-host.invalid")


@contextlib.contextmanager
def as_anybody() -> Iterator[None]:
    """As a user without rights: root may have every port."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_port_of_the_system_is_refused(room: "Room") -> None:
    with as_anybody(), pytest.raises(UsageError, match="permission denied"):
        room.head(port=7)


def test_ctrl_c_while_calling_leaves_nothing_behind() -> None:
    def interrupt(_who: str, _since: float) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        NodeLink.connect(
            host="127.0.0.1", port=free_port(), token=b"t", node_rank=1, node_host="b", timeout_s=20, on_wait=interrupt
        )  # fmt: skip
    assert not [thread for thread in threading.enumerate() if thread.name == "unisono.guard.control"]
