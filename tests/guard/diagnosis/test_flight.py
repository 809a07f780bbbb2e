"""Recordings of several ranks are matched.

Those of recorded/ are of real gloo ranks, torch 2.13; recorded/train.py.txt made them. Run: pytest
tests/guard/diagnosis/test_flight.py
"""

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.guard.diagnosis.flight_recording import (
    NotARecordingError,
    is_recording,
    rank_of_name,
    read_recording,
)
from unisono.guard.diagnosis.flight_rules import judge_recordings
from unisono.guard.diagnosis.run_facts import Hypothesis

RECORDED = Path(__file__).parent / "recorded"
JSON, PICKLE = "flight-rank-*.json", "nccl_trace_rank_*"


def judged(case: str, pattern: str, *, without: int | None = None) -> list[Hypothesis]:
    files = sorted((RECORDED / f"flight-{case}").glob(pattern))
    assert len(files) == 3
    return judge_recordings(
        [read_recording(file.name, file.read_bytes()) for rank, file in enumerate(files) if rank != without]
    )


def with_status(case: str, change: Any) -> list[Hypothesis]:
    """The recordings of a case after `change(rank, dump)`, as NCCL's would be named."""
    found = []
    for rank, file in enumerate(sorted((RECORDED / f"flight-{case}").glob(JSON))):
        dump = json.loads(file.read_text())
        change(rank, dump)
        found.append(read_recording(file.name, json.dumps(dump).encode()))
    return judge_recordings(found)


@pytest.mark.parametrize("pattern", [JSON, PICKLE])
@pytest.mark.parametrize(
    ("case", "cause", "ranks", "words"),
    [
        ("missing", "rank_stalled", (1,), "ranks 0, 2 wait in all_reduce #4 [[1000]] of group 0:default_pg, which rank 1 did not reach"),
        ("kind", "collective_mismatch", (2,), "rank 2: all_gather #4 [[3]], rank 0: all_reduce #4 [[3]]"),
        ("size", "collective_mismatch", (), "rank 0: all_reduce #4 [[1000]], rank 1: all_reduce #4 [[992]]"),
        ("chain", "rank_stalled", (2,), "rank 0 in all_reduce #1 [[6]] of group 1:undefined; rank 1 in all_reduce #1 [[5]]"),
    ],
)  # fmt: skip
def test_who_is_late_or_does_something_else_is_named(
    pattern: str, case: str, cause: str, ranks: tuple[int, ...], words: str
) -> None:
    finding = judged(case, pattern)[0]
    assert (finding.cause, finding.ranks) == (cause, ranks)
    assert words in finding.why
    assert finding.evidence


def test_the_pickle_reports_the_line_of_the_program() -> None:
    finding = judged("kind", PICKLE)[0]
    assert [event.text.rpartition(", ")[2] for event in finding.evidence] == [
        f"called at train.py:{line} in <module>" for line in (21, 22, 22)
    ]


def test_a_rank_without_a_recording_may_have_died() -> None:
    finding = judged("missing", PICKLE, without=1)[0]
    assert finding.cause == "undetermined"  # gloo does not say that there is a rank 1

    def nccl_reports(rank: int, dump: dict[str, Any]) -> None:
        dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
        if rank == 1:
            dump.update(json.loads(json.dumps(others[0])))

    others = [json.loads((RECORDED / "flight-missing/flight-rank-00000.json").read_text())]
    others[0]["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    finding = with_status("missing", nccl_reports)[0]
    assert (finding.cause, finding.ranks) == ("rank_died_first", (3,))
    assert "there is no recording of rank 3" in finding.why


def test_a_gpu_that_has_not_begun_what_all_have_called_is_named() -> None:
    def on_gpus(rank: int, dump: dict[str, Any]) -> None:
        for entry in dump["entries"]:
            entry["profiling_name"] = "nccl:all_reduce"
            entry["input_sizes"] = [[3]]
            entry["state"] = "scheduled" if rank == 1 else "started"

    finding = with_status("kind", on_gpus)[0]
    assert (finding.cause, finding.ranks) == ("rank_stalled", (1,))


def test_all_in_the_same_collective_blames_nobody() -> None:
    def alike(rank: int, dump: dict[str, Any]) -> None:
        dump["entries"][-1] |= {"profiling_name": "gloo:all_reduce", "input_sizes": [[3]]}

    finding = with_status("kind", alike)[0]
    assert (finding.cause, finding.ranks) == ("undetermined", ())
    assert finding.missing


def test_who_waits_for_nobody_gives_no_finding() -> None:
    def done(rank: int, dump: dict[str, Any]) -> None:
        dump["pg_status"]["0"]["last_completed_collective"] = dump["pg_status"]["0"][
            "last_enqueued_collective"
        ]

    assert with_status("kind", done) == []


def test_old_recordings_without_a_status_are_matched_by_their_entries() -> None:
    def old(rank: int, dump: dict[str, Any]) -> None:
        del dump["pg_status"], dump["pg_config"]
        for entry in dump["entries"]:
            entry["state"] = "completed" if entry["collective_seq_id"] < 4 else "started"

    finding = with_status("missing", old)[0]
    assert (finding.cause, finding.ranks) == ("rank_stalled", (1,))


def test_recordings_are_known_by_their_beginning_and_ranks_by_their_names() -> None:
    for file in RECORDED.glob("flight-*/*"):
        assert is_recording(file.read_bytes()[:4096]), file
    assert not is_recording(b'{"loss": 1.0, "step": 3}\n')
    assert not is_recording(pickle.dumps({"state": [1, 2]}))
    names = ("nccl_trace_rank_12", "flight-rank-00003.json", "dumps/fr.7", "x.json", "comm_lib_trace_rank_0")
    assert [rank_of_name(name) for name in names] == [12, 3, 7, None, 0]


def test_malicious_pickle_is_refused_and_what_it_wanted_is_reported(tmp_path: Path) -> None:
    head = pickle.dumps({"pg_status": {}}, 2)[:-1]
    evil = head + b"cposix\nsystem\n(X\x05\x00\x00\x00touch" + b"tR."
    assert is_recording(evil)
    with pytest.raises(
        NotARecordingError,
        match=r"x is not a readable flight recording.*GLOBAL posix\.system.*none of it was executed",
    ):
        read_recording("x", evil)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=10
)  # fmt: skip


@settings(deadline=None)
@given(
    st.sampled_from(sorted(RECORDED.glob("flight-*/*.json"))),
    st.lists(st.tuples(st.integers(0, 40), junk), max_size=4),
    st.data(),
)
def test_a_recording_with_anything_in_any_place_is_judged_or_refused(
    file: Path, changes: list[tuple[int, Any]], data: st.DataObject
) -> None:
    dump = json.loads(file.read_text())
    for _, value in changes:
        place: Any = dump
        for _ in range(data.draw(st.integers(0, 3))):
            if (
                isinstance(place, dict | list)
                and place
                and isinstance(
                    down := place[
                        data.draw(
                            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
                        )
                    ],
                    dict | list,
                )
            ):
                place = down
        if isinstance(place, dict) and place:
            place[data.draw(st.sampled_from(sorted(place)))] = value
        elif isinstance(place, list) and place:
            place[0] = value
    with contextlib.suppress(NotARecordingError):
        judge_recordings([read_recording(name, json.dumps(dump).encode()) for name in ("r_0", "r_1")])
