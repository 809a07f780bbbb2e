"""How the ladder is climbed, over imagined networks.

Run: pytest tests/front/checks/ladder/test_ladder_order.py
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.front.checks.ladder import (
    OWN,
    AttemptOutcome,
    Climb,
    Settings,
    climb,
    export_lines,
    ladder_finding,
    rungs,
)

GOOD, SLOW = 1e9, 1e6
NCCL = rungs("nccl", interfaces=["eth0", "eth1"], set_by_hand=[])
GLOO = rungs("gloo", interfaces=["eth0", "eth1"], set_by_hand=["GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"])


def climbed(works: Callable[[Settings], float], steps: "list[object] | None" = None) -> Climb:
    def attempt(settings: Settings, name: str) -> AttemptOutcome:
        del name
        rate = works(settings)
        return AttemptOutcome(
            ok=rate > 0,
            text="it hangs" if not rate else "",
            bytes_per_second=rate or None,
            small_s=0.001 if rate else None,
        )

    return climb(steps or NCCL, attempt, enough=1e8)  # type: ignore[arg-type]


@pytest.mark.makes("network.ladder", "pass")
def test_what_works_as_it_is_is_tried_once_and_left_alone() -> None:
    found = climbed(lambda settings: GOOD)
    assert len(found.tried) == 1
    finding = ladder_finding(found)
    assert (finding.status, finding.fix) == ("pass", ())


@pytest.mark.makes("network.ladder", "fail")
def test_only_the_step_that_helps_is_written_out() -> None:
    """The ladder is cumulative, so what was laid below in vain is taken away again."""
    found = climbed(lambda settings: GOOD if settings.get("NCCL_P2P_DISABLE") == "1" else 0.0)
    finding = ladder_finding(found)
    assert (finding.status, finding.fix) == ("fail", ("export NCCL_P2P_DISABLE=1",))
    assert any("`unisono train … --reason NCCL_P2P_DISABLE='WHY'`" in line for line in finding.evidence)
    assert any("2 to 20 times slower" in line for line in finding.evidence)


def test_two_steps_that_are_needed_together_are_both_written_out() -> None:
    def works(settings: Settings) -> float:
        return (
            GOOD
            if settings.get("NCCL_SOCKET_IFNAME") == "=eth0" and settings.get("NCCL_IB_DISABLE") == "1"
            else 0.0
        )

    assert set(ladder_finding(climbed(works)).fix) == {
        "export GLOO_SOCKET_IFNAME=eth0",
        "export NCCL_SOCKET_IFNAME==eth0",
        "export NCCL_IB_DISABLE=1",
    }


def test_interfaces_take_each_others_place() -> None:
    found = climbed(
        lambda settings: GOOD if settings.get("GLOO_SOCKET_IFNAME") == "eth1" else 0.0, list(GLOO)
    )
    assert [one.name for one in found.tried] == [
        "current settings", "without the current settings (GLOO_SOCKET_IFNAME)", "interface pinned to eth0", "interface pinned to eth1",
        "interface pinned to eth1, without: without the current settings (GLOO_SOCKET_IFNAME)",
    ]  # fmt: skip
    assert ladder_finding(found).fix == ("export GLOO_SOCKET_IFNAME=eth1",)


def test_a_variable_that_was_left_over_is_unset() -> None:
    found = climbed(
        lambda settings: (
            GOOD if "GLOO_SOCKET_IFNAME" in settings and settings["GLOO_SOCKET_IFNAME"] is None else 0.0
        ),
        list(GLOO),
    )
    assert ladder_finding(found).fix == ("unset GLOO_SOCKET_IFNAME",)


def test_where_nothing_works_that_is_reported() -> None:
    finding = ladder_finding(climbed(lambda settings: 0.0))
    assert (finding.status, "nothing works: it hangs" in finding.evidence[0]) == ("fail", True)
    assert len(finding.evidence) == 1 + 1 + len(NCCL)


def test_what_crawls_is_climbed_and_reported_from_what_fails() -> None:
    finding = ladder_finding(
        climbed(lambda settings: GOOD if settings.get("NCCL_IB_DISABLE") == "1" else SLOW)
    )
    assert (finding.status, finding.fix) == ("warn", ("export NCCL_IB_DISABLE=1",))
    finding = ladder_finding(climbed(lambda settings: SLOW))
    assert finding.status == "warn"
    assert "very slow" in finding.evidence[0]
    assert "no setting makes it faster" in finding.evidence[0]


def test_what_it_costs_against_the_best_seen_is_reported() -> None:
    """The first that works is slower than a later trial without one of its steps."""

    def works(settings: Settings) -> float:
        if settings.get("NCCL_IB_DISABLE") != "1":
            return 0.0
        return 2e8 if settings.get("NCCL_SOCKET_IFNAME") else 4e8

    finding = ladder_finding(climbed(works))
    assert finding.fix == ("export NCCL_IB_DISABLE=1",)
    assert "400 MB/s" in finding.evidence[0]


def test_each_nodes_own_interface_is_put_in_where_lines_are_typed() -> None:
    steps = rungs("gloo", interfaces=[OWN], set_by_hand=[])
    found = climbed(lambda settings: GOOD if settings.get("GLOO_SOCKET_IFNAME") == OWN else 0.0, list(steps))
    assert ladder_finding(found, interface="ens8").fix == ("export GLOO_SOCKET_IFNAME=ens8",)


NAMES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


@given(st.sets(st.sampled_from(NAMES)))
def test_whatever_steps_are_needed_exactly_these_are_written_out(needed: set[str]) -> None:
    found = climbed(lambda settings: GOOD if all(settings.get(name) for name in needed) else 0.0)
    assert found.chosen is not None
    assert {name for name in found.chosen.settings if name != "GLOO_SOCKET_IFNAME"} == needed
    lines = export_lines(found.chosen.settings)
    assert all(any(name in line for line in lines) for name in needed)
