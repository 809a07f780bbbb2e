"""Writes the picture and the table of rooms in docs/explanation/architecture.md from
pyproject.toml, the imports and the docstrings of the rooms; the Chinese page gets the picture, its
table is translated by hand.

    python scripts/draw_rooms.py            writes the pages
    python scripts/draw_rooms.py --check    exit 1 if one is not up to date; a test runs this

An arrow means "imports". Arrows that follow from others are omitted (transitive reduction), so a
room also reaches what its arrows reach.
"""

import argparse
import ast
import gc
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure_house import Module, imports_between, read_modules

ROOT = Path(__file__).parent.parent
PARTS = {
    ROOT / "docs" / "explanation" / "architecture.md": ("picture", "rooms"),
    ROOT / "docs" / "zh" / "explanation" / "architecture.md": ("picture",),
}
"""The pages, and what is made in each."""
WINGS = ("front", "jobs", "trainer", "guard", "base")
"""The wings, the highest first; each has a contract of its name in pyproject.toml."""


def main() -> int:
    """Writes the pages, or with --check compares them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare")
    gc.disable()  # syntax trees of 300 files, all of which stay: the collector would take two thirds of the time
    only_compares = parser.parse_args().check
    bodies = make_parts()
    code = 0
    for page, names in PARTS.items():
        old = page.read_text(encoding="utf-8")
        new = filled(old, {name: bodies[name] for name in names})
        if only_compares and old != new:
            print(f"{page} is not up to date: run python scripts/draw_rooms.py", file=sys.stderr)
            code = 1
        elif not only_compares:
            page.write_text(new, encoding="utf-8")
    return code


def make_parts() -> dict[str, list[str]]:
    """The lines of the picture and of the table."""
    modules = read_modules()
    wings = read_wings()
    return {
        "picture": picture(wings, reduced(room_imports(modules))),
        "rooms": table(wings, modules),
    }


def filled(page: str, parts: Mapping[str, Sequence[str]]) -> str:
    """A page with these parts made again.

    Raises:
        ValueError: the page has no place for one.
    """
    for name, lines in parts.items():
        begin, end = f"<!-- {name}: made by scripts/draw_rooms.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"there is no part {begin} … {end}")
        body = "\n".join([begin, "", *lines, "", end])
        page = pattern.sub(lambda _, body=body: body, page)  # type: ignore[misc]
    return page


def read_wings() -> dict[str, list[str]]:
    """The rooms of each wing, the highest first, e.g. `guard.watch`."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = {
        contract["id"]: contract.get("layers") for contract in pyproject["tool"]["importlinter"]["contracts"]
    }
    return {
        wing: [
            f"{wing}.{room.strip()}"
            for layer in layers[wing]
            for room in layer.split("|")
            if not room.strip().startswith("_")
        ]
        for wing in WINGS
    }


def room_imports(modules: Sequence[Module]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    imports: dict[str, set[str]] = {}
    for module, targets in imports_between(modules).items():
        room = _room_of(module)
        if room:
            imports.setdefault(room, set()).update(filter(None, map(_room_of, targets)))
    return {room: targets - {room} for room, targets in imports.items()}


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The transitive reduction of an acyclic graph: no arrow that a longer way replaces."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(graph.get(start, ()))
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(graph.get(node, ()))
        return seen

    reached = {node: reach(node) for node in graph}
    return {
        node: {
            target
            for target in targets
            if not any(target in reached.get(other, ()) for other in targets - {target})
        }
        for node, targets in graph.items()
    }


def picture(wings: Mapping[str, Sequence[str]], graph: Mapping[str, set[str]]) -> list[str]:
    """A Mermaid flow chart: a frame for each wing, the arrows between rooms."""
    lines = ["```mermaid", "flowchart TB"]
    for wing, rooms in wings.items():
        lines += [
            f"  subgraph {wing}",
            *(f'    {room}["{room.partition(".")[2]}"]' for room in rooms),
            "  end",
        ]
    known = {room for rooms in wings.values() for room in rooms}
    for room in sorted(known):
        lines += [f"  {room} --> {target}" for target in sorted(graph.get(room, set()) & known)]
    return [*lines, "```"]


def table(wings: Mapping[str, Sequence[str]], modules: Sequence[Module]) -> list[str]:
    """Each room with its job: the first sentence of its docstring."""
    jobs = {module.name: first_sentence(ast.get_docstring(module.tree) or "") for module in modules}
    lines = []
    for wing, rooms in wings.items():
        lines += ["", f"### {wing}", "", jobs[f"unisono.{wing}"], "", "| room | job |", "|---|---|"]
        lines += [f"| `{room.partition('.')[2]}` | {jobs[f'unisono.{room}']} |" for room in rooms]
    return lines[1:]


def first_sentence(docstring: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def _room_of(module: str) -> str:
    """The room of a module, e.g. `guard.watch`; empty for the modules beside the wings."""
    parts = module.split(".")
    return ".".join(parts[1:3]) if len(parts) > 2 and parts[1] in WINGS else ""


if __name__ == "__main__":
    sys.exit(main())
