"""Preference objectives on the command line: what is refused with its line, and what a run shows.

Run: pytest tests/front/cli/test_preferences.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from unisono.front.cli.app import main

PAIR = {"prompt": "count to two", "chosen": "one two", "rejected": "two one"}
RATED = {"prompt": "count to two", "completion": "one two", "label": True}
PLAIN = {"prompt": "count to two", "completion": "one two"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def write(objective: str, rows: list[Any], more: str = "", data: str = "") -> None:
    """Writes rows.jsonl and c.yaml; `more` begins on line 7 of it."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    Path("rows.jsonl").write_text("".join(line + "\n" for line in lines))
    Path("c.yaml").write_text(
        "model: {path: 'builtin:tiny', dtype: float32}\nadapter: {rank: 4, alpha: 8}\nobjective:"
        f" {objective}\ndata: {{train: rows.jsonl, max_length: 64{data}}}\nbatch: {{global: 4}}\nduration: 4"
        f" steps\n{more}\ndevice: cpu\noutput_dir: out\n"
    )


@pytest.mark.parametrize(
    ("objective", "section", "words"),
    [
        ("dpo", "{beta: 0}", "preference.beta: must be"),
        ("kto", "{beta: -0.1}", "preference.beta: must be"),
        ("simpo", "{beta: -1}", "preference.beta: must be"),
        ("dpo", "{label_smoothing: 0.5}", "preference.label_smoothing: must be"),
        ("dpo", "{loss: ipo, label_smoothing: 0.1}", "preference.label_smoothing: ipo has none"),
        ("dpo", "{gamma: 0.5}", "preference.gamma: objective dpo does not use it"),
        ("dpo", "{desirable_weight: 2}", "preference.desirable_weight: objective dpo does not use it"),
        ("kto", "{loss: sigmoid}", "preference.loss: objective kto does not use it"),
        ("kto", "{label_smoothing: 0.1}", "preference.label_smoothing: objective kto does not use it"),
        ("orpo", "{reference: builtin:tiny}", "preference.reference: objective orpo does not use it"),
        ("simpo", "{reference: auto}", "preference.reference: objective simpo does not use it"),
        ("reward", "{reference: auto}", "preference.reference: objective reward does not use it"),
        ("reward", "{beta: 0.1}", "preference.beta: objective reward does not use it"),
        ("sft", "{beta: 0.1}", "preference.beta: objective sft does not use it"),
        ("dpo", "{loss: exo}", "preference.loss: "),
        ("dpo", "{betta: 0.1}", "did you mean `beta`?"),
    ],
)
def test_a_setting_that_the_objective_cannot_use_is_refused_with_its_line(
    capsys: pytest.CaptureFixture[str], objective: str, section: str, words: str
) -> None:
    write(objective, [PAIR], f"preference: {section}")
    code, _, err = run(capsys, "train", "c.yaml")
    assert code == 2
    assert words in err
    assert "c.yaml:7" in err
    assert "Traceback" not in err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("objective", "more", "data", "words"),
    [
        ("dpo", "", ", too_long: split", "data.too_long: objective dpo does not take split"),
        ("kto", "", ", too_long: split", "data.too_long: objective kto does not take split"),
        ("reward", "", ", loss_on: all", "data.loss_on: objective reward does not take all"),
        ("reward", "eval: {samples: 1}", ", eval: 0.5", "a reward model writes no answers"),
        ("kto", "checkpoint: {best: reward_accuracy}", ", eval: 0.5", "checkpoint.best: objective kto does not take reward_accuracy"),
        ("dpo", "optim: {label_smoothing: 0.1}", "", "its loss has no token targets"),
    ],
)  # fmt: skip
def test_settings_of_other_sections_unfit_for_preferences_are_refused(
    capsys: pytest.CaptureFixture[str], objective: str, more: str, data: str, words: str
) -> None:
    write(objective, [PAIR], more, data)
    code, _, err = run(capsys, "train", "c.yaml")
    assert code == 2
    assert words in err
    assert f"c.yaml:{7 if more else 4}" in err


