"""While modules are imported Python's collector rests; afterwards it works, and leaves alone what
they made.
"""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from unisono.base.child import loading_modules


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_and_works_again() -> None:
    with loading_modules():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), loading_modules():
        import no_such_module  # type: ignore[import-not-found] # noqa: F401
    assert gc.isenabled()


def test_what_came_before_is_not_looked_at_and_new_garbage_is_found() -> None:
    gc.unfreeze()
    with loading_modules():
        kept: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= len(kept)

    class Ring:
        """Refers to itself."""

    ring = Ring()
    ring.me = ring  # type: ignore[attr-defined]
    del ring
    assert gc.collect() > 0


def test_a_rank_and_a_task_collect_nothing_while_they_load() -> None:
    """Seen in a process of its own: no collection begins within the imports of a task that brings
    torch.
    """
    program = (
        "import gc\n"
        "seen = []\n"
        "from unisono.base.child import loading_modules\n"
        "gc.callbacks.append(lambda moment, facts: seen.append(moment))\n"
        "with loading_modules():\n"
        "    import unisono.trainer.task.evaluate\n"
        "print(len(seen))"
    )
    reported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert reported.stdout.strip() == "0"
