"""What a start in a directory is, case by case. Run: pytest tests/guard/rundir/test_start_decision.py"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import small_disk
from unisono.base.errors import UsageError
from unisono.guard.facts.storage import leave_nonce
from unisono.guard.rundir import RunDir
from unisono.jobs.runs.start_decision import (
    StartDecision,
    decide_start,
    next_old,
    refuse_if_shrunk,
    set_aside,
)
from unisono.trainer.config import RunConfig, config_digest


def _config(root: Path, **changes: Any) -> RunConfig:
    body: dict[str, Any] = {
        "model": "builtin:tiny", "data": {"train": "rows.jsonl"}, "duration": "3 epochs", "output_dir": str(root), **changes
    }  # fmt: skip
    return RunConfig.model_validate(body)


def _write_run(
    root: Path, *, step: int = 40, total: int = 100, outcome: str | None = None, **changes: Any
) -> RunDir:
    """A run as a start leaves it."""
    run = RunDir(root)
    run.checkpoints.mkdir(parents=True)
    config = _config(root, **changes)
    plan = {"schema": 1, "run_id": "the-run", "config": config.model_dump(mode="json", by_alias=True), "total_steps": total,
            "config_digest": config_digest(config)}  # fmt: skip
    run.plan.write_text(json.dumps(plan))
    run.config.write_text("# Written by unisono 0.1\n")
    run.metrics.write_text("")
    run.checkpoint(step).mkdir()
    if outcome is not None:
        run.result.write_text(json.dumps({"schema": 1, "outcome": outcome, "exit_code": 0, "step": step}))
    return run


def _decide(
    root: Path,
    *,
    resume: bool = False,
    fresh: bool = False,
    allow: frozenset[str] = frozenset(),
    **changes: Any,
) -> StartDecision:
    """The decision; and a check that nothing was touched by it."""
    before = _snapshot(root)
    try:
        return decide_start(RunDir(root), _config(root, **changes), resume=resume, fresh=fresh, allow=allow)
    finally:
        assert _snapshot(root) == before


def _snapshot(root: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in root.parent.rglob("*"))


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("there", ["nothing", "empty", "only a lock", "parents missing"])
def test_where_nothing_is_a_run_begins_also_with_resume(there: str, tmp_path: Path, *, resume: bool) -> None:
    root = tmp_path / "a" / "b" if there == "parents missing" else tmp_path / "out"
    if there in ("empty", "only a lock"):
        root.mkdir()
    if there == "only a lock":
        (root / "run.lock").write_text("")
    decision = _decide(root, resume=resume)
    assert decision.kind == "fresh"
    assert decision.run_id


def _write_run_of_ranks(root: Path, *, of_ranks: tuple[int, int] | None, world_size: int, size: int) -> None:
    run = _write_run(root, batch={"global": size, "micro": 2})
    plan = json.loads(run.plan.read_text())
    run.plan.write_text(
        json.dumps(plan | {"global_batch": size, "batch_of_ranks": of_ranks, "world_size": world_size})
    )


@pytest.mark.parametrize("of_ranks", [(2, 4), None])
def test_a_batch_of_ranks_is_the_same_on_any_number_of_them(
    tmp_path: Path, of_ranks: tuple[int, int] | None
) -> None:
    root = tmp_path / "out"
    _write_run_of_ranks(root, of_ranks=of_ranks, world_size=2, size=16)
    assert _decide(root, batch={"per_rank": 2, "accumulate": 4}).earlier_batch == (16, of_ranks)
    for batch in ({"global": 16, "micro": 2}, {"per_rank": 1, "accumulate": 8}):
        assert _decide(root, batch=batch).kind == "resume"
    for batch in (
        {"per_rank": 2, "accumulate": 8},
        {"per_rank": 3, "accumulate": 4},
        {"global": 8, "micro": 2},
    ):
        with pytest.raises(UsageError, match="batch"):
            _decide(root, batch=batch)


def test_two_fresh_runs_have_two_names(tmp_path: Path) -> None:
    assert _decide(tmp_path / "out").run_id != _decide(tmp_path / "out").run_id


def test_a_start_that_died_before_its_plan_is_started_again(tmp_path: Path) -> None:
    root = tmp_path / "out"
    for folder in ("events", "logs", "checkpoints"):
        (root / folder).mkdir(parents=True)
    (root / "data.json").write_text('{"schema": 1}')
    leave_nonce(root)  # a head that was killed before the other nodes had come
    (root / "config.yaml").write_text("# Written by unisono 0.1\nseed: 0\n")
    (root / ".plan.json.tmp-123-ab12").write_text("half")
    decision = _decide(root)
    assert decision.kind == "fresh"
    assert "before its plan was made" in decision.reason


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("outcome", [None, "preempted", "interrupted", "stalled", "died", "failed"])
def test_an_unfinished_run_continues_by_itself_and_reports_it(
    outcome: str | None, tmp_path: Path, *, resume: bool
) -> None:
    root = tmp_path / "out"
    _write_run(root, outcome=outcome)
    decision = _decide(root, resume=resume)
    assert (decision.kind, decision.run_id) == ("resume", "the-run")
    assert "unfinished" in decision.reason
    assert outcome is None or outcome in decision.reason


def test_what_does_not_decide_what_is_learned_may_change(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root)
    decision = _decide(root, duration="5 epochs", restarts=7, track=["tensorboard"], grace="1 minute")
    assert decision.kind == "resume"
    assert "5 epochs instead of 3 epochs" in decision.reason


@pytest.mark.parametrize("outcome", [None, "completed"])
@pytest.mark.parametrize("resume", [False, True])
def test_settings_of_a_different_run_are_refused_line_by_line_with_a_fix(
    outcome: str | None, tmp_path: Path, *, resume: bool
) -> None:
    """The first line's fix is what to type; each further line says what its change means."""
    root = tmp_path / "out"
    _write_run(root, outcome=outcome)
    with pytest.raises(UsageError) as caught:
        _decide(root, resume=resume, optim={"lr": 1e-3}, seed=5, checkpoint={"keep": 9})
    first, *rest = caught.value.problems
    assert caught.value.exit_code == 2
    assert "would become a different one: 2 changes" in first.what
    assert "--allow optim.lr --allow seed" in first.fix
    assert all(way in first.fix for way in ("revert them", "a different output_dir", "out.old-1"))
    assert [problem.what.partition(":")[0] for problem in rest] == [
        "optim.lr is 0.001, and was 0.0002",
        "seed is 5, and was 0",
    ]
    assert all(problem.what.partition(": ")[2] for problem in rest), "each says what it means"


