"""torch.distributed under guard, in programs that know nothing of it.

Run: pytest tests/guard/programs/inside/test_groups.py
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guard.programs.inside.conftest import PROGRAMS
from tests.guard.programs.inside.front import Played
from unisono.guard.integrations.inside.process_groups import device_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
Start = Callable[..., Played]
_LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")


def test_world_of_one_trains_without_a_store_whatever_its_variables_say(
    guarded: Start,
) -> None:
    """MASTER_ADDR and MASTER_PORT are missing, and the interface is another machine's: each of them
    ends such a program by itself.
    """
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "ens34"}
    played = guarded(sys.executable, PROGRAMS / "alone.py", world_size=1, env=env)
    assert played.until_ended() == 0, played.printed
    lines = dict(
        line.split(maxsplit=1)
        for line in played.printed.splitlines()
        if line.startswith(("listens", "interface"))
    )
    assert set(lines.get("listens", "").split()) <= set(_LOOPBACK), "gloo listens on the loopback at the most"
    assert lines["interface"] == "None", "what names no interface of this machine is dropped for good"
    notes = played.notes()
    assert any("a world of one rank" in note and "GLOO_SOCKET_IFNAME=ens34" in note for note in notes)
    assert sum("destroy_process_group was called again" in note for note in notes) == 1
    assert played.events_of("result")[0]["step"] == 3


@pytest.mark.parametrize("how", ["leave", "destroy"])
def test_program_ending_right_after_a_collective_ends_well_with_gloo(guarded: Start, how: str) -> None:
    """Without the guard 15 of 16 of these abort: `terminate called without an active exception`
    (pytorch#190489).
    """
    played = guarded(sys.executable, PROGRAMS / "launcher.py", 2, PROGRAMS / "ending.py", how, world_size=2)
    assert played.until_ended() == 0, played.printed
    assert played.events_of("result", 0)[0]["step"] == 3


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_ranks_a_program_starts_itself_are_guarded_but_not_their_loaders(
    guarded: Start, tmp_path: Path, method: str
) -> None:
    played = guarded(sys.executable, PROGRAMS / "children.py", tmp_path, method)
    assert played.until_ended() == 0, played.printed
    assert sorted(played.ranks.known) == [0, 1]
    assert [played.events_of("result", rank) != [] for rank in (0, 1)] == [True, True]
    assert all(memory.read() is not None for memory in played.ranks.beats.values())


@pytest.mark.long
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_exception_in_a_rank_that_a_program_made_by_itself_is_reported(
    guarded: Start, tmp_path: Path, method: str
) -> None:
    played = guarded(sys.executable, PROGRAMS / "children.py", tmp_path, method, "raise")
    assert played.until_ended() != 0
    (crashed,) = played.events_of("crashed", 1)
    assert (crashed["error"], crashed["peer_lost"]) == ("ZeroDivisionError: a batch of nothing", False)
    assert "children.py" in crashed["where"]


@pytest.mark.parametrize(
    ("local_rank", "count", "device"),
    [("0", 4, 0), ("3", 4, 3), ("3", 1, 0), ("4", 4, None), ("", 4, None), ("x", 2, None)],
)
def test_rank_has_the_device_of_its_local_rank_or_the_only_visible_one(
    local_rank: str, count: int, device: int | None
) -> None:
    assert device_for(local_rank, count) == device