def test_random_weights_are_not_compared_with_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    write("dpo", [PAIR], "preference: {reference: builtin:tiny}")
    code, _, err = run(capsys, "train", "c.yaml", "model.weights=random", "adapter=null")
    assert code == 2
    assert "preference.reference: random weights" in err
    assert "c.yaml:7" in err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("objective", "rows", "line", "words"),
    [
        ("kto", [RATED, RATED | {"label": "yes"}], 2, "label is 'yes', not a boolean"),
        ("kto", [RATED, RATED | {"label": 1}], 2, "label is 1, not a boolean"),
        ("dpo", [PAIR, {"prompt": "p", "chosen": "a"}], 2, "it has a chosen answer, but no rejected one"),
        (
            "reward",
            [PAIR, {"prompt": "p", "rejected": "a"}],
            2,
            "it has a rejected answer, but no chosen one",
        ),
        ("simpo", [PAIR, PAIR | {"rejected": "one two"}], 2, "the chosen and the rejected answer are equal"),
        ("orpo", [PAIR, PAIR | {"rejected": " "}], 2, "empty"),
        ("sft", [PAIR], 1, "objective sft trains on one answer for each row"),
        ("dpo", [PLAIN], 1, "objective dpo needs pairs of answers"),
        ("dpo", [RATED], 1, "objective dpo needs pairs of answers"),
        ("kto", [PAIR], 1, "objective kto needs answers with a label"),
    ],
)
def test_rows_that_are_not_for_the_objective_are_refused_with_their_line(
    capsys: pytest.CaptureFixture[str], objective: str, rows: list[Any], line: int, words: str
) -> None:
    write(objective, rows)
    code, _, err = run(capsys, "train", "c.yaml")
    assert code == 2, err
    assert words in err
    assert f"rows.jsonl:{line}" in err
    assert "Traceback" not in err


@pytest.mark.processes
def test_a_reference_that_cannot_be_compared_with_is_refused(
    capsys: pytest.CaptureFixture[str], model_dir: Path
) -> None:
    for named, words in (("nowhere", "nowhere"), (str(model_dir), "the reference has")):
        write("dpo", [PAIR], f"preference: {{reference: {named}}}")
        code, _, err = run(capsys, "train", "c.yaml")
        assert code == 2, err
        assert words in err
        assert "preference.reference" in err
        assert "model.path" not in err


@pytest.mark.slow  # a run of four steps
def test_a_run_shows_its_metrics_and_its_reference(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"count to {n}", "chosen": f"one {n}", "rejected": f"nothing {n}"} for n in range(24)]
    long = [
        {"prompt": "p", "chosen": "one " * 90 + "a", "rejected": "one " * 90 + "b"},
        PAIR | {"rejected": "one two"},
    ]
    write(
        "dpo", rows + long, "eval: {every: 2 steps, samples: 3}\ncheckpoint: {best: reward_accuracy, every: 2 steps}",
        ", eval: 0.25, on_bad_row: skip, too_long: cut",
    )  # fmt: skip
    code, out, err = run(capsys, "--json", "train", "c.yaml")
    assert code == 0, err
    said = [json.loads(line) for line in out.splitlines()]
    names = {
        "rewards_chosen",
        "rewards_rejected",
        "reward_margin",
        "reward_accuracy",
        "logps_chosen",
        "logps_rejected",
    }
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps, evaluations = (
        [line for line in lines if "loss" in line],
        [line for line in lines if "eval_loss" in line],
    )
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert all(names <= line.keys() and "kl" not in line for line in steps)
    assert all({f"eval_{name}" for name in names} <= line.keys() for line in evaluations)
    assert all(names <= line.keys() for line in said if line["kind"] == "step")
    # The reference is computed once, for training and evaluation: the user sees how many rows.
    events = [json.loads(line) for line in Path("out/events/rank-00000.jsonl").read_text().splitlines()]
    found = [(line["computed"], line["reused"]) for line in events if line["kind"] == "reference"]
    assert found == [(24, 0)]
    # Rows that cannot be compared are counted with the reason.
    ledger = json.loads(Path("out/data.json").read_text())
    assert (ledger["total"]["rows"], ledger["total"]["used"], ledger["total"]["bad"]) == (26, 24, 2)
    whys = {row["line"]: row["why"] for row in ledger["rows"] if row["what"] == "bad"}
    assert "equal up to the cut" in whys[25]
    assert "the chosen and the rejected answer are equal" in whys[26]
    # The best step is that of the best accuracy; a rejected answer is nobody's reference.
    result = json.loads(Path("out/result.json").read_text())
    best = max(evaluations, key=lambda line: (line["eval_reward_accuracy"], -line["step"]))
    assert result["eval"]["reward_accuracy"] == best["eval_reward_accuracy"]
    samples = [event for event in events if event["kind"] == "sample"]
    assert len(samples) == 9
    assert all(sample["reference"].startswith("one") for sample in samples)
    shutil.rmtree("out")
