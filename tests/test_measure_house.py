"""The report on the layout of src/unisono. Run: pytest tests/test_measure_house.py"""

from pathlib import Path

import pytest

import measure_house
from measure_house import (
    TARGETS,
    Report,
    code_lines,
    folders_at_top,
    imports_between,
    measure,
    read_modules,
    repeated_classes,
    repeated_names,
)

FILES = {
    "__init__.py": '"""A package."""\n',
    "front/cli/__init__.py": "",
    "front/cli/rows.py": "def run():\n    from unisono.trainer.training.loop import steps\n\n    return steps()\n",
    "front/rows/__init__.py": "",
    "trainer/training/__init__.py": "",
    "trainer/training/loop.py": (
        '"""The loop."""\n\nfrom unisono.trainer.training import rows\n\n\ndef steps():\n    """Of a run."""\n    #'
        " counted\n    return rows.COUNT\n"
    ),
    "trainer/training/rows.py": "TABLE = [1, 2]  # fmt: skip\nCOUNT = len(TABLE)\n",
    "trainer/plan/rows.py": "",
    "trainer/data/rows.py": "import unisono.trainer.training.rows\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "unisono"
    for name, text in FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_code_lines_exclude_docstrings_comments_and_blank_lines(package: Path) -> None:
    modules = {module.name: module for module in read_modules(package)}
    assert code_lines(modules["unisono.trainer.training.loop"]) == {3, 6, 9}


def test_import_belongs_to_the_module_holding_the_name_even_in_a_function(package: Path) -> None:
    imports = imports_between(read_modules(package))
    assert imports["unisono.front.cli.rows"] == {"unisono.trainer.training.loop"}
    assert imports["unisono.trainer.training.loop"] == {"unisono.trainer.training.rows"}
    assert imports["unisono.trainer.data.rows"] == {"unisono.trainer.training.rows"}


def test_a_file_name_may_occur_twice_and_a_command_may_have_its_rooms_name(package: Path) -> None:
    assert repeated_names(read_modules(package)) == {"rows": 3}
    (package / "trainer" / "data" / "rows.py").unlink()
    assert repeated_names(read_modules(package)) == {}


def test_a_class_has_a_name_that_no_other_class_has(package: Path) -> None:
    (package / "trainer/plan/rows.py").write_text("class Row:\n    class _Cell: ...\n")
    (package / "trainer/data/rows.py").write_text("def make():\n    class _Cell: ...\n")
    assert repeated_classes(read_modules(package)) == {
        "_Cell": ["trainer/data/rows.py", "trainer/plan/rows.py"]
    }


def test_the_figures_are_those_of_the_files(package: Path) -> None:
    report = measure(read_modules(package))
    assert report.figures["files"] == len(FILES)
    assert report.figures["lines"] == sum(text.count("\n") for text in FILES.values())
    assert report.figures["lines of a file, most"] == 9
    assert report.figures["modules with one importer"] == 1  # the loop; the rows have two
    assert report.figures["fmt: skip"] == 1
    assert report.details["lines of the largest room"] == "trainer/training"


def test_every_target_is_of_a_figure_and_a_missed_one_is_named(package: Path) -> None:
    report = measure(read_modules(package))
    assert {target.figure for target in TARGETS} <= report.figures.keys()
    assert [target.figure for target in report.missed()] == [
        "lines of a file, median",
        "file names used more than twice",
    ]


@pytest.mark.parametrize(("argv", "code"), [([], 0), (["--check"], 1)])
def test_a_missed_target_fails_only_the_check(
    argv: list[str],
    code: int,
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measure_house, "read_modules", lambda: read_modules(package))
    assert measure_house.main(argv) == code
    assert "NOT MET" in capsys.readouterr().out


def test_the_check_passes_where_every_target_is_met() -> None:
    report = Report({target.figure: target.bound for target in TARGETS}, {})
    assert report.missed() == []


def test_the_package_meets_its_targets() -> None:
    """Raise a bound together with docs/decisions/0024-size-of-the-package.md."""
    assert measure(read_modules()).missed() == []


def test_folders_and_rooms_of_the_wings_are_counted(package: Path) -> None:
    modules = read_modules(package)
    assert folders_at_top(modules) == {"front", "trainer"}
    report = measure(modules)
    assert report.figures["rooms of a wing, most"] == 3
    assert report.details["rooms of a wing, most"] == "trainer"
