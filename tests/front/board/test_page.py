"""The page in Chromium: what it shows, that nothing in it runs or asks for more, that everybody can
use it.

Run: .venv/bin/python -m pytest tests/front/board/test_page.py
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from board_pictures import take_pictures
from tests import front_server
from tests.front.board.boards import board_of, chromium
from tests.front.board.made_runs import append, groups_of, make_hostile, make_run, write
from tests.front.board.test_sample_pictures import make_run_with_pictures
from tests.jobs.nodes.harness import ENTRY, PACED
from tests.needs import lacking
from unisono.front.board.page import runs_file
from unisono.front.board.regions import REGIONS
from unisono.guard.rundir import RunDir
from unisono.jobs.runs.start_decision import set_aside
from unisono.trainer.objectives.rollout_files import write_rollout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking("chromium")), reason=lacking("chromium") or "-"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of playwright's own process
]

AXE = Path(__file__).parent / "axe" / "axe.min.js"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    with chromium() as made:
        yield made


@pytest.fixture(autouse=True)
def closed(browser: Browser) -> Iterator[None]:
    """No page of a test that is over draws beside the next."""
    yield
    for context in browser.contexts:
        context.close()


@pytest.fixture
def errors() -> list[str]:
    """What a page complained of."""
    return []


def opened(browser: Browser, url: str, errors: list[str], **options: Any) -> Page:
    """A page with its curves painted."""
    context = browser.new_context(viewport={"width": options.pop("width", 1280), "height": 900}, **options)
    context.set_default_timeout(120_000)  # the machine may be busy
    page = context.new_page()
    page.on(
        "console",
        lambda message: (
            errors.append(f"{message.text} {message.location}") if message.type == "error" else None
        ),
    )
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.wait_for_selector("[data-painted]")
    return page


def file_of(folder: Path, *runs: Path) -> str:
    """The address of a file with some runs."""
    out = folder / "page.html"
    out.write_text(runs_file(list(runs), key=b"")[1])
    return out.as_uri()


def until(condition: Callable[[], bool], *, limit_s: float = 120.0) -> float:
    """Waits for an event, with a limit; the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "it never happened"
        time.sleep(0.05)
    return time.monotonic() - began


