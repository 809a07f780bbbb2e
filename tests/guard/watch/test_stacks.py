"""Stacks as faulthandler and py-spy write them, recorded from real ranks.

Run: pytest tests/guard/watch/test_stacks.py
"""

import json
from pathlib import Path

import pytest

from unisono.guard.watch.rank_dumps import MOST_FRAMES, main_thread_of_faulthandler, main_thread_of_py_spy

RECORDED = Path(__file__).parent / "recorded"
SLEEP = (RECORDED / "stacks-sleep.txt").read_text()
PY_SPY = (RECORDED / "py-spy-all_gather.json").read_text()
PULSE = SLEEP[: SLEEP.index("\n\n") + 2]


def test_the_main_threads_frames_come_innermost_first_and_no_other_threads() -> None:
    assert main_thread_of_faulthandler(SLEEP) == (
        "/home/ada/rank.py:111 in sleeps_after_sums", "/home/ada/rank.py:28 in main", "/home/ada/rank.py:124 in <module>",
    )  # fmt: skip


def test_last_thread_is_the_main_one_even_if_a_different_got_the_signal() -> None:
    swapped = SLEEP.replace("Current thread", "Thread").replace("Thread", "Current thread", 1)
    assert main_thread_of_faulthandler(swapped) == main_thread_of_faulthandler(SLEEP)


def test_the_frames_of_a_thread_that_trains_come_in_place_of_the_main_ones() -> None:
    number = int(PULSE.split()[1], 16)
    assert main_thread_of_faulthandler(SLEEP, trains=number) == main_thread_of_faulthandler(PULSE) != main_thread_of_faulthandler(SLEEP)  # fmt: skip
    assert main_thread_of_faulthandler(SLEEP, trains=1) == main_thread_of_faulthandler(SLEEP)


def test_only_the_signalled_thread_counts_among_too_many_threads() -> None:
    current, *_ = SLEEP.split("\n\n")[1:]
    assert main_thread_of_faulthandler(f"{current}\n\n{PULSE}...\n")[0].endswith(" in sleeps_after_sums")
    assert main_thread_of_faulthandler(f"{PULSE}...\n") == ()


def test_newer_pythons_name_their_threads() -> None:
    named = SLEEP.replace("b80 (most", "b80 [python] (most")
    assert main_thread_of_faulthandler(named) == main_thread_of_faulthandler(SLEEP)


@pytest.mark.parametrize("text", ["", "noise\n", "  File \"a\", line 1 in f\n", "Current thread 0x0"])  # fmt: skip
def test_what_is_not_a_stack_gives_none(text: str) -> None:
    assert main_thread_of_faulthandler(text) == ()


def test_a_deep_stack_is_cut_and_control_characters_are_gone() -> None:
    deep = "Current thread 0x00 (most recent call first):\n" + '  File "a\x1b[31mb.py", line 1 in f\n' * 100
    frames = main_thread_of_faulthandler(deep + "  ...\n")
    assert len(frames) == MOST_FRAMES
    assert frames[0] == "ab.py:1 in f"


def test_py_spys_main_thread_is_the_one_with_the_processs_number() -> None:
    threads = json.loads(PY_SPY)
    pid = next(thread["os_thread_id"] for thread in threads if thread["thread_name"] == "MainThread")
    frames = main_thread_of_py_spy(PY_SPY, pid=pid)
    assert frames[0].endswith("distributed_c10d.py:4287 in all_gather")
    assert frames[-1] == "/home/ada/rank.py:124 in <module>"
    assert main_thread_of_py_spy("a warning\n" + PY_SPY, pid=pid) == frames


@pytest.mark.parametrize("text", ["", "Error: Permission Denied", "[]", '[{"frames": []}]', PY_SPY[:200]])
def test_what_py_spy_reports_else_is_not_a_stack(text: str) -> None:
    assert main_thread_of_py_spy(text, pid=1) == ()
