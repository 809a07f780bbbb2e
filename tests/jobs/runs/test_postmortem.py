"""Ranks that died of a collective that does not belong to the others'.

Run: pytest tests/jobs/runs/test_postmortem.py
"""

import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.guard.watch.run_views import places, run_view, view
from unisono.base.user_code import MODEL_CODE
from unisono.guard.control.connection import Left
from unisono.guard.supervise.decision import NodeLoss
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.supervise.postmortem import apart, name_death, name_loss

if TYPE_CHECKING:
    from unisono.base.messages import CrashedMessage

ABORTED = RankEnd(0, -signal.SIGABRT, None, "train", 7)


@pytest.mark.parametrize("idle_s", [0.0, 0.05, 3.0])
def test_rank_ended_by_gloo_for_anothers_size_is_never_the_culprit(
    idle_s: float,
) -> None:
    """However lately the other one has entered the collective."""
    dead = replace(view(0, "comm", 0.0, comm=41, elements=80), has_ended=True)
    found = apart(run_view([dead, view(1, "comm", idle_s, comm=41, elements=160)]), ABORTED)
    assert found is not None
    assert found.cause == "collective_mismatch"


def test_a_rank_that_has_gone_on_since_is_not_where_it_was_seen() -> None:
    dead = replace(view(0, "comm", 0.0, comm=41, elements=80), has_ended=True)
    assert apart(run_view([dead, view(1, "comm", 0.05, comm=42, elements=160)]), ABORTED) is None
    assert apart(run_view([dead, view(1, "compute", 0.05, comm=41)]), ABORTED) is None


def test_words_of_gloo_name_the_cause_if_no_rank_was_in_a_collective() -> None:
    printed = (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at"
        " /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 664 vs 660. Received data size"
        " doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
    )
    plan: Any = SimpleNamespace(ranks=places(3), own_code={})
    found = name_death(replace(ABORTED, tail=printed), plan)
    assert (found.cause, found.ranks, found.step) == ("collective_mismatch", (), 7)
    assert "received data of a different size than expected in phase train after step 7" in found.summary
    assert "SIGABRT" in found.evidence[0].text
    assert name_death(ABORTED, plan).cause == "rank_killed"
    killed = replace(ABORTED, returncode=-signal.SIGKILL, tail=printed)
    assert name_death(killed, plan).cause == "rank_killed"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB", "cuda_oom"),
        ("AcceleratorError: CUDA error: out of memory", "cuda_oom"),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "no_cuda_build"),
        ("AcceleratorError: CUDA error: no kernel image is available for execution on the device", "cuda_arch_unsupported"),
        ("AcceleratorError: CUDA error: device-side assert triggered", "user_code_error"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", "user_code_error"),
    ],
)  # fmt: skip
def test_exception_about_the_device_is_named_so_whatever_code_raised_it(error: str, cause: str) -> None:
    """Only the trial of the longest batch and the steps have a verdict of their own; a model, for
    example, is loaded before.
    """
    plan: Any = SimpleNamespace(ranks=places(2), own_code={})
    crash: CrashedMessage = {"kind": "crashed", "error": error, "where": "load.py:1"}
    found = name_death(RankEnd(1, 5, crash, "load_model", 0), plan)
    assert (found.cause, found.ranks) == (cause, (1,))
    assert error in found.summary
    assert found.fix or cause == "user_code_error"


def test_a_rank_that_was_killed_is_the_culprit_whatever_the_others_wait_in() -> None:
    dead = replace(view(0, "comm", 0.0, comm=41, elements=80), has_ended=True)
    killed = replace(ABORTED, returncode=-signal.SIGKILL)
    assert apart(run_view([dead, view(1, "comm", 3.0, comm=41, elements=160)]), killed) is None


