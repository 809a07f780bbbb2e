"""The wheel alone brings the guard and the fronts into an environment of another trainer, and
changes nothing there.

Run: pytest -m long tests/test_light_core.py (downloads torch for the CPU, transformers and others)
"""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROGRAMS = REPOSITORY / "tests/guard/programs/programs"
OTHER_TRAINER = ("torch==2.13.0", "transformers==4.57.*", "peft", "accelerate", "datasets")
TRAINER_FIX = "  fix:   pip install 'unisono[train]'\n"

pytestmark = [pytest.mark.long, pytest.mark.network, pytest.mark.timeout(1500)]


def run(folder: Path, *words: str | Path, code: int | None = 0, cwd: Path | None = None) -> str:
    """What a program of an environment prints."""
    variables = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        [folder / "bin" / words[0], *words[1:]],
        cwd=cwd or folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=900,
    )
    assert code is None or done.returncode == code, done.stdout
    return done.stdout


def install(folder: Path, *packages: str | Path) -> None:
    run(folder, "pip", "install", "--quiet", *packages)


def versions(folder: Path) -> set[str]:
    return set(run(folder, "pip", "freeze").splitlines())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    venv.create(folder / "venv", with_pip=True)
    run(folder / "venv", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, REPOSITORY)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_guards_in_an_environment_of_another_trainer(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=True)
    install(folder, *OTHER_TRAINER)
    before = versions(folder)
    install(folder, wheel)
    assert before <= versions(folder)

    words = ("unisono", "run", "--output-dir")
    program = ("python", PROGRAMS / "hf_trainer.py", "--out", tmp_path / "losses")
    assert "completed: exit code 0" in run(folder, *words, "healthy", "--", *program)
    missing = run(folder, *words, "failed", "--", "python", "-c", "import nothing_here", code=2)
    assert "[missing_dependency]" in missing
    (folder / "failed" / "verdict.json").unlink()
    assert "[missing_dependency]" in run(folder, "unisono", "diagnose", "failed/logs", code=None)
    assert "pass   system.versions" in run(folder, "unisono", "doctor", code=None)

    (folder / "c.yaml").write_text("model: builtin:tiny\ndata: {train: rows.jsonl}\n")
    refused = run(folder, "unisono", "train", "c.yaml", "output_dir=out", code=2)
    assert "transformers>=5.0 (4.57" in refused
    assert TRAINER_FIX in refused
    assert not (folder / "out").exists()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="needs Python 3.11: wheels of versions that old")
def test_the_core_works_with_the_lowest_versions_that_it_accepts(wheel: Path, tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = [re.sub(r">=([\d.]+).*", r"==\1", line) for line in project["dependencies"]]
    venv.create(tmp_path, with_pip=True)
    install(tmp_path, wheel, *lowest)
    assert "torch" not in " ".join(versions(tmp_path))

    assert "For example: unisono train" in run(tmp_path, "unisono", "--help")
    assert "nan_loss" in run(tmp_path, "unisono", "explain", "nan_loss")
    (tmp_path / "train.log").write_text("ModuleNotFoundError: No module named 'nothing_here'\n")
    assert "[missing_dependency]" in run(tmp_path, "unisono", "diagnose", "train.log", code=None)
    assert "pass   system.versions" in run(tmp_path, "unisono", "doctor", code=None)
    assert TRAINER_FIX in run(tmp_path, "unisono", "generate", "runs/demo", "hello", code=2)
