"""Programs that know nothing of unisono, and a small front that guards them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guard.programs.inside.front import Played, end, play

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Played]]:
    """Starts programs under guard; see play."""
    with contextlib.ExitStack() as stack:

        def start(*command: object, **more: object) -> Played:
            played = play(tmp_path, [str(word) for word in command], **more)  # type: ignore[arg-type]
            stack.callback(end, played)
            return played

        yield start