def test_what_is_allowed_continues_and_the_rest_is_still_refused(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root)
    asked: dict[str, Any] = {"optim": {"lr": 1e-3}, "seed": 5}
    assert _decide(root, allow=frozenset({"optim.lr", "seed"}), **asked).kind == "resume"
    with pytest.raises(UsageError) as caught:
        _decide(root, allow=frozenset({"seed"}), **asked)
    assert "pass --allow optim.lr to resume" in caught.value.problems[0].fix
    assert len(caught.value.problems) == 2


def test_what_the_checkpoint_cannot_follow_cannot_be_allowed(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root)
    with pytest.raises(UsageError) as caught:
        _decide(root, batch={"global": 8}, seed=5, allow=frozenset({"batch.global"}))
    first, *rest = caught.value.problems
    assert "revert batch.global, which cannot be allowed, and pass --allow seed for the rest" in first.fix
    assert "rows would be repeated or skipped" in rest[0].what


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint": {"every": "7 steps"}}, {"eval": {"every": None}}, {"batch": {"micro": 1}}, {"device": "cpu"},
        {"memory": {"gradient_checkpointing": True}}, {"parallel": {"strategy": "ddp"}}, {"grace": "1 minute"}, {"restarts": 0},
        {"data": {"train": "moved.jsonl"}}, {"model": "moved"}, {"track": ["tensorboard"]},
    ],
    ids=str,
)  # fmt: skip
def test_what_alters_no_meaning_by_itself_continues(change: dict[str, Any], tmp_path: Path) -> None:
    _write_run(tmp_path / "out")
    assert _decide(tmp_path / "out", **change).kind == "resume"


