"""The table of launchers names tests that there are. Run: pytest tests/docs/test_launchers.py"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "launchers.md"
COLUMNS = 5


def test_every_cell_of_the_table_leads_to_a_test_that_exists() -> None:
    cells = re.findall(r'\[test\]\((\S+) "(\w+)"\)', PAGE.read_text())
    assert len(cells) >= 4 * COLUMNS
    for path, name in cells:
        file = (PAGE.parent / path).resolve()
        assert file.is_relative_to(ROOT / "tests"), path
        functions = {
            node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{path}::{name}"


def test_every_row_has_all_columns() -> None:
    table = PAGE.read_text().split("## What is tested")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "|---" not in line]
    assert rows
    assert {line.count("|") for line in rows} == {COLUMNS + 2}