@pytest.mark.parametrize(
    ("at_head", "at_node", "host"),
    [
        (Left(1, "b", "silent for 8 s", False, 8.2), Left(0, "a", "silent for 8 s", False, 8.2, gave_up=True), "b"),
        (Left(1, "b", "silent for 9 s", False, 9.1, gave_up=True), Left(0, "a", "silent for 9 s", False, 9.1), "a"),
        (
            Left(1, "b", "silent for 8 s", False, 8.2, is_cut=True, gave_up=True),
            Left(0, "a", "silent for 8 s", False, 8.2, is_cut=True),
            "b",
        ),
    ],
    ids=["the node was stopped", "the head was stopped", "the node heard nothing, and its last word came through"],
)  # fmt: skip
def test_both_ends_of_a_connection_that_was_given_up_report_the_same_words(
    at_head: Left, at_node: Left, host: str
) -> None:
    printed = [
        name_loss(NodeLoss.at_head(at_head), head="a", after_s=0.5),
        name_loss(NodeLoss.at_node(at_node, node_rank=1, host="b"), head="a", after_s=0.5),
    ]
    assert printed[0] == printed[1]
    assert printed[0].hosts == (host,)
    assert printed[0].named_after_s == pytest.approx(at_head.silent_s + 0.5), "since the last sign of life"


def test_a_closed_connection_is_the_other_sides_end() -> None:
    gone = "its unisono process ended without closing the connection"
    assert name_loss(NodeLoss.at_head(Left(1, "b", gone, False)), head="a").hosts == ("b",)
    own = NodeLoss.at_node(Left(0, "a", gone, False), node_rank=1, host="b")
    assert name_loss(own, head="a").hosts == ("a",)


OWN = {"/home/u/own.py": "the objective"}


def _death_of(end: RankEnd, code: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    plan: Any = SimpleNamespace(ranks=places(2), own_code=code)
    found = name_death(end, plan)
    return found.summary, found.fix


def test_rank_that_ends_with_0_and_no_result_is_named_with_the_users_code() -> None:
    summary, fix = _death_of(RankEnd(0, 0, None, "objective", 0), OWN)
    assert "exit status 0, without a final message, while it executed the objective /home/u/own.py" in summary
    assert "/home/u/own.py" in fix[0]
    summary, fix = _death_of(RankEnd(0, 0, None, "train", 3), OWN)
    assert "whose likely origin is the objective /home/u/own.py" in summary
    assert "/home/u/own.py" in fix[0]
    summary, fix = _death_of(RankEnd(0, 0, None, "load_data", 0), MODEL_CODE)
    assert "the model's own code (model.trust_remote_code)" in summary
    assert "traceback" not in fix[0]
    summary, fix = _death_of(RankEnd(0, 0, None, "train", 3), {})
    assert summary.endswith("exit status 0, without a final message")
    assert "dataset" not in fix[0]
    assert "log" in fix[0]


@pytest.mark.parametrize(
    "end",
    [
        RankEnd(
            0, 5, {"kind": "crashed", "error": "KeyError: 'x'", "where": "torch/x.py:1", "traceback":
            'Traceback (most recent call last):\n  File "/a/loop.py", line 1, in f\n  File "/home/u/own.py", line 7, in loss\n  File "torch/x.py", line 1, in g\n'},
            "train", 3,
        ),
        RankEnd(
            0, -signal.SIGSEGV, None, "train", 3, tail="Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f0000000000 (most recent call first):\n"
            '  File "/lib/ctypes.py", line 5 in string_at\n  File "/home/u/own.py", line 7 in loss\n  File "/home/u/own.py", line 90 in outer\n',
        ),
    ],
    ids=["an exception", "a fault in native code"],
)  # fmt: skip
def test_a_death_in_the_users_code_is_blamed_on_its_innermost_line(end: RankEnd) -> None:
    summary, fix = _death_of(end, OWN)
    assert summary.endswith("the likely origin is the objective, /home/u/own.py:7")
    assert fix == ("Fix the objective, /home/u/own.py:7.",)
    summary, fix = _death_of(end, {"/home/u/other.py": "the objective"})
    assert "likely origin" not in summary
    killed = replace(end, returncode=-signal.SIGKILL, last=None, tail="")
    assert "likely origin" not in _death_of(killed, OWN)[0], "a signal from outside is not the file's doing"
