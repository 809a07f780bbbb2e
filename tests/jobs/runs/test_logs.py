"""All ranks' logs and events, merged in time. Run: pytest tests/jobs/runs/test_logs.py"""

import json
import os
import queue
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.errors import UsageError
from unisono.guard.rundir.merged_logs import followed_logs, merged_logs


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def event(time: float, kind: str, **fields: Any) -> str:
    return json.dumps({"kind": kind, "time": time, **fields}) + "\n"


def test_printed_lines_take_the_time_at_which_the_log_was_seen_to_grow(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "box-rank-00000.log", "first\nsecond\nthird\n")
    write(tmp_path / "logs" / "box-rank-00000.times", "[10.0, 6]\n[20.0, 19]\n")
    write(tmp_path / "events" / "rank-00000.jsonl", event(15.0, "phase", phase="train") + '{"kind": "torn')
    write(tmp_path / "logs" / "other-rank-00001.log", "of another\n")
    write(tmp_path / "logs" / "other-rank-00001.times", "[12.5, 11]\n")
    found = [(line.time, line.rank, line.host, line.source) for line in merged_logs(tmp_path)]
    assert found == [
        (10.0, 0, "box", "printed"), (12.5, 1, "other", "printed"), (15.0, 0, "", "told"), (20.0, 0, "box", "printed"),
        (20.0, 0, "box", "printed"),
    ]  # fmt: skip


def test_sizes_in_events_have_units(tmp_path: Path) -> None:
    line = event(1.0, "checkpoint", bytes=2_533_640, step=200) + event(2.0, "step", memory_bytes=612_000_000)
    write(tmp_path / "events" / "rank-00000.jsonl", line)
    found = [line.text for line in merged_logs(tmp_path)]
    assert found == ["checkpoint: 2.53 MB, step 200", "step: memory 612 MB"]


@pytest.mark.parametrize("time", ["1e400", "-1e400", "NaN", "1" + "0" * 400, "1e15", '"noon"', "true", "[]"])
def test_a_line_whose_time_is_none_is_left_out_and_counted(time: str, tmp_path: Path) -> None:
    bad = '{"kind": "phase", "phase": "x", "time": ' + time + "}\n"
    write(
        tmp_path / "events" / "rank-00000.jsonl",
        event(15.0, "phase", phase="a") + bad + bad + event(16.0, "phase", phase="b"),
    )
    write(tmp_path / "logs" / "box-rank-00000.log", "first\n")
    write(tmp_path / "logs" / "box-rank-00000.times", f"[{time}, 6]\n")
    skipped: list[str] = []
    assert [line.time for line in merged_logs(tmp_path, on_skip=skipped.append)] == [0.0, 15.0, 16.0]
    assert skipped == ["events/rank-00000.jsonl: 2 lines were skipped: their time cannot be read"]


def test_a_log_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "box-rank-00000.log", "first\n")
    os.mkfifo(tmp_path / "logs" / "box-rank-00001.log")
    write(tmp_path / "logs" / "box-rank-00002.log", "\0" * 5_000_000)
    (tmp_path / "events" / "rank-00000.jsonl").mkdir(parents=True)
    skipped: list[str] = []
    assert [line.text for line in merged_logs(tmp_path, on_skip=skipped.append)] == ["first"]
    assert skipped == [
        "logs/box-rank-00001.log cannot be read: it is a named pipe, not a regular file",
        "logs/box-rank-00002.log: 5 lines were skipped: they hold nothing but NUL bytes",
        "events/rank-00000.jsonl cannot be read: Is a directory",
    ]


def two_nodes(root: Path, *, ahead_s: float) -> None:
    """A run of two nodes, the second of which has a clock that is ahead; rank 1 fails at 100 s, and
    rank 0 says so half a second later.
    """
    plan = {"ranks": [{"rank": 0, "node_rank": 0, "host": "a"}, {"rank": 1, "node_rank": 1, "host": "b"}]}
    nodes = [
        {"node_rank": 0, "host": "a", "clock_offset_s": 0.0},
        {"node_rank": 1, "host": "b", "clock_offset_s": ahead_s},
    ]
    write(root / "plan.json", json.dumps(plan))
    write(root / "agreement.json", json.dumps({"nodes": nodes}))
    write(root / "logs" / "a-rank-00000.log", "Connection closed by peer\n")
    write(root / "logs" / "a-rank-00000.times", "[100.5, 26]\n")
    write(root / "logs" / "b-rank-00001.log", "KeyError: 'labels'\n")
    write(root / "logs" / "b-rank-00001.times", json.dumps([100 + ahead_s, 19]) + "\n")
    write(root / "events" / "rank-00001.jsonl", event(100.2 + ahead_s, "crashed", error="KeyError: 'labels'"))


