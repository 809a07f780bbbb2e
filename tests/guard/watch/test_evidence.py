"""Files that a verdict cites, of real ranks and a real token table.

Run: pytest tests/guard/watch/test_evidence.py
"""

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.guard.watch.conftest import LIMIT_S, Watched
from unisono.base.causes import Verdict
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.evidence import MESSAGE_BYTES, RawEvidence, end_of_log, keep_evidence
from unisono.guard.supervise.node_messages import (
    CollectStacks,
    NodeNews,
    RankViews,
    StacksCollected,
    decode_news,
    encode,
)
from unisono.guard.supervise.rank_monitor import MonitorReports
from unisono.guard.watch.rank_dumps import read_flight
from unisono.guard.watch.views import Look
from unisono.trainer.data.token_table import Encoded, TokenWriter, write_meta, write_split

RECORDED = Path(__file__).parent / "recorded"
FLIGHT = (RECORDED / "flight-all_reduce.json").read_text()
STACKS = (RECORDED / "stacks-sleep.txt").read_text()
RAW = RawEvidence(STACKS, FLIGHT, "printed\n")
TOKEN = "hf_" + "a" * 30


def verdict(*ranks: int, phase: str = "compute") -> Verdict:
    return Verdict(
        cause="user_code_stuck",
        when="during",
        summary="it does not come back",
        ranks=ranks,
        phase=phase,
        step=7,
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Three rows, each a sequence of its own."""
    folder = tmp_path / "table"
    folder.mkdir()
    with TokenWriter(folder / "tokens.arrow") as writer:
        for _ in range(3):
            writer.add(Encoded(ids=np.array([1, 2], np.int32), targets=np.array([False, True])))
    three = np.arange(3)
    rows = {"stored": three, "length": three, "loss": three, "file": three * 0, "number": three + 1}
    write_split(folder, "train", rows, [[0], [1], [2]])
    write_meta(folder, {}, files=[("a.jsonl", True)])
    return folder


def test_a_verdict_cites_files_that_only_their_owner_reads(tmp_path: Path, table: Path) -> None:
    run = RunDir(tmp_path / "run")
    looks = {1: Look(1, rows=(2, 0)), 0: Look(0, rows=(1,))}
    cited = keep_evidence(run, verdict(1), table=table, raw={0: RAW, 1: RAW}, looks=looks)
    names = [Path(one.where).name for one in cited]
    assert names == [
        "stacks-rank-00001.txt", "flight-rank-00001.json", "stacks-rank-00000.txt", "flight-rank-00000.json",
        "log-rank-00001.txt", "rows-rank-00001.json",
    ]  # fmt: skip
    paths = [run.root / one.where for one in cited]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert stat.S_IMODE(run.evidence.stat().st_mode) == 0o700
    assert paths[0].read_text() == STACKS
    assert read_flight(paths[1].read_text()) == read_flight(FLIGHT)
    rows = json.loads(paths[5].read_text())
    assert (rows["sequences"], rows["rows"], rows["step"]) == ([2, 0], ["a.jsonl:3", "a.jsonl:1"], 7)


def test_a_second_verdict_leaves_the_files_of_the_first(tmp_path: Path, table: Path) -> None:
    run = RunDir(tmp_path / "run")
    first = keep_evidence(run, verdict(1), table=table, raw={1: RAW}, looks={})
    second = keep_evidence(run, verdict(1), table=table, raw={1: RawEvidence("others")}, looks={})
    assert [one.where for one in second] == ["evidence/stacks-rank-00001-2.txt"]
    assert (run.root / first[0].where).read_text() == STACKS


def test_rows_that_cannot_be_looked_up_are_kept_by_their_numbers(tmp_path: Path) -> None:
    run, looks = RunDir(tmp_path / "run"), {1: Look(1, rows=(2, 0))}
    (cited,) = keep_evidence(run, verdict(1), table=tmp_path / "none", raw={}, looks=looks)
    assert json.loads((run.root / cited.where).read_text())["sequences"] == [2, 0]
    assert not keep_evidence(run, verdict(1, phase="save"), table=tmp_path, raw={}, looks=looks), (
        "no rows are worked on in a save"
    )


def test_a_place_that_cannot_be_written_leaves_no_evidence_and_no_error(tmp_path: Path, table: Path) -> None:
    (tmp_path / "run").write_text("a file")
    assert keep_evidence(RunDir(tmp_path / "run"), verdict(1), table=table, raw={1: RAW}, looks={}) == ()


def test_what_ranks_have_written_is_made_safe_and_bounded() -> None:
    raw = RawEvidence(
        "a\x1b[31mb", f'{{"a": "{TOKEN}"}}', f"https://me:secret@host/x {TOKEN}\n" + "é" * (1 << 20)
    )
    found = RawEvidence.from_json(raw.to_json())
    assert found.stacks == "ab"
    assert TOKEN not in found.flight + found.log
    assert len(json.dumps(raw.to_json())) <= MESSAGE_BYTES
    loud = RawEvidence("日" * (1 << 20), "日" * (1 << 20), "日" * (1 << 20))
    assert len(json.dumps(loud.to_json())) <= MESSAGE_BYTES
    with pytest.raises(KeyError):
        RawEvidence.from_json({})


def test_the_end_of_a_log_is_its_last_twenty_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert end_of_log(log) == ""
    log.write_bytes(b"\xff" * 100_000 + b"\n" + b"".join(b"%d\n" % i for i in range(30)))
    assert end_of_log(log).split() == [str(i) for i in range(10, 30)]


def as_received(news: NodeNews) -> NodeNews:
    """The message after its way to the head."""
    received = decode_news(json.loads(json.dumps(encode(news))))
    assert received is not None
    return received


def test_a_node_reports_how_its_ranks_are_and_what_a_look_has_found(watched: Callable[..., Watched]) -> None:
    ranks = watched("sleep", "leave")
    sent: list[NodeNews] = []
    telling = MonitorReports(ranks.local, 0, sent.append)
    limit = time.monotonic() + LIMIT_S

    def until(condition: Callable[[NodeNews], bool], *, ask: Callable[[], None] = lambda: None) -> NodeNews:
        while not (matches := [decoded for one in sent if condition(decoded := as_received(one))]):
            assert time.monotonic() < limit
            ask()
            ranks.local.poll(0.02)
            telling.send()
        return matches[-1]

    beats = until(lambda one: isinstance(one, RankViews) and all(view.beat for view in one.views))
    assert isinstance(beats, RankViews)
    assert [view.rank for view in beats.views] == [0, 1]
    # A look ends after 1.5 s with what there is: one that found nothing is made again.
    collected = until(
        lambda one: isinstance(one, StacksCollected) and bool(one.looks[0].stack),
        ask=lambda: telling.look(CollectStacks((0, 5))),
    )
    assert isinstance(collected, StacksCollected)
    assert collected.looks[0].stack[0].endswith(" in sleep")
    assert "most recent call first" in collected.raw[0].stacks
    ranks.local.end("over")
    ranks.local.poll(0)
    before = len(sent)
    telling.send()
    assert len(sent) == before, "the head may have begun the next start"
    telling.close()
