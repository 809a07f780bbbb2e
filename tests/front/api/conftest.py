"""The fronts of these tests are forked; programs of their own, and threads, start fresh
interpreters.
"""

from collections.abc import Iterator

import pytest

from tests import front_server
from unisono.guard.supervise import child_process


@pytest.fixture(scope="module", autouse=True)
def forked_fronts() -> Iterator[None]:
    """What the tests' own process starts through unisono.front.api."""
    front_server.wait_for_rank_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "_Executed", front_server.start_child)
        yield
