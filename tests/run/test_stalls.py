"""A rank of a program that hangs while another waits for it: reported soon, with its line, and for as long as it lasts.

Run: pytest tests/run/test_stalls.py; all of them: pytest tests/run/test_stalls.py -m "long or not long"
"""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise

import pytest

from tests.run.guarded import LIMIT_S, TORCHRUN, Guarded, Program

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
STALLS = Program("torch DDP that hangs, torchrun", "stalls.py", TORCHRUN)
SHORT, LONG = ("sleep", "fifo", "http"), ("lock", "pool", "prompt")
WARNINGS = 3  # after about 5, 10 and 20 s
_WARNING = re.compile(r"warning: (rank 0, .* for (\d+) s, .*)")


def warnings_of(guarded: Guarded) -> list[re.Match[str]]:
    return list(_WARNING.finditer(guarded.front.text()))


@pytest.fixture(scope="module")
def stalled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """What fronts have printed of programs that stall at the same time, by fault, until the last of some warnings."""
    faults: tuple[str, ...] = request.param
    with ExitStack() as stack:
        started = {
            fault: stack.enter_context(
                closing(Guarded(STALLS, tmp_path_factory.mktemp(fault), "--fault", fault))
            )
            for fault in faults
        }
        limit = time.monotonic() + LIMIT_S
        while any(len(warnings_of(one)) < WARNINGS for one in started.values()):
            assert time.monotonic() < limit, {fault: one.front.text() for fault, one in started.items()}
            time.sleep(0.2)
        yield {fault: one.front.text() for fault, one in started.items()}


@pytest.mark.parametrize(
    ("stalled", "fault"),
    [
        *(pytest.param(SHORT, fault, id=fault) for fault in SHORT),
        *(pytest.param(LONG, fault, id=fault, marks=pytest.mark.long) for fault in LONG),
    ],
    indirect=["stalled"],
)
def test_a_stall_is_reported_with_its_line_each_time_that_its_age_doubles(
    stalled: dict[str, str], fault: str
) -> None:
    text = stalled[fault]
    found = list(_WARNING.finditer(text))
    ages = [int(one[2]) for one in found]
    assert ages[0] <= 10
    assert all(1.7 <= later / earlier <= 3 for earlier, later in pairwise(ages)), ages
    assert all(re.search(rf"stalls\.py:\d+ in {fault}", one[1]) for one in found), text
    assert text.count("investigating: ") == 1
    assert "move again" not in text
