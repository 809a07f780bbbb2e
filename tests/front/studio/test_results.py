"""What becomes of results: evaluation, answers beside each other, exports with a download, and a
repository of the hub.

Run: .venv/bin/python -m pytest tests/front/studio/test_results.py
"""

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests import needs
from tests.front.hub.standin import TOKEN, environment, running_hub
from tests.front.studio.studios import TINY, RunningStudio, opened, studio_of, until, write_rows
from tests.needs import lacking
from tests.trainer.diffusion.making import write_pictures, write_pipeline

QUANTIZES = Path(__file__).parents[1] / "talk" / "quantizes.py"
pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def config(name: str, lr: float) -> str:
    return (
        f"{TINY}adapter: {{rank: 2}}\nbatch: {{global: 4}}\ncheckpoint: {{every: 4 steps, read_back: false}}\n"
        f"optim: {{lr: {lr}}}\nduration: 8 steps\noutput_dir: runs/{name}\n"
    )


def train(studio: RunningStudio, *runs: tuple[str, float]) -> None:
    for name, lr in runs:
        assert studio.post("start", text=config(name, lr)).status == 200
    for name, _ in runs:
        until(lambda: studio.row(name).get("state") == "completed")  # noqa: B023 - called at once


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStudio]:
    """A studio with two finished runs, the first of which has learned something."""
    root = tmp_path_factory.mktemp("studio")
    write_rows(root)
    (root / "prompts.txt").write_text("say 7\nsay 8\n")
    tool = tmp_path_factory.mktemp("tools") / "llama-quantize"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} {QUANTIZES} "$@"\n')
    tool.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
        with studio_of(root) as made:
            train(made, ("one", 3e-2), ("two", 1e-5))
            yield made


def task_of(studio: RunningStudio, task: dict[str, Any]) -> dict[str, Any]:
    """A task once it is over."""

    def ended() -> dict[str, Any] | None:
        tasks = studio.get("/api/studio/runs")["tasks"]
        shown: dict[str, Any] = next(one for one in tasks if one["id"] == task["id"])
        return shown if shown["state"] in ("done", "failed") else None

    done: dict[str, Any] = until(ended)
    return done


def download(studio: RunningStudio, task: dict[str, Any]) -> bytes:
    path = f"/api/studio/downloads/{task['id']}"
    answer = studio.send("GET", path, Authorization=f"Bearer {studio.token}")
    assert answer.status == 200
    return answer.data


def exported(studio: RunningStudio, **body: Any) -> dict[str, bytes]:
    """The files of an export, by their names in its download."""
    task = task_of(studio, studio.post("export", name="one", **body).json)
    assert task["state"] == "done", task["problems"]
    with zipfile.ZipFile(io.BytesIO(download(studio, task))) as archive:
        assert archive.testzip() is None
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def test_an_evaluation_has_figures_and_a_file_of_predictions(studio: RunningStudio) -> None:
    task = task_of(studio, studio.post("evaluate", name="one", data="rows.jsonl").json)
    assert task["state"] == "done", task["problems"]
    assert task["answer"]["rows"] == 60
    lines = [json.loads(line) for line in download(studio, task).splitlines()]
    assert len(lines) == 60
    shown = studio.get(f"/api/studio/answers?group={task['id']}")
    assert shown["columns"] == ["one"]
    assert shown["rows"][7]["reference"] == "7 it is"
    assert "say 7" in shown["rows"][7]["prompt"]


def test_a_checkpoint_and_a_base_model_answer_the_same_prompts(studio: RunningStudio) -> None:
    sides = [{"name": "one", "step": 8}, {"name": "one", "base": True}]
    group = studio.post("compare", sides=sides, data="prompts.txt").json["group"]

    def ended() -> bool:
        tasks = [one for one in studio.get("/api/studio/runs")["tasks"] if one["group"] == group]
        return len(tasks) == 2 and all(one["state"] in ("done", "failed") for one in tasks)

    until(ended)
    shown = studio.get(f"/api/studio/answers?group={group}")
    assert shown["columns"] == ["one @ 8", "one (base)"]
    assert [row["prompt"] for row in shown["rows"]] == ["say 7", "say 8"]
    answers = [row["answers"] for row in shown["rows"]]
    assert all(isinstance(text, str) for row in answers for text in row)
    assert any(row[0] != row[1] for row in answers), "training changed an answer"


def test_an_adapter_a_merged_model_and_gguf_are_taken_away(studio: RunningStudio) -> None:
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*exported(studio, what="adapter", step=4)}
    assert "model.safetensors" in exported(studio, what="merged")
    sizes = {}
    for kind in ("f16", "q8_0"):
        files = exported(studio, what="gguf", quantize=kind)
        (name,) = (name for name in files if name.endswith(".gguf"))
        assert files[name].startswith(b"GGUF")
        sizes[kind] = len(files[name])
    assert sizes["q8_0"] < sizes["f16"]


