"""What is wrong with a config is said all at once, with file, line and remedy, in plain words.

Run: pytest tests/config
"""

from pathlib import Path

import pytest

from unisono.base.errors import ConfigError, Problem
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import RunConfig

GOOD = "model: m\ndata: {train: d}\noutput_dir: o\n"


def refused(tmp_path: Path, text: str, *overrides: str) -> list[Problem]:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return list(caught.value.problems)


def the_one(tmp_path: Path, text: str, *overrides: str) -> Problem:
    (problem,) = refused(tmp_path, text, *overrides)
    return problem


def accepted(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    return load_config(file, overrides).config


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("modle: x", "did you mean `model`?"),
        ("optim: {warmpu: 3%}", "did you mean `warmup`?"),
        ("batch: {globl: 3}", "did you mean `global`?"),
        ("lr: 1.0e-4", "did you mean `optim.lr`?"),  # of another section
        ("optim: {strict: true}", "known keys here: kind, options, lr, "),  # nothing is near
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_and_its_line(
    tmp_path: Path, line: str, nearest: str
) -> None:
    problem = the_one(tmp_path, GOOD + line)
    assert problem.what.startswith("unknown key `")
    assert problem.where == f"{tmp_path}/t.yaml:4"
    assert problem.fix.startswith(nearest)


def test_all_problems_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    text = "model: m\ndata:\n  train: d\n  max_length: many\noptm: 1\nseed: -1\nduration: 3 moons\n"
    problems = refused(tmp_path, text, "batch.micro=x", "nonsense")
    lines = [int(problem.where[-1]) for problem in problems if problem.where[-1].isdigit()]
    assert lines == sorted(lines)
    assert {problem.where.removeprefix(f"{tmp_path}/") for problem in problems} == {
        "t.yaml:4", "t.yaml:5", "t.yaml:6", "t.yaml:7", "t.yaml", "command line",
    }  # fmt: skip
    assert len(problems) == 7  # with the missing output_dir, and two of the command line


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("seed: soon", "seed: must be a whole number of at least 0 and below 4,294,967,296, got 'soon'"),
        ("seed: 1.5", "seed: must be a whole number of at least 0 and below 4,294,967,296, got 1.5"),
        ("optim: {lr: fast}", "optim.lr: must be a number above 0, got 'fast'"),
        ("optim: {lr: .nan}", "optim.lr: must be a number above 0, got nan"),
        ("optim: {lr: true}", "optim.lr: must be a number above 0, got True"),
        ("optim: {betas: [0.9]}", "optim.betas: must be a list of two numbers from 0 to below 1, got a list"),
        ("deterministic: 1", "deterministic: must be true or false, got 1"),
        ("batch: {micro: 0}", "batch.micro: must be a whole number of at least 1 or `auto`, got 0"),
        ("track: wandbb", "track: must be a list (each: one of `tensorboard`, `wandb`, `swanlab`), got 'wandbb'"),
        ("eval: {every: 5}", "eval.every: must be an amount with its unit, e.g. `3 epochs`, `500 steps` or `2M tokens` or null, got 5"),
        ("output_dir: ''", "output_dir: must be text that is not empty, got ''"),
        ("memory: [1]", "memory: must be a section (keys: gradient_checkpointing), got a list"),
        ("adapter: {targets: ['(']}", "adapter.targets.0: '(' is not a valid regular expression: missing ), unterminated subpattern at position 0"),
        ("duration: 3 moons", "duration: '3 moons' has no unit; write for example `3 epochs`, `500 steps` or `2M tokens`"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_shown_with_what_the_key_takes(tmp_path: Path, line: str, what: str) -> None:
    text = GOOD.replace("output_dir: o\n", "") if line.startswith("output_dir") else GOOD
    assert the_one(tmp_path, text + line).what == what


def test_a_key_of_a_source_is_answered_with_its_place(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, "model: m\ndata: {train: d, columns: {output: a}}\noutput_dir: o\n")
    assert problem.fix == "it belongs to a source: data.train: [{path: FILE, columns: …}]"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("objective: pretrian", "did you mean `pretrain`?"),
        ("adapter: none", "write null"),
        ("adapter: {kind: lroa}", "did you mean `lora`?"),
        ("device: gpu", "did you mean `cuda`?"),
        ("track: wandbb", "did you mean `wandb`?"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(tmp_path: Path, line: str, fix: str) -> None:
    assert the_one(tmp_path, GOOD + line).fix == fix


def test_a_number_where_text_is_needed_gets_quotes(tmp_path: Path) -> None:
    problem = the_one(tmp_path, "model: {path: m, revision: 1234567}\ndata: {train: d}\noutput_dir: o\n")
    assert problem.fix == "put it in quotes: '1234567'"


@pytest.mark.parametrize("key", ["model", "data", "output_dir"])
def test_a_missing_key_is_named_with_an_example_that_loads(tmp_path: Path, key: str) -> None:
    text = "".join(line + "\n" for line in GOOD.splitlines() if not line.startswith(key))
    problem = the_one(tmp_path, text)
    assert problem.what == f"the key `{key}` is missing"
    accepted(tmp_path, text + problem.fix.removeprefix("add `").removesuffix("`"))


def test_of_a_union_only_the_deepest_problem_is_reported(tmp_path: Path) -> None:
    text = GOOD.replace("d}", "[a, {path: b, weight: -1}]}")
    assert the_one(tmp_path, text).what == "data.train.1.weight: must be a number above 0, got -1"


def test_contradictions_come_together_each_at_its_own_line(tmp_path: Path) -> None:
    text = GOOD + "batch: {micro: 3, global: 64}\ncheckpoint:\n  best: eval_loss\nfreeze: [embed]\n"
    problems = refused(tmp_path, text, "optim.kind=muon")
    assert {(problem.what.partition(":")[0], problem.where.removeprefix(f"{tmp_path}/")) for problem in problems} == {
        ("batch.micro", "t.yaml:4"), ("checkpoint.best", "t.yaml:6"), ("freeze", "t.yaml:7"), ("optim.kind", "command line"),
    }  # fmt: skip
    assert all(problem.fix for problem in problems)


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (
            "{per_rank: 2, global: 16}",
            "batch.per_rank: `global` already sets the number of sequences per step",
        ),
        (
            "{per_rank: 2, micro: 2}",
            "batch.micro: `per_rank` already sets the number of sequences per forward",
        ),
        ("{accumulate: 2}", "batch.accumulate: it counts forwards of `per_rank` sequences"),
    ],
)
def test_the_two_forms_of_the_batch_exclude_each_other(tmp_path: Path, batch: str, what: str) -> None:
    problem = the_one(tmp_path, GOOD + f"batch: {batch}")
    assert problem.what == what
    assert problem.fix


def test_sources_that_contradict_themselves_are_refused_each_with_its_line(tmp_path: Path) -> None:
    text = """model: m
output_dir: o
data:
  train:
  - {path: a, samples: 3, weight: 2}
  - path: b
    tags: {user_tag: u}
  eval:
  - {path: c, weight: 2}
  mix: {probabilities: [0.5]}
"""
    found = {
        problem.what.partition(":")[0]: problem.where.removeprefix(f"{tmp_path}/")
        for problem in refused(tmp_path, text)
    }
    assert found == {
        "data.train.0.weight": "t.yaml:5", "data.train.1.tags": "t.yaml:7", "data.eval.0.weight": "t.yaml:9",
        "data.mix.probabilities": "t.yaml:10",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("{strategy: interleave_over, probabilities: [0.5, 0.4]}", "they sum to 0.9"),
        ("{strategy: interleave_over, probabilities: [1.0]}", "1 probabilities for 2 sources"),
        ("{probabilities: [0.5, 0.5]}", "concat takes all rows"),
        ("{strategy: interleave}", "must be one of"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(tmp_path: Path, mix: str, words: str) -> None:
    text = f"model: m\noutput_dir: o\ndata: {{train: [a, b], mix: {mix}}}\n"
    assert words in the_one(tmp_path, text).what


def test_the_micro_batch_is_answered_with_those_that_divide(tmp_path: Path) -> None:
    problem = the_one(tmp_path, GOOD + "batch: {micro: 3, global: 64}")
    assert problem.what == "batch.micro: 3 does not divide the global batch of 64 sequences"
    assert problem.fix == "set batch.micro to 1, 2, 4, 8, 16, 32 or 64"


@pytest.mark.parametrize(
    "line",
    [
        "model: {path: m, quantize: nf4}\nadapter: null", "train_only: {layers: 1}", "optim: {kind: muon}",
        "eval: {stop_after: 3}", "objective: pretrain\ndata: {train: d, loss_on: last-answer}",
    ],
)  # fmt: skip
def test_other_contradictions_are_refused_with_a_remedy(tmp_path: Path, line: str) -> None:
    keys = {part.partition(":")[0] for part in line.splitlines()}
    rest = "".join(part + "\n" for part in GOOD.splitlines() if part.partition(":")[0] not in keys)
    assert the_one(tmp_path, rest + line).fix


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "'1e-4'"])
def test_numbers_are_read_as_people_write_them(tmp_path: Path, text: str) -> None:
    assert accepted(tmp_path, GOOD + f"optim: {{lr: {text}}}").optim.lr == 1e-4


def test_a_share_in_exponent_form_is_not_a_path(tmp_path: Path) -> None:
    assert accepted(tmp_path, GOOD, "data.eval=5e-2").data.eval == 0.05


def test_a_date_is_text(tmp_path: Path) -> None:
    assert accepted(tmp_path, GOOD, "output_dir=2026-11-21").output_dir == "2026-11-21"


def test_a_whole_number_stands_where_a_number_is_requested(tmp_path: Path) -> None:
    assert accepted(tmp_path, GOOD, "adapter.alpha=16").adapter.alpha == 16.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "key", "variable"),
    [
        ("model: m\ndata: {train: '${DATA_FILE}'}\noutput_dir: o\n", "data.train", "${DATA_FILE}"),
        ("model: m\ndata: {train: d}\noutput_dir: ${oc.env:HOME}/o\n", "output_dir", "${oc.env:HOME}"),
        ("model: $HOME/m\ndata: {train: d}\noutput_dir: o\n", "model.path", "$HOME"),
        ("model: m\ndata: {train: [{path: a/$USER}]}\noutput_dir: o\n", "data.train.0.path", "$USER"),
        ("model: m\ndata: {train: d}\noutput_dir: runs/qwen-$USER.1\n", "output_dir", "$USER"),
        ("model: m\ndata: {train: d}\noutput_dir: runs/$(date +%F)\n", "output_dir", "$(date +%F)"),
        ("model: m\ndata: {train: d}\noutput_dir: o\nseed: ${SEED}\n", "seed", "${SEED}"),
        ("model: '%MODEL_DIR%/m'\ndata: {train: d}\noutput_dir: o\n", "model.path", "%MODEL_DIR%"),
    ],
)
def test_a_variable_is_not_expanded_and_refused(tmp_path: Path, text: str, key: str, variable: str) -> None:
    problem = the_one(tmp_path, text)
    assert problem.what == f"{key} has the variable {variable}"
    assert "not expanded" in problem.why
    assert "use KEY=VALUE on the command line" in problem.fix
    assert (f'"{key}=' in problem.fix) == (variable.startswith("$") and ".0." not in key)


