"""How a guarded program's end is read: signals, patience after a signal, remedies.

Run: pytest tests/guard/programs/test_program_end.py
"""

import signal

import pytest

from unisono.base.causes import CATALOGUE, Evidence, Verdict
from unisono.guard.diagnosis.gather import BY_PRIORITY
from unisono.guard.integrations.inside.loaders import framework_in
from unisono.guard.programs.launcher_facts import read_command
from unisono.guard.programs.program_end import (
    ProgramEnd,
    StopDeadline,
    exit_code_of_verdict,
    for_program,
    name_program_death,
    signal_of,
)

PYTHON = read_command(["python", "train.py"])
SHELL = read_command(["sh", "train.sh"])


def _says(cause: str) -> Verdict:
    """What a log is made of."""
    return Verdict(cause=cause, when="after", summary=f"the log says {cause}", fix=("read it",))


@pytest.mark.parametrize(
    ("words", "returncode", "number"),
    [
        ("python train.py", -9, signal.SIGKILL),
        ("python train.py", 137, None),
        ("python train.py", 1, None),
        ("sh train.sh", 139, signal.SIGSEGV),
        ("sh train.sh", 130, None),
        ("sh train.sh", 247, None),
        ("deepspeed train.py", 247, signal.SIGKILL),
        ("llamafactory-cli train x.yaml", 245, signal.SIGSEGV),
        ("llamafactory-cli train x.yaml", 255, None),
        ("timeout 5 python train.py", 124, None),
    ],
)
def test_a_signal_is_read_from_what_shells_and_launchers_make_of_it(
    words: str, returncode: int, number: signal.Signals | None
) -> None:
    assert signal_of(returncode, read_command(words.split())) == number


def test_kill_while_the_kernel_counted_an_oom_kill_is_the_oom_killers() -> None:
    end = ProgramEnd(1, "b", -9, oom_killed=True)
    verdict = name_program_death(end, PYTHON, diagnosed=_says("user_code_error"))
    assert verdict is not None
    assert (verdict.cause, verdict.hosts) == ("host_oom_killed", ("b",))
    assert verdict.summary == "the program was killed by the OOM killer on node 1 (b)"


@pytest.mark.parametrize(
    ("returncode", "printed", "cause"),
    [
        (-9, "user_code_error", "rank_killed"),  # an exception that it had got over
        (-9, "rank_died_first", "rank_killed"),
        (-9, "preempted_sigterm", "preempted_sigterm"),
        (-6, "rank_stalled", "rank_stalled"),  # as NCCL's watchdog ends a process
        (-11, "rank_died_first", "rank_killed"),
        (3, "user_code_error", "user_code_error"),
    ],
)
def test_the_log_explains_a_crash_and_not_a_kill_from_outside(
    returncode: int, printed: str, cause: str
) -> None:
    verdict = name_program_death(
        ProgramEnd(0, "a", returncode, oom_killed=False), PYTHON, diagnosed=_says(printed)
    )
    assert verdict is not None
    assert verdict.cause == cause


def test_program_that_exits_by_itself_and_reports_nothing_has_no_verdict() -> None:
    assert name_program_death(ProgramEnd(0, "a", 3), SHELL) is None


def test_second_signal_to_the_same_node_a_second_later_shortens_the_time() -> None:
    stopping = StopDeadline(40.0)
    assert stopping.take(signal.SIGUSR1, 0, 99.0) is None, "it means what the program makes of it"
    assert "40 s" in (stopping.take(signal.SIGTERM, 0, 100.0) or "")
    assert stopping.take(signal.SIGTERM, 0, 100.5) is None, "a scheduler's second word for the same wish"
    assert stopping.take(signal.SIGTERM, 1, 102.0) is None, "the same wish on another node"
    assert stopping.end_by == 140.0
    assert "5.0 s" in (stopping.take(signal.SIGINT, 0, 103.0) or "")
    assert stopping.end_by == 108.0
    stopping.take(signal.SIGINT, 0, 104.5)
    assert stopping.end_by == 104.5


@pytest.mark.parametrize(
    ("text", "cause", "exit_code"),
    [
        ("DistNetworkError: The server socket has failed to listen on any local network address. port: 45351, code: -98, name: EADDRINUSE, message: address already in use", "port_in_use", 3),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "cuda_oom", 5),
        ("OSError: [Errno 28] No space left on device", "disk_full", 6),
        ("IndexError: index out of range in self", "user_code_error", 5),
    ],
)  # fmt: skip
def test_an_exception_whose_words_leave_no_doubt_is_not_a_fault_of_a_row(
    text: str, cause: str, exit_code: int
) -> None:
    evidence = (Evidence(where="rank 0, train.py:3", text=text),)
    verdict = for_program(Verdict(cause="user_code_error", when="during", summary="x", evidence=evidence), "")
    assert (verdict.cause, exit_code_of_verdict(verdict)) == (cause, exit_code)


@pytest.mark.parametrize("cause", sorted(CATALOGUE))
def test_a_remedy_for_a_program_of_others_promises_nothing_of_ours(cause: str) -> None:
    verdict = Verdict(cause=cause, when=CATALOGUE[cause].when[0], summary="x", fix=CATALOGUE[cause].remedy)
    text = " ".join(for_program(verdict, "").fix)
    assert not any(word in text for word in ("the run resumes", "same command", "batch.micro", "checkpoint.keep")) or cause in (
        "storage_unfit",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "framework", "key"),
    [
        (["transformers", "transformers.trainer"], "transformers", "resume_from_checkpoint=True"),
        (["transformers.trainer", "trl.trainer.utils"], "trl", "resume_from_checkpoint=True"),
        (
            ["transformers.trainer", "trl.trainer.utils", "llamafactory.train"],
            "llamafactory",
            "resume_from_checkpoint",
        ),
        (["pytorch_lightning.trainer.trainer"], "lightning", 'ckpt_path="last"'),
        (["transformers", "torch"], "", ""),
    ],
)
def test_the_remedy_names_the_programs_own_way_to_resume_where_it_is_known(
    modules: list[str], framework: str, key: str
) -> None:
    assert framework_in(modules) == framework
    assert framework in ("", *BY_PRIORITY)
    verdict = Verdict(cause="rank_killed", when="during", summary="x", fix=CATALOGUE["rank_killed"].remedy)
    fix = for_program(verdict, framework_in(modules)).fix
    assert key in fix[-1]
    assert ("To resume" in fix[-1]) == bool(framework)
