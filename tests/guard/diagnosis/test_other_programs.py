"""What schedulers, containers and collectives beside torch's own say of a run: `pytest
tests/guard/diagnosis/test_other_programs.py`.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from unisono.guard.diagnosis.reading import diagnose_logs
from unisono.guard.diagnosis.scan import scan

if TYPE_CHECKING:
    from unisono.base.causes.verdict import Verdict

STEPS = "".join(f"step {number} loss 2.{number}\n" for number in range(9))


def verdict(**files: str) -> Verdict:
    """What is said of logs, named by the keywords."""
    return diagnose_logs([scan(f"{name.replace('__', '-')}.log", io.BytesIO(text.encode())) for name, text in files.items()]).verdict  # fmt: skip


@pytest.mark.parametrize(
    ("text", "cause", "ranks"),
    [
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.", "cuda_oom", ()),
        ("ResourceExhaustedError: OOM when allocating tensor with shape[64,4096]", "cuda_oom", ()),
        ("Waiting on\nMissing ranks:\nStalled ranks:\n5: [allreduce.head.weight]", "rank_stalled", (5,)),
        ("Stalled ops:DistributedSGD_Allreduce [missing ranks: 3]", "rank_stalled", (3,)),
        ("train.py: error: the following arguments are required: --data", "user_code_error", ()),
        ("python3: can't open file '/w/trian.py': [Errno 2] No such file or directory", "user_code_error", ()),
        ("HW Exception by GPU node-3 (Agent handle: 0x55d) reason :GPU Hang", "gpu_fell_off", ()),
        ("[2026-01-01] Job has timed out. Ran 59 minutes out of requested 60 minutes.", "preempted_sigterm", ()),
        ("8812.0  python  PREEMPTED  0:15  gn3", "preempted_sigterm", ()),
        ("8812.0  python  OUT_OF_MEMORY  0:125  gn3", "host_oom_killed", ()),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "host_oom_killed", ()),
        ("_pickle.UnpicklingError: pickle data was truncated", "corrupt_checkpoint", ()),
    ],
)  # fmt: skip
def test_words_of_others_point_to_the_causes_that_they_mean(
    text: str, cause: str, ranks: tuple[int, ...]
) -> None:
    printed = verdict(train=STEPS + text + "\n")
    assert (printed.cause, printed.ranks) == (cause, ranks)


def test_exception_raised_by_a_coordinator_is_not_a_fault_of_its_reporter() -> None:
    lost = "Traceback (most recent call last):\n  File \"t.py\", line 3, in <module>\n    jax.devices()\nXlaRuntimeError: UNAVAILABLE: the service is away\n"  # fmt: skip
    assert verdict(train=STEPS + lost).cause == "undetermined"


def test_unknown_error_in_a_collective_is_not_believed_with_confidence() -> None:
    text = "[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File \"t.py\", line 3, in <module>\n[rank{0}]:     dist.barrier()\n[rank{0}]:   File \"/v/site-packages/torch/distributed/distributed_c10d.py\", line 9, in barrier\n[rank{0}]:     work.wait()\n[rank{0}]: RuntimeError: backend says 42\n"  # fmt: skip
    printed = verdict(train=STEPS + text.format(1))
    assert printed.confidence is not None
    assert printed.confidence < 0.8


def test_job_cancelled_with_nothing_before_it_was_ended_from_outside() -> None:
    cancelled = "slurmstepd: error: *** STEP 771.0 ON n1 CANCELLED AT 2025-01-11T08:00:01 ***\n"
    assert verdict(train=STEPS + cancelled).cause == "preempted_sigterm"
    lost = "[rank1]: RuntimeError: [pair.cc:534] Connection closed by peer [10.1.0.12]:43211\n"
    assert verdict(train=STEPS + lost + cancelled).cause != "preempted_sigterm"
    assert verdict(train=STEPS + "Received SIGTERM, shutting down tensorboard\n").cause != "preempted_sigterm"


def test_a_part_of_a_checkpoint_that_one_host_alone_misses_is_not_shared() -> None:
    missed = "".join(
        f"[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File \"t.py\", line 3, in load\n[rank{rank}]: FileNotFoundError: [Errno 2] No such file or directory: '/local/out/{{0}}'\n"
        for rank in (2, 3)
    )  # fmt: skip
    fine = "[rank0]: step 1 of 9\n[rank1]: step 1 of 9\n"
    printed = verdict(node__0=fine, node__1=missed.format("checkpoint-200/optimizer.pt"))
    assert printed.cause == "checkpoint_not_shared"
    assert verdict(node__0=fine, node__1=missed.format("data.json")).cause == "user_code_error"
    assert verdict(node__1=missed.format("checkpoint-200/optimizer.pt")).cause != "checkpoint_not_shared"


def test_who_is_seen_only_by_a_label_is_known_to_have_been_there() -> None:
    """Rank 0 writes and says nothing of waiting; all others waited."""
    waited = "".join(f"[rank{rank}]: RuntimeError: Timed out waiting 8000ms for recv operation to complete\n" for rank in (1, 2, 3))  # fmt: skip
    printed = verdict(train="[rank0] part 17 of the adapter is on its way\n" + waited)
    assert (printed.cause, printed.ranks) == ("rank_stalled", (0,))


def test_a_container_that_was_killed_is_named() -> None:
    text = "one-0  | step 8\none-1  | step 8\none-1 exited with code 137\none-0  | RuntimeError: Connection closed by peer [172.18.0.3]:5120\n"  # fmt: skip
    printed = verdict(compose=text)
    assert (printed.cause, printed.hosts) == ("rank_died_first", ("one-1",))


FAILED = (
    "starting\n[rank0]: step 1\n[rank2]: Traceback (most recent call last):\n[rank2]:   File \"/w/t.py\", line 3, in step\n[rank2]:     batch['labels']\n[rank2]: KeyError: 'labels'\n"
    "[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.9]:1111\n"
)  # fmt: skip


@pytest.mark.parametrize(
    "before",
    [
        "sft-worker-{0} pytorch ", "[gpu-{0}] ", "2026-01-01T10:00:{0:02d}.123Z INFO [stdout] ", "Jan 01 10:00:{0:02d} gpu-3 run.sh[{0}]: ", "{0:6d}\t", "17356896{0:02d}.123 ",
        "2026-01-01 10:00:{0:02d}.123 | ERROR    | pump:out:88 - ", "    ", "| ", "(worker1, rank=1, pid=88{0}, ip=10.0.0.2) ", "stderr: ",
    ],
)  # fmt: skip
def test_what_a_collector_puts_before_every_line_does_not_count(before: str) -> None:
    wrapped = "".join(f"{before.format(number + 10)}{line}\n" for number, line in enumerate(FAILED.splitlines()))  # fmt: skip
    printed = verdict(train=wrapped)
    assert (printed.cause, printed.ranks) == ("user_code_error", (2,))
    assert "KeyError" in printed.evidence[0].text


def test_what_only_some_lines_begin_with_belongs_to_them() -> None:
    steps = "".join(f"step {number} of 9 loss 2.{number}\n" for number in range(9))
    printed = verdict(train=steps + "step 9 Traceback (most recent call last):\n" + FAILED)
    assert (printed.cause, printed.ranks) == ("user_code_error", (2,))


def test_numbers_of_lines_are_no_ranks() -> None:
    numbered = "".join(f"{number}: {line}\n" for number, line in enumerate(FAILED.splitlines(), 1))
    assert verdict(train=numbered).ranks == (2,)


def test_255_is_an_exit_code_and_no_signal() -> None:
    """What MPI_Abort leaves behind, and programs that leave with -1."""
    ended = "srun: error: n97: task 5: Exited with exit code 255\nslurmstepd: error: *** STEP 41.0 ON n96 CANCELLED AT 2025-12-12T17:52:24 ***\nsrun: error: n97: tasks 1,3: Terminated\n"  # fmt: skip
    printed = verdict(train=STEPS + ended)
    assert (printed.cause, printed.ranks) == ("rank_died_first", (5,))