def test_a_section_where_a_list_of_sections_stands_is_a_list_of_one(tmp_path: Path) -> None:
    text = "model: m\ndata: {train: {path: a.csv, weight: 2}, eval: {path: b.csv}}\noutput_dir: o\n"
    data = accepted(tmp_path, text).data
    assert [(source.path, source.weight) for source in data.train] == [("a.csv", 2.0)]  # type: ignore[union-attr]
    assert [source.path for source in data.eval] == ["b.csv"]  # type: ignore[union-attr]
    assert accepted(tmp_path, text, "data.train.path=c.csv").data.train[0].path == "c.csv"  # type: ignore[union-attr]
    problem = the_one(tmp_path, text.replace("weight", "wieght"))
    assert problem.where.endswith(":2")
    assert "did you mean" in problem.fix


def test_a_variable_in_an_item_of_a_list_is_set_with_the_whole_list(tmp_path: Path) -> None:
    text = "model: m\ndata: {train: [a.jsonl, '${DATA}/b.jsonl']}\noutput_dir: o\n"
    assert "all of data.train:" in the_one(tmp_path, text).fix
    assert accepted(tmp_path, text, "data.train=[a.jsonl, /data/b.jsonl]").data.train == [
        "a.jsonl",
        "/data/b.jsonl",
    ]


