"""What a run of the tests says of tests that it could not run. Run: pytest tests/test_needs.py"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import llama_cpp
from tests.needs import PROGRAMS, lacking, what_was_skipped

ROOT = Path(__file__).parents[1]


def test_one_line_reports_what_was_not_run_for_want_of_what() -> None:
    reasons = [
        "Skipped: needs iptables",
        "Skipped: needs slurmctld, munged",
        "Skipped: needs iptables",
        "needs root: x",
    ]
    assert (
        what_was_skipped(reasons)
        == "not run: 4 tests, for want of iptables (2), slurmctld, munged (1), root (1); `make system`, as"
        " root, installs the programs"
    )
    assert what_was_skipped(["needs root"]) == "not run: 1 test, for want of root (1)"
    assert what_was_skipped([]) == ""


def test_a_program_that_is_missing_is_named() -> None:
    assert lacking("sh") == ""
    assert lacking("sh", "no-such-program", "nor-this") == "needs no-such-program, nor-this"


def test_make_system_installs_the_package_of_every_program_that_tests_need() -> None:
    script = (ROOT / "scripts" / "install_system.sh").read_text()
    packages = re.search(r"packages=\((.*?)\)", script, re.DOTALL)
    assert packages is not None
    assert set(PROGRAMS.values()) <= set(packages[1].split())
    assert f"llama_cpp={llama_cpp.PACKAGE}@{llama_cpp.VERSION} " in script


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of its own, with the hooks of this one and a test that is skipped."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_a():\n    pytest.skip('needs no-such-program')\ndef test_b():\n    pass\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("options", "code"),
    [((), 0), (("--skips-allowed", "no-such-program"), 0), (("--skips-allowed", "a GPU"), 1)],
)
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")])
def test_a_skip_that_is_not_allowed_fails_the_run(
    suite: Path,
    options: tuple[str, ...],
    code: int,
    workers: tuple[str, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    words = [
        sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(suite), "-p", "tests.needs",
        # In pytest's usual directory it would first remove what older runs left there, for minutes.
        "--basetemp", str(tmp_path_factory.mktemp("inner")), *workers, *options,
    ]  # fmt: skip
    alone = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
    }  # what is installed beside it takes a second to import
    done = subprocess.run(
        [*words, str(suite)], cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    last = done.stdout.strip().splitlines()
    assert done.returncode == code, done.stdout + done.stderr
    assert "not run: 1 test, for want of no-such-program (1)" in last[-1 if code == 0 else -2]
    if code:
        assert "a skip that is not expected" in last[-1]
