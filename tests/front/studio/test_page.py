"""The studio's page in Chromium: a first hour, the form and its YAML, keyboard, looks and words.

Run: .venv/bin/python -m pytest tests/front/studio/test_page.py
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.front.studio.studios import (
    TINY,
    first_paint_ms,
    opened,
    steps_of,
    studio_of,
    typed_ms,
    until,
    write_rows,
)
from tests.needs import lacking
from unisono.front.studio.page import OWN_STATIC, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("closed"),
    pytest.mark.skipif(bool(lacking("chromium")), reason=lacking("chromium") or "-"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of playwright's own process
]
AXE = Path(__file__).parents[1] / "board" / "axe" / "axe.min.js"


def yaml_of(page: Page) -> str:
    return page.locator("#yaml").input_value()


@pytest.mark.ranks
def test_from_an_empty_directory_to_a_chat_with_the_trained_model(browser: Browser, tmp_path: Path) -> None:
    rows, root = write_rows(tmp_path), tmp_path / "root"
    errors: list[str] = []
    root.mkdir()
    with studio_of(root) as studio:
        page = opened(browser, studio.url, errors)
        clicks = 0

        def click(name: str) -> None:
            nonlocal clicks
            clicks += 1
            page.get_by_role("button", name=name, exact=True).click()

        click("builtin:tiny")
        with page.expect_file_chooser() as chooser:
            click("Upload …")
        chooser.value.set_files(rows)
        until(lambda: "studio/uploads/rows.jsonl" in yaml_of(page))
        page.get_by_label("Duration (epochs)").fill("8 steps")
        page.get_by_label("Learning rate optim.lr").fill("3e-2")
        clicks += 2
        click("Start")
        page.wait_for_selector("html[data-run='run-1 completed']")
        until(lambda: int(page.locator(".plot").get_attribute("data-drawn") or 0) == 8)
        click("Chat")
        until(lambda: page.locator("[data-side][data-state=ready]").count() == 2)
        page.get_by_label("Message").fill("say 7")
        page.keyboard.press("Enter")
        clicks += 2
        page.wait_for_selector("[data-side=result] li[data-done]")
        page.wait_for_selector("[data-side=beside] li[data-done]")
        answers = page.locator("li.assistant .answer-text").all_inner_texts()
        assert len(answers) == 2
        assert answers[0] != answers[1], "the result answers differently than its base model"
        assert clicks <= 12
    assert [one for one in errors if "ERR_CONNECTION" not in one and "INCOMPLETE" not in one] == []


def test_form_and_yaml_follow_each_other(browser: Browser, tmp_path: Path) -> None:
    write_rows(tmp_path)
    errors: list[str] = []
    with studio_of(tmp_path) as studio:
        page = opened(browser, studio.url, errors)
        page.get_by_label("Model model.path").fill("builtin:tiny")
        page.get_by_label("Learning rate optim.lr").fill("1e-3")
        page.get_by_label("Full fine-tuning").check()
        until(
            lambda: (
                yaml_of(page)
                == "model: builtin:tiny\nadapter: null\noptim:\n  lr: 1e-3\noutput_dir: runs/run-1\n"
            )
        )
        page.get_by_label("Learning rate optim.lr").fill("fast")
        until(lambda: "must be a number" in page.locator("#e-f-optim\\.lr").inner_text())
        assert page.get_by_label("Learning rate optim.lr").get_attribute("aria-invalid") == "true"
        page.locator("#yaml").fill(f"{TINY}adapter: {{rank: 4}}\nseed: 7\noutput_dir: runs/mine\n")
        until(lambda: page.get_by_label("LoRA rank").input_value() == "4")
        assert page.get_by_label("LoRA", exact=True).is_checked()
        page.get_by_text(re.compile("All settings")).click()
        page.get_by_label("Search settings").fill("seed")
        assert page.locator("#a-seed").input_value() == "7"
        until(lambda: page.locator("details .field:visible").count() < 10)
        page.locator("#a-seed").fill("8")
        until(lambda: "seed: 8" in yaml_of(page))
        assert "unisono train mine.yaml" in page.locator(".command").inner_text()
        page.wait_for_selector("#plan[data-state=shown]")
        plan = page.locator("#plan").inner_text()
        assert "Optimizer steps\n1" in plan
        assert "this run has only 1 optimizer step" in plan, "a short run is warned of"
        page.get_by_role("button", name="Preview rows").click()
        page.wait_for_selector("#rows mark.loss")
        assert "0 it is</s>" in page.locator("#rows pre mark").all_inner_texts()[0]
    assert [one for one in errors if "ERR_CONNECTION" not in one and "INCOMPLETE" not in one] == []


@pytest.mark.ranks
def test_a_run_is_stopped_resumed_extended_and_begun_afresh_on_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    write_rows(tmp_path)
    text = f"{TINY}batch: {{global: 2}}\ncheckpoint: {{every: 30 steps, read_back: false}}\nduration: 80 steps\noutput_dir: runs/one\n"
    errors: list[str] = []
    with studio_of(tmp_path) as studio:
        page = opened(browser, studio.url, errors)

        def press(name: str, state: str) -> None:
            page.locator("#s-run").get_by_role("button", name=name, exact=True).first.click()
            page.wait_for_selector(f"html[data-run='one {state}']")

        page.locator("#yaml").fill(text)
        until(lambda: page.get_by_label("Output directory").input_value() == "runs/one")
        page.get_by_role("button", name="Start", exact=True).click()
        until(lambda: (studio.row("one").get("step") or 0) > 1)
        press("Stop", "interrupted")
        stopped = studio.row("one")["step"]
        assert studio.row("one")["steps"][0] == stopped < 80, "its checkpoint can be chosen"
        press("Resume", "completed")
        page.get_by_role("button", name="Extend").click()
        page.get_by_label("New duration").fill("84 steps")
        page.keyboard.press("Enter")
        until(lambda: studio.row("one")["step"] == 84)
        page.wait_for_selector("html[data-run='one completed']")
        page.get_by_role("button", name="Start again from scratch").click()
        page.locator(".note").get_by_role("button", name="Start again from scratch").click()
        until((tmp_path / "runs" / "one.old-1").is_dir)
        until(lambda: studio.row("one").get("state") == "completed")
    for name in ("one.old-1", "one"):
        assert steps_of(tmp_path, name) == list(range(1, 85)), "no gap, and the longer duration"
    assert [one for one in errors if "ERR_CONNECTION" not in one and "INCOMPLETE" not in one] == []


WORDS = {
    "per_device_train_batch_size": "batch.per_rank", "batch size": "batch.global", "gradient accumulation": "batch.accumulate",
    "gradient_accumulation_steps": "batch.accumulate", "cutoff_len": "data.max_length", "learning rate": "optim.lr", "lora_r": "adapter.rank",
    "批大小": "batch.global", "学习率": "optim.lr",
}  # fmt: skip


def test_settings_are_found_by_the_words_of_people_and_of_other_tools(
    browser: Browser, tmp_path: Path
) -> None:
    with studio_of(tmp_path) as studio:
        page = opened(browser, studio.url, [])
        page.get_by_text(re.compile("All settings")).click()
        for words_, key in WORDS.items():
            page.get_by_label("Search settings").fill(words_)
            page.locator(f"#a-{key.replace('.', chr(92) + '.')}").wait_for()
            until(lambda: 0 < page.locator("details .field:visible").count() < 12)


def test_the_page_is_painted_and_a_key_is_in_the_yaml_at_once(browser: Browser, tmp_path: Path) -> None:
    with studio_of(tmp_path) as studio:
        page = opened(browser, studio.url, [])
        assert first_paint_ms(page) < 5_000, "five times the bound"
        page.get_by_text(re.compile("All settings")).click()  # all fields follow the YAML, too
        times = typed_ms(page, "f-output_dir", "-a-long-name")
        assert statistics.median(times) < 500, "five times the bound"


def test_a_file_of_llamafactory_fills_the_form(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data")
    columns = {"prompt": "prompt", "response": "completion"}
    (tmp_path / "data" / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "rows.jsonl", "columns": columns}})
    )
    text = "model_name_or_path: builtin:tiny\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 6\ndataset: mine\ntemplate: empty\noutput_dir: saves/x\nper_device_train_batch_size: 2\n"
    with studio_of(tmp_path) as studio:
        page = opened(browser, studio.url, [])
        page.locator("#yaml").fill(text)
        until(lambda: page.get_by_label("LoRA rank").input_value() == "6")
        assert "rows.jsonl" in yaml_of(page)
        assert page.get_by_label("Output directory").input_value() == "saves/x"
        assert "LLaMA-Factory" in page.locator("#s-new_run .note").first.inner_text()


def test_the_keyboard_alone_starts_a_preview(browser: Browser, tmp_path: Path) -> None:
    write_rows(tmp_path)
    with studio_of(tmp_path) as studio:
        page = opened(browser, studio.url, [])
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        reached: list[str] = []
        while page.evaluate("document.activeElement.dataset.keep") != "preview_rows":
            page.keyboard.press("Tab")
            at = page.evaluate("document.activeElement.id")
            reached.append(at)
            assert len(reached) < 80
            if at == "f-model.path":
                page.keyboard.type("builtin:tiny")
            if at == "f-data.train":
                page.keyboard.type("rows.jsonl")
        assert {"f-model.path", "f-data.train", "objective", "f-optim.lr", "f-output_dir"} <= set(reached)
        page.keyboard.press("Enter")
        page.wait_for_selector("#rows mark.loss")


LOOKS = [("en", "light", 1280), ("zh", "dark", 360)]


@pytest.mark.parametrize(("language", "scheme", "width"), LOOKS)
def test_axe_finds_nothing_in_any_view(
    browser: Browser, tmp_path: Path, language: str, scheme: Any, width: int
) -> None:
    write_rows(tmp_path)
    (tmp_path / "launchers.yaml").write_text("pair: {nproc: 2}\n")
    with studio_of(tmp_path, "--allow-push", "--launchers", str(tmp_path / "launchers.yaml")) as studio:
        url = f"{studio.url}&lang={language}"
        page = opened(browser, url, [], color_scheme=scheme, width=width, bypass_csp=True)
        page.locator("#f-model\\.path").fill("builtin:tiny")
        page.locator("#launcher").select_option("pair")
        until(lambda: "--nproc=2" in page.locator(".command").inner_text())
        page.locator("#f-optim\\.lr").fill("x")
        until(lambda: page.locator("[aria-invalid=true]").count())
        page.locator("#s-new_run details summary").click()
        page.add_script_tag(path=AXE)
        for view in ("start", "runs", "chat", "results", "diagnose"):
            page.locator(f"nav [data-view={view}]").click()
            until(lambda: page.locator(f"#v-{view}").is_visible())  # noqa: B023 - called at once
            violations = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
            found = [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in violations]
            assert found == [], view
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                "wider than the window"
            )
        assert page.evaluate("document.documentElement.lang") == {"en": "en", "zh": "zh-CN"}[language]


def test_a_pasted_log_is_diagnosed_in_the_language_of_the_page(browser: Browser, tmp_path: Path) -> None:
    with studio_of(tmp_path) as studio:
        page = opened(browser, f"{studio.url}&lang=zh", [])
        page.goto(f"http://127.0.0.1:{studio.port}/?lang=zh#diagnose")
        page.locator("#log").fill("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        page.get_by_role("button", name="查找原因").click()
        page.wait_for_selector("[data-cause=cuda_oom]")
        assert re.search("[\u4e00-\u9fff]", page.locator("[data-cause] dd.first").inner_text())


def test_both_languages_have_every_word_that_the_page_uses() -> None:
    by_language = words()
    assert {*by_language["en"]} == {*by_language["zh"]}
    text = "".join(path.read_text() for path in OWN_STATIC.glob("*.js"))
    used = set(re.findall(r'\b(?:t|button|field|section|tile)\("([\w.-]+)"', text))
    assert used - {*by_language["en"]} == set()
