"""The judgement of the dial matrix: which node, or which way between two, is cut; and where only
small messages pass.

Run: pytest tests/guard/agree/test_network.py
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.guard.agree.making import interfaces, node, nodes, reached
from unisono.base.causes import CATALOGUE, Verdict
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.dial_matrix import compare_network
from unisono.guard.agree.reports import DialReport


def matrix(
    bad: dict[tuple[int, int], str] | None = None, *, number: int = 3, ports: tuple[int, ...] = (40001,)
) -> list[DialReport]:
    """Every node dials every other; `bad` says what became of some ways."""
    return [
        reached(source, target, (bad or {}).get((source, target), "ok"), port=port)
        for source in range(number)
        for target in range(number)
        if source != target
        for port in ports
    ]


def judge(dials: list[DialReport], number: int = 3) -> Agreement:
    return compare_network(dials, nodes(number))


def only(dials: list[DialReport], number: int = 3) -> Verdict:
    [verdict] = judge(dials, number).fatal
    return verdict


def test_both_checks_pass_and_report_what_was_tried_if_all_ways_are_open() -> None:
    agreement = judge(matrix(ports=(40001, 40002)))
    assert [(check.id, check.status) for check in agreement.checks] == [
        ("network.dial", "pass"),
        ("network.size", "pass"),
    ]
    assert agreement.checks[0].text == "6 connections tested on 6 ports, all open, at most 0.4 ms round trip"
    assert agreement.checks[1].text == "up to 1 MiB returned complete"


def test_a_node_that_nobody_reaches_is_named() -> None:
    verdict = only(matrix({(0, 2): "timed_out", (1, 2): "timed_out"}))
    assert (verdict.cause, verdict.hosts) == ("address_unreachable", ("c",))
    assert (
        verdict.summary == "no node reaches node 2 (c) at 10.0.0.2: timed out: a firewall drops the packets"
    )
    assert verdict.evidence[0].where == "node 0 (a) → node 2 (c)"
    assert verdict.fix[0].startswith(
        "on node 2 (c): `sudo iptables -I INPUT -p tcp -s 10.0.0.0,10.0.0.1 -j ACCEPT`"
    )
    assert verdict.confidence == 1.0


def test_a_node_that_is_cut_off_both_ways_is_named_once() -> None:
    verdict = only(
        matrix({(0, 2): "timed_out", (1, 2): "timed_out", (2, 0): "timed_out", (2, 1): "timed_out"})
    )
    assert verdict.hosts == ("c",)
    assert "and it reaches no other node" in verdict.summary


def test_a_node_that_reaches_nobody_is_named() -> None:
    verdict = only(matrix({(2, 0): "timed_out", (2, 1): "timed_out"}))
    assert verdict.hosts == ("c",)
    assert verdict.summary.startswith("node 2 (c) reaches no other node")


def test_one_way_between_two_blames_nobody_and_gives_its_direction() -> None:
    verdict = only(matrix({(1, 2): "refused"}))
    assert verdict.hosts == ()
    assert verdict.summary.startswith(
        "node 1 (b) cannot reach node 2 (c) at 10.0.0.2 port 40001: connection refused"
    )
    assert verdict.summary.endswith("the other direction works")


def test_refused_timed_out_and_no_route_are_distinguished() -> None:
    words = {
        outcome: only(matrix({(1, 2): outcome})).summary
        for outcome in ("refused", "timed_out", "unreachable", "stranger")
    }
    assert len(set(words.values())) == 4
    assert "no route" in words["unreachable"]
    assert "a different program answers" in words["stranger"]
    assert any("ip route get 10.0.0.2" in line for line in only(matrix({(1, 2): "unreachable"})).fix)


def test_of_two_nodes_a_cut_in_both_directions_blames_nobody() -> None:
    both = only(matrix({(0, 1): "timed_out", (1, 0): "timed_out"}, number=2), 2)
    assert both.hosts == ()
    assert both.summary.startswith("nodes 0 (a) and 1 (b) cannot reach each other")
    one = only(matrix({(0, 1): "timed_out"}, number=2), 2)
    assert one.hosts == ("b",)
    assert one.confidence < 1.0


def test_where_nobody_reaches_anybody_nobody_is_blamed() -> None:
    verdict = only(matrix({(a, b): "timed_out" for a in range(3) for b in range(3)}))
    assert verdict.hosts == ()
    assert verdict.summary.startswith("no node reaches any other (6 connections tested)")


def test_ports_that_are_open_and_those_that_are_not_are_shown() -> None:
    dials = [*matrix(number=2), reached(0, 1, "timed_out", port=51234)]
    assert "(port 51234; open: 40001)" in only(dials, 2).summary


def test_large_messages_lost_while_small_ones_pass_are_a_matter_of_size() -> None:
    dials = [*matrix(number=2)[1:], reached(0, 1, "stalled", largest_bytes=1400)]
    verdict = only(dials, 2)
    assert (verdict.cause, verdict.hosts) == ("mtu_blackhole", ())
    assert verdict.summary.startswith("1,400 bytes pass from node 0 (a) to node 1 (b), 9,000 do not")
    assert "mtu" in verdict.fix[0]
    assert any("eth0 has MTU 1500" in item.text for item in verdict.evidence)


def test_the_node_that_is_in_every_stalled_way_is_named() -> None:
    dials = [
        (
            one.model_copy(update={"outcome": "stalled", "largest_bytes": 1400})
            if 2 in (one.source, one.target)
            else one
        )
        for one in matrix()
    ]
    assert only(dials).hosts == ("c",)


def test_ways_that_were_not_tried_are_unknown() -> None:
    agreement = judge([dial for dial in matrix() if 2 not in (dial.source, dial.target)])
    assert agreement.agreed
    [check] = agreement.with_status("unknown")
    assert check.text == "connections to or from node 2 (c) were not tested"
    assert [check.status for check in judge([]).checks] == ["unknown"]


def test_one_node_has_no_network_to_judge() -> None:
    assert compare_network([], [node(0, nodes=1)]).checks == []


outcomes = st.sampled_from(["ok", "refused", "timed_out", "unreachable", "stranger", "stalled"])
any_dial = st.builds(
    lambda source, target, outcome, port, largest, tried: reached(
        source, target, outcome, port=port, largest_bytes=largest, tried_bytes=tried
    ),
    st.integers(0, 4), st.integers(0, 4), outcomes, st.integers(1, 3), st.integers(0, 2**20), st.lists(st.integers(0, 2**21), max_size=3),
)  # fmt: skip


@given(st.lists(any_dial, max_size=25), st.integers(1, 5), st.randoms())
@settings(max_examples=150, deadline=None)
def test_any_matrix_is_judged_the_same_in_any_order(
    dials: list[DialReport], number: int, rng: random.Random
) -> None:
    agreement = judge(dials, number)
    shuffled = list(dials)
    rng.shuffle(shuffled)
    assert judge(shuffled, number).to_json() == agreement.to_json()
    for verdict in agreement.verdicts:
        assert verdict.cause in CATALOGUE
        assert verdict.fix
        assert len(verdict.hosts) < number
    assert agreement.agreed == (not agreement.with_status("fail"))


@pytest.mark.parametrize("port", [1, 65535])
def test_a_second_network_is_offered_where_there_is_one(port: int) -> None:
    reports = nodes(2)
    reports[1] = reports[1].model_copy(
        update={"interfaces": [*interfaces("10.0.0.1"), *interfaces("192.168.0.9")]}
    )
    dials = [reached(0, 1, "timed_out", port=port), reached(1, 0)]
    [verdict] = compare_network(dials, reports).fatal
    assert "a different network" in verdict.fix[-1]
