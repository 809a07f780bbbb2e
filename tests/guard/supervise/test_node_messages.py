"""Messages between fronts. Run: pytest tests/guard/supervise/test_node_messages.py"""

import json
from typing import get_args

import pytest

from tests.guard.agree.making import rank
from unisono.base.causes import Verdict
from unisono.base.messages import StepMessage, message_of
from unisono.guard.agree.training import PreparedFacts
from unisono.guard.integrations.border import Answer, ReportedFacts
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.guard.supervise import node_messages as messages
from unisono.guard.supervise.evidence import RawEvidence
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.supervise.node_messages import HeadRequest, NodeNews, decode_news, decode_request, encode
from unisono.guard.watch.views import Look, ProcessView, RankView

_PLACE = RankPlace(
    rank=3,
    node_rank=1,
    local_rank=0,
    host="b",
    device=DeviceChoice(kind="cpu", name="cpu", memory_bytes=0, bfloat16=False),
)
_VERDICT = Verdict(cause="node_missing", when="before", summary="node 1 is missing")
_PREPARED = PreparedFacts(
    data_digest="d",
    rows=4,
    sequences=2,
    tokens=9,
    loss_tokens=5,
    total_steps=1,
    ledger={"used": 4},
    model_type="llama",
    parameters=10,
    model_digest="m",
)
_NEWS: list[NodeNews] = [
    messages.RanksRegistered((_PLACE,), 4, 1, (3,), 2),
    messages.RankSaid(3, message_of(StepMessage, {"loss": float("inf"), "reward": 0.5})),
    messages.RankEnded(RankEnd(3, -9, {"kind": "crashed", "error": "é"}, "compute", 7), 1),
    messages.RankReported(rank(3)),
    messages.RankViews((RankView(3, 1, None, 1.5, 0.0, ProcessView(state="S")),), ("a:1 -> b:2",)),
    messages.StacksCollected((Look(3, ("train.py:1 in step",)),), {3: RawEvidence(stacks="s")}),
    messages.TimelineLines(('{"rank": 3}',)),
    messages.FactsReported("7-data", ReportedFacts(7, "data", 3, 4, {"rows": 5}, {"seconds": 0.5})),
    messages.LauncherUnwatched("process 7 starts ranks"),
    messages.SignalReceived("SIGUSR1"),
    messages.ProgramEnded(1, 2, None, subreaper_lost=True),
    messages.Diagnosed(_VERDICT),
    messages.Diagnosed(None),
    messages.Refused(({"what": "the disk is full"},)),
    messages.AllEnded(),
    messages.SnapshotsSent(),
    messages.NodePrepared(_PREPARED),
    messages.Stop("SIGTERM", again=True),
]
_REQUESTS: list[HeadRequest] = [
    messages.Start(("a", 29_500), "0123"),
    messages.Go(("a", 29_500)),
    messages.End("another rank ended the run"),
    messages.CollectStacks((0, 3)),
    messages.FactsAnswered("7-data", Answer(agreed=False, text="rows differ")),
    messages.DiagnosisRequested(),
    messages.VerdictReached(_VERDICT),
    messages.Note("all ranks agree"),
    messages.Warned("clock_skew", "clocks differ by 9 s", "synchronise them"),
    messages.SnapshotsRequested(),
    messages.Prepare(),
    messages.PlanDecided({"schema": 1, "loss": float("inf")}),
    messages.Again(1),
    messages.Again(2, messages.CheckpointIdentity("step-00000004", "e3b0")),
    messages.JobEnded(
        4, (_VERDICT,), ({"what": "the disk is full"},), {"outcome": "died", "loss": float("-inf")}
    ),
    messages.JobEnded(130, stopped=messages.StoppedBy("SIGINT", "node 1 (b)")),
    messages.Stop("SIGINT"),
]


@pytest.mark.parametrize("news", _NEWS, ids=lambda news: type(news).__name__)
def test_the_head_reads_what_a_node_sends(news: NodeNews) -> None:
    assert decode_news(json.loads(json.dumps(encode(news)))) == news


@pytest.mark.parametrize("request_", _REQUESTS, ids=lambda request: type(request).__name__)
def test_a_node_reads_what_the_head_sends(request_: HeadRequest) -> None:
    assert decode_request(json.loads(json.dumps(encode(request_)))) == request_


def test_verdicts_are_sent_in_the_form_of_verdict_json() -> None:
    assert encode(messages.VerdictReached(_VERDICT))["verdict"] == _VERDICT.to_json()
    assert encode(messages.Diagnosed(_VERDICT))["verdict"] == _VERDICT.to_json()


def test_an_unreadable_verdict_does_not_cost_the_last_message() -> None:
    ended = decode_request(
        {**encode(messages.JobEnded(4, (_VERDICT,))), "verdicts": [{}, _VERDICT.to_json()]}
    )
    assert ended == messages.JobEnded(4, (_VERDICT,))


@pytest.mark.parametrize(("union", "sent"), [(NodeNews, _NEWS), (HeadRequest, _REQUESTS)])
def test_every_message_is_sent_above_and_has_a_kind_of_its_own(union: object, sent: list[NodeNews]) -> None:
    assert {type(one) for one in sent} == set(get_args(union))
    assert len({one.kind for one in get_args(union)}) == len(get_args(union))


def test_kinds_and_fields_of_a_newer_version_are_ignored() -> None:
    assert decode_news({"kind": "weather", "degrees": 3}) is None
    assert decode_news({"kind": "asked", "signal": "SIGTERM", "urgency": 9}) == messages.SignalReceived(
        "SIGTERM"
    )
    assert decode_request({"kind": "asked", "signal": "SIGTERM"}) is None


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "asked"},
        {"kind": "program_ended", "returncode": "x"},
        {"kind": "rank_ended", "end": {"rank": 0}},
        {"kind": "rank_ended", "end": 7},
        {"kind": "beats", "views": [None]},
        {"kind": "looked", "looks": [], "raw": {"x": {}}},
        {"kind": "diagnosed", "verdict": {"cause": 3}},
        {"kind": "timeline", "lines": "abc"},
        {"kind": "brought", "key": "k", "reported": []},
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_that_cannot_be_read_are_refused(value: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode_news(value)
