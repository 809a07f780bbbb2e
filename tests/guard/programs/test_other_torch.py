"""`unisono run` with other versions of torch than the one that is installed here.

By hand, and `long`:

python3.11 -m venv /tmp/t2.11 && /tmp/t2.11/bin/pip install torch==2.11.0 -e '.[dev]'
UNISONO_TEST_PYTHONS=/tmp/t2.11/bin/python:/tmp/t2.12/bin/python pytest -m long
tests/guard/programs/test_other_torch.py
"""

import os
import subprocess
from pathlib import Path

import pytest

PYTHONS = [path for path in os.environ.get("UNISONO_TEST_PYTHONS", "").split(os.pathsep) if path]
FILES = (
    "tests/guard/programs/test_torchrun.py", "tests/guard/programs/test_two_nodes.py", "tests/guard/programs/inside/test_private.py", "tests/guard/programs/inside/test_groups.py",
    "tests/guard/programs/inside/test_verdicts.py", "tests/guard/programs/test_repeated_starts.py",
)  # fmt: skip
LIMIT_S = 1500.0


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("python", PYTHONS or [""])
def test_what_depends_on_torch_holds_with_a_different_torch(python: str, file: str) -> None:
    if not python:
        pytest.skip("needs another torch: UNISONO_TEST_PYTHONS names no Python that has another torch")
    words = [python, "-m", "pytest", "-q", "-m", "long or not long", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:]