@given(st.floats(-1e6, 1e6))
def test_a_clock_that_is_off_changes_nothing_of_the_order(ahead_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        two_nodes(Path(folder), ahead_s=ahead_s)
        lines = list(merged_logs(Path(folder)))
    assert [(line.rank, line.source) for line in lines] == [(1, "printed"), (1, "told"), (0, "printed")]
    assert [line.time for line in lines] == pytest.approx([100.0, 100.2, 100.5], abs=1e-3)


def test_a_host_that_has_a_different_rank_now_is_reported_by_its_name(tmp_path: Path) -> None:
    """A run that went on without a node has numbered its ranks anew; the log's name still says
    where it was.
    """
    two_nodes(tmp_path, ahead_s=60.0)
    write(tmp_path / "logs" / "b-rank-00000.log", "earlier\n")
    write(tmp_path / "logs" / "b-rank-00000.times", "[110.0, 8]\n")
    (line,) = [line for line in merged_logs(tmp_path) if line.text == "earlier"]
    assert (line.rank, line.time) == (0, 50.0)


def test_verdicts_stand_where_they_were_made_and_known_words_are_marked(tmp_path: Path) -> None:
    two_nodes(tmp_path, ahead_s=0.0)
    write(
        tmp_path / "verdicts" / "0001.json", json.dumps({"cause": "rank_killed", "summary": "rank 1 is gone"})
    )
    os.utime(tmp_path / "verdicts" / "0001.json", (100.3, 100.3))
    lines = list(merged_logs(tmp_path))
    assert [line.source for line in lines] == ["printed", "told", "verdict", "printed"]
    assert lines[2].text == "verdict: rank 1 is gone [rank_killed]"
    assert lines[2].label == "the run *"
    assert (lines[3].signatures, lines[3].label) == (["peer_closed"], "rank 0 a !")


def test_of_a_progress_bar_its_last_state_is_shown(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "a-rank-00000.log", " 1%|\r 2%|\r100%|\r\nnext\r\n")
    assert [line.text for line in merged_logs(tmp_path)] == ["100%|", "next"]


def test_a_run_that_continues_is_followed_to_its_end(tmp_path: Path) -> None:
    """Half lines wait for their other half; new ranks are taken in; without its lock the run has
    ended.
    """
    write(tmp_path / "run.lock", "{}")
    log = tmp_path / "logs" / "a-rank-00000.log"
    write(log, "one\nhal")
    found: queue.Queue[str | None] = queue.Queue()

    def follow() -> None:
        for line in followed_logs(tmp_path):
            found.put(line.text)
        found.put(None)

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    assert found.get(timeout=20) == "one"
    with log.open("a") as file:
        file.write("f\n")
    assert found.get(timeout=20) == "half"
    write(tmp_path / "logs" / "b-rank-00001.log", "of another\n")
    assert found.get(timeout=20) == "of another"
    with log.open("a") as file:
        file.write("the end without its newline")
    write(tmp_path / "verdict.json", json.dumps({"cause": "rank_killed", "summary": "rank 1 is gone"}))
    (tmp_path / "run.lock").unlink()
    left = list(iter(lambda: found.get(timeout=20), None))
    assert sorted(text for text in left if text) == [
        "the end without its newline",
        "verdict: rank 1 is gone [rank_killed]",
    ]
    follower.join(20)


def test_a_log_without_times_is_shown_all_the_same(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "a-b-rank-00003.log", "one\ntwo\n")
    lines = list(merged_logs(tmp_path))
    assert [(line.text, line.host, line.rank) for line in lines] == [("one", "a-b", 3), ("two", "a-b", 3)]


def test_a_directory_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no logs"):
        list(merged_logs(tmp_path))


def test_a_runs_logs_are_in_time_and_hold_what_was_printed_and_reported(front: Any) -> None:
    front.run()
    lines = list(merged_logs(front.out))
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    assert {line.source for line in lines} == {"printed", "told"}
    assert any(line.text == "loading" for line in lines)
    assert all(line.time > 0 for line in lines)
