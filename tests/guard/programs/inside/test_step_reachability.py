"""Whether a rank can come back to where it made a step.

Run: pytest tests/guard/programs/inside/test_step_reachability.py
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from unisono.guard.integrations.inside import StepReachability

Told = dict[str, bool | None]


class Rank:
    """A program that makes steps, and waits at places which have names."""

    def __init__(self) -> None:
        self.way = StepReachability()
        self.events_of: Told = {}

    def step(self) -> None:
        self.way.note(sys._getframe())

    def wait(self, name: str) -> None:
        self.events_of[name] = self.way.is_open(sys._getframe())


@contextmanager
def held() -> Iterator[None]:
    yield


def plain(rank: Rank) -> None:
    rank.wait("nothing yet")
    for number in range(3):
        rank.wait("before")
        rank.step()
        if number == 1:
            rank.wait("in the loop")
    rank.wait("after")


def epochs(rank: Rank) -> None:
    for _ in range(2):
        while True:
            rank.step()
            break
        rank.wait("between")
    rank.wait("after")


def one_epoch(rank: Rank) -> None:
    with held():
        for _ in range(2):
            rank.step()
        rank.wait("within")


def called(rank: Rank) -> None:
    for epoch in range(2):
        one_epoch(rank)
        if epoch:
            rank.wait("between")
    rank.wait("after")


def called_once(rank: Rank) -> None:
    one_epoch(rank)
    rank.wait("after")


def caught(rank: Rank) -> None:
    while True:
        try:
            rank.step()
            rank.wait("in the loop")
            if rank.events_of:
                return_ = rank.events_of["in the loop"]
                raise ValueError(return_)
        except ValueError:
            break
        finally:
            rank.wait("at its end")
    rank.wait("after")


def of_a_generator(rank: Rank) -> None:
    def steps() -> Iterator[int]:
        yield from range(2)
        rank.wait("when there are no more")

    for _ in steps():
        rank.step()
    rank.wait("after")


def alone(program: Callable[[Rank], None]) -> Told:
    """What a program finds that nobody calls: pytest's own loop may call it again."""
    rank = Rank()
    thread = threading.Thread(target=program, args=(rank,))
    thread.start()
    thread.join()
    return rank.events_of


@pytest.mark.parametrize(
    ("program", "reported"),
    [
        (plain, {"nothing yet": None, "before": True, "in the loop": True, "after": False}),
        (epochs, {"between": True, "after": False}),
        (called, {"within": True, "between": True, "after": False}),
        (called_once, {"within": False, "after": False}),
        (caught, {"in the loop": True, "at its end": False, "after": False}),
        (of_a_generator, {"when there are no more": True, "after": False}),
    ],
)
def test_places_with_and_without_a_bytecode_path_to_the_step_differ(
    program: Callable[[Rank], None], reported: Told
) -> None:
    assert alone(program) == reported


def test_loop_that_has_just_begun_is_not_confused_with_the_one_before() -> None:
    """The place is noted once a second: until then nothing leads to the first one, and nobody is
    told to be ahead.
    """

    def both(rank: Rank) -> None:
        plain(rank)
        epochs(rank)

    assert alone(both)["between"] is False
