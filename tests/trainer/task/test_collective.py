"""One small sum over real processes before anything is loaded.

Run: pytest tests/trainer/task/test_collective.py
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from unisono.base.errors import UnisonoError
from unisono.guard.supervise.task_process import TaskProcess

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class Group:
    """The processes of a collective, each with the stream of its messages."""

    def __init__(self, world_size: int, present: int | None = None, **request: Any) -> None:
        self.tasks = [
            TaskProcess("collective", {"rank": rank, "world_size": world_size, **request}, has_input=True)
            for rank in range(present or world_size)
        ]
        self.streams = [task.messages() for task in self.tasks]
        self.port = 0

    def ready(self) -> None:
        """Until all have loaded torch."""
        for stream in self.streams:
            for message in stream:
                if message["kind"] == "store":
                    self.port = message["port"]
                if message.get("phase") == "collective.store":
                    break

    def go(self, port: int | None = None) -> None:
        for task in self.tasks:
            task.send({"store": ["127.0.0.1", port or self.port]})

    def results(self, ranks: Iterator[int] | None = None) -> list[Any]:
        return [[*self.streams[rank]][-1] for rank in ranks or range(len(self.tasks))]

    def close(self) -> None:
        for task in self.tasks:
            with contextlib.suppress(UnisonoError):
                task.close()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    for group in made:
        group.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_that_reach_each_other_add_their_numbers(groups: list[Group], world_size: int) -> None:
    group = Group(world_size)
    groups.append(group)
    group.ready()
    group.go()
    for result in group.results():
        assert result["ok"], result
        assert result["missing"] == []
        assert result["bytes_per_second"] > 1e5
        assert 0 < result["seconds"] < 60
        assert f"{world_size} ranks sum 4 MiB" in result["text"]


def test_one_that_never_comes_is_named_by_all_others(groups: list[Group]) -> None:
    # Within the deadline those two must find each other.
    group = Group(3, present=2, deadline_s=6.0, names=["node 0 (ada)", "node 1 (bob)", "node 2 (cyd)"])
    groups.append(group)
    group.ready()
    began = time.monotonic()
    group.go()
    for result in group.results():
        assert (result["ok"], result["missing"]) == (False, [2])
        assert "node 2 (cyd) did not connect" in result["text"]
        assert 5.9 < result["seconds"] < 15
    assert time.monotonic() - began < 30


def test_one_that_is_killed_amid_the_sum_ends_it_for_all(groups: list[Group]) -> None:
    group = Group(3, deadline_s=8.0, rounds=1_000_000)
    groups.append(group)
    group.ready()
    group.go()
    for message in group.streams[0]:
        if message.get("phase") == "collective.sum":
            break
    victim = group.tasks[1]._child
    victim.signal(signal.SIGKILL)
    began = time.monotonic()
    for result in group.results(iter((0, 2))):
        assert result["ok"] is False
        assert "gloo" in result["text"]
        assert result["seconds"] < 12
    assert time.monotonic() - began < 30
    with pytest.raises(UnisonoError, match="SIGKILL"):
        list(group.streams[1])


def test_one_that_is_stopped_is_named_and_the_others_end_in_time(groups: list[Group]) -> None:
    group = Group(2, deadline_s=5.0)
    groups.append(group)
    group.ready()
    stopped = group.tasks[1]._child
    stopped.signal(signal.SIGSTOP)
    group.go()
    [result] = group.results(iter((0,)))
    assert (result["ok"], result["missing"]) == (False, [1])


def test_a_store_where_nobody_listens_is_reported_in_time(groups: list[Group]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    group = Group(2, deadline_s=2.0)
    groups.append(group)
    group.ready()
    group.tasks[1].send({"store": ["127.0.0.1", closed]})
    [result] = group.results(iter((1,)))
    assert result["ok"] is False
    assert "refused" in result["text"]


def test_without_a_front_it_ends(groups: list[Group]) -> None:
    group = Group(2)
    groups.append(group)
    group.ready()
    group.tasks[0]._child.close_input()
    [result] = group.results(iter((0,)))
    assert "the front is gone" in result["text"]


def test_an_address_of_a_different_machine_is_reported(groups: list[Group]) -> None:
    group = Group(2, present=1, store_host="192.0.2.77")
    groups.append(group)
    [result] = group.results()
    assert result["ok"] is False
    assert "assign" in result["text"]


def test_nothing_is_left_behind(groups: list[Group]) -> None:
    group = Group(2, deadline_s=60.0)
    groups.append(group)
    group.ready()
    pids = [task._child.pid for task in group.tasks]
    group.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
