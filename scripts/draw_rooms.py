"""Writes the picture and the table of rooms in docs/explanation/architecture.md from
pyproject.toml, the imports and the docstrings of the rooms.

    python scripts/draw_rooms.py            writes the page
    python scripts/draw_rooms.py --check    exit 1 if it is not up to date; a test runs this

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

from measure_house import SOURCE, Module, imports_between, read_modules

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
BASE = "base"
"""The node of the small modules directly in the package."""


def main() -> int:
    """Writes the page, or with --check compares it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare")
    gc.disable()  # syntax trees of 300 files, all of which stay: the collector would take two thirds of the time
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old)
    if parser.parse_args().check:
        if old != new:
            print(f"{PAGE} is not up to date: run python scripts/draw_rooms.py", file=sys.stderr)
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


def filled(page: str) -> str:
    """The page with both parts made again."""
    modules = read_modules()
    layers = read_layers()
    parts = {
        "picture": picture(layers, reduced(room_imports(modules))),
        "rooms": table(layers, modules),
    }
    for name, lines in parts.items():
        begin, end = f"<!-- {name}: made by scripts/draw_rooms.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"{PAGE} has no part {begin} … {end}")
        body = "\n".join([begin, "", *lines, "", end])
        page = pattern.sub(lambda _, body=body: body, page)  # type: ignore[misc]
    return page


def read_layers() -> list[list[str]]:
    """Rooms by layer, the highest first; the modules directly in the package are one node."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    rooms = [[room.strip() for room in layer.split("|") if _is_room(room.strip())] for layer in layers]
    return [layer for layer in rooms if layer] + [[BASE]]


def room_imports(modules: Sequence[Module]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for module, targets in imports_between(modules).items():
        room = _room_of(module)
        found.setdefault(room, set()).update(_room_of(target) for target in targets)
    found.pop(
        BASE, None
    )  # the modules there are of several layers: some import `causes`, which imports others of them
    return {room: targets - {room} for room, targets in found.items()}


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


def picture(layers: Sequence[Sequence[str]], graph: Mapping[str, set[str]]) -> list[str]:
    """A Mermaid flow chart: a row for each layer, the arrows between rooms."""
    lines = ["```mermaid", "flowchart TB"]
    for number, layer in enumerate(layers):
        lines += [
            f'  subgraph layer{number}[" "]',
            "    direction LR",
            *(f"    {room}" for room in layer),
            "  end",
        ]
    known = {room for layer in layers for room in layer}
    for room in sorted(known):
        lines += [f"  {room} --> {target}" for target in sorted(graph.get(room, set()) & known)]
    return [*lines, "```"]


def table(layers: Sequence[Sequence[str]], modules: Sequence[Module]) -> list[str]:
    """Each room with its job: the first line of its docstring."""
    jobs = {
        _room_of(module.name): (ast.get_docstring(module.tree) or "").partition("\n")[0]
        for module in modules
        if module.path.name == "__init__.py" and len(module.path.parts) == 2
    }
    jobs[BASE] = "Small modules beside the rooms, without dependencies on them: " + ", ".join(
        f"`{module.path.stem}`"
        for module in modules
        if len(module.path.parts) == 1 and module.path.stem[0] != "_"
    )
    return [
        "| room | job |",
        "|---|---|",
        *(f"| `{room}` | {jobs[room]} |" for layer in layers for room in layer),
    ]


def _is_room(name: str) -> bool:
    return (SOURCE / name).is_dir()


def _room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and _is_room(parts[1]) else BASE


if __name__ == "__main__":
    sys.exit(main())
