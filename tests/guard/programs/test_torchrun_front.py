"""The small front of a torchrun that was started by hand.

Run: pytest tests/guard/programs/test_torchrun_front.py
"""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ports import free_port
from unisono.guard.integrations.border import LAUNCHER, Answer, Guard, Presence, find_guard

LIMIT_S = 120.0


def companion(node: int, port: int) -> "subprocess.Popen[str]":
    """Of one of two nodes with two ranks each."""
    settings = {
        "nodes": 2, "node_rank": node, "host": "127.0.0.1", "port": port, "nproc": 2, "wait_s": LIMIT_S, "uneven": False,
        "words": ["torchrun", "train.py"], "pid": os.getpid(),
    }  # fmt: skip
    started = subprocess.Popen(
        [sys.executable, "-m", "unisono.guard.programs.torchrun_front"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "UNISONO_TOKEN": "a secret that both nodes of this test share"},
    )  # fmt: skip
    assert started.stdin is not None
    started.stdin.write(json.dumps(settings) + "\n")
    started.stdin.flush()
    return started


def guard_of(one: "subprocess.Popen[str]") -> Guard:
    """The border that a companion has made."""
    assert one.stdout is not None
    guard = find_guard({"UNISONO_GUARD": one.stdout.readline().strip()})
    assert guard is not None
    return guard


def bring(guard: Guard) -> Answer | None:
    """As a torchrun does; gives its answer."""
    details = {"store_port": 1, "max_restarts": 0}
    return Presence(guard).report_facts(
        LAUNCHER, {"nproc": 2}, rank=guard.node_rank, world_size=2, details=details, limit_s=LIMIT_S
    )


def test_an_answer_is_there_until_torchrun_has_read_it() -> None:
    """However long it takes to look: else it would say that it had none."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(companion(node, port)) for node in (0, 1)]
        for one in both:
            stack.callback(one.kill)
        guards = [guard_of(one) for one in both]
        with ThreadPoolExecutor(2) as asking:
            answers = list(asking.map(bring, guards))
        assert all(answer is not None and answer.agreed for answer in answers)
        with pytest.raises(subprocess.TimeoutExpired):
            both[1].wait(3)  # all is said, and it stays
        for one, guard in zip(both, guards, strict=True):
            assert guard.folder.exists()
            assert one.stdin is not None
            one.stdin.close()
            assert one.wait(LIMIT_S) == 0
