"""The border between a front and the processes of somebody else's program.

Run: pytest tests/guard/programs/test_border.py
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from unisono.guard.integrations import border
from unisono.guard.watch import Beats

_RANK = """
import os, sys, time
from unisono.guard.integrations import border
guard = border.find_guard(os.environ)
own = border.own_registration(os.environ)
presence = border.Presence(guard)
record, stacks, answers = presence.make_memory()
from unisono.guard.watch import Beats
beats = Beats(record)
presence.register(own)
beats.begin_step(7)
beats.enter("compute")
answer = presence.report_facts("data", {"rows": 5}, rank=own.rank, world_size=own.world_size, limit_s=60)
presence.emit("result" if answer.agreed else "refused", text=answer.text)
"""


@pytest.fixture
def guard(tmp_path: Path) -> border.Guard:
    found = border.Guard(tmp_path / "guard", "one", os.getpid(), host="a")
    found.write()
    return found


def test_a_rank_of_its_own_process_is_read_also_after_its_end(guard: border.Guard) -> None:
    """Who it is, its last sign of life, what it brought, and how it ended."""
    environment = {
        **os.environ, border.VARIABLE: str(guard.folder / border.GUARD_FILE), "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
    }  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", _RANK], env=environment) as process:
        answerer = threading.Thread(target=_answer_first, args=(guard.folder,))
        answerer.start()
        assert process.wait(60) == 0
        answerer.join(60)
    (found,) = border.registrations(guard.folder)
    assert (found.pid, found.rank, found.world_size) == (process.pid, 1, 2)
    memory = border.memory_of(guard.folder, found.pid)
    beat = memory.read()
    memory.close()
    assert beat is not None
    assert (beat.step, beat.phase) == (7, "compute")
    event: Any
    (event,) = border.EventsOf(guard.folder, found.pid).new()
    assert (event["kind"], event["text"]) == ("refused", "rows differ")
    assert not list(border.reported_facts(guard.folder))


def _answer_first(folder: Path) -> None:
    for _ in range(6000):
        for reported in border.reported_facts(folder):
            assert reported.facts == {"rows": 5}
            border.answer_facts(folder, reported, border.Answer(agreed=False, text="rows differ"))
            return
        threading.Event().wait(0.01)


def test_a_folder_of_others_guards_nobody(guard: border.Guard) -> None:
    path = guard.folder / border.GUARD_FILE
    environment = {border.VARIABLE: str(path)}
    found = border.find_guard(environment)
    assert found == guard
    path.chmod(0o644)
    assert border.find_guard(environment) is None
    assert border.find_guard({}) is None
    assert border.find_guard({border.VARIABLE: "/nowhere/guard.json"}) is None


def test_torn_and_newer_files_do_no_harm(guard: border.Guard) -> None:
    (guard.folder / "rank-1.json").write_text("{", encoding="utf-8")
    (guard.folder / "rank-2.json").write_text("[]", encoding="utf-8")
    one = border.Registration(3, 4, 0, 0, 1, 1, "a")
    value = {**{name: getattr(one, name) for name in one.__slots__}, "of_tomorrow": 1}
    (guard.folder / "rank-3.json").write_text(json.dumps(value), encoding="utf-8")
    assert [found.pid for found in border.registrations(guard.folder)] == [3]
    with pytest.raises(OSError, match="beat-3"):
        border.memory_of(guard.folder, 3)


def test_events_come_whole_and_once(guard: border.Guard) -> None:
    reader: Any = border.EventsOf(guard.folder, os.getpid())
    assert reader.new() == []
    presence = border.Presence(guard)
    presence.emit("note", text="one")
    path = guard.folder / f"events-{os.getpid()}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        file.write('junk\n{"kind": "no')
    assert [event["text"] for event in reader.new()] == ["one"]
    with path.open("a", encoding="utf-8") as file:
        file.write('te", "text": "two"}\n')
    assert [event["text"] for event in reader.new()] == ["two"]


def test_who_waits_for_a_front_that_is_gone_continues(guard: border.Guard) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait(60)
    gone = border.Guard(guard.folder, "one", process.pid)
    assert border.Presence(gone).report_facts("data", {}, rank=0, world_size=1, limit_s=60) is None


def test_a_record_made_again_leaves_the_front_its_old_one(guard: border.Guard) -> None:
    presence = border.Presence(guard)
    first, *fds = presence.make_memory()
    Beats(first).enter("compute")
    memory = border.memory_of(guard.folder, os.getpid())
    second, *more = presence.make_memory()
    Beats(second).enter("data")
    beat = memory.read()
    assert beat is not None
    assert beat.phase == "compute"
    memory.close()
    for fd in (*fds, *more):
        os.close(fd)


def test_folder_removed_by_the_subreaper_holds_nothing_and_takes_nothing(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert list(border.reported_facts(gone)) == []
    assert list(border.registrations(gone)) == []
    border.answer_facts(gone, border.ReportedFacts(1, "data", 0, 1, {}, {}), border.Answer(True, "", 0, {}))
    assert not gone.exists()
