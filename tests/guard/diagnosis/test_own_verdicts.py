"""What unisono itself has said in a log: the verdict at the end, or the stall that was not over.

Run: .venv/bin/python -m pytest tests/guard/diagnosis/test_own_verdicts.py
"""

import io

import pytest

from unisono.guard.diagnosis.reading import diagnose_logs
from unisono.guard.diagnosis.scan import scan

STALL = (
    "unisono: warning: rank 2, node 0 (a) sleeps or waits, and does not return; it has been in step 7 for"
    " {age} s, at train.py:9 in reward  [user_code_stuck] (Fix the code.)"
)
STALL_OF_ALL = (
    "unisono: warning: no rank computes, for 40 s: ranks 0, 2 and 3 at train.py:9 in reward "
    " [waits_for_input] (Answer by a setting.)"
)
STALL_IN_CHINESE = "unisono：警告：rank 2，node 0 (a) 在休眠或等待，没有返回  [user_code_stuck]（修复代码。）"
MOVES = "unisono: the ranks move again after 20 s: rank 2, node 0 (a) sleeps or waits, and does not return"
VERDICT = "unisono: rank 1, node 0 (a) was killed by SIGKILL  [rank_killed]"
PICTURE = "unisono: the picture pictures/9.png of data/train.jsonl:10 cannot be read any more: {why}  [picture_changed]"
BLOCK = "WHAT      ranks 1 and 3 were killed by SIGKILL  [rank_killed]"
BLOCK_IN_CHINESE = "问题      rank 1，node 0 (a) 被 SIGKILL 杀死  [rank_killed]"


def diagnosed(*lines: str) -> tuple[str, list[int]]:
    """Cause and ranks of a log with these lines after some steps."""
    steps = [f"step {step} of 100, loss 2.{step}" for step in range(1, 8)]
    log = ("\n".join([*steps, *lines]) + "\n").encode()
    verdict = diagnose_logs([scan("train.log", io.BytesIO(log))]).verdict
    return verdict.cause, list(verdict.ranks)


@pytest.mark.parametrize(
    ("lines", "cause", "ranks"),
    [
        ([STALL.format(age=5), STALL.format(age=10)], "user_code_stuck", [2]),
        ([STALL_OF_ALL], "waits_for_input", [0, 2, 3]),
        ([STALL_IN_CHINESE], "user_code_stuck", [2]),
        ([STALL.format(age=20), MOVES, STALL.format(age=5)], "user_code_stuck", [2]),
        ([STALL.format(age=5), VERDICT], "rank_killed", [1]),
        ([BLOCK], "rank_killed", [1, 3]),
        ([PICTURE.format(why="it has changed since its row was prepared")], "picture_changed", []),
        ([PICTURE.format(why="it cannot be read: No such file or directory")], "picture_changed", []),
        ([BLOCK_IN_CHINESE], "rank_killed", [1]),
    ],
)
def test_what_unisono_said_last_is_the_cause(lines: list[str], cause: str, ranks: list[int]) -> None:
    assert diagnosed(*lines) == (cause, ranks)


@pytest.mark.parametrize(
    "lines",
    [
        [STALL.format(age=20), MOVES],
        [STALL.format(age=20), *(f"step {step} of 100, loss 1.{step}" for step in range(8, 30))],
        [VERDICT, *(f"step {step} of 100, loss 1.{step}" for step in range(8, 30))],
        ["unisono: the run is completed: 7 steps  [healthy]"],
        ["unisono: rank 1 ended  [not_a_cause]", "UserWarning: an unused argument  [unused]"],
    ],
)
def test_a_stall_that_ended_and_what_is_no_cause_are_not_blamed(lines: list[str]) -> None:
    assert diagnosed(*lines)[0] in ("undetermined", "healthy")
