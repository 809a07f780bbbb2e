"""All ranks' logs and events, merged in time. Run: pytest tests/launch/test_logs.py"""

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.launch.logs import merged_logs


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


def test_a_log_without_times_is_shown_all_the_same(tmp_path: Path) -> None:
    write(tmp_path / "logs" / "a-b-rank-00003.log", "one\ntwo\n")
    lines = list(merged_logs(tmp_path))
    assert [(line.text, line.host, line.rank) for line in lines] == [("one", "a-b", 3), ("two", "a-b", 3)]


def test_a_directory_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no logs"):
        list(merged_logs(tmp_path))


def test_a_runs_logs_are_in_time_and_hold_what_was_printed_and_told(front: Any) -> None:
    front.run()
    lines = list(merged_logs(front.out))
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    assert {line.source for line in lines} == {"printed", "told"}
    assert any(line.text == "loading" for line in lines)
    assert all(line.time > 0 for line in lines)
