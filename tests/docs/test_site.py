"""The documentation site builds strictly in both languages, and Chinese pages match the English
ones.

Run: pytest tests/docs/test_site.py
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from cause_pages import KINDS
from page_checks import (
    BLOCK,
    chinese_pages,
    stamp,
    unknown_commands,
    unknown_keys,
    why_behind,
    without_twin,
)
from site_hooks import drawn_rooms
from tests import front_server
from tests.docs.conftest import build
from unisono.base.causes import CATALOGUE

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_page_loads_a_file_from_the_network(site: Path) -> None:
    loading = r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//|<link[^>]+rel=["']?(?:stylesheet|preconnect|preload)[^>]+href=["']?https?://|@import|url\(["']?https?://"""
    pages = list(site.rglob("*.html"))
    assert {page.relative_to(site).parts[0] for page in pages} >= {"index.html", "zh", "how-to"}
    for page in [*pages, *site.rglob("*.css")]:
        assert not re.search(loading, page.read_text("utf-8")), page


@pytest.mark.slow
def test_the_language_switch_of_each_page_leads_to_the_same_page(site: Path) -> None:
    """To the home where there is no such page: decisions, and pages not yet translated."""
    switch = re.compile(r'<a href="([^"]+)" hreflang="(en|zh)"')
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    for page in pages:
        name = page.relative_to(site / "zh" if page.is_relative_to(site / "zh") else site)
        for address, language in switch.findall(page.read_text("utf-8")):
            root = site / "zh" if language == "zh" else site
            wanted = root / name if (root / name).exists() else root / "index.html"
            assert (page.parent / address).resolve() == wanted.resolve(), page
    assert (site / "zh" / "how-to" / "low-memory.html") in pages


@pytest.mark.slow
def test_parts_of_patterns_are_searched_and_not_shown(site: Path) -> None:
    for part, cause in (
        ("NVML_SUCCESS == r", "cuda_oom"),
        ("ouble Bit", "ecc_error"),
        ("in local", "nan_loss"),
    ):
        page = f"reference/causes/{cause}.html"
        assert part not in (site / page).read_text("utf-8")
        index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))["docs"]
        assert page in [entry["location"] for entry in index if part in entry["text"]]


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
    "example.md": ("```yaml\nmodel: m\ndata:\n  train: x.jsonl\n  evl: y.jsonl\n```", "data.evl"),
    "picture.md": ("![there](nowhere.png)", "nowhere.png"),
    "html.md": ('<img src="gone.png" alt="there">', "gone.png"),
}
"""Pages that name what does not exist, and the words of each."""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The warnings of a build that fails at all pages but the first."""
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
    assert f"Aborted with {len(WRONG)} warnings in strict mode!" in done.stdout + done.stderr
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


def test_an_english_page_without_a_chinese_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("page_checks.DOCS", tmp_path)
    monkeypatch.setattr("page_checks.CHINESE", tmp_path / "zh")
    for name in ("how-to/new.md", "how-to/old.md", "zh/how-to/old.md", "decisions/0001.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# One\n")
    assert without_twin() == ["how-to/new.md"]


def test_every_page_but_decisions_has_a_chinese_one() -> None:
    assert without_twin() == []


def test_every_cause_is_in_one_kind() -> None:
    assert sorted(cause for causes in KINDS.values() for cause in causes) == sorted(CATALOGUE)


def test_keys_in_files_of_other_tools_are_not_ours() -> None:
    ours = "```yaml\nmodel: m\noptim: {lr: 1.0e-4, rate: 2}\n```\n"
    assert list(unknown_keys(ours)) == ["optim.rate"]
    assert list(unknown_keys("```yaml\nmodel_name_or_path: m\noutput_dir: x\ncutoff: 2\n```\n")) == []
    assert list(unknown_keys("```yaml\napiVersion: v1\ndata: {a: b}\n```\n")) == []


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


def test_every_room_of_the_architecture_is_drawn_with_its_imports() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    (chart,) = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    svg = drawn_rooms(chart)
    assert svg.count("<rect") == chart.count('["') > 40
    assert svg.count('marker-end="') == chart.count("-->") > 40