def test_a_different_config_may_be_tried_where_no_step_was_made(tmp_path: Path) -> None:
    run = _write_run(tmp_path / "out", outcome="died")
    run.checkpoint(40).rmdir()
    decision = _decide(run.root, seed=1)
    assert decision.kind == "fresh"
    assert decision.run_id != "the-run"
    assert "before its first step" in decision.reason
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UsageError, match="a different one"):
        _decide(run.root, seed=1)


@pytest.mark.parametrize("flags", [{}, {"resume": True}])
def test_a_finished_run_is_not_written_over(flags: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root, step=100, total=100, outcome="completed")
    with pytest.raises(UsageError, match="is finished: 100 steps, duration 3 epochs") as caught:
        _decide(root, **flags)
    fix = caught.value.problems[0].fix
    assert all(remedy in fix for remedy in ("--resume", "--fresh", "a different output_dir"))


def test_a_finished_run_grows_only_with_resume(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root, step=100, total=100, outcome="completed")
    with pytest.raises(UsageError, match="is finished"):
        _decide(root, duration="5 epochs")
    decision = _decide(root, resume=True, duration="5 epochs")
    assert (decision.kind, decision.run_id, decision.done_steps) == ("extend", "the-run", 100)
    assert "to 5 epochs" in decision.reason


def test_a_finished_run_does_not_shrink(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root, step=100, total=100, outcome="completed")
    with pytest.raises(UsageError, match="is finished"):
        _decide(root, resume=True, duration="2 epochs")


def test_a_different_unit_is_judged_once_steps_are_known(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root, step=100, total=100, outcome="completed")
    decision = _decide(root, resume=True, duration="120 steps")
    refuse_if_shrunk(decision, done_steps=100, total_steps=120)
    for total in (100, 80):
        with pytest.raises(UsageError, match=f"is {total} steps, but 100 are already done"):
            refuse_if_shrunk(decision, done_steps=100, total_steps=total)


def test_an_extension_that_died_before_its_first_step_can_be_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root, step=100, total=170, outcome="completed", duration="5 epochs")
    assert _decide(root, resume=True, duration="5 epochs").kind == "extend"


def test_an_unfinished_run_cannot_lose_steps(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root)
    decision = _decide(root, duration="1 epoch")
    refuse_if_shrunk(decision, done_steps=40, total_steps=40)  # it has come to its end, and writes its result
    with pytest.raises(UsageError, match="is 30 steps, but 40 are already done"):
        refuse_if_shrunk(decision, done_steps=40, total_steps=30)


@pytest.mark.parametrize("outcome", [None, "completed"])
def test_fresh_is_a_new_run_whatever_was_there(outcome: str | None, tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root, outcome=outcome)
    decision = _decide(root, fresh=True, seed=9)
    assert decision.kind == "fresh"
    assert decision.run_id != "the-run"
    assert "is renamed" in decision.reason


def test_setting_aside_renames_and_deletes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "out"
    (tmp_path / "out.old-1").mkdir()
    run = _write_run(root)
    before = sorted(path.name for path in run.root.rglob("*"))
    moved = set_aside(run)
    assert moved == tmp_path / "out.old-2"
    assert not root.exists()
    assert sorted(path.name for path in moved.rglob("*")) == before
    assert next_old(root) == tmp_path / "out.old-3"


def test_resume_and_fresh_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude"):
        _decide(tmp_path / "out", resume=True, fresh=True)


