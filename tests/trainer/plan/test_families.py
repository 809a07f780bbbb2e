"""Families of models.

Run: pytest tests/plan/test_families.py
"""

import re
from pathlib import Path

import unisono

SOURCE = Path(unisono.__file__).parent
NAMES = re.compile(
    r"\bDIFFUSION\b|is_picture_model|is_image_model\(|[!=]= \"diffusion\"|\bPICTURES\b|\brun\.pictures\b"
)
STILL_BRANCH = {
    "trainer/config/sections.py": 1,
    "trainer/config/schema.py": 5,
}
"""Lines outside of the families that name one: may only become fewer. The name itself, and rules of
a config that compare two values.
"""
TABLES = ("trainer/config/limits.py",)
"""Rows of what objectives take: data, not branches (docs/decisions/0039-limits-of-objectives.md)."""


def test_no_line_outside_of_the_families_names_one() -> None:
    named = {}
    for file in sorted(SOURCE.rglob("*.py")):
        path = file.relative_to(SOURCE)
        if "families" in (*path.parts, path.stem) or path.as_posix() in TABLES:
            continue
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if NAMES.search(line)]
        if lines:
            named[path.as_posix()] = len(lines)
    assert named == STILL_BRANCH
