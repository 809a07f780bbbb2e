"""A launcher of another package takes one file. Run: pytest tests/jobs/runs/test_other_launchers.py"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from unisono.jobs.launchers.launchers import LAUNCHERS

TOY = """
import json, subprocess
from dataclasses import dataclass
from unisono.guard.rundir.records import RunResult
from unisono.jobs.launchers.launcher import Launcher, front_command, option

@dataclass(frozen=True)
class Toy(Launcher):
    name = "toy"
    places_nodes = True
    label: str | None = option(metavar="TEXT", help="What the note says.")

    def train(self, request, show):
        show({"kind": "note", "time": 0.0, "text": f"toy starts {self.label}"})
        words = front_command(request, str(request.config_path))
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as front:
            for line in front.stdout:
                show(message := json.loads(line))
        return RunResult.from_json(message)
"""
CONFIG = {
    "model": {"path": "builtin:tiny", "weights": "random"}, "adapter": None, "data": {"train": "rows.jsonl"},
    "duration": "1 steps", "batch": {"global": 1}, "device": "cpu", "output_dir": "out",
}  # fmt: skip
SOURCE = Path(unisono.__file__).parent
Ran = subprocess.CompletedProcess[str]


def install(site: Path, *, entry: str = "toy_launcher:Toy", module: str = TOY) -> None:
    """A package as pip leaves it: its module, and the metadata that name the entry point."""
    metadata = site / "toy_launcher-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-launcher\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[unisono.launchers]\ntoy = {entry}\n")
    (site / "toy_launcher.py").write_text(module)


def unisono_with(folder: Path, *words: str) -> Ran:
    """The command line in a folder, with the packages of its `site`."""
    (folder / "c.yaml").write_text(json.dumps(CONFIG))
    (folder / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))  # fmt: skip
    path = os.pathsep.join([str(folder / "site"), str(SOURCE.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "unisono", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)  # fmt: skip


@pytest.mark.ranks
def test_a_launcher_of_another_package_starts_a_run(tmp_path: Path) -> None:
    install(tmp_path / "site")
    options = ["--launcher", "toy", "--launcher-option", "label=here", "--nproc", "1"]
    ran = unisono_with(tmp_path, "train", "c.yaml", *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "toy starts here" in ran.stderr
    assert json.loads((tmp_path / "out" / "result.json").read_text())["outcome"] == "completed"
    assert [path.name for path in (tmp_path / "site").glob("*.py")] == ["toy_launcher.py"]


@pytest.mark.ranks
def test_a_launcher_that_gives_no_result_is_named(tmp_path: Path) -> None:
    """The run itself is whole."""
    install(tmp_path / "site", module=TOY.replace("RunResult.from_json(message)", "message"))
    ran = unisono_with(tmp_path, "train", "c.yaml", "--launcher", "toy", "--nproc", "1")
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "launcher toy gave a dict instead of a RunResult" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert json.loads((tmp_path / "out" / "result.json").read_text())["outcome"] == "completed"


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["train", "c.yaml", "--launcher", "toi"], "did you mean `toy`?"),
        (["train", "c.yaml", "--launcher", "toy", "--launcher-option", "queue=x"], "its options: label"),
        (["train", "c.yaml", "--launcher", "toy", "--head", "a"], "finds and starts the nodes itself, without --head"),
        (["doctor", "--launcher", "toy"], "--launcher toy does not run doctor"),
        (["run", "--launcher", "toy", "--", "true"], "unisono run --nodes N --node-rank R --head HOST -- true"),
        (["train", "c.yaml", "--launcher", "toy", "--launcher-option", "label"], "has no name, or no value"),
    ],
)  # fmt: skip
def test_what_a_launcher_cannot_do_is_refused(tmp_path: Path, words: list[str], printed: str) -> None:
    install(tmp_path / "site")
    ran = unisono_with(tmp_path, *words)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert printed in re.sub(r"\s+", " ", ran.stderr)


@pytest.mark.parametrize("entry", ["toy_launcher:Toys", "no_such_module:Toy"])
def test_launcher_that_cannot_be_imported_is_named_only_when_requested(tmp_path: Path, entry: str) -> None:
    install(tmp_path / "site", entry=entry)
    ran = unisono_with(tmp_path, "train", "c.yaml", "--dry-run", "--launcher", "toy")
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "launcher toy cannot be imported" in ran.stderr
    completed = unisono_with(tmp_path, "completion", "bash", "--line", "unisono train --launcher t")
    assert (completed.returncode, completed.stdout.strip()) == (0, "toy")


def comparisons(tree: ast.AST) -> list[str]:
    """Comparisons of a launcher with names, and look-ups by its name in a literal."""
    sources = []
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            parts = [node.slice, *filter(None, node.value.keys)]
        elif isinstance(node, ast.Match):
            values = [each.value for each in ast.walk(node) if isinstance(each, ast.MatchValue)]
            parts = [node.subject, *values]
        names = {
            each.value for part in parts for each in ast.walk(part) if isinstance(each, ast.Constant)
        } & LAUNCHERS.keys()
        if names and any("launcher" in ast.unparse(part).lower() for part in parts):
            sources.append(ast.unparse(node))
    return sources


def test_no_file_but_its_own_asks_for_a_launcher_by_name() -> None:
    assert comparisons(ast.parse('if request.launcher in ("ray", "slurm"): pass'))
    assert comparisons(ast.parse('match launcher:\n  case "ray": pass'))
    assert comparisons(ast.parse('{"ray": 1}[launcher]'))
    modules = {sys.modules[type(each).__module__].__file__ for each in LAUNCHERS.values()}
    others = [path for path in SOURCE.rglob("*.py") if str(path) not in modules]
    compared = {str(path): lines for path in others if (lines := comparisons(ast.parse(path.read_text())))}
    assert compared == {}


def test_the_help_of_the_option_names_every_launcher() -> None:
    from unisono.front.cli.job_options import JobOptionGroup, ProgramJobOptions

    for group in (JobOptionGroup, ProgramJobOptions):
        (launcher,) = (each for each in group.parameters() if each.name == "launcher")
        assert all(re.search(rf"\b{name}\b", launcher.annotation.__metadata__[0].help) for name in LAUNCHERS)
