"""What a process uses: a download is work, heartbeats are not, and no connection of the program
changes by being looked at.

Run: .venv/bin/python -m pytest tests/guard/programs/inside/test_process_use.py
"""

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.guard.integrations.inside.process_use import _MUCH_TRAFFIC, _thread_s, _Totals, _traffic

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Twelve TCP connections of this process with itself."""
    made: list[Pair] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(12):
            client = socket.create_connection(server.getsockname())
            made.append((client, server.accept()[0]))
    yield made
    for pair in made:
        for one in pair:
            one.close()


def open_files() -> set[str]:
    """The numbers of the files that this process has open."""
    return {one.name for one in Path("/proc/self/fd").iterdir()}


def sent(pairs: list[Pair], size: int) -> tuple[_Totals, _Totals]:
    """The totals before and after each pair has sent so many bytes, as of a process that does
    nothing else.
    """
    before = _Totals(0.0, 0, 0, _traffic(), None)
    for client, server in pairs:
        client.sendall(bytes(size))
        assert len(server.recv(size, socket.MSG_WAITALL)) == size
    return before, before._replace(traffic=_traffic())


def test_a_download_is_work(pairs: list[Pair]) -> None:
    before, after = sent(pairs[:1], _MUCH_TRAFFIC + 1)
    assert after.is_more_than(before)


def test_heartbeats_on_many_connections_are_not(pairs: list[Pair]) -> None:
    before, after = sent(pairs, _MUCH_TRAFFIC // 8)
    assert sum(after.traffic.values()) - sum(before.traffic.values()) > _MUCH_TRAFFIC
    assert not after.is_more_than(before)


def test_a_new_connection_and_a_closed_one_are_no_work(pairs: list[Pair]) -> None:
    before, _ = sent(pairs, 1)
    for one in pairs.pop():
        one.close()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        after = before._replace(traffic=_traffic())
    assert not after.is_more_than(before)


def test_connections_stay_blocking_where_the_program_has_a_default_timeout(pairs: list[Pair]) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        files = open_files()
        assert _traffic()
        assert open_files() <= files  # fewer where the collector closed those of other tests
    finally:
        socket.setdefaulttimeout(before)
    for pair in pairs:
        for one in pair:
            assert not fcntl.fcntl(one.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK


@pytest.mark.parametrize(
    ("thread_s", "all_s", "works"),
    [
        (0.001, 0.03, False),  # polls, beside threads of gloo on a slow processor
        (0.01, 0.01, True),
        (0.0, 0.1, True),  # a thread of the program computes
        (None, 0.003, False),
        (None, 0.01, True),
    ],
)
def test_the_training_thread_is_judged_by_its_cpu_time(
    thread_s: float | None, all_s: float, *, works: bool
) -> None:
    thread = None if thread_s is None else 7.0
    before = _Totals(9.0, 0, 0, {}, thread)
    after = _Totals(9.0 + all_s, 0, 0, {}, None if thread is None else thread + (thread_s or 0.0))
    assert after.is_more_than(before) == works


def test_cpu_time_of_a_thread_is_read() -> None:
    before = _thread_s(threading.get_ident())
    assert before is not None
    sum(range(2_000_000))
    after = _thread_s(threading.get_ident())
    assert after is not None
    assert 0.001 < after - before < 10
    assert _thread_s(-1) is None