def test_the_file_asks_for_nothing_and_shows_every_region(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    url = file_of(tmp_path, make_run(tmp_path / "run", outcome="stalled", rollouts=2))
    context = browser.new_context(offline=True)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    page.wait_for_selector("[data-painted]")
    assert asked == [url]
    for region in REGIONS:
        section = page.locator(f"[data-region={region}]")
        assert section.get_by_role("heading", level=2).count() == 1, region
        assert len(section.inner_text()) > 20, region
    assert page.locator("[data-region=verdict] a").inner_text() == "What this cause means: rank_stopped"
    page.locator("[data-region=verdict] a").click()
    assert page.locator("[data-region=verdict] details").get_attribute("open") is not None
    assert page.locator("tr.culprit").get_attribute("data-rank") == "1"
    assert errors == []


def test_pictures_are_beside_their_samples_live_and_in_the_file(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    root = make_run_with_pictures(tmp_path / "run")
    with board_of(root) as board:
        for url in (board.url, file_of(tmp_path, root)):
            page = opened(browser, url, errors)
            images = page.locator("[data-region=samples] td img")
            images.first.scroll_into_view_if_needed()
            widths = "images => images.map((image) => image.naturalWidth)"
            until(lambda: images.evaluate_all(widths).count(40) == 2)  # noqa: B023 - called at once
            assert images.first.get_attribute("alt") == "Picture 1"
            assert images.count() == 6


def test_on_paper_every_region_is_there_with_whole_curves_in_light_colours(
    browser: Browser, full_page: str, errors: list[str]
) -> None:
    page = opened(browser, full_page, errors, width=700, color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    document = page.pdf(format="A4")
    assert document.startswith(b"%PDF")
    assert document.count(b"/Type /Page\n") + document.count(b"/Type/Page/") >= 2, "it takes several pages"
    for region in REGIONS:
        assert page.locator(f"[data-region={region}]").is_visible(), region
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bg')").strip() in (
        "#fff",
        "#ffffff",
    )
    cut = page.evaluate("""[...document.querySelectorAll('[data-curve]')].filter((card) => {
            const canvas = card.querySelector('canvas');
            return !canvas || !canvas.width || canvas.getBoundingClientRect().right > innerWidth + 1;
        }).map((card) => card.dataset.curve)""")
    assert cut == []
    breaks = "[...document.querySelectorAll('.chart')].map((one) => getComputedStyle(one).breakInside)"
    assert set(page.evaluate(breaks)) == {"avoid"}
    assert errors == []


def test_the_chinese_page_has_the_verdict_and_its_cause_in_chinese(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    url = file_of(tmp_path, make_run(tmp_path / "run", outcome="stalled"))
    page = opened(browser, url + "?lang=zh", errors)
    verdict = page.locator("[data-region=verdict]")
    what = verdict.locator("dd").first.inner_text()
    assert "停止" in what or "挂起" in what or "暂停" in what, what
    assert what.endswith("[rank_stopped]")
    verdict.locator("a").click()
    explained = verdict.locator("details").inner_text()
    assert explained.startswith("rank_stopped: ")
    english = [line for line in explained.split("\n") if line and not re.search("[\u4e00-\u9fff]", line)]
    assert english == [], "of the cause nothing is left in English"
    assert errors == []


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a file with two runs, one of which was stalled; of ten steps, as axe looks at
    every cell of the tables.
    """
    folder = tmp_path_factory.mktemp("full")
    runs = [
        make_run(folder / "run", outcome="stalled", steps=10, rollouts=3),
        make_run(folder / "other", seed=1, lr=1e-3, steps=10),
    ]
    return file_of(folder, *runs)


EVERY_LOOK = [
    (language, scheme, width)
    for language in ("en", "zh")
    for scheme in ("light", "dark")
    for width in (1280, 360)
]
SHORT = [("en", "light", 1280), ("zh", "dark", 360)]


@pytest.mark.parametrize(
    ("language", "scheme", "width"),
    [pytest.param(*look, marks=[] if look in SHORT else [pytest.mark.long]) for look in EVERY_LOOK],
)
def test_axe_finds_nothing_in_any_region(
    browser: Browser, full_page: str, errors: list[str], language: str, scheme: Any, width: int
) -> None:
    page = opened(
        browser, f"{full_page}?lang={language}", errors, color_scheme=scheme, width=width, bypass_csp=True
    )
    for _ in range(2):  # the second time those in what was opened
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        until(lambda: page.locator("[data-curve=cpu_time_s]").count() == 1)
    until(lambda: page.locator("[data-curve=cpu_time_s] tbody tr").count() > 0)
    page.add_script_tag(path=AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found["violations"]] == []
    assert len(found["passes"]) > 20
    page.locator("[name=answers][value=over]").check()
    page.wait_for_selector("[data-step]")
    over = page.evaluate("axe.run('#rollouts', {resultTypes: ['violations']})")
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in over["violations"]] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
    assert page.evaluate("document.documentElement.lang") == {"en": "en", "zh": "zh-CN"}[language]
    page.context.close()
    assert errors == []


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path, errors: list[str]) -> None:
    root = make_hostile(tmp_path / "run")
    page = opened(browser, file_of(tmp_path, root), errors)
    with board_of(root) as board:
        live = opened(browser, board.url, errors)
        for one in (page, live):
            one.wait_for_selector("[data-region=log] li")
            one.wait_for_selector("[data-region=rollouts] .answer")
            assert one.evaluate("window.hurt") is None
            assert one.locator("section[data-region]").count() == len(REGIONS)
            assert one.locator("#page img, #page script, #page style, #page iframe").count() == 0
            for region in ("verdict", "rollouts"):
                assert "<script>window.hurt=1</script>" in one.locator(f"[data-region={region}]").inner_text()
    assert [error for error in errors if "CONNECTION" not in error and "INCOMPLETE" not in error] == []


def test_answers_of_a_step_and_of_a_prompt_over_the_steps(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    root = make_run(tmp_path / "run", outcome=None, rollouts=8)
    with board_of(root) as board:
        for url in (board.url, file_of(tmp_path, root)):
            is_live = url == board.url
            page = opened(browser, url, errors)
            region = page.locator("[data-region=rollouts]")
            region.locator(".answer").first.wait_for()
            assert "Step 8 / 8" in region.inner_text()
            assert region.locator(".answer").count() == 4
            rewards = [float(text) for text in region.locator(".answer strong").all_inner_texts()]
            assert rewards == sorted(rewards, reverse=True)
            region.locator(".prompts button").last.click()
            region.locator(".prompts button[aria-pressed=true]").get_by_text("prompts.jsonl:6").wait_for()
            assert "What is 18 + 18?" in region.locator(".prompt").inner_text()
            assert page.evaluate("document.activeElement.dataset.keep"), "the focus stays"
            region.get_by_label("One prompt over steps").check()
            region.locator("[data-step]").first.wait_for()
            steps = [one.get_attribute("data-step") for one in region.locator("[data-step]").all()]
            assert steps == (["2", "4", "6", "8"] if is_live else ["2", "4", "8"]), (
                "6 of 8 steps are in a file"
            )
            region.get_by_role("button", name="Earlier").click()
            region.get_by_text("Step 7 / 8").wait_for()
            if not is_live:
                continue
            groups = groups_of(9, random.Random(1), share=0.5)
            write_rollout(root, 9, groups, rank=0, ranks=1)
            region.get_by_text("Step 7 / 9").wait_for()
            region.locator("[data-step='9']").wait_for()
            region.get_by_role("button", name="Newest step").click()
            region.get_by_text("Step 9 / 9").wait_for()
    assert [error for error in errors if "CONNECTION" not in error and "INCOMPLETE" not in error] == []


def test_a_run_without_rollouts_has_no_region_of_answers(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    page = opened(browser, file_of(tmp_path, make_run(tmp_path / "run")), errors)
    assert page.locator("[data-region=rollouts]").is_hidden()
    assert page.get_by_role("link", name="Answers").count() == 0
    assert errors == []


def test_the_keyboard_alone_reaches_everything(browser: Browser, tmp_path: Path, errors: list[str]) -> None:
    page = opened(browser, file_of(tmp_path, make_run(tmp_path / "run", outcome="stalled")), errors)
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(() => { const at = document.activeElement; const region = at.closest('[data-region]');"
                " return `${region ? region.dataset.region : 'top'} ${at.tagName} ${at.className}`; })()"
            )
        )
    for wanted in (
        "top A skip",
        "curves DIV plot",
        "curves INPUT ",
        "curves BUTTON ",
        "curves SUMMARY ",
        "ranks INPUT ",
        "log INPUT ",
        "log SELECT ",
        "log OL lines",
        "verdict SUMMARY ",
        "verdict A ",
    ):
        assert wanted in reached, wanted
    page.locator("[data-curve=loss] .plot").focus()
    before = page.evaluate("document.documentElement.dataset.zoomed")
    page.keyboard.press("+")
    until(lambda: page.evaluate("document.documentElement.dataset.zoomed") != before)


def test_smoothing_axes_log_scale_tables_and_search_work(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    root = make_run(tmp_path / "run")
    append(root, {"step": 41, "loss": None})
    page = opened(browser, file_of(tmp_path, root), errors)
    loss = page.locator("[data-curve=loss]")
    assert "1 NaN" in loss.inner_text()
    loss.locator("summary").click()
    until(lambda: loss.locator("tbody tr").count() == 41)
    assert "NaN" in loss.locator("tbody tr").last.inner_text()
    for name in ("Tokens", "Time", "Step"):
        page.get_by_label(name, exact=True).check()
    page.get_by_label("Smoothing").fill("0.9")
    page.get_by_label("Log scale").check()
    page.get_by_text("More curves").click()
    until(lambda: page.locator("[data-curve=cpu_time_s]").count() == 1)
    page.get_by_role("searchbox").fill("out of memory")
    until(lambda: page.locator("[data-region=log] li").count() == 2)
    assert page.locator("[data-region=log] mark").count() == 2
    page.emulate_media(media="print")
    assert page.locator("header.top").is_hidden()
    assert errors == []


def test_several_runs_share_axes_and_only_differences_come_first(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    runs = [
        make_run(tmp_path / name, seed=seed, lr=lr)
        for seed, (name, lr) in enumerate({"a": 1e-4, "b": 1e-3, "c": 1e-2}.items())
    ]
    page = opened(browser, file_of(tmp_path, *runs), errors)
    assert page.locator("[data-region=status] tbody tr").count() == 3
    first = page.locator("[data-region=config] table").first
    assert [row.split("\t")[0] for row in first.locator("tbody tr").all_inner_texts()] == ["optim.lr"]
    page.get_by_label("b", exact=True).uncheck()
    page.locator("#pick").select_option("c")
    until(lambda: page.locator("[data-region=status] strong").inner_text() == "c")
    dashes = "[0, 1, 2].map((at) => document.querySelectorAll('.legend canvas')[at].toDataURL())"
    until(lambda: len(set(page.evaluate(dashes))) == 3)
    assert errors == []


def order_of(page: Page) -> list[str]:
    """The regions as they stand on the page."""
    regions: list[str] = page.evaluate("[...document.querySelectorAll('[data-region]')].map((one) => one.id)")
    links: list[str] = page.evaluate(
        "[...document.querySelectorAll('[data-for]')].map((one) => one.dataset.for)"
    )
    assert links == regions
    return regions


def test_a_verdict_stands_before_the_curves_only_if_there_is_one(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    for outcome, expected in (("stalled", ["verdict", "curves"]), ("completed", ["curves", "verdict"])):
        page = opened(browser, file_of(tmp_path, make_run(tmp_path / outcome, outcome=outcome)), errors)
        assert order_of(page)[1:3] == expected
    assert errors == []


def test_phases_and_starts_have_chinese_words(browser: Browser, tmp_path: Path, errors: list[str]) -> None:
    root = make_run(tmp_path / "run")
    for rank, phase in enumerate(("close", "update")):
        entry = {
            "schema": 1,
            "time": 1_795_540_100.0,
            "rank": rank,
            "phase": phase,
            "step": 40,
            "seconds": {"data": 0.1},
        }
        with (root / "events" / "timeline-00000.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
    page = opened(browser, f"{file_of(tmp_path, root)}?lang=zh", errors)
    cells = [page.locator(f"[data-rank='{rank}'] td").nth(1).inner_text() for rank in (0, 1)]
    assert cells == ["正在退出", "正在更新权重"]
    assert "全新开始" in page.locator("[data-region=status]").inner_text()
    assert errors == []


DRAWN_TEXTS = """(() => {
  const fill = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    const chart = this.canvas.closest("[data-curve]");
    if (chart) (chart.texts ??= []).push(text);
    return fill.call(this, text, ...place);
  };
})()"""


def ticks_of(browser: Browser, url: str, errors: list[str], key: str) -> tuple[Page, list[str]]:
    """A page, and what was written at the axes of a chart."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.add_init_script(DRAWN_TEXTS)
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    chart = page.locator(f"[data-curve={key}]")
    until(lambda: bool(chart.evaluate("(node) => node.texts?.length ?? 0")))
    return page, chart.evaluate("(node) => node.texts")


def test_one_evaluation_has_whole_steps_at_its_axis(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    url = file_of(tmp_path, make_run(tmp_path / "run", steps=10))
    _, texts = ticks_of(browser, url, errors, "eval_loss")
    assert {"9", "10", "11"} <= set(texts)
    assert not {text for text in texts if text.startswith(("9.", "10."))}
    assert errors == []


def test_a_run_that_has_diverged_does_not_flatten_the_others(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    append(runs[2], {"step": 41, "lr": 0.5, "loss": 0.1})
    page, texts = ticks_of(browser, file_of(tmp_path, *runs), errors, "lr")
    assert (
        page.locator("[data-curve=lr] .outside").inner_text()
        == "Beyond this scale: c. The log scale shows all."
    )
    assert not {"0.1", "0.2", "0.5"} & set(texts), "the axis ends at the others"
    assert page.locator("[data-curve=loss] .outside").is_hidden()
    page.get_by_label("c", exact=True).uncheck()
    until(lambda: page.locator("[data-curve=lr] .outside").is_hidden())
    assert errors == []


def test_ranks_show_the_step_that_is_logged(browser: Browser, tmp_path: Path, errors: list[str]) -> None:
    root = make_run(tmp_path / "run", outcome=None)
    with board_of(root) as board:
        page = opened(browser, board.url, errors)
        step = page.locator("[data-rank='1'] .at")
        until(lambda: step.inner_text() == "40")
        append(root, {"step": 61, "loss": 0.2})
        until(lambda: step.inner_text() == "61")
    assert [error for error in errors if "CONNECTION" not in error and "INCOMPLETE" not in error] == []


def test_paths_and_keys_are_readable_on_a_phone(browser: Browser, tmp_path: Path, errors: list[str]) -> None:
    page = opened(browser, file_of(tmp_path, make_run(tmp_path / "run")), errors, width=360)
    for region, text in (("data", "data/train.jsonl"), ("config", "checkpoint.best")):
        box = page.locator(f"[data-region={region}] .code", has_text=text).first.bounding_box()
        assert box is not None
        assert box["height"] < 40, "one line"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_memory_is_among_the_first_curves(browser: Browser, tmp_path: Path, errors: list[str]) -> None:
    url = file_of(tmp_path, make_run(tmp_path / "run"))
    page, texts = ticks_of(browser, url, errors, "memory_bytes")
    assert "502 MB" in page.locator("[data-curve=memory_bytes] .read").inner_text()
    assert all(text.endswith("B") for text in texts if not text.isdecimal())


def test_the_page_follows_cuts_moves_and_a_server_that_goes(
    browser: Browser, tmp_path: Path, errors: list[str]
) -> None:
    root = make_run(tmp_path / "run", outcome=None)
    with board_of(root) as board:
        page = opened(browser, board.url, errors)
        assert "token" not in page.url
        drawn = page.locator("[data-curve=loss]")

        def last() -> float:
            return float(drawn.get_attribute("data-drawn") or 0)

        until(lambda: last() == 40)
        append(root, {"step": 41, "loss": 0.2}, {"step": 42, "loss": 0.2}, end="")
        assert until(lambda: last() == 41) < 10, "five times the bound"
        with (root / "metrics.jsonl").open("a") as file:
            file.write("\n")
        until(lambda: last() == 42)
        lines = (root / "metrics.jsonl").read_text().splitlines(keepends=True)[:22]
        (root / "new").write_text("".join(lines))
        (root / "new").rename(root / "metrics.jsonl")
        until(lambda: last() == 20)
        assert all("401" in error for error in errors)
        set_aside(RunDir(root))
        make_run(root, steps=3, outcome=None)
        until(lambda: last() == 3)
        until(lambda: "run.old-1" in page.locator("[data-region=status]").inner_text())
        board.end()
        gone = until(lambda: page.locator("html").get_attribute("data-connection") == "lost")
        assert gone < 25, "five times the bound"
        assert page.locator(".banner").inner_text().startswith("The server does not answer")
        with board_of(root, options=("--port", str(board.port))):
            until(lambda: page.locator("html").get_attribute("data-connection") == "live")
            append(root, {"step": 4, "loss": 0.2})
            until(lambda: last() == 4)
    # 404: a request may meet the moment in which the run is set aside.
    assert all("net::" in error or "401" in error or "404" in error for error in errors)


@pytest.mark.ranks
def test_a_stopped_rank_is_named_on_the_page_in_the_words_of_the_terminal(
    browser: Browser, tmp_path: Path, errors: list[str], model_dir: Path
) -> None:
    rows = "".join(json.dumps({"prompt": f"say {n}", "completion": f"{n}"}) + "\n" for n in range(200))
    write(tmp_path / "rows.jsonl", None, text=rows)
    root = tmp_path / "run"
    config = (
        f"model: {model_dir}\ndata: {{train: {tmp_path / 'rows.jsonl'}}}\noutput_dir: {root}\nduration: 5000"
        " steps\nbatch: {global: 4}\nrestarts: 0\n"
    )
    write(tmp_path / "train.yaml", None, text=config)
    (tmp_path / "answers.json").write_text(json.dumps(PACED))
    words = [sys.executable, str(ENTRY), str(tmp_path / "answers.json"), "train", str(tmp_path / "train.yaml"), "--nproc", "2"]  # fmt: skip
    said = (tmp_path / "said.txt").open("w+")
    with said, front_server.start(words, stdout=said, stderr=subprocess.STDOUT) as training:
        try:
            until(
                lambda: (root / "metrics.jsonl").exists() and (root / "metrics.jsonl").stat().st_size > 2_000,
                limit_s=120,
            )
            with board_of(root) as board:
                page = opened(browser, board.url, errors)
                until(lambda: page.locator("[data-region=status] .badge").first.inner_text() == "Running")
                os.kill(worker_of(root, 1), signal.SIGSTOP)
                page.wait_for_selector("[data-region=status] [data-warning]", timeout=120_000)
                warned = page.locator("[data-region=status] [data-warning]").inner_text()
                page.wait_for_selector("[data-region=verdict] [data-cause]", timeout=120_000)
                training.wait(60)
                said.seek(0)
                said_before = next(
                    line for line in said if line.rstrip().endswith(warned)
                )  # the same words, above the verdict
                assert "rank 1" in said_before
                said.seek(0)
                block = [line for line in said.read().splitlines() if re.match(r"(WHAT|WHO|DETECTED) ", line)]
                until(lambda: page.locator("[data-region=status] .badge").first.inner_text() == "Stalled")
                assert page.locator("[data-warning]").count() == 0, "it is over with the run"
                shown = page.locator("[data-region=verdict] dd").all_text_contents()
                assert [line[10:] for line in block] == shown[: len(block)]
                assert page.locator("tr.culprit").get_attribute("data-rank") == "1"
                until(lambda: page.locator("tr[data-rank='0'] .shares i").count() == 4)
        finally:
            if training.poll() is None:
                training.kill()
    assert errors == []


def worker_of(root: Path, rank: int) -> int:
    """The process of a rank, from the report in its events."""
    for line in (root / "events" / f"rank-{rank:05d}.jsonl").read_text().splitlines():
        message = json.loads(line)
        if message["kind"] == "rank_report":
            return int(message["report"]["pid"])
    raise AssertionError("the rank has not reported yet")


@pytest.fixture(scope="module")
def pictures(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Of the page, as they are in the docs: `scripts/board_pictures.py` writes them there."""
    return take_pictures(browser, tmp_path_factory.mktemp("pictures"))


def test_the_pictures_of_the_docs_show_every_region(pictures: dict[str, bytes]) -> None:
    folder = Path(__file__).parents[3] / "docs" / "how-to" / "pictures"
    assert {path.name for path in folder.glob("board-*.png")} == set(pictures)
    assert all(len(picture) > 20_000 for picture in pictures.values())
