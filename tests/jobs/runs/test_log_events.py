"""Ranks' logs are followed while they grow; a line that means something is told, once, and ends
nothing.

Run: pytest tests/jobs/runs/test_log_events.py
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.causes import Verdict
from unisono.base.causes.signatures import LINE_LIMIT
from unisono.base.messages import fields_of
from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.guard.supervise.local_ranks import open_log
from unisono.guard.supervise.rank_logs import CODE, FollowedLog, LineSplitter, LogEvents, LogMatch, RateLimit

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB"
WARN = "node-b:902:1011 [0] misc/socket.cc:484 NCCL WARN Connect to 172.17.0.1<44123> failed"
VICTIM = "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:24351"
_CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=10**10, bfloat16=True)
PLACES = [RankPlace(rank=n, node_rank=n, local_rank=0, host=f"h{n}", device=_CPU) for n in range(2)]


class Log:
    """A real log, and who follows it."""

    def __init__(self, path: Path, rate: RateLimit | None = None) -> None:
        self.file: IO[bytes] = open_log(path)
        self.file.write(f"{OOM}\n".encode())  # of an earlier start
        self.followed = FollowedLog(self.file, 1, rate or RateLimit())

    def prints(self, text: str | bytes) -> list[str]:
        """The signatures that are told for what it prints now."""
        self.file.write(text.encode() if isinstance(text, str) else text)
        self.followed.grew(os.fstat(self.file.fileno()).st_size)
        return [str(fields_of(message)["signature"]) for message in self.followed.take_matches()]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """A followed log."""
    made = Log(tmp_path / "a-rank-00001.log")
    yield made
    made.file.close()


def test_a_line_is_reported_once_with_its_words_and_what_they_may_mean(log: Log) -> None:
    log.file.write(f"step 3\n{OOM}\n{OOM}\n".encode())
    log.followed.grew(os.fstat(log.file.fileno()).st_size)
    message: Any
    (message,) = log.followed.take_matches()
    assert (message["kind"], message["code"], message["signature"]) == ("warning", CODE, "cuda_out_of_memory")
    assert "CUDA out of memory. Tried to allocate 4.64 GiB" in message["text"]
    assert "unisono explain cuda_oom" in message["fix"]


def test_what_was_there_before_the_start_is_history(log: Log) -> None:
    assert log.prints("nothing of note\n") == []


def test_what_victims_report_and_what_ends_a_rank_is_not_reported(log: Log) -> None:
    text = (
        f"{VICTIM}\nTraceback (most recent call last):\nKeyError: 'labels'\n 20%|██ | 810/4000"
        " [37:48<2:28:52,  2.83s/it]\n"
    )
    assert log.prints(text) == []


def test_a_half_line_waits_for_its_other_half(log: Log) -> None:
    assert log.prints(OOM[:20]) == []
    assert log.prints(OOM[20:]) == []
    assert log.prints("\n") == ["cuda_out_of_memory"]


def test_progress_bars_and_colours_do_not_hide_a_line(log: Log) -> None:
    assert log.prints(f" 10%|█\r 11%|█\r\x1b[33m{WARN}\x1b[0m\r 12%|█\r") == ["nccl_warn"]


def test_a_line_in_two_halves_of_a_character_is_read_all_the_same(log: Log) -> None:
    data = f"ä {OOM}\n".encode()
    assert log.prints(data[:1]) + log.prints(data[1:]) == ["cuda_out_of_memory"]


def test_secrets_in_a_line_are_not_shown(log: Log) -> None:
    log.file.write(
        b"ConnectionError: Max retries exceeded with url: https://me:hunter2@host/x?token=abcdef\n"
    )
    log.followed.grew(os.fstat(log.file.fileno()).st_size)
    message: Any
    (message,) = log.followed.take_matches()
    assert "hunter2" not in str(message)
    assert "abcdef" not in str(message)


def test_log_that_grows_by_megabytes_is_followed_in_bounded_time(log: Log) -> None:
    began = time.process_time()
    found = log.prints("x" * (64 << 20) + "\n" + "a line\n" * 10_000 + f"{OOM}\n")
    assert found == ["cuda_out_of_memory"]
    assert time.process_time() - began < 2.0


def test_a_log_that_was_cut_is_followed_from_there(log: Log) -> None:
    assert log.prints("some text\n") == []
    log.file.truncate(0)
    log.followed.grew(os.fstat(log.file.fileno()).st_size + 100)
    assert log.followed.take_matches() == []


def test_at_most_so_many_a_minute_are_reported(tmp_path: Path) -> None:
    now = [0.0]
    rate = RateLimit(most=2, clock=lambda: now[0])
    followed = Log(tmp_path / "r.log", rate)
    assert followed.prints(f"{OOM}\n{WARN}\nOSError: [Errno 28] No space left on device\n") == [
        "cuda_out_of_memory",
        "nccl_warn",
    ]
    now[0] = 61.0
    assert followed.prints("OSError: [Errno 28] No space left on device\n") == ["disk_is_full"], "not lost"
    followed.file.close()


@given(st.text(alphabet=st.sampled_from("ab\r\n"), max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_lines_are_the_same_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    whole = LineSplitter().feed((text + "\n").encode())
    lines, data, found, start = LineSplitter(), (text + "\n").encode(), [], 0
    for cut in [*sorted(cuts), len(data)]:
        found += lines.feed(data[start:cut] if cut > start else b"")
        start = max(start, cut)
    assert found == whole == [line for line in text.replace("\r", "\n").split("\n") if line]


def test_of_a_line_without_end_the_head_is_kept_and_memory_is_bounded() -> None:
    lines = LineSplitter()
    found = [line for _ in range(100) for line in lines.feed(b"y" * LINE_LIMIT)]
    assert len(found) == 1
    assert lines.feed(b"end\nnext\n") == ["next"]


def test_head_keeps_the_last_hits_and_a_verdict_cites_its_culprits_hits() -> None:
    events = LogEvents(PLACES)
    for number in range(20):
        events.on_message(
            1, LogMatch(1, "nccl_warn", None, f"NCCL WARN number {number}", float(number)).to_message()
        )
    events.on_message(0, LogMatch(0, "nccl_warn", None, "of a victim", 3.0).to_message())
    events.on_message(0, {"kind": "warning", "time": 1.0, "code": "another", "text": "x", "fix": ""})
    assert [hit.text for hit in events.matches(1)][-1] == "NCCL WARN number 19"
    assert len(events.matches(1)) == 8
    verdict = Verdict(cause="rank_killed", when="during", summary="rank 1 is gone", ranks=(1,))
    cited = events.cited(verdict)
    assert [item.where for item in cited.evidence] == ["the log of rank 1, node 1 (h1)"] * 3
    assert (cited.cause, cited.ranks, cited.summary) == ("rank_killed", (1,), "rank 1 is gone")
    assert events.look() is None


def test_a_run_shows_what_its_rank_prints_and_is_not_ended_by_it(front: Any) -> None:
    done = front.run("--json", faults={"says": WARN})
    assert done.returncode == 0, done.stderr
    (message,) = _hits(done.stdout)
    assert (message["signature"], message["line"]) == ("nccl_warn", WARN)
    assert front.read("result.json")["verdict"] is None


def test_last_line_of_a_dying_rank_is_reported_and_cited_in_the_verdict(front: Any) -> None:
    """It dies at once after it has said so; the verdict's cause is what was seen, not what was
    said.
    """
    done = front.run("--json", "restarts=0", faults={"says": WARN, "kill": 2})
    assert done.returncode == 5, done.stderr
    assert len(_hits(done.stdout)) == 1
    verdict = front.read("verdict.json")
    assert verdict["cause"] == "rank_killed"
    assert WARN in [item["text"] for item in verdict["evidence"]]


def _hits(stdout: str) -> list[dict[str, Any]]:
    return [message for message in map(json.loads, stdout.splitlines()) if message.get("code") == CODE]
