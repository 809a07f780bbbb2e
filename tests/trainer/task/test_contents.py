"""What a run's files hold, as nodes compare it before anything imports torch.

Run: pytest tests/trainer/task/test_contents.py
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from unisono.base.events import Reporter
from unisono.base.files import read_json
from unisono.guard.supervise.task_process import run_request
from unisono.trainer.config import RunConfig
from unisono.trainer.model.directory import inspect_model, locate_model
from unisono.trainer.plan.task_requests import ContentsRequest, InputDigests
from unisono.trainer.task import input_digests
from unisono.trainer.task.input_digests import Digested, digest_files

HEAVY = ("torch", "transformers", "peft", "datasets", "pyarrow", "numpy", "tokenizers", "safetensors")
# 0.2 s on a quiet machine, of which half is Python and pydantic; a busy one is given five times the
# promised 0.4 s.
CPU_S = 0.4 * 5


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rows.jsonl").write_text(f'{{"text": "{name}"}}\n')
    return folder


def config(rows: Path, **keys: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": {"path": "builtin:tiny"},
        "data": {"train": str(rows / "a" / "rows.jsonl")},
        "output_dir": "/nowhere",
    }
    for name, value in keys.items():
        section, _, key = name.partition("__")
        body[section][key] = value
    return body


def look(tmp_path: Path, body: dict[str, Any]) -> InputDigests:
    request = ContentsRequest(RunConfig.model_validate(body), tmp_path / "cache")
    return input_digests.run(request, Reporter(None))


def digests(found: Mapping[str, Any], kind: str) -> dict[str, str]:
    return {entry["label"]: entry["digest"] for entry in found[f"{kind}_files"]}


def test_as_a_process_it_is_quick_and_imports_nothing_heavy(tmp_path: Path, rows: Path) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"config": config(rows), "cache_dir": str(tmp_path / "cache")}))
    program = (
        "import sys, json, resource; from unisono.trainer.task.entry import main; main(sys.argv[1:]); "
        "print(json.dumps([sorted(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_utime]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "contents", str(request)], capture_output=True, text=True, check=True
    )
    modules, cpu_s = json.loads(done.stdout)
    assert not set(HEAVY) & set(modules)
    assert cpu_s < CPU_S


def test_started_by_a_front_it_gives_what_agreement_compares(tmp_path: Path, rows: Path) -> None:
    found = run_request(ContentsRequest(RunConfig.model_validate(config(rows)), tmp_path / "cache"))
    assert found["note"] == ""
    assert [entry["label"] for entry in found["data_files"]] == ["train[0]: rows.jsonl"]
    assert "tokenizer.json" in digests(found, "tokenizer")
    assert {"config.json", "model.safetensors"} <= set(digests(found, "model"))
    assert found["code"] == {}


def test_labels_have_no_paths_and_tell_the_files_of_a_glob_apart(tmp_path: Path, rows: Path) -> None:
    train = [str(rows / "*" / "rows.jsonl"), {"path": f"file://{rows}/b/rows.jsonl"}]
    template = tmp_path / "chat.jinja"
    template.write_text("{{ x }}")
    found = look(
        tmp_path,
        config(
            rows, data__train=train, data__eval=str(rows / "a" / "rows.jsonl"), data__template=str(template)
        ),
    )
    labels = [entry["label"] for entry in found["data_files"]]
    assert labels == [
        "train[0]: a/rows.jsonl", "train[0]: b/rows.jsonl", "train[1]: rows.jsonl", "eval: rows.jsonl", "template: chat.jinja",
    ]  # fmt: skip
    data = digests(found, "data")
    assert data["train[0]: b/rows.jsonl"] == data["train[1]: rows.jsonl"] != data["eval: rows.jsonl"]
    assert str(tmp_path) not in json.dumps(found["data_files"])


def test_the_same_files_elsewhere_give_the_same_and_one_byte_another(tmp_path: Path, rows: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(rows, other)
    here, there = look(tmp_path, config(rows)), look(tmp_path, config(other))
    assert here["data_files"] == there["data_files"]
    file = other / "a" / "rows.jsonl"
    file.write_text(file.read_text().replace("a", "b"))
    assert look(tmp_path, config(other))["data_files"] != here["data_files"]


def test_what_is_not_on_this_machine_is_noted_and_nothing_is_fetched(tmp_path: Path, rows: Path) -> None:
    found = look(
        tmp_path,
        config(
            rows,
            data__train=["s3://bucket/x.jsonl", "org/rows"],
            model__path="org/model",
            model__tokenizer="org/tok",
        ),
    )
    assert found["data_files"] == found["model_files"] == found["tokenizer_files"] == []
    for words in ("train[0]", "train[1]", "org/model comes from the hub", "org/tok comes from the hub"):
        assert words in found["note"]
    assert found["parameters"] is None


def test_what_is_missing_or_damaged_is_noted_and_not_refused(tmp_path: Path, rows: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    found = look(tmp_path, config(rows, data__train=str(rows / "c.jsonl"), model__path=str(broken)))
    assert "there is no file" in found["note"]
    assert "no weights" in found["note"]
    assert set(digests(found, "model")) == {"config.json"}


def test_a_pipe_as_template_is_noted_and_not_waited_for(tmp_path: Path, rows: Path) -> None:
    os.mkfifo(tmp_path / "t.jinja")
    found = look(tmp_path, config(rows, data__template=str(tmp_path / "t.jinja")))
    assert "named pipe" in found["note"]


def test_a_hub_model_is_compared_where_it_is_certain_which_one_it_is(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "c" * 40
    folder = tmp_path / "hub" / "models--org--model"
    tiny = locate_model("builtin:tiny")
    shutil.copytree(tiny, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    of_builtin = look(tmp_path, config(rows))["model_files"]
    named = config(rows, model__path="org/model")
    assert look(tmp_path, named)["model_files"] == [], "the hub may have a newer one"
    assert (
        look(tmp_path, config(rows, model__path="org/model", model__revision=commit))["model_files"]
        == of_builtin
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert look(tmp_path, named)["model_files"] == of_builtin


def test_code_that_the_model_brings_counts_where_it_is_trusted(tmp_path: Path, rows: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(locate_model("builtin:tiny"), model)
    (model / "modeling_x.py").write_text("x = 1\n")
    assert look(tmp_path, config(rows, model__path=str(model)))["code"] == {}
    found = look(tmp_path, config(rows, model__path=str(model), model__trust_remote_code=True))
    assert list(found["code"]) == ["model/modeling_x.py"]


def test_figures_of_the_model_are_those_of_prepare(tmp_path: Path, rows: Path) -> None:
    from unisono.trainer.config import RunConfig

    found, facts = look(tmp_path, config(rows)), inspect_model(RunConfig.model_validate(config(rows)))
    assert (found["parameters"], found["linear_in_out"]) == (facts.parameters, facts.linear_in_out)


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is large enough to be kept, and settled."""
    monkeypatch.setattr(input_digests, "_KEPT_FROM_BYTES", 1000)
    monkeypatch.setattr(input_digests, "_SETTLED_S", -10.0)
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(5000))
    return file


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which files are read from now on."""
    found: list[Path] = []
    real = input_digests._DigestRun._read

    def read(self: input_digests._DigestRun, file: Path) -> str:
        found.append(file)
        return real(self, file)

    monkeypatch.setattr(input_digests._DigestRun, "_read", read)
    return found


def test_a_large_file_is_read_once(tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "digests.json"
    first = digest_files([large], cache=cache)
    seen = reads(monkeypatch)
    assert digest_files([large], cache=cache) == first
    assert seen == []


def test_a_file_that_was_changed_is_read_again_also_with_its_old_times(
    tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "digests.json"
    first = digest_files([large], cache=cache)
    before = large.stat()
    data = bytearray(large.read_bytes())
    data[2500] ^= 1
    time.sleep(0.02)  # longer than the kernel's clock tick, by which it writes the times of files
    large.write_bytes(bytes(data))
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert large.stat().st_mtime_ns == before.st_mtime_ns
    seen = reads(monkeypatch)
    assert digest_files([large], cache=cache) != first
    assert seen == [large]


def test_a_file_that_was_changed_just_now_is_not_kept(
    tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_digests, "_SETTLED_S", 1e6)
    digest_files([large], cache=tmp_path / "digests.json")
    assert not (tmp_path / "digests.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"x": 3}}'])
def test_a_torn_cache_is_as_none(tmp_path: Path, large: Path, text: str) -> None:
    cache = tmp_path / "digests.json"
    cache.write_text(text)
    [found] = digest_files([large], cache=cache).values()
    assert isinstance(found, Digested)
    assert str(large) in read_json(cache)["files"]


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path: Path, large: Path) -> None:
    (tmp_path / "file").write_text("")
    [found] = digest_files([large], cache=tmp_path / "file" / "digests.json").values()
    assert isinstance(found, Digested)


def test_unreadable_file_is_reported_and_the_others_are_digested(tmp_path: Path, large: Path) -> None:
    found = digest_files([tmp_path / "none", large, tmp_path], cache=tmp_path / "digests.json")
    assert isinstance(found[tmp_path / "none"], FileNotFoundError)
    assert isinstance(found[tmp_path], IsADirectoryError)
    assert isinstance(found[large], Digested)


def test_progress_reaches_the_whole(tmp_path: Path, large: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 777)
    reported: list[tuple[int, int]] = []
    digest_files(
        [large, other],
        cache=tmp_path / "d.json",
        on_progress=lambda done, total: reported.append((done, total)),
    )
    assert reported[-1] == (5777, 5777)
    assert reported == sorted(reported)
