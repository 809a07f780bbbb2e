"""The table of launchers names tests that there are. Run: pytest tests/docs/test_launchers.py"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "launchers.md"
LAUNCHERS, COLUMNS = 5, 5
NO_DISK = "one machine"


def rows() -> list[list[str]]:
    """The cells of each launcher's row, behind its name."""
    table = PAGE.read_text().split("## What is tested")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ") and "|---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")[1:]] for line in lines[1:]]


def test_every_cell_of_the_table_leads_to_a_test_that_exists() -> None:
    cells = [cell for row in rows() for cell in row]
    assert cells.count(NO_DISK) == 1
    for cell in (cell for cell in cells if cell != NO_DISK):
        link = re.fullmatch(r'\[test\]\((\S+) "(\w+)"\)', cell)
        assert link, cell
        path, name = link.groups()
        file = (PAGE.parent / path).resolve()
        assert file.is_relative_to(ROOT / "tests"), path
        functions = {
            node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{path}::{name}"
        marks = {ast.unparse(mark) for mark in functions[name].decorator_list}
        assert not any(re.search(r"xfail|skip", mark) for mark in marks), (
            f"{path}::{name} is not expected to pass"
        )


def test_every_launcher_has_all_columns() -> None:
    assert len(rows()) == LAUNCHERS
    assert {len(row) for row in rows()} == {COLUMNS}
