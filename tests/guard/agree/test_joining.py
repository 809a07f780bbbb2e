"""Verdicts on who is there and who is not, and what the nodes prepared.

Run: pytest tests/guard/agree/test_joining.py
"""

from typing import Any

import pytest

from tests.guard.agree.making import nodes
from unisono.base.causes import CATALOGUE, Evidence, Verdict
from unisono.guard.agree import membership
from unisono.guard.agree.training import PreparedFacts, compare_prepared
from unisono.guard.control.connection import Rejected

TOKEN = Rejected("10.0.0.9:41000", "its proof does not fit", "token", 2)
NOISE = Rejected("10.0.0.7:5", "not our protocol", "malformed")


def test_a_node_that_never_called_is_named_with_those_that_are_here() -> None:
    verdict = membership.missing_nodes(3, {0: "a", 1: "b"}, [], 60.2)
    assert verdict.cause == "node_missing"
    assert (
        verdict.summary
        == "node 2 has never connected; nodes 0 (a) and 1 (b) are connected (2 of 3, waited 60 s)"
    )
    assert verdict.hosts == ()
    known = membership.missing_nodes(3, {0: "a", 1: "b"}, [], 60.2, hosts={0: "a", 1: "b", 2: "c"})
    assert known.summary.startswith("node 2 (c) has never connected")
    assert known.hosts == ("c",)


def test_many_missing_nodes_are_ranges() -> None:
    verdict = membership.missing_nodes(1024, {rank: f"n{rank}" for rank in range(512)}, [], 300)
    assert (
        verdict.summary
        == "nodes 512–1023 have never connected; nodes 0–511 are connected (512 of 1,024, waited 300 s)"
    )


def test_rejected_callers_are_evidence_and_the_likely_one_leads_the_remedy() -> None:
    verdict = membership.missing_nodes(3, {0: "a", 1: "b"}, [NOISE, TOKEN], 60)
    assert verdict.evidence[0] == Evidence(
        where="call from 10.0.0.9:41000", text="its proof does not fit (claims to be node 2)"
    )
    assert verdict.evidence[1].where == "call from 10.0.0.7:5"
    assert "token" in verdict.fix[0]
    assert "or start it" in membership.missing_nodes(3, {0: "a", 1: "b"}, [NOISE], 60).fix[0]


def test_a_wrong_token_names_the_address_and_blames_no_host() -> None:
    """What a caller without the secret says of itself is not proven."""
    verdict = membership.wrong_token(TOKEN)
    assert (verdict.cause, verdict.hosts) == ("token_rejected", ())
    assert "10.0.0.9:41000" in verdict.summary
    assert "node 2" in verdict.summary


def test_a_node_that_left_and_one_that_fell_silent_have_their_causes() -> None:
    gone = membership.lost_node(2, "c", "connection closed", silent=False)
    assert (gone.cause, gone.hosts) == ("node_missing", ("c",))
    assert gone.summary == "node 2 (c) was connected, and left before the start: connection closed"
    assert membership.lost_node(2, "c", "10 s of silence", silent=True).cause == "node_unreachable"


def test_a_node_that_refuses_gives_its_reason_or_its_verdict() -> None:
    problems = [
        {"what": "unknown key `data.max_lenght`", "where": "bad.yaml:4", "fix": "did you mean `max_length`?"},
        {"what": "more"},
    ]
    verdict = membership.refused_node(2, "c", problems)
    assert (verdict.cause, verdict.hosts) == ("node_refused", ("c",))
    assert verdict.summary == "node 2 (c) refused: unknown key `data.max_lenght`; and 1 more problem"
    assert verdict.evidence[0] == Evidence(where="bad.yaml:4", text="unknown key `data.max_lenght`")
    assert verdict.fix == ("did you mean `max_length`?",)
    own = Verdict(cause="storage_unfit", when="before", summary="output_dir is read-only", fix=("mount it",))
    reported = membership.refused_node(2, "c", [], verdict=own)
    assert (reported.cause, reported.summary, reported.fix) == (
        "storage_unfit",
        "node 2 (c) refused: output_dir is read-only",
        ("mount it",),
    )


def test_every_verdict_is_one_line_with_a_remedy_and_a_fitting_cause() -> None:
    """Fitting is a cause that the catalogue knows before the start."""
    nasty = Rejected("1.2.3.4:5\x1b[2J", "line\nbreak", "token", 1, "x\ny")
    for verdict in (
        membership.missing_nodes(2, {}, [nasty], 1), membership.wrong_token(nasty),
        membership.lost_node(1, "h\n", "w\n", silent=True), membership.refused_node(1, "h", []),
    ):  # fmt: skip
        assert "\n" not in verdict.summary
        assert "\x1b" not in str(verdict.to_json())
        assert "before" in CATALOGUE[verdict.cause].when
        assert verdict.fix


# What nodes prepared


def facts(**changes: Any) -> PreparedFacts:
    values: dict[str, Any] = {
        "data_digest": "d" * 16, "rows": 2200, "sequences": 325, "tokens": 81_900, "loss_tokens": 60_400, "eval_rows": 200, "total_steps": 380,
        "formats": ("/data/a.jsonl: messages",), "template": "the tokenizer's own", "ledger": {"used": 2200}, "model_type": "llama",
        "parameters": 1_330_000, "model_digest": "m" * 16,
    }  # fmt: skip
    return PreparedFacts(**{**values, **changes})


def prepared(**changes: Any) -> Verdict | None:
    agreement = compare_prepared({0: facts(), 1: facts(**changes), 2: facts()}, nodes())
    assert len(agreement.fatal) <= 1
    return agreement.fatal[0] if agreement.fatal else None


def test_nodes_that_prepared_the_same_agree_whatever_their_paths_are() -> None:
    assert prepared() is None
    assert prepared(formats=("/other/a.jsonl: messages",)) is None


@pytest.mark.parametrize(
    ("changes", "cause", "start"),
    [
        (
            {"rows": 2199, "ledger": {"used": 2199}, "data_digest": "x"},
            "data_mismatch",
            "rows: 2,199 on node 1 (b), 2,200 on nodes 0 (a) and 2 (c)",
        ),
        (
            {"tokens": 5, "data_digest": "x"},
            "tokenizer_files_mismatch",
            "tokens: 5 on node 1 (b), 81,900 on nodes 0 (a) and 2 (c)",
        ),
        ({"model_digest": "x"}, "weights_mismatch", "weights: digest x on node 1 (b), digest mmm"),
    ],
)
def test_what_differs_is_named_with_both_values(changes: dict[str, Any], cause: str, start: str) -> None:
    verdict = prepared(**changes)
    assert verdict is not None
    assert (verdict.cause, verdict.hosts, verdict.phase) == (cause, ("b",), "agree.prepared")
    assert verdict.summary.startswith(start)


def test_a_different_template_is_shown_where_tokens_differ() -> None:
    verdict = prepared(tokens=5, data_digest="x", template="chat_template.jinja")
    assert verdict is not None
    assert any("chat_template.jinja" in item.text for item in verdict.evidence)


def test_a_node_that_prepared_nothing_is_unknown() -> None:
    [check] = compare_prepared({0: facts(), 1: facts()}, nodes()).with_status("unknown")
    assert check.where == "node 2 (c)"
    assert compare_prepared({}, nodes()).agreed
