"""What the README and the docs say is true: links lead somewhere, commands and configs work.

Run: pytest tests/docs
"""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

import readme_pictures
from models_page import trained
from page_checks import unknown_commands, unknown_keys
from tests import front_server
from unisono.base.causes.verdict import EXIT_CODES
from unisono.base.locale import chinese
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import build_config
from unisono.trainer.config.yaml_file import parse_yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in _BLOCK.findall(text) if found == language]


def first_config(tmp_path: Path) -> Path:
    """The README's config, as a reader would have saved it, with its results elsewhere."""
    (text,) = blocks(README, "yaml")
    path = tmp_path / "first.yaml"
    path.write_text(text.replace("runs/first", str(tmp_path / "run")))
    return path


def links(page: Path) -> list[tuple[Path, str]]:
    """The files of this repository that a page links to, each with the anchor or an empty text."""
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?[^)]*\)", _BLOCK.sub("", page.read_text()))
    return [
        ((page.parent / target).resolve() if target else page, anchor)
        for target, anchor in found
        if not target.startswith("http")
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by the rule of GitHub."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    """`bench/results/x.json` or `tests/front/drill`; a pattern, or a name in capitals, stands for any."""
    text = page.read_text()
    if page.parent.name == "causes":
        text = re.sub(r"```text.*?```", "", text, flags=re.DOTALL)  # lines of logs: `28.9 examples/s`
    named = re.findall(
        r"(?<![\w/.~-])((?:bench|tests|scripts|examples|src|docs)/[\w./-]*[\w/])(?![\w*…{\[(])", text
    )
    for path in named:
        assert Path(path).name.isupper() or (ROOT / path).exists(), f"{page.name}: {path}"


def test_every_page_is_linked_from_the_index() -> None:
    pages, seen = [ROOT / "docs" / "README.md"], set()
    while pages:
        page = pages.pop()
        seen.add(page)
        pages += [target for target, _ in links(page) if target.suffix == ".md" and target not in seen]
    assert set((ROOT / "docs").rglob("*.md")) - seen == set()


def test_the_exit_codes_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == EXIT_CODES


def test_the_tree_is_there() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    (tree,) = [body for body in blocks(contributing, "") if "the package" in body]
    for line in tree.splitlines():
        assert (ROOT / line.split()[0]).is_dir(), line


def test_the_commands_of_make_are_its_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`make (\w+)`", README)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_it_is_read_in_a_minute() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900


def test_both_languages_link_each_other() -> None:
    chinese = ROOT / "README.zh.md"
    assert (chinese, "") in links(ROOT / "README.md")
    assert (ROOT / "README.md", "") in links(chinese)


def test_the_first_config_is_short_and_loads(tmp_path: Path) -> None:
    path = first_config(tmp_path)
    assert len(path.read_text().splitlines()) == 5
    assert load_config(path).config.model.path == "builtin:tiny"


def test_the_pictures_show_the_recorded_run_and_the_results() -> None:
    for name, svg in readme_pictures.drawn().items():
        assert (readme_pictures.PICTURES / name).read_text() == svg, "run scripts/readme_pictures.py"


def test_the_recorded_run_says_the_same_in_both_languages() -> None:
    """Its fixes are those of the program today."""
    record = json.loads(readme_pictures.RECORD.read_text())
    fixes = [line for line in record["en"] if line.startswith("FIX")]
    assert fixes
    assert [chinese()(line) for line in fixes] == [line for line in record["zh"] if line.startswith("解决")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_shown_exists(page: Path) -> None:
    """`unisono NAME` in a block or in the text, with options that its --help knows."""
    assert list(unknown_commands(page.read_text())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_key_that_is_shown_exists(page: Path) -> None:
    """`section.key` in backquotes or as an override."""
    assert list(unknown_keys(page.read_text())) == []


def test_yaml_that_is_shown_is_yaml() -> None:
    for page in PAGES:
        for body in blocks(page.read_text(), "yaml"):
            assert isinstance(yaml.safe_load(body), dict), page.name


def test_the_version_and_the_help_answer() -> None:
    for words in (["--version"], ["--help"], ["init", "--list"], ["explain", "nan_loss"]):
        assert notify(*words)


@pytest.mark.slow
def test_the_first_config_trains_and_its_result_answers(tmp_path: Path) -> None:
    """The README's config and commands, with fewer steps; what the tutorial does with the result
    comes after.
    """
    config, run = first_config(tmp_path), str(tmp_path / "run")
    notify("train", str(config), "duration=3 steps")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["outcome"], result["step"]) == ("completed", 3)
    assert notify("generate", run, "timer fifty minutes", "--max-tokens", "8").strip()
    assert json.loads(notify("checkpoint", "ls", run, "--json"))["checkpoints"]
    notify("export", run, str(tmp_path / "model"), "--merge")
    assert (tmp_path / "model" / "config.json").exists()
    notify("data", "preview", str(config), "--rows", "2")
    assert notify("train", str(config), "--dry-run", "output_dir=" + str(tmp_path / "other"))


def notify(*words: str) -> str:
    """What a command of the documentation writes to stdout; it must end with 0."""
    done = front_server.run([sys.executable, "-m", "unisono", *words], cwd=ROOT)
    assert done.returncode == 0, f"unisono {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_configs_of_every_objective_load() -> None:
    page = (ROOT / "docs" / "how-to" / "preferences.md").read_text()
    base, *others = (yaml.safe_load(body) for body in blocks(page, "yaml"))
    seen = set()
    for sections in ({}, *others):
        raw, lines = parse_yaml(yaml.safe_dump({**base, **sections}), name="preferences.yaml")
        seen.add(build_config(raw, lines=lines, name="preferences.yaml").config.objective)
    assert seen == {"dpo", "simpo", "orpo", "kto", "reward"}


def test_the_number_of_trained_architectures_is_that_of_the_results() -> None:
    types = json.loads((ROOT / "bench" / "results" / "models.json").read_text("utf-8"))["types"]
    assert f"{trained(types)} of {len(types)} architectures train" in README
    chinese_readme = (ROOT / "README.zh.md").read_text("utf-8")
    assert f"{len(types)} 种结构中 {trained(types)} 种" in chinese_readme
