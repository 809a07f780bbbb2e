"""Dumps of torch's flight recorder, recorded from real gloo ranks with torch 2.13.

Run: pytest tests/guard/watch/test_flight.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.guard.watch.rank_dumps import Flight, read_flight, shortened
from unisono.guard.watch.views import Collective

RECORDED = Path(__file__).parent / "recorded"


def dump(name: str) -> str:
    return (RECORDED / f"flight-{name}.json").read_text()


@pytest.mark.parametrize(
    ("name", "begun", "completed"),
    [
        ("all_reduce", "all_reduce #6 [[1000]]", 5),
        ("all_gather", "all_gather #6 [[3]]", 5),
        ("barrier", "barrier #6 []", 5),
        ("behind", "all_reduce #5 [[7]]", 5),
    ],
)
def test_the_last_collective_is_known_with_its_kind_and_sizes(name: str, begun: str, completed: int) -> None:
    found = read_flight(dump(name))
    assert (str(found.begun), found.completed) == (begun, completed)


def test_of_several_groups_the_one_that_a_rank_waits_in_counts() -> None:
    assert read_flight(dump("two_groups")) == Flight(Collective("1:pairs", 3, "all_reduce", "[[6]]"), 2)


def test_where_it_waits_in_none_the_group_of_all_ranks_counts() -> None:
    found: dict[str, Any] = json.loads(dump("two_groups"))
    found["entries"][-1]["retired"] = True
    begun = read_flight(json.dumps(found)).begun
    assert begun == Collective("0:default_pg", 1, "all_reduce", "[[4]]")


@pytest.mark.parametrize(
    ("name", "reported", "completed"), [("all_reduce", "3", 5), ("behind", "3", 5), ("behind", "-1", 5)]
)
def test_a_count_of_completed_ones_that_has_gone_back_does_not_count(
    name: str, reported: str, completed: int
) -> None:
    """Gloo's threads write it in any order, the last word wins; seen to fall from 5 to 3."""
    found = json.loads(dump(name))
    found["pg_status"]["0"]["last_completed_collective"] = reported
    assert read_flight(json.dumps(found)).completed == completed


def test_what_waits_behind_a_later_one_that_has_ended_is_not_completed() -> None:
    found = json.loads(dump("behind"))
    found["entries"][2]["retired"] = False  # number 3 of 5
    assert read_flight(json.dumps(found)).completed == 2


def test_without_word_of_what_has_retired_the_count_is_all_there_is() -> None:
    found = json.loads(dump("all_reduce"))
    for entry in found["entries"]:
        del entry["retired"]
    assert read_flight(json.dumps(found)).completed == 5


def test_numbers_count_where_the_entry_is_no_longer_kept() -> None:
    found = json.loads(dump("all_reduce"))
    found["entries"] = []
    assert read_flight(json.dumps(found)) == Flight(None, 5)


def test_before_the_first_collective_nothing_is_completed() -> None:
    found = json.loads(dump("all_reduce"))
    found["pg_status"]["0"] |= {"last_completed_collective": "-1", "last_enqueued_collective": "1"}
    found["entries"] = [{**found["entries"][0], "retired": False}]
    flight = read_flight(json.dumps(found))
    assert (str(flight.begun), flight.completed) == ("all_reduce #1 [[7]]", None)


def test_the_names_of_nccl_lose_their_backend_too() -> None:
    found = dump("all_reduce").replace("gloo:", "nccl:")
    assert str(read_flight(found).begun) == "all_reduce #6 [[1000]]"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"error": "RuntimeError"}', '{"pg_status": {}}', '{"pg_status": {"0": {}}}', '{"pg_status": []}']
)  # fmt: skip
def test_what_is_not_a_dump_reports_nothing(text: str) -> None:
    assert read_flight(text) == Flight()


def test_a_long_dump_loses_its_oldest_entries_and_reports_the_same() -> None:
    text = dump("all_gather")
    short = shortened(text, limit=1500)
    assert len(short) <= 1500
    assert read_flight(short) == read_flight(text)
    assert shortened(text, limit=1 << 20) == text
    assert shortened("x" * 100, limit=10) == "x" * 10