def test_the_lora_of_an_image_model_is_taken_away_for_kohya(tmp_path: Path) -> None:
    needs.package("diffusers")
    pipeline_dir = write_pipeline(tmp_path / "pipeline")
    write_pictures(tmp_path / "images" / "2_tile", ["red", "blue"])
    text = (
        f"model: {{path: {pipeline_dir}, dtype: float32}}\nobjective: diffusion\nadapter: {{rank: 2, targets: unet}}\n"
        "data: {train: images, resolution: 32}\ndiffusion: {bucket_step: 8, min_side: 16, max_side: 64}\n"
        "batch: {global: 2}\nduration: 2 steps\noutput_dir: runs/one\n"
    )
    with studio_of(tmp_path) as studio:
        assert studio.post("start", text=text).status == 200
        until(lambda: studio.row("one").get("state") == "completed")
        files = exported(studio, what="kohya")
        assert any(name.endswith(".safetensors") for name in files)


def test_a_push_uses_its_token_once_and_leaves_it_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path)
    with running_hub() as hub:
        for name, value in environment(hub.url, tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        with studio_of(tmp_path, "--allow-push") as studio:
            train(studio, ("one", 1e-3))
            body = {"name": "one", "repo": "anna/one", "private": True}
            wrong = task_of(
                studio, studio.post("push", **body, token="hf_" + "wrong0123456789wrong0123456").json
            )
            assert wrong["state"] == "failed"
            assert wrong["problems"]
            done = task_of(studio, studio.post("push", **body, token=TOKEN).json)
            assert done["state"] == "done", done["problems"]
            assert done["answer"]["repo"] == "anna/one"
            assert hub.repos["anna/one"].private
            files = hub.repos["anna/one"].commits[done["answer"]["commit"]]
            assert {"README.md", "adapter_model.safetensors"} <= {*files}
            assert TOKEN in hub.tokens
            assert studio.post("push", **body, token=" ").status == 400
            shown = json.dumps(studio.get("/api/studio/runs"))
            assert studio.audit().count(" push ") == 2
        written = subprocess.run(
            ["grep", "-rlF", TOKEN, tmp_path], check=False, capture_output=True, text=True
        )
        assert (written.stdout, TOKEN in shown) == ("", False)


def test_a_studio_without_the_option_pushes_nothing(studio: RunningStudio) -> None:
    refused = studio.post("push", name="one", repo="anna/one", token=TOKEN)
    assert refused.status == 400
    assert refused.whats == ["this studio does not push to the hub"]
    assert TOKEN not in studio.audit()


@pytest.mark.usefixtures("closed")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of playwright's own process
@pytest.mark.skipif(bool(lacking("chromium")), reason=lacking("chromium") or "-")
def test_a_checkpoint_is_chosen_and_answers_are_compared_on_the_page(
    browser: Browser, studio: RunningStudio
) -> None:
    errors: list[str] = []
    page = opened(browser, studio.url, errors)
    page.goto(f"http://127.0.0.1:{studio.port}/#chat/two")
    until(lambda: page.locator("[data-side][data-state=ready]").count() == 2)
    page.get_by_label("Result of").select_option("one\n4")
    page.locator("[data-side=result] h3").get_by_text("one, step 4").wait_for()
    until(lambda: page.locator("[data-side][data-state=ready]").count() == 2)
    assert "one at step 4" in page.locator("[data-side=result] [role=status]").inner_text()
    page.get_by_label("Message").fill("say 7")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-side=result] li[data-done]")
    page.locator("nav [data-view=results]").click()
    page.get_by_label("Model", exact=True).select_option("one")
    page.get_by_label("File with prompts").fill("prompts.txt")
    page.get_by_label("With", exact=True).select_option("two\n4")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("columnheader", name="two @ 4").wait_for()
    assert page.locator("[data-group] tbody tr").count() == 2
    page.get_by_label("File with rows").fill("rows.jsonl")
    page.get_by_role("button", name="Evaluate").click()
    page.wait_for_selector("[data-kind=evaluate][data-state=done]")
    with page.expect_download() as downloaded:
        page.locator("[data-kind=evaluate]").first.get_by_role("link", name="Download").click()
    assert len(Path(downloaded.value.path()).read_text().splitlines()) == 60
    assert page.get_by_label("Token with write access").count() == 0, "the owner does not allow it"
    assert [one for one in errors if "ERR_CONNECTION" not in one and "INCOMPLETE" not in one] == []
