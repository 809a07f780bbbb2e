"""A LLaMA-Factory file on the command line: what is read, what is refused, and what people are
told.

Run: pytest tests/front/cli/test_llamafactory.py
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from unisono.front.cli.app import main
from unisono.jobs.runs.config_file import load_config

TEXT = """\
model_name_or_path: builtin:tiny
stage: sft
do_train: true
finetuning_type: lora
dataset: identity
output_dir: out
plot_loss: true
learning_rate: 1.0e-4
num_train_epochs: 1.0
cutoff_len: 64
use_cpu: true
"""


@pytest.fixture(autouse=True)
def _datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text('{"identity": {"file_name": "identity.json"}}')
    rows = [{"instruction": f"count to {n}", "input": "", "output": "one two"} for n in range(20)]
    Path("data/identity.json").write_text(json.dumps(rows))
    Path("x.yaml").write_text(TEXT)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.processes
def test_a_file_is_trained_and_its_config_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "x.yaml", "per_device_train_batch_size=4", "optim.weight_decay=0.1")
    assert code == 0, err
    assert err.count("x.yaml is a LLaMA-Factory file") == 1
    (ignored,) = [line for line in err.splitlines() if line.startswith("ignored")]
    assert "plot_loss" in ignored
    written = load_config(Path("out/config.yaml"))
    assert written.translation is None
    assert (written.config.optim.weight_decay, written.config.optim.lr) == (0.1, 1e-4)
    code, _, err = run(capsys, "train", "out/config.yaml", "output_dir=again")
    assert code == 0, err
    first, second = (
        [json.loads(line)["loss"] for line in Path(run_dir, "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
        for run_dir in ("out", "again")
    )  # fmt: skip
    assert first == second != []


@pytest.mark.processes
def test_overwrite_output_dir_renames_finished_and_resumes_unfinished_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("x.yaml").write_text(
        TEXT + "overwrite_output_dir: true\nper_device_train_batch_size: 5\nsave_steps: 2\n"
    )
    assert run(capsys, "train", "x.yaml")[0] == 0
    first = json.loads(Path("out/plan.json").read_text())["run_id"]
    _, out, _ = run(capsys, "--json", "doctor", "x.yaml")
    (start,) = [check for check in json.loads(out)["checks"] if check["id"] == "config.start"]
    assert (start["status"], "is renamed" in start["evidence"][0]) == ("pass", True)
    code, _, err = run(capsys, "train", "x.yaml")
    assert code == 0, err
    assert json.loads(Path("out.old-1/plan.json").read_text())["run_id"] == first
    second = json.loads(Path("out/plan.json").read_text())["run_id"]
    for name in ("result.json", "checkpoints/step-00000004"):  # as if it had died after step 2
        path = Path("out", name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, _, err = run(capsys, "train", "x.yaml")
    assert code == 0, err
    assert "step 2" in next(line for line in err.splitlines() if line.startswith("start"))
    assert json.loads(Path("out/plan.json").read_text())["run_id"] == second
    assert not Path("out.old-2").exists()
    Path("x.yaml").write_text(TEXT)
    code, _, err = run(capsys, "train", "x.yaml")
    assert code == 2
    assert "--fresh" in err


@pytest.mark.processes
def test_the_plan_names_the_line_of_each_value_and_counts_the_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "train", "x.yaml", "num_train_epochs=3", "--dry-run")
    assert code == 0, err
    assert "LLaMA-Factory makes 9 steps" in out  # 20 rows, eight a step: 7.5
    origins = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith("optim."))
    assert origins["optim.lr"] == "x.yaml:8"
    assert origins["optim.eps"] == "x.yaml: LLaMA-Factory's default"


@pytest.mark.processes
def test_the_switches_in_the_environment_have_their_options_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_TORCHRUN", "1")
    monkeypatch.setenv("USE_RAY", "1")
    _, _, err = run(capsys, "train", "x.yaml", "--dry-run")
    assert err.count("FORCE_TORCHRUN: not needed; `--nproc N`") == 1
    assert err.count("USE_RAY: not read; use `--launcher ray") == 1


def test_all_problems_come_at_once_with_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(TEXT + "quantization_bit: 3\nlearning_rat: 1\n")
    code, _, err = run(capsys, "train", "x.yaml", "use_galore=true")
    assert code == 2
    assert "Traceback" not in err
    assert err.count("error:") == 3
    for words in ("x.yaml:12", "x.yaml:13", "where: command line", "did you mean `learning_rate`?"):
        assert words in err
    assert not Path("out").exists()


def test_a_file_of_another_verb_ends_with_the_command_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    Path("merge.yaml").write_text(
        "model_name_or_path: m\nadapter_name_or_path: a\ntemplate: qwen3\nexport_dir: merged\n"
    )
    code, _, err = run(capsys, "train", "merge.yaml")
    assert code == 2
    assert err.count("error:") == 1
    assert "run `unisono export merge.yaml`" in err


@pytest.mark.parametrize("command", [["train"], ["doctor"], ["data", "preview"]])
def test_a_v1_file_is_refused_by_every_command(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    Path("v1.yaml").write_text("model: m\ntrain_dataset: d\nmicro_batch_size: 1\n")
    code, _, err = run(capsys, *command, "v1.yaml")
    assert code == 2
    assert "micro_batch_size → batch.micro" in err


@pytest.mark.processes
def test_preview_shows_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "data", "preview", "x.yaml", "max_samples=3", "--rows", "1")
    assert code == 0, err
    assert "3 rows" in out
    assert "x.yaml is a LLaMA-Factory file" in err


@pytest.mark.processes
def test_doctor_takes_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "doctor", "x.yaml")
    assert code in (0, 6), err  # 6: this machine is not fit
    assert "error:" not in err


# ---- init --from-llamafactory


def test_init_writes_our_config_with_the_key_behind_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "init", "--from-llamafactory", "x.yaml", "--out", "ours.yaml")
    assert (code, out) == (0, "")
    assert "wrote ours.yaml" in err
    assert "across the ends of epochs" not in err  # there is one
    text = Path("ours.yaml").read_text()
    assert any(line.split() == ["lr:", "0.0001", "#", "learning_rate"] for line in text.splitlines())
    assert load_config(Path("ours.yaml")).config == load_config(Path("x.yaml")).config
    code, _, err = run(capsys, "init", "--from-llamafactory", "x.yaml", "--out", "ours.yaml")
    assert (code, Path("ours.yaml").read_text()) == (2, text)


def test_init_says_that_steps_run_across_the_ends_of_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(TEXT.replace("num_train_epochs: 1.0", "num_train_epochs: 2.0"))
    code, _, err = run(capsys, "init", "--from-llamafactory", "x.yaml")
    assert (code, err.count("across the ends of epochs")) == (0, 1)


def test_init_as_json_lists_every_key_with_its_fate(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "init", "--from-llamafactory", "x.yaml", "--json")
    found = json.loads(out)
    assert (code, found["schema"]) == (0, 1)
    assert [entry["key"] for entry in found["keys"]] == list(yaml.safe_load(TEXT))
    assert all(set(entry) == {"key", "value", "fate", "ours", "note"} for entry in found["keys"])
    by_key = {entry["key"]: entry for entry in found["keys"]}
    assert (by_key["learning_rate"]["fate"], by_key["learning_rate"]["ours"]) == ("carried", "optim.lr")
    assert by_key["plot_loss"]["fate"] == "ignored"
    assert found["config"]["optim"]["lr"] == 1e-4


def test_init_as_json_lists_all_keys_also_if_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text(TEXT + "quantization_bit: 3\nlearning_rat: 1\nhf_hub_token: hf_" + "a" * 30)
    code, out, err = run(capsys, "init", "--from-llamafactory", "x.yaml", "--json")
    found = json.loads(out)
    assert code == 2
    fates = {entry["key"]: entry["fate"] for entry in found["keys"]}
    assert [key for key, fate in fates.items() if fate == "refused"] == [
        "quantization_bit",
        "learning_rat",
        "hf_hub_token",
    ]
    assert len(found["problems"]) == 3
    assert "aaaa" not in out + err


def test_init_as_json_lists_the_keys_of_a_file_for_a_different_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("merge.yaml").write_text(
        "model_name_or_path: m\nadapter_name_or_path: a\ntemplate: qwen3\nexport_dir: merged\n"
    )
    code, out, err = run(capsys, "init", "--from-llamafactory", "merge.yaml", "--json")
    assert code == 0
    assert "run `unisono export merge.yaml`" in err
    fates = {entry["key"]: (entry["fate"], entry["ours"]) for entry in json.loads(out)["keys"]}
    assert fates["export_dir"] == ("translated", "OUT")
    assert run(capsys, "init", "--from-llamafactory", "merge.yaml")[0] == 2


def test_init_refuses_a_file_that_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ours.yaml").write_text("model: m\ndata: {train: d}\noutput_dir: o\n")
    code, _, err = run(capsys, "init", "--from-llamafactory", "ours.yaml")
    assert code == 2
    assert "is not a file of LLaMA-Factory" in err