FOREIGN: dict[str, str] = {
    "thesis.tex": "",
    "config.yaml": "seed: 0  # written by hand\n",
    "data.json": '[{"my": "rows"}]',
    "plan.json": '{"tasks": ["holiday"]}',
    "environment.json": '{"conda": 1}',
    "result.json": '{"schema": 1, "outcome": "completed"}',
    "model": "",
    "metrics.jsonl": "",
}


@pytest.mark.parametrize("flags", [{}, {"resume": True}, {"fresh": True}], ids=str)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_directory_that_is_not_a_run_is_refused_and_never_renamed(
    name: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "out"
    root.mkdir()
    (root / name).write_text(FOREIGN[name])
    with pytest.raises(UsageError, match="is not a run of unisono") as caught:
        _decide(root, **flags)
    assert name in caught.value.problems[0].what
    assert caught.value.problems[0].fix


def test_what_a_person_puts_beside_a_run_is_not_a_hindrance(tmp_path: Path) -> None:
    root = tmp_path / "out"
    _write_run(root)
    (root / "notes.txt").write_text("looks good")
    assert _decide(root).kind == "resume"


@pytest.mark.parametrize("content", ["torn {", "{}", None])
def test_checkpoints_without_a_plan_are_refused(content: str | None, tmp_path: Path) -> None:
    run = _write_run(tmp_path / "out")
    if content is None:
        run.plan.unlink()
    else:
        run.plan.write_text(content)
    with pytest.raises(UsageError, match=r"holds checkpoints, but no plan") as caught:
        _decide(run.root)
    assert caught.value.problems[0].where == str(run.plan)


def test_a_config_of_a_different_version_is_refused_with_the_key(tmp_path: Path) -> None:
    run = _write_run(tmp_path / "out")
    plan = json.loads(run.plan.read_text())
    plan["config"]["optim"]["gone"] = 1
    run.plan.write_text(json.dumps(plan))
    with pytest.raises(UsageError, match="cannot read") as caught:
        _decide(run.root)
    assert "optim.gone" in caught.value.problems[0].why


def test_an_output_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for root in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(UsageError, match="is a file") as caught:
            decide_start(RunDir(root), _config(root), resume=False, fresh=False)
        assert caught.value.problems[0].where == "output_dir"


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="is a broken link"):
        decide_start(RunDir(tmp_path / "out"), _config(tmp_path / "out"), resume=False, fresh=False)


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "result.json",
        "config.yaml",
        "loss.svg",
        "logs/box-rank-00000.log",
        "events/rank-00000.jsonl",
    ],
)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_the_place_of_a_runs_own_file_is_refused(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    run = _write_run(tmp_path / "out")
    path = run.root / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(UsageError, match=f"{path.name} is a (named pipe|directory)") as caught:
        _decide(run.root)
    assert str(path) in caught.value.problems[0].fix
    assert _decide(run.root, fresh=True).kind == "fresh"


@pytest.mark.parametrize("name", ["n" * 300, "\0", "/".join(["d" * 200] * 25)])
def test_a_name_that_no_directory_can_have_is_refused(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    with pytest.raises(UsageError, match="output_dir cannot be used") as caught:
        decide_start(RunDir(root), _config(root), resume=False, fresh=False)
    assert str(root) in caught.value.problems[0].where


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory that this user cannot write."""
    place = tmp_path / "closed"
    place.mkdir(mode=0o500)
    if os.geteuid() != 0:
        yield place
        return
    with small_disk(place, "ro"):  # root may write everywhere else
        yield place


@pytest.mark.parametrize("below", ["", "out", "a/b"])
def test_an_output_dir_that_cannot_be_written_is_refused(below: str, closed: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written") as caught:
        decide_start(RunDir(closed / below), _config(closed / below), resume=False, fresh=False)
    assert caught.value.problems[0].where == "output_dir"
    assert str(closed) in caught.value.problems[0].what
