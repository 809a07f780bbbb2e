"""What our own runs' directories say; runs that really ended are in tests/jobs/nproc/test_diagnose.py.

Run: pytest tests/guard/diagnosis/test_own_runs.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.base.causes.verdict import Verdict
from unisono.guard.diagnosis.own_runs import diagnose_run, is_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks that has made five steps."""
    places = [{"rank": rank, "node_rank": 0, "host": "ada"} for rank in range(2)]
    write(
        tmp_path / "plan.json",
        {
            "schema": 1,
            "run_id": "r",
            "world_size": 2,
            "total_steps": 9,
            "nodes": [{"node_rank": 0, "host": "ada", "nproc": 2}],
            "ranks": places,
        },
    )
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 6)) + '{"step": 6, "lo'
    )
    for rank in range(2):
        events(
            tmp_path,
            rank,
            {"kind": "phase", "time": 1000.0, "phase": "start", "text": "x"},
            {"kind": "phase", "time": 1010.0, "phase": "data", "text": "y"},
        )
    write(tmp_path / "checkpoints/step-00000003/manifest.json", {})
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def events(run: Path, rank: int, *messages: dict[str, Any]) -> None:
    path = run / f"events/rank-{rank:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(message) + "\n" for message in messages))


def verdict(run: Path) -> Verdict:
    assert is_run(run)
    return diagnose_run(run).verdict


def result(run: Path, **fields: Any) -> None:
    write(run / "result.json", {"schema": 1, "exit_code": 0, "step": 5, **fields})


def test_a_completed_run_is_healthy_and_reports_of_its_restarts(run: Path) -> None:
    result(
        run,
        outcome="completed",
        restarts=[{"verdict": {"summary": "rank 0 was killed"}, "from_step": 3, "seconds": 1.0}],
    )
    found = verdict(run)
    assert (found.cause, found.severity, found.step) == ("healthy", "none", 5)
    assert found.evidence[0].text == "rank 0 was killed"


@pytest.mark.parametrize(
    ("outcome", "cause"), [("preempted", "preempted_sigterm"), ("interrupted", "healthy")]
)
def test_who_was_asked_to_end_is_reported_how_to_continue(run: Path, outcome: str, cause: str) -> None:
    result(run, outcome=outcome, exit_code=75)
    found = verdict(run)
    assert found.cause == cause
    assert "unisono train" in found.fix[-1]
    assert "resumes from step 3" in found.fix[-1]


@pytest.mark.parametrize(
    ("outcome", "exit_code", "says"),
    [
        ("completed", 0, "the program succeeded"),
        ("preempted", 143, "asked to stop (SIGTERM), and ended with exit code 143"),
        ("failed", 3, "ended with exit code 3"),
    ],
)
def test_program_under_run_is_promised_no_checkpoint_or_command_of_ours(
    run: Path, outcome: str, exit_code: int, says: str
) -> None:
    write(run / "plan.json", {"schema": 1, "run_id": "r", "command": ["torchrun", "train.py"], "nodes": []})
    events(run, 0, {"kind": "framework", "time": 1020.0, "name": "lightning"})
    result(run, outcome=outcome, exit_code=exit_code)
    found = verdict(run)
    assert says in found.summary
    reported = [line for line in found.fix if "unisono" in line or "resume" in line]
    assert ["ckpt_path" in line for line in reported] == ([] if outcome == "completed" else [True])


def test_a_refusal_gives_its_own_words_without_secrets(run: Path) -> None:
    secret = "hf_" + "Zq7Rw2Xk9Lm4Tn8Vb3Yc6Hd1"
    result(
        run,
        outcome="refused",
        exit_code=2,
        problems=[{"what": f"model.path is odd ({secret})", "where": "model.path", "fix": "set model.path"}],
    )
    found = verdict(run)
    assert found.summary == "model.path is odd (…)"
    assert found.fix[0] == "set model.path"


def test_a_run_that_ended_silently_names_who_fell_silent_first(run: Path) -> None:
    events(run, 0, {"kind": "checkpoint", "time": 1100.0, "step": 3})
    found = verdict(run)
    assert (found.cause, found.ranks, found.step) == ("undetermined", (), 5)
    assert "rank 1 fell silent first, in phase data" in found.summary


def test_a_rank_in_an_earlier_phase_than_the_others_is_the_one(run: Path) -> None:
    events(
        run,
        1,
        {"kind": "phase", "time": 1020.0, "phase": "start", "text": "x"},
        {"kind": "phase", "time": 1021.0, "phase": "load_data", "text": "x"},
    )
    events(
        run,
        0,
        {"kind": "phase", "time": 1020.0, "phase": "start", "text": "x"},
        {"kind": "phase", "time": 1021.0, "phase": "join", "text": "x"},
    )
    found = verdict(run)
    assert (found.cause, found.ranks, found.phase) == ("rank_stalled", (1,), "load_data")


def test_the_first_exception_that_is_not_a_victims_counts(run: Path) -> None:
    events(
        run,
        0,
        {
            "kind": "crashed",
            "time": 1050.0,
            "error": "RuntimeError: Connection closed by peer",
            "peer_lost": True,
        },
    )
    events(
        run,
        1,
        {
            "kind": "crashed",
            "time": 1051.0,
            "error": "ValueError: row 7",
            "traceback": "a\nValueError: row 7",
            "peer_lost": False,
        },
    )
    found = verdict(run)
    assert (found.cause, found.ranks) == ("user_code_error", (1,))


def test_exception_in_the_file_of_an_own_objective_is_blamed_on_its_line(run: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    write(run / "plan.json", {**plan, "config": {"objective": "/home/u/own.py:Own"}})
    trace = (
        'Traceback (most recent call last):\n  File "/home/u/own.py", line 7, in loss\n  File "/t/torch.py",'
        " line 1, in f\nValueError: x"
    )
    events(run, 1, {"kind": "crashed", "time": 1051.0, "error": "ValueError: x", "traceback": trace})
    found = verdict(run)
    assert found.summary.endswith("the likely origin is the objective, /home/u/own.py:7")
    assert found.fix[0] == "Fix the objective, /home/u/own.py:7."


def test_torn_and_foreign_files_do_not_matter(run: Path) -> None:
    (run / "events/rank-00001.jsonl").write_bytes(
        b'\xff\x00{"kind"\n[1]\n{"kind": "phase", "time": "x"}\n{"kind": "phase", "time": 1e999, "phase":'
        b' 3}\n{"kind": "crashed"'
    )
    (run / "result.json").write_text("{")
    (run / "agreement.json").write_text("[]")
    (run / "verdict.json").write_text('{"schema": 1}')
    assert verdict(run).summary


def test_a_directory_of_logs_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"steps": []}')
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / "missing")
