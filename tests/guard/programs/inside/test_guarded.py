"""`unisono.guarded()` in a loop of one's own. Run: pytest tests/guard/programs/inside/test_guarded.py"""

import subprocess
import sys
from collections.abc import Callable

import pytest

import unisono
from tests.guard.programs.inside.conftest import PROGRAMS
from tests.guard.programs.inside.front import Played


def test_outside_of_run_a_guarded_loop_is_a_loop() -> None:
    seen = []
    with unisono.guarded() as guard:
        for batch in guard.steps([1, 2, 3]):
            seen.append(batch)
            guard.step(float("nan"))
    assert (seen, guard.done) == ([1, 2, 3], 3)


def test_an_exception_in_a_guarded_loop_is_the_programs_own() -> None:
    def loop() -> None:
        with unisono.guarded() as guard:
            for _ in guard.steps([1]):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()


def test_importing_unisono_loads_neither_torch_nor_what_guards() -> None:
    show = "import sys, unisono; print('torch' in sys.modules, 'unisono.guard.integrations' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_under_run_the_front_knows_step_phase_and_loss(guarded: Callable[..., Played]) -> None:
    """Also of a program that loads no torch: its steps are those that it tells."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    played = guarded(sys.executable, PROGRAMS / "bare.py", world_size=1, env=env, forked=False)
    assert played.until_ended() == 0, played.printed
    reported = played.events_of("step")
    assert (reported[0]["step"], reported[0]["loss"]) == (1, 1.0)
    no_number = {"step": 4, "loss": "nan"}.items()
    assert any(no_number <= one.items() for one in reported), "what is no number is told at once"
    assert played.events_of("result")[0]["step"] == 5
    beat = played.ranks.beats[0].read()
    assert beat is not None
    assert (beat.phase, beat.step) == ("program", 6)


@pytest.mark.ranks
def test_under_run_a_rank_past_its_loop_differs_from_one_in_its_next_step(
    guarded: Callable[..., Played],
) -> None:
    """Both have made as many steps, and neither has a loader of torch."""
    played = guarded(sys.executable, PROGRAMS / "launcher.py", 2, PROGRAMS / "unequal.py", world_size=2)
    played.until(lambda: played.verdict or played.process.poll() is not None)
    assert played.verdict is not None, (played.printed, played.messages)
    assert (played.verdict.cause, played.verdict.ranks) == ("unequal_steps", (1,)), played.verdict.summary
