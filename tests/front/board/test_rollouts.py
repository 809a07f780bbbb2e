"""Sampled answers on the board: what it reads of the files of rollouts, and files that are not what
they seem.

Run: .venv/bin/python -m pytest tests/front/board/test_rollouts.py
"""

import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.front.board.made_runs import groups_of, make_run
from unisono.front.board.follow import FollowedRun
from unisono.front.board.regions import show_region
from unisono.front.board.rollouts import NO_PYARROW
from unisono.trainer.objectives.rollout_files import write_rollout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with answers of 8 steps."""
    return make_run(tmp_path / "run", rollouts=8)


def shown(root: Path, **query: str) -> dict[str, Any]:
    run = FollowedRun("run", root)
    run.look()
    return show_region(run, "rollouts", query)


def test_a_step_has_its_groups_and_their_means(root: Path) -> None:
    table = parquet.read_table(root / "rollouts" / "step-00000005.0.parquet").to_pylist()
    region = shown(root, step="5")
    assert (region["first"], region["last"], region["step"], region["problems"]) == (1, 8, 5, [])
    assert [group["rewards"] for group in region["groups"]] == [
        [row["reward"] for row in table if row["place"] == place] for place in (12, 13, 14)
    ]
    figures = region["figures"]
    assert figures["reward"] == pytest.approx(sum(row["reward"] for row in table) / 12)
    assert figures["answer_tokens"] == pytest.approx(sum(len(row["ids"]) for row in table) / 12)
    assert figures["truncated"] == pytest.approx(sum(row["stop"] == "length" for row in table) / 12)
    assert figures["equal_groups"] == pytest.approx(sum(row["is_equal"] for row in table) / 12)
    assert set(figures) >= {"reward_exact", "reward_length"}


def test_the_answers_of_a_group_are_whole(root: Path) -> None:
    chosen = shown(root, step="5", group="13.0")["group"]
    rows = parquet.read_table(root / "rollouts" / "step-00000005.0.parquet").to_pylist()
    rows = [row for row in rows if row["place"] == 13]
    assert chosen["row"] == rows[0]["row"]
    assert chosen["prompt"][1]["content"] == "What is 14 + 10?"
    for answer, row in zip(chosen["answers"], rows, strict=True):
        assert {name: answer[name] for name in ("text", "reward", "advantage", "stop")} == {
            name: row[name] for name in ("text", "reward", "advantage", "stop")
        }
        assert answer["tokens"] == len(row["ids"])


def test_a_step_that_there_is_not_is_the_nearest(root: Path) -> None:
    assert [shown(root, **query)["step"] for query in ({}, {"step": "99"}, {"step": "0"}, {"step": "x"})] == [
        8,
        8,
        1,
        8,
    ]


def test_the_ranks_and_the_steps_of_a_rollout_are_in_one_place(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    rng = random.Random(0)
    steps = [groups_of(step, rng, share=0.5) for step in (1, 2, 3)]
    for rank in (0, 1):
        mine = [group for groups in steps for group in groups if group.place % 2 == rank]
        write_rollout(root, 1, mine, rank=rank, ranks=2)
    region = shown(root, step="2")
    assert (region["first"], region["last"]) == (1, 3)
    assert [group["key"] for group in region["groups"]] == ["3.0", "4.0", "5.0"]


def test_a_prompt_over_the_steps(root: Path) -> None:
    region = shown(root, row="data/prompts.jsonl:2")
    assert [group["step"] for group in region["over"]] == [1, 3, 5, 7]
    assert {group["prompt"][1]["content"] for group in region["over"]} == {"What is 14 + 10?"}
    assert all(len(group["answers"]) == 4 for group in region["over"])
    assert shown(root, row="../../etc/passwd")["over"] == []


def test_of_many_occurrences_the_first_and_the_last_stay(tmp_path: Path) -> None:
    region = shown(make_run(tmp_path / "run", rollouts=60), row="data/prompts.jsonl:2")
    steps = [group["step"] for group in region["over"]]
    assert (len(steps), steps[0], steps[-1], region["left_out"]) == (12, 1, 59, 18)


def test_a_file_has_some_steps_with_prompts_that_recur(root: Path) -> None:
    region = shown(root, spread="1")
    assert [one["step"] for one in region["steps"]] == [1, 2, 4, 5, 7, 8]
    assert all(len(one["details"]) == 3 and one["groups_left_out"] == 0 for one in region["steps"])


def test_long_texts_are_cut(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    write_rollout(root, 1, groups_of(1, random.Random(0), share=0.5, text="long " * 10_000), rank=0, ranks=1)
    group = shown(root)["group"]
    assert len(group["answers"][0]["text"]) < 4_100
    assert len(group["prompt"][1]["content"]) < 4_100
    assert len(group["row"]) < 4_100


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"PAR1 nothing", "is damaged"),
        (pa.table({"step": [1]}), "has no column place as a run writes it"),
        (pa.table({"step": ["one"], "place": [1]}), "has no column step as a run writes it"),
    ],
    ids=["no parquet", "columns are missing", "a column of another type"],
)
def test_other_files_are_a_problem_in_words(root: Path, content: Any, problem: str) -> None:
    path = root / "rollouts" / "step-00000008.0.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        parquet.write_table(content, path)
    (said,) = shown(root)["problems"]
    assert problem in said
    assert path.name in said


def test_a_link_out_of_the_run_is_not_followed(root: Path, tmp_path: Path) -> None:
    path = root / "rollouts" / "step-00000008.0.parquet"
    path.rename(tmp_path / "elsewhere.parquet")
    path.symlink_to(tmp_path / "elsewhere.parquet")
    assert shown(root)["problems"] == ["it is a link that leads out of the run's directory"]


def test_names_of_other_files_are_no_rollouts(root: Path) -> None:
    for name in (
        "step-x.0.parquet",
        "step-00000009.parquet",
        "step-00000009.0.parquet.tmp",
        "step-1.0.parquet",
    ):
        (root / "rollouts" / name).write_bytes(b"nothing")
    assert (shown(root)["last"], shown(root)["problems"]) == (8, [])


def test_without_pyarrow_it_says_what_is_missing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    assert shown(root)["problems"] == [NO_PYARROW]


def test_a_run_without_rollouts_has_nothing_to_show(tmp_path: Path) -> None:
    region = shown(make_run(tmp_path / "run"))
    assert set(region) == {"schema", "version", "problems"}
    assert region["problems"] == []


def test_new_answers_are_announced(root: Path) -> None:
    run = FollowedRun("run", root)
    run.look()
    assert "rollouts" not in run.look()
    write_rollout(root, 9, groups_of(9, random.Random(0), share=0.5), rank=0, ranks=1)
    assert "rollouts" in run.look()
