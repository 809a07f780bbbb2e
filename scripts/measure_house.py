"""Measures how src/unisono is laid out: sizes of files and functions, imports between modules, file
names, targets met or not.

python scripts/measure_house.py            the report
python scripts/measure_house.py --check    the same, with exit code 1 where a target is missed
"""

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "unisono"
SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE
_NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_EXEMPT_NAMES = ("__init__", "__main__")
_MOST_OF_A_NAME = 2
_PARTS_OF_A_MODULE = 2  # a wing, and a room or module in it


@dataclass(frozen=True)
class Target:
    """A bound on one figure of the report.

    Attributes:
        figure: the key in `Report.figures`.
        bound: the largest value, or with `at_least` the smallest one.
        at_least: whether more is better.
        note: shown behind the bound.
    """

    figure: str
    bound: int
    at_least: bool = False
    note: str = ""

    def is_met(self, value: int) -> bool:
        """Whether a value is within the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


WINGS = ("base", "front", "guard", "jobs", "trainer")

TARGETS = (
    Target("lines", 158_800, note="docs/decisions/0024-size-of-the-package.md"),
    Target("folders at the top", 6),
    Target("rooms of a wing, most", 12),
    Target("lines of a file, median", 170, at_least=True),
    Target("imports of one module, most", 28),
    Target("file names used more than twice", 0),
    Target("class names used twice", 0),
    Target("fmt: skip", 50),
)


@dataclass(frozen=True)
class Module:
    """One file of the package.

    Attributes:
        name: dotted, e.g. `unisono.trainer.plan.resolve`.
        path: relative to the package.
        text: its source.
    """

    name: str
    path: Path
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """All lines of the file."""
        return self.text.count("\n")

    @property
    def room(self) -> str:
        """Wing and room, e.g. `guard/watch`; a module directly in a wing is a room of its own; `.` for
        a file beside the wings.
        """
        parts = self.path.with_suffix("").parts
        if len(parts) < _PARTS_OF_A_MODULE:
            return "."
        return "/".join(parts[:2]) if parts[1] != "__init__" else "."


@dataclass(frozen=True)
class Report:
    """The figures, and what stands behind some of them.

    Attributes:
        figures: by name.
        details: a line for some of the figures, by the same name.
    """

    figures: dict[str, int]
    details: dict[str, str]

    def missed(self) -> list[Target]:
        """The targets that are not met."""
        return [target for target in TARGETS if not target.is_met(self.figures[target.figure])]


def read_modules(root: Path = SOURCE) -> list[Module]:
    """Every Python file below a package's directory."""
    modules = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        parts = [root.name, *path.with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, path, file.read_text(encoding="utf-8")))
    return modules


def measure(modules: Sequence[Module]) -> Report:
    """The figures of a package."""
    sizes = [module.lines for module in modules]
    code = {module.name: code_lines(module) for module in modules}
    functions = [size for module in modules for size in _function_sizes(module, code[module.name])]
    imports = imports_between(modules)
    importers = Counter(target for targets in imports.values() for target in targets)
    widest = max(imports, key=lambda name: len(imports[name]))
    repeated, classes = repeated_names(modules), repeated_classes(modules)
    rooms = lines_of_rooms(modules)
    folders = {module.path.parts[:2] for module in modules if len(module.path.parts) > _PARTS_OF_A_MODULE}
    wings = Counter(wing for wing, _ in folders)
    most_rooms = wings.most_common(1)[0] if wings else ("", 0)
    largest, largest_lines = rooms.most_common(1)[0]
    figures = {
        "files": len(modules),
        "lines": sum(sizes),
        "folders at the top": len(folders_at_top(modules)),
        "rooms of a wing, most": most_rooms[1],
        "code lines": sum(len(lines) for lines in code.values()),
        "lines of a file, median": int(statistics.median(sizes)),
        "lines of a file, 90 %": _percentile(sizes, 0.9),
        "lines of a file, most": max(sizes),
        "code lines of a function, median": int(statistics.median(functions)),
        "code lines of a function, 90 %": _percentile(functions, 0.9),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "imports of one module, most": len(imports[widest]),
        "file names used more than twice": len(repeated),
        "class names used twice": len(classes),
        "fmt: skip": sum(module.text.count("# fmt: skip") for module in modules),
        "lines of the largest room": largest_lines,
    }
    details = {
        "rooms of a wing, most": most_rooms[0],
        "lines of a file, most": str(max(modules, key=lambda module: module.lines).path),
        "imports of one module, most": widest,
        "file names used more than twice": ", ".join(f"{name} ×{count}" for name, count in repeated.items()),
        "class names used twice": ", ".join(
            f"{name} in {' and '.join(paths)}" for name, paths in classes.items()
        ),
        "lines of the largest room": largest,
    }
    return Report(figures, details)


def lines_of_rooms(modules: Sequence[Module]) -> Counter[str]:
    """All lines of each room."""
    rooms: Counter[str] = Counter()
    for module in modules:
        rooms[module.room] += module.lines
    return rooms


def folders_at_top(modules: Sequence[Module]) -> set[str]:
    """The folders directly in the package that hold Python files."""
    return {module.path.parts[0] for module in modules if len(module.path.parts) > 1}


def code_lines(module: Module) -> set[int]:
    """The numbers of the lines that hold code: no blank ones, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def imports_between(modules: Sequence[Module]) -> dict[str, set[str]]:
    """The modules of the package that each of them imports, anywhere in its text."""
    names = {module.name for module in modules}
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                targets = {f"{node.module}.{alias.name}" for alias in node.names}
                found[module.name] |= (targets | {node.module} if not targets <= names else targets) & names
            elif isinstance(node, ast.Import):
                found[module.name] |= {alias.name for alias in node.names} & names
        found[module.name].discard(module.name)
    return found


def repeated_names(modules: Sequence[Module]) -> dict[str, int]:
    """File names that occur more often than twice.

    A command's file in cli may have the name of the room that it starts.
    """
    rooms = {module.room for module in modules}
    counts = Counter(
        module.path.stem
        for module in modules
        if not (module.room == "front/cli" and f"front/{module.path.stem}" in rooms)
    )
    return {
        name: count for name, count in counts.items() if count > _MOST_OF_A_NAME and name not in _EXEMPT_NAMES
    }


def repeated_classes(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Classes, private ones, too, that share their name with another one, and their files."""
    files: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(module.path.as_posix())
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def show(report: Report) -> str:
    """The report as text: a line for each figure, with its target where there is one."""
    targets = {target.figure: target for target in TARGETS}
    rows = []
    for figure, value in report.figures.items():
        row = f"{figure:<34} {value:>7,}"
        if target := targets.get(figure):
            bound = f"{'at least' if target.at_least else 'at most'} {target.bound:,}"
            row += f"   {bound:<16} {'met' if target.is_met(value) else 'NOT MET'}"
            row += f"   ({target.note})" if target.note else ""
        if detail := report.details.get(figure):
            row += f"   ({detail})"
        rows.append(row)
    return "\n".join(rows)


def _function_sizes(module: Module, code: set[int]) -> list[int]:
    return [
        len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _percentile(values: Sequence[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; gives the exit code."""
    parser = argparse.ArgumentParser(description="Measures how src/unisono is laid out.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    arguments = parser.parse_args(argv)
    report = measure(read_modules())
    print(show(report))
    return 1 if arguments.check and report.missed() else 0


if __name__ == "__main__":
    sys.exit(main())
