"""The documentation site builds strictly in both languages, and Chinese pages match the English
ones.

Run: pytest tests/docs/test_site.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from bench.docs_search import ask, kept_lines
from page_checks import BLOCK, chinese_pages, stamp, unknown_commands, unknown_keys, why_behind
from tests import front_server
from tests.front.board.boards import CHROMIUM, CHROMIUM_FLAGS
from tests.needs import need

ROOT = Path(__file__).parents[2]


def build(config: Path | str, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(site)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    for config, place in (("mkdocs.yml", folder), ("mkdocs.zh.yml", folder / "zh")):
        done = build(config, place)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_no_page_loads_a_file_from_the_network(site: Path) -> None:
    loading = r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//|<link[^>]+rel=["']?(?:stylesheet|preconnect|preload)[^>]+href=["']?https?://|@import|url\(["']?https?://"""
    pages = list(site.rglob("*.html"))
    assert {page.relative_to(site).parts[0] for page in pages} >= {"index.html", "zh", "how-to"}
    for page in [*pages, *site.rglob("*.css")]:
        assert not re.search(loading, page.read_text("utf-8")), page


@pytest.mark.slow
def test_pasted_log_line_finds_its_cause_among_the_first_three_results(site: Path) -> None:
    """The site's own search, with the theme's script and the site's index.

    Figures for more lines: bench/docs_search.py.
    """
    need("node")
    rows = list(kept_lines())
    found = dict(zip((row["line"] for row in rows), ask(site, rows), strict=True))
    missed = {
        row["line"]: found[row["line"]] for row in rows if not set(row["causes"]) & set(found[row["line"]])
    }
    assert len(rows) > 60
    assert len(missed) <= 0.05 * len(rows), missed


@pytest.mark.slow
def test_the_words_of_the_most_asked_questions_find_their_pages(site: Path) -> None:
    need("node")
    asked = {
        "using GPU 3 to perform barrier as devices used by this process are currently unknown": (
            "device_unbound_barrier"
        ),
        "Watchdog caught collective operation timeout": "rank_stalled",
        "nan_loss": "nan_loss",
        "train with little memory": "low-memory",
        "slurm": "slurm",
        "resume": "resume",
    }
    for (words, page), first in zip(
        asked.items(), ask(site, [{"line": words} for words in asked]), strict=True
    ):
        assert page in first, (words, first)


@pytest.mark.slow
def test_chinese_search_finds_causes_by_chinese_words_and_by_log_lines(site: Path) -> None:
    need("node")
    asked = {
        "显存不足": "cuda_oom",
        "掉卡": "gpu_fell_off",
        "端口被占用": "port_in_use",
        "检查点损坏": "corrupt_checkpoint",
        "数据量不一致 步数不同": "unequal_steps",
        "术语表": "glossary",
        "Watchdog caught collective operation timeout": "rank_stalled",
    }
    for (words, page), first in zip(
        asked.items(), ask(site / "zh", [{"line": words} for words in asked]), strict=True
    ):
        assert page in first, (words, first)


@pytest.mark.slow
def test_a_link_between_the_languages_and_to_other_files_leads_somewhere(site: Path) -> None:
    """MkDocs itself checks links within a language."""
    for page in site.rglob("*.html"):
        for address in re.findall(r'<a href="(\.\.[^"#]*\.html)', page.read_text("utf-8")):
            assert (page.parent / address).resolve().exists(), f"{page}: {address}"


WRONG = {
    "page.md": ("[there](nowhere.md)", "nowhere.md"),
    "anchor.md": ("[there](#nowhere)", "#nowhere"),
    "command.md": ("```\nunisono trian x.yaml\n```", "unisono trian"),
    "option.md": ("`unisono train x.yaml --fastly`", "--fastly"),
    "key.md": ("```yaml\nmodel: m\n```\n`data.tran`", "data.tran"),
}
"""Pages that name what does not exist, and the words of each."""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The warnings of a build that fails at five of six pages."""
    folder = tmp_path_factory.mktemp("wrong")
    docs = folder / "docs"
    docs.mkdir()
    (docs / "README.md").write_text("# One\n")
    for name, (text, _) in WRONG.items():
        (docs / name).write_text(f"# One\n\n{text}\n")
    config = folder / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: {docs}\nhooks: [{ROOT}/scripts/site_hooks.py]\nnav: {['README.md', *WRONG]}\n"
                      f"theme: {{custom_dir: {ROOT}/docs-theme}}\n")  # fmt: skip
    done = build(config, folder / "site")
    assert done.returncode != 0
    assert "Aborted with 5 warnings in strict mode!" in done.stdout + done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("WARNING")]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_the_build_fails_at_a_page_that_names_what_does_not_exist(name: str, complaints: list[str]) -> None:
    (complaint,) = [line for line in complaints if name in line]
    assert WRONG[name][1] in complaint


@pytest.mark.parametrize("page", chinese_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_is_made_from_the_english_one_as_it_is_now(page: Path) -> None:
    """If this fails: translate what has changed in the English page, then python
    scripts/page_checks.py --stamp PAGE.
    """
    assert why_behind(page) == ""


def test_a_chinese_page_whose_english_page_changed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "ROOT": tmp_path,
        "DOCS": tmp_path / "docs",
        "CHINESE": tmp_path / "docs" / "zh",
    }.items():
        monkeypatch.setattr(f"page_checks.{name}", value)
    english, chinese = tmp_path / "docs" / "a.md", tmp_path / "docs" / "zh" / "a.md"
    chinese.parent.mkdir(parents=True)
    english.write_text("# One\n")
    chinese.write_text("# 一\n")
    assert "does not note docs/a.md" in why_behind(chinese)
    stamp(chinese)
    assert why_behind(chinese) == ""
    english.write_text("# Two\n")
    assert "docs/a.md has changed" in why_behind(chinese)
    stamp(chinese)
    assert chinese.read_text().count("<!-- from") == 1


def test_blocks_within_lists_are_checked() -> None:
    text = "- do\n  ```bash\n  unisono trian x\n  ```\n- `optim.rate`\n"
    assert BLOCK.search(text)
    assert list(unknown_commands(text)) == ["unisono trian x"]
    assert list(unknown_keys(text)) == ["optim.rate"]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_script_of_the_fifth_story_is_named_with_its_rank(tmp_path: Path) -> None:
    """docs/explanation/reports.md: the command that it shows, and the verdict."""
    command = [sys.executable, "-m", "unisono", "run", "--", "torchrun", "--nproc-per-node", "2", str(ROOT / "examples" / "unequal_split.py")]  # fmt: skip
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = front_server.run(command, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 4, done.stderr
    assert "[unequal_steps]" in done.stderr + done.stdout
    assert re.search(r"^WHO +rank 0, host ", done.stderr + done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_in_a_browser_the_site_searches_when_it_is_opened_as_a_file(site: Path) -> None:
    """Without a server a page may not start the search's worker:
    docs-theme/javascripts/iframe-worker.js runs it in a frame.
    """
    need("chromium")
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        page = browser.new_page(viewport={"width": 390, "height": 844})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "reference" / "causes.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.keyboard.press("/")
        page.keyboard.type("Watchdog caught collective operation timeout")
        first = page.wait_for_selector(".md-search-result__item a", timeout=60_000)
        assert first is not None
        assert (first.get_attribute("href") or "").partition("?")[0].endswith("rank_stalled.html")
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
