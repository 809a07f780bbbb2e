"""What may change under a run that goes on. Run: pytest tests/guard/rundir/test_plan_changes.py"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.errors import UsageError
from unisono.guard.rundir import RunDir
from unisono.jobs.runs.config_changes import ChangeFinding, not_allowed
from unisono.jobs.runs.plan_changes import ResumeChanges, check_same_run, find_changes, unused_allowances
from unisono.trainer.config import RunConfig

SPLIT = {"rows": 40, "sequences": 40, "tokens": 400, "loss_tokens": 200}


def config(**more: Any) -> dict[str, Any]:
    body = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "output_dir": "out", **more}
    return RunConfig.model_validate(body).model_dump(mode="json", by_alias=True)


PLAN: dict[str, Any] = {
    "config": config(), "model": {"digest": "m1"}, "threads": 2, "dtype": "float32", "device": {"kind": "cpu", "name": "x"},
    "data": {"digest": "d1", "rows_digest": "r1", "files_digest": "f1", "tokenizer_digest": "t1", "train": SPLIT, "eval": None},
    "micro_batch": 4, "gradient_checkpointing": False, "world_size": 1, "strategy": "single", "global_batch": 16, "resume": {"step": 5},
}  # fmt: skip

OTHERWISE: dict[str, Any] = {
    "model.digest": "m2", "threads": 4, "dtype": "bfloat16", "device.kind": "cuda", "device.name": "y", "micro_batch": 2, "world_size": 2,
    "strategy": "fsdp", "gradient_checkpointing": True, "data.rows_digest": "r2", "data.files_digest": "f2", "data.tokenizer_digest": "t2",
    "data.train": {**SPLIT, "sequences": 30}, "config.seed": 3, "config.optim.lr": 0.5, "config.checkpoint.keep": 9,
    "config.data.format": "alpaca", "config.data.packing": False, "config.model.tokenizer": "other",
}  # fmt: skip


def plan(**changes: Any) -> dict[str, Any]:
    """The plan with other values at dotted places, written with __ for a dot."""
    found = copy.deepcopy(PLAN)
    for dotted, value in changes.items():
        *sections, name = dotted.split("__")
        place = found
        for section in sections:
            place = place[section]
        place[name] = value
    return found


def changed(before: dict[str, Any], after: dict[str, Any], **packages: str) -> list[ChangeFinding]:
    return find_changes(before, after, {}, packages)


def names(found: list[ChangeFinding]) -> list[str]:
    return [finding.name for finding in found if finding.verdict != "line"]


def otherwise(keys: set[str]) -> dict[str, Any]:
    return plan(**{key.replace(".", "__"): OTHERWISE[key] for key in keys})


some_keys = st.sets(st.sampled_from(sorted(OTHERWISE)))


def test_the_same_plan_continues_silently() -> None:
    assert changed(PLAN, PLAN) == []


@given(some_keys)
def test_a_plan_differs_from_itself_in_nothing(keys: set[str]) -> None:
    same = otherwise(keys) | {
        "device": PLAN["device"]
    }  # a GPU is not bit-equal even to itself, which is said
    assert changed(same, same) == []


@given(some_keys)
def test_whatever_differs_is_reported_or_refused(keys: set[str]) -> None:
    reported = keys - {"data.files_digest", "data.tokenizer_digest"}
    assert bool(changed(PLAN, otherwise(keys))) >= bool(reported)


@given(some_keys)
def test_changes_the_refusal_asks_to_allow_are_sufficient_and_all_needed(keys: set[str]) -> None:
    found = changed(PLAN, otherwise(keys))
    needed = frozenset(names(found))
    assert not_allowed(found, needed) == []
    for one in needed:
        assert [finding.name for finding in not_allowed(found, needed - {one})] == [one]


@given(some_keys)
def test_what_makes_a_different_run_comes_before_the_lines(keys: set[str]) -> None:
    order = [finding.verdict for finding in changed(PLAN, otherwise(keys))]
    assert order == sorted(order, key=["fixed", "refused", "line"].index)


@given(some_keys)
def test_other_rows_are_never_continued_unless_something_was_allowed(keys: set[str]) -> None:
    if keys & {"data.rows_digest", "data.train"}:
        assert set(names(changed(PLAN, otherwise(keys)))) & {
            "data", "tokenizer", "versions", "seed", "data.packing",
        }  # fmt: skip


def test_other_files_that_give_the_same_rows_are_a_line() -> None:
    (found,) = changed(PLAN, plan(data__files_digest="f2"))
    assert (found.verdict, found.text) == ("line", "the data files have changed, and give the same rows")


def test_files_that_were_moved_are_a_line() -> None:
    (found,) = changed(PLAN, plan(config=config(data={"train": "moved.jsonl"})))
    assert found.text == 'data.train is "moved.jsonl", and was "rows.jsonl": the rows are the same'
    (found,) = changed(PLAN, plan(config=config(model={"path": "m-moved"})))
    assert found.text.endswith("its files have the same content")


def test_other_rows_report_exactly_where_the_run_continues_in_them() -> None:
    (found,) = changed(
        PLAN, plan(data__rows_digest="r2", data__files_digest="f2", data__train={**SPLIT, "sequences": 30})
    )
    assert (found.name, found.before, found.after) == ("data", "r1", "r2")
    assert "(files changed)" in found.text
    assert (
        "80 sequences are done; the order of an epoch is drawn again for 30 sequences (they were 40)"
        in found.text
    )
    assert "continues at position 21 of epoch 3" in found.text
    assert "no longer form complete epochs" in found.text


def test_a_split_off_evaluation_may_have_been_learned() -> None:
    share = config(data={"train": "rows.jsonl", "eval": 0.1})
    found = changed(plan(config=share), plan(config=share, data__rows_digest="r2", data__files_digest="f2"))
    assert "evaluation rows may have been trained on" in found[0].text


def test_the_tokenizer_has_its_own_name() -> None:
    found = changed(PLAN, plan(data__tokenizer_digest="t2", data__rows_digest="r2"))
    assert names(found) == ["tokenizer"]
    (line,) = changed(PLAN, plan(data__tokenizer_digest="t2"))
    assert line.verdict == "line"
    assert "same tokens" in line.text


def test_equal_files_loaded_differently_are_a_different_tokenizer() -> None:
    """It is transformers that loads them differently: the traits differ and the files do not."""
    before = plan(data__tokenizer_traits="a")
    found = changed(before, plan(data__tokenizer_traits="b", data__rows_digest="r2"))
    assert names(found) == ["tokenizer"]
    (line,) = changed(before, plan(data__tokenizer_traits="b"))
    assert line.verdict == "line"
    assert changed(PLAN, before) == [], "a plan of an earlier version"


def test_other_rows_of_the_same_files_are_the_packages_doing() -> None:
    found = find_changes(PLAN, plan(data__rows_digest="r2"), {"tokenizers": "0.21"}, {"tokenizers": "0.22"})
    assert names(found) == ["versions"]
    assert "(tokenizers is 0.22, and was 0.21)" in found[0].text


def test_a_setting_that_shapes_rows_explains_that_they_are_others() -> None:
    found = changed(PLAN, plan(config=config(seed=3), data__rows_digest="r2"))
    assert names(found) == ["seed"]


def test_a_different_model_reports_what_the_weights_are_upon() -> None:
    (found,) = changed(PLAN, plan(model__digest="m2"))
    assert found.name == "model"
    assert "the adapter would continue on weights that it was not trained on" in found.text
    full = config(adapter=None)
    (found,) = changed(plan(config=full), plan(config=full, model__digest="m2"))
    assert "trained weights come from the checkpoint" in found.text


def test_different_world_size_reports_what_stays_the_same_and_what_changes() -> None:
    """The line also says why losses agree to rounding only."""
    (found,) = changed(PLAN, plan(world_size=2, strategy="ddp"))
    assert found.verdict == "line"
    assert (
        found.text
        == "world_size is 2, and was 1: the same rows in the same order; losses agree to rounding, not"
        " bit-exactly: sums over the ranks have a different order"
    )


def test_strategy_is_reported_beside_a_new_world_size_if_it_cuts_tensors() -> None:
    two = changed(PLAN, plan(world_size=2, strategy="fsdp"))
    assert [finding.text.split()[0] for finding in two] == ["world_size", "strategy"]
    assert "parallel.strategy" not in two[1].text, "several ranks cannot be single"
    (one,) = changed(plan(world_size=2, strategy="ddp"), plan(world_size=2, strategy="fsdp"))
    assert "set parallel.strategy to ddp to restore it" in one.text


def test_with_dropout_a_different_world_size_agrees_in_the_mean_only() -> None:
    dropping = config(adapter={"dropout": 0.1})
    (found,) = changed(plan(config=dropping), plan(config=dropping, world_size=2))
    assert "adapter.dropout is 0.1" in found.text
    assert "only on average" in found.text


def test_what_auto_came_to_counts_and_not_what_was_written() -> None:
    written = config(batch={"micro": 4}, model={"path": "m", "dtype": "float32"}, device="cpu")
    assert changed(PLAN, plan(config=written)) == []
    (found,) = changed(PLAN, plan(dtype="bfloat16"))
    assert (found.name, found.verdict) == ("model.dtype", "refused")
    assert "set model.dtype to float32 to restore it" in found.text


def test_on_a_gpu_it_is_reported_that_nothing_is_bit_equal() -> None:
    (found,) = changed(plan(device__kind="cuda"), plan(device__kind="cuda"))
    assert "deterministic is false" in found.text
    same: dict[str, Any] = {"config": config(deterministic=True), "device__kind": "cuda"}
    assert changed(plan(**same), plan(**same)) == []


def test_what_costs_bit_equality_is_reported_with_the_remedy() -> None:
    (found,) = changed(PLAN, plan(threads=4))
    assert (
        found.text
        == "threads is 4, and was 2: losses agree to rounding, not bit-exactly: sums are split among the"
        " threads of a rank; set OMP_NUM_THREADS=2 to restore it"
    )


def test_only_packages_that_numbers_depend_on_are_named() -> None:
    found = find_changes(PLAN, PLAN, {"torch": "2.13.0", "pytest": "8"}, {"torch": "2.14.0", "pytest": "9"})
    assert [f.text for f in found] == ["torch is 2.14.0, and was 2.13.0: losses may not be bit-exact"]


def start(tmp_path: Path, after: dict[str, Any], *allow: str, torch: str = "1") -> ResumeChanges:
    return check_same_run(RunDir(tmp_path), after, {"torch": torch}, allow=frozenset(allow))


def write(tmp_path: Path, before: dict[str, Any]) -> None:
    RunDir(tmp_path).plan.write_text(json.dumps(before))
    RunDir(tmp_path).environment.write_text(json.dumps({"schema": 1, "packages": {"torch": "1"}}))


def test_the_earlier_start_is_read_from_its_directory(tmp_path: Path) -> None:
    write(tmp_path, PLAN)
    assert start(tmp_path, PLAN) == ResumeChanges([], [])
    assert start(tmp_path, PLAN, torch="2").lines[0].startswith("torch is 2, and was 1")


def test_everything_that_makes_a_different_run_is_refused_together(tmp_path: Path) -> None:
    write(tmp_path, PLAN)
    after = plan(data__rows_digest="r2", data__files_digest="f2", model__digest="m2", threads=4)
    with pytest.raises(UsageError) as caught:
        start(tmp_path, after)
    first, *rest = caught.value.problems
    assert "--allow model --allow data" in first.fix
    assert len(rest) == 2
    with pytest.raises(UsageError) as caught:
        start(tmp_path, after, "model")
    assert "pass --allow data to resume" in caught.value.problems[0].fix


def test_what_was_allowed_is_kept_over_all_starts(tmp_path: Path) -> None:
    write(tmp_path, PLAN)
    found = start(tmp_path, plan(model__digest="m2"), "model")
    assert found.lines[0].startswith("allowed: the model's files have changed")
    assert found.allowed == [{"key": "model", "before": "m1", "after": "m2", "from_step": 5}]
    write(tmp_path, plan(model__digest="m2") | {"allowed": found.allowed})
    later = plan(model__digest="m2", config=config(seed=9), resume={"step": 8})
    again = start(tmp_path, later, "seed")
    assert again.allowed == [*found.allowed, {"key": "seed", "before": 0, "after": 9, "from_step": 8}]
    assert not any("model" in line for line in again.lines), "the next start compares with what really ran"


def test_what_was_allowed_without_effect_is_reported(tmp_path: Path) -> None:
    write(tmp_path, PLAN)
    assert start(tmp_path, PLAN, "data").lines == unused_allowances(frozenset({"data"}))
    assert "--allow data was not needed" in unused_allowances(frozenset({"data"}))[0]
    assert start(tmp_path, plan(model__digest="m2"), "model", "seed").lines[1:] == unused_allowances(frozenset({"seed"}))  # fmt: skip
