"""Where a step of a training loop begins, as it shows from outside.

Run: pytest tests/guard/programs/inside/test_loop.py
"""

from unisono.guard.integrations.inside import StepStarts

ALL_GATHER, BARRIER = (4, 512), (3, 0)


def looped(steps: int, *, opening: tuple[int, int] = ALL_GATHER) -> tuple[StepStarts, list[bool]]:
    """A loop that has made steps with two collectives each; and whether the first of each has begun
    it.
    """
    loop, begun = StepStarts(), []
    for _ in range(steps):
        begun.append(loop.collective(*opening))
        assert not loop.collective(5, 64)
        loop.stepped()
    return loop, begun


def test_loop_without_a_loader_begins_steps_with_their_first_collective() -> None:
    loop, begun = looped(6)
    assert begun == [False, False, False, True, True, True]
    assert loop.collective(*ALL_GATHER)


def test_what_is_called_after_the_loop_begins_no_step() -> None:
    loop, _ = looped(6)
    assert not loop.collective(*BARRIER)
    assert not loop.collective(*ALL_GATHER), "only the first after a step may"


def test_training_batches_begin_steps_and_evaluation_batches_do_not() -> None:
    loop, training, held_out = StepStarts(), [1], [2]
    assert loop.batch(held_out), "before the first step nobody knows"
    for _ in range(2):
        assert loop.batch(training)
        loop.stepped()
    assert not loop.batch(held_out)
    assert not loop.collective(*ALL_GATHER), "nor does a collective where a loader is read"


def test_a_loader_that_is_trained_on_later_is_followed() -> None:
    loop, first, second = StepStarts(), [1], [2]
    for rows in (first, second, second):
        loop.batch(rows)
        loop.stepped()
    assert loop.batch(second)
    assert not loop.batch(first)


def test_gather_in_each_step_begins_no_step_while_batches_are_read() -> None:
    """As the Trainer gathers its loss, before it takes the next batch."""
    loop, rows = StepStarts(), [1]
    for _ in range(6):
        loop.batch(rows)
        loop.stepped()
        assert not loop.collective(*ALL_GATHER)