def test_a_variable_where_yaml_begins_a_section_is_named_as_one(tmp_path: Path) -> None:
    problem = the_one(tmp_path, "model: m\noptim: {lr: ${LR}}\ndata: {train: d}\noutput_dir: o\n")
    assert "not expanded" in problem.why
    assert ":2:" in problem.where
    assert "not expanded" not in the_one(tmp_path, "model: '${M}\n").why  # the fault is behind the last line


def test_a_setting_in_the_place_of_the_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "model=builtin:tiny")
    assert "pass the config before KEY=VALUE" in caught.value.problems[0].fix


def test_the_command_that_expands_a_variable_has_the_rest_of_the_value(tmp_path: Path) -> None:
    problem = the_one(tmp_path, "model: m\ndata: {train: d}\noutput_dir: /work/${USER}/runs\n")
    assert '"output_dir=/work/${USER}/runs"' in problem.fix
    assert problem.where.endswith(":3")


def test_a_dollar_elsewhere_is_a_character(tmp_path: Path) -> None:
    text = GOOD + "adapter: {kind: lora, targets: ['.*(q|v)_proj$']}\n"
    accepted(tmp_path, text, "data.template=lf:qwen3", "data.system=Price in $USD of ${item}")
    accepted(tmp_path, text, "output_dir=runs/%Y%m%d-100%", "data.train=a$b.jsonl")
    drawn = "model: m\nobjective: diffusion\ndata: {train: d}\noutput_dir: o\n"
    accepted(tmp_path, drawn, "diffusion.prompts=['a ${colour} cat']")


@pytest.mark.parametrize(
    ("override", "ours"),
    [("epochs=5", "duration: 3 epochs"), ("learning_rate=1e-4", "optim.lr"), ("batch_size=4", "batch.global"), ("dataset=x", "data.train")],
)  # fmt: skip
def test_a_name_of_other_trainers_is_answered_with_ours(tmp_path: Path, override: str, ours: str) -> None:
    assert the_one(tmp_path, GOOD, override).fix == f"did you mean `{ours}`?"


def test_rows_or_runs_given_as_config_are_answered_with_the_right_command(tmp_path: Path) -> None:
    rows, run = tmp_path / "my rows.jsonl", tmp_path / "run"
    rows.write_text('{"text": "a"}\n')
    run.mkdir()
    for name in ("plan.json", "config.yaml"):
        (run / name).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_config(rows)
    assert f"`unisono init --data '{rows}' --out train.yaml`" in caught.value.problems[0].fix
    with pytest.raises(ConfigError) as caught:
        load_config(run)
    assert caught.value.problems[0].fix == f"pass its config: {run}/config.yaml"


def test_a_misspelled_config_is_answered_with_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "tarin.yaml")
    assert f"did you mean {tmp_path}/train.yaml?" in caught.value.problems[0].fix
