"""What is read of Slurm: node lists, time limits, fields, states, and what srun prints.

Run: pytest tests/jobs/slurm/test_slurm_output.py
"""

import json
from pathlib import Path

import pytest

from unisono.guard.facts.slurm import (
    NodeState,
    SlurmAnswer,
    SlurmStep,
    fields_of,
    hosts_of,
    read_slurm_step,
    seconds_of,
)
from unisono.guard.rundir import RunDir
from unisono.jobs.launchers.slurm_batch_job import result_of_job
from unisono.jobs.launchers.slurm_controller import JobState
from unisono.jobs.launchers.slurm_job_follower import JobEnd, JobOutput


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("ada,bob", ["ada", "bob"]),
        ("gpu[01-03,07]", ["gpu01", "gpu02", "gpu03", "gpu07"]),
        ("gpu[9-11]-ib,login", ["gpu9-ib", "gpu10-ib", "gpu11-ib", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("", []), ("gpu[3-1]", []), ("gpu[1-", []), ("gpu[1-999999999]", []), ("gpu[a]", []),
    ],
)  # fmt: skip
def test_a_list_of_nodes_is_spelt_out_or_not_read_at_all(text: str, names: list[str]) -> None:
    assert hosts_of(text) == names


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("8:00:00", 28_800), ("1-0", 86_400), ("1-12:30", 131_400), ("1-12:30:15", 131_415),
     ("UNLIMITED", None), ("", None), ("tomorrow", None), ("1:2:3:4", None)],
)  # fmt: skip
def test_a_time_limit_is_read_as_slurm_writes_it(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_a_step_is_read_where_there_is_one_and_a_batch_script_is_none() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu[1-2]",
    }
    assert read_slurm_step(batch) is None
    assert read_slurm_step(batch | step) == SlurmStep("7", "0", 0, 2, 2, 0, "gpu[1-2]")
    assert read_slurm_step(batch | step | {"SLURM_NODEID": "2"}) is None
    assert read_slurm_step(batch | step | {"SLURM_JOB_ID": "$(x)"}) is None


def test_fields_hold_spaces_and_end_at_the_next_name() -> None:
    fields = fields_of(
        "NodeName=bob State=IDLE+DRAIN OS=Linux 6.1 #1 SMP Reason=disk is dying [root@2026-11-22T06:00:00]"
    )
    assert fields["State"] == "IDLE+DRAIN"
    assert fields["OS"] == "Linux 6.1 #1 SMP"
    assert fields["Reason"] == "disk is dying [root@2026-11-22T06:00:00]"


@pytest.mark.parametrize(
    ("state", "usable"),
    [("IDLE", True), ("MIXED", True), ("ALLOCATED", True), ("IDLE+POWERED_DOWN", True), ("IDLE~", True), ("IDLE+PLANNED", True),
     ("DOWN", False), ("DOWN*", False), ("IDLE*", False), ("IDLE+DRAIN", False), ("MIXED+DRAIN", False), ("DOWN+NOT_RESPONDING", False),
     ("IDLE+MAINT", False)],
)  # fmt: skip
def test_a_node_that_is_down_or_drained_gets_no_job(state: str, *, usable: bool) -> None:
    assert NodeState("bob", state).usable is usable


def test_slurms_own_words_lose_the_name_of_its_command() -> None:
    printed = SlurmAnswer(
        1,
        "",
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed:"
        " Invalid\n",
    )
    assert printed.words == "invalid partition specified: x; Batch job submission failed: Invalid"


@pytest.mark.parametrize("size", [5, 1_023, 1_024, 1_025, 2_048, 5_000])
def test_messages_that_srun_breaks_into_pieces_are_whole_again(size: int, tmp_path: Path) -> None:
    message = {"kind": "plan", "text": ""}
    message["text"] = "x" * max(0, size - len(json.dumps(message)))
    whole = json.dumps(message)
    pieces = [whole[start : start + 1_024] for start in range(0, len(whole), 1_024)]
    text = (
        "".join(f"0: {piece}\n1: {piece}\n" for piece in pieces)
        + "srun: error: bob: task 1: Killed\n0: Traceback\n"
    )
    path = tmp_path / "lines"
    lines, heard = JobOutput(path), []
    assert lines.read_new() == []
    for end in (0, 700, 1_500, len(text)):  # read while it is written
        path.write_text(text[:end])
        heard += lines.read_new()
    assert [(spoken.node, spoken.message) for spoken in heard] == [
        (0, message),
        (1, message),
        (None, None),
        (0, None),
    ]
    assert heard[2].text == "srun: error: bob: task 1: Killed"


def test_job_with_a_silent_head_has_step_and_checkpoint_of_the_runs_files(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path)
    lines = [{"step": step, "loss": 2.0 / step, "tokens": 10 * step} for step in range(1, 8)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "lo')
    for step in (3, 6):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    (run.checkpoints / ".tmp-step-00000007").mkdir()
    followed = JobEnd(JobState("7", "NODE_FAIL"), None, [], None, [])
    result, verdict = result_of_job(followed, run=run, seconds=1.0)
    assert verdict is not None
    assert verdict.cause == "node_unreachable"
    assert (result.step, result.tokens, result.loss) == (7, 70, 2.0 / 7)
    assert result.checkpoint == str(run.checkpoints / "step-00000006")
