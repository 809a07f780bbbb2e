"""The weights to use, where an optimizer trains others: evaluations and results have them."""

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.trainer.training.run import Run
from unisono.trainer.training.saving import wait_for_copies


@contextmanager
def averaged(run: Run) -> Iterator[None]:
    """Within it, the model has the weights to use; see `Optimizers.averaged`.

    All ranks must enter it.
    """
    wait_for_copies(run)
    with run.optimizers.averaged():
        yield
