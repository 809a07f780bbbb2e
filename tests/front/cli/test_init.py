"""`unisono init` gives configs that load, and overwrites nothing.

Run: pytest tests/front/cli/test_init.py
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.front.cli.app import main
from unisono.front.cli.init import job_names, template_names, template_text
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import RunConfig
from unisono.trainer.config.yaml_file import all_keys, describe_field, section_in


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("name", template_names())
def test_a_template_loads_without_a_change(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.yaml"
    code, out, err = run(capsys, name, "--out", str(file))
    assert (code, out) == (0, "")
    assert str(file) in err
    assert load_config(file).config.output_dir == f"runs/{name}"


@pytest.mark.parametrize("name", [*template_names(), *job_names()])
def test_a_template_fits_a_terminal_of_80_columns(name: str) -> None:
    assert max(len(line) for line in template_text(name).splitlines()) <= 80


@pytest.mark.parametrize("name", template_names())
def test_a_template_reports_first_what_it_is_for(name: str) -> None:
    assert re.match(r"# [A-Z].{20,77}\n(# .*\n)?# Start it with", template_text(name))


def test_the_choices_in_a_comment_are_all_that_the_key_takes() -> None:
    """`kind: lora  # lora | dora | rslora` lists the words of the schema, no more and no fewer."""
    texts = "".join(template_text(name) for name in template_names())
    found = re.findall(r"^ *([a-z_]+): \S+ +# (?:.*: )?([\w-]+(?: \| [\w.:-]+)+)$", texts, re.MULTILINE)
    assert len(found) >= 6
    for key, listed in found:
        choices = [
            set(_words(known)) - {"auto"} for known in all_keys(RunConfig) if known.split(".")[-1] == key
        ]
        assert set(listed.split(" | ")) in choices, key


def _words(key: str) -> list[str]:
    """The words that a key of the config takes."""
    section: Any = RunConfig
    *outer, last = key.split(".")
    for part in outer:
        section = section_in({f.alias or n: f for n, f in section.model_fields.items()}[part].annotation)
    return (
        re.findall(r"`([^` ]+)`", describe_field(section.model_fields[last]))
        if last in section.model_fields
        else []
    )


def test_without_a_file_it_goes_to_stdout_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, out, err) == (0, template_text("lora"), "")


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("mine")
    code, _, err = run(capsys, "--out", str(file))
    assert (code, file.read_text()) == (2, "mine")
    assert f"error: {file} exists" in err


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--out", str(tmp_path / "no" / "train.yaml"))
    assert code == 2
    assert "Traceback" not in err


def test_an_unknown_template_ends_with_2_and_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "loar")
    assert code == 2
    assert "did you mean `lora`?" in err


def test_the_list_has_every_template(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--list")
    assert [line.split()[0] for line in out.splitlines()] == [*template_names(), *job_names()]
    _, out, _ = run(capsys, "--list", "--json")
    assert [item["name"] for item in json.loads(out)["templates"]] == [*template_names(), *job_names()]


def test_a_ray_job_asks_its_cluster_for_as_many_nodes_as_its_command_does() -> None:
    job = yaml.safe_load(template_text("ray-job"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = job["spec"]["entrypoint"].split()
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    resources = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert words[:2] == ["unisono", "train"]
    assert words[words.index("--nodes") + 1] == str(workers["replicas"])
    assert words[words.index("--nproc") + 1] == resources["nvidia.com/gpu"]
    assert job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def rows_in(folder: Path, number: int = 300, **more: str) -> Path:
    file = folder / "rows.jsonl"
    rows = [
        {
            "instruction": f"Add {i} and {i + 1}, and tell me the result.",
            "output": f"It is {2 * i + 1}.",
            **more,
        }
        for i in range(number)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.processes  # nvidia-smi is asked where nvidia-ml-py is not installed
def test_a_config_for_300_rows_has_steps_enough_and_intervals_within_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows_in(tmp_path)
    code, _, err = run(capsys, "--data", "rows.jsonl", "--out", "train.yaml")
    assert code == 0
    assert "300 rows, alpaca: the first row has instruction and output" in err
    config = load_config(Path("train.yaml")).config
    assert (config.data.train, config.data.format, config.data.max_length) == ("rows.jsonl", "alpaca", 256)
    with pytest.raises(SystemExit) as ended:
        main(["train", "train.yaml", "model=builtin:tiny", "--dry-run", "--json"])
    assert not ended.value.code
    plan = json.loads(capsys.readouterr().out.splitlines()[0])
    assert 50 <= plan["total_steps"] <= 400
    assert max(plan["eval_every"], plan["checkpoint_every"]) < plan["total_steps"]
    assert plan["warnings"] == []


def test_other_columns_are_mapped_and_the_file_still_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "qa.csv").write_text("Question,Answer\nwhat is 1,one\nwhat is 2,two\n")
    code, out, _ = run(capsys, "--data", str(tmp_path / "qa.csv"))
    assert code == 0
    (source,) = yaml.safe_load(out)["data"]["train"]
    assert source == {
        "path": str(tmp_path / "qa.csv"),
        "columns": {"instruction": "Question", "output": "Answer"},
    }
    RunConfig.model_validate(yaml.safe_load(out))


@pytest.mark.parametrize("template", ["lora", "full"])
@pytest.mark.parametrize(("rows", "share"), [(1, None), (19, None), (20, 0.05)])
def test_rows_are_held_out_only_of_enough(
    rows: int, share: float | None, template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A share of one row would be all of them."""
    _, out, _ = run(capsys, template, "--data", str(rows_in(tmp_path, rows)))
    assert RunConfig.model_validate(yaml.safe_load(out)).data.eval == share


@pytest.mark.parametrize("template", ["lora", "full"])
def test_pairs_get_their_objective_and_a_lower_rate(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    _, out, _ = run(capsys, template, "--data", str(file))
    config = RunConfig.model_validate(yaml.safe_load(out))
    assert config.objective == "dpo"
    usual = yaml.safe_load(template_text(template))["optim"]["lr"]
    assert config.optim.lr == pytest.approx(usual / 10)


def test_json_has_what_was_found_and_what_is_proposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "--data", str(rows_in(tmp_path, 40)), "--json")
    body = json.loads(out)
    assert (body["data"]["rows"], body["data"]["format"], body["data"]["bad"]) == (40, "alpaca", 0)
    assert body["proposed"]["steps"] >= 50
    assert f"global: {body['proposed']['global_batch']} " in body["text"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--data", "none.jsonl"], "there is no file none.jsonl"),
        (["pretrain", "--data", "rows.jsonl"], "is for plain text"),
        (["ray-job", "--data", "rows.jsonl"], "has no rows"),
        (["--data", "odd.jsonl"], "its columns are left, right"),
        (["--data", "rows.jsonl", "--from-llamafactory", "x.yaml"], "are given"),
    ],
)
def test_rows_that_give_no_config_are_refused(
    words: list[str],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows_in(tmp_path, 3)
    (tmp_path / "odd.jsonl").write_text('{"left": "a", "right": "b"}\n')
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert why in err
