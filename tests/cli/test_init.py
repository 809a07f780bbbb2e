"""`unisono init` gives configs that load, and overwrites nothing.

Run: pytest tests/cli/test_init.py
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.cli.app import main
from unisono.cli.init import job_names, template_names, template_text
from unisono.config import RunConfig, load_config
from unisono.config.yaml_file import all_keys, describe_field, section_in


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
    found = re.findall(r"^ *([a-z_]+): \S+ +# (?:.*: )?([\w-]+(?: \| [\w-]+)+)$", texts, re.MULTILINE)
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
