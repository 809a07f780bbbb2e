"""A run killed with SIGKILL at random moments ends as if nobody had. Run: pytest tests/cli/test_kills.py"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_SCRIPT = Path(__file__).parents[2] / "bench" / "kills.py"


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kills", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_five_kills_change_nothing(kills: ModuleType, tmp_path: Path) -> None:
    wanted, report = kills.disturbed(tmp_path, kills=5, seed=1)
    assert report.kills == 5
    assert [step for step, *_ in wanted["losses"]] == list(range(1, kills.STEPS + 1))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_kills_change_nothing(kills: ModuleType, tmp_path: Path) -> None:
    _, report = kills.disturbed(tmp_path, kills=50, seed=2)
    assert report.kills == 50
    assert report.of_front > 0
    assert report.of_worker > 0
