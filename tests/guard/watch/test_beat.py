"""A rank's record, its reader and its writer: .venv/bin/python -m pytest
tests/guard/watch/test_beat.py
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.guard.watch import (
    KINDS,
    MAIN,
    MAIN_AT,
    MOST_ROWS,
    PHASES,
    PULSE,
    PULSE_AT,
    RESTING_S,
    Beats,
    beat_while_collecting,
)
from unisono.guard.watch.views import BeatMemory, read_beat

HAMMERING_S = 3.0
STANDIN = str(Path(__file__).parent / "standins" / "beating_rank.py")
SMALL, NUMBER = st.integers(0, 1 << 20), st.integers(0, (1 << 64) - 1)


@pytest.fixture
def memory() -> Iterator[BeatMemory]:
    """The front's end of a record."""
    made = BeatMemory(0)
    yield made
    made.close()


def until(condition: Callable[[], bool], *, limit_s: float = 30.0) -> None:
    """Waits for an event, with a limit."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.005)


@given(
    step=SMALL, micros=st.integers(0, 5), phase=st.sampled_from([phase.name for phase in PHASES]), done=NUMBER, total=NUMBER,
    kind=st.sampled_from(KINDS), elements=NUMBER, sequences=st.lists(NUMBER, max_size=2 * MOST_ROWS),
)  # fmt: skip
def test_what_a_rank_writes_is_what_its_front_reads(
    step: int, micros: int, phase: str, done: int, total: int, kind: str, elements: int, sequences: list[int]
) -> None:
    with contextlib.closing(BeatMemory(3)) as memory:
        assert memory.read() is None
        beats = Beats.inherited(memory.record_fd)
        beats.begin_step(step)
        beats.note_batch(sequences)
        for _ in range(micros):
            beats.begin_micro(sequences)
        beats.begin_collective(kind, elements)
        beats.enter(phase, done=done, total=total)
        found = memory.read()
        assert found is not None
        assert (found.step, found.micro, found.phase, found.done, found.total) == (
            step,
            micros,
            phase,
            done,
            total,
        )
        assert (found.comm, found.kind, found.elements) == (1, kind, elements)
        assert (found.pulse_ns, found.answered) == (0, 0)
        assert memory.rows() == (sequences[:MOST_ROWS] if micros else [])


def test_batch_digest_is_equal_in_all_processes_and_differs_by_sequences(
    memory: BeatMemory,
) -> None:
    code = (
        "from unisono.guard.watch import RECORD_BYTES, Beats\nfrom unisono.guard.watch.views import read_beat\nm ="
        " bytearray(RECORD_BYTES); b = Beats(m); b.note_batch([3, 1, 2]); b.enter('data');"
        " print(read_beat(m).digest)"
    )
    reported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )  # fmt: skip
    found = []
    for sequences in ([3, 1, 2], [1, 2, 3]):
        beats = Beats.inherited(memory.record_fd)
        beats.note_batch(sequences)
        beats.enter("data")
        beat = memory.read()
        assert beat is not None
        found.append(beat.digest)
    assert found[0] == int(reported.stdout)
    assert found[0] != found[1]


def test_reader_of_a_rank_that_only_beats_never_sees_a_torn_record() -> None:
    """The writer makes every number of a record a function of its step, so that any mixture of two
    records shows.
    """
    with contextlib.closing(BeatMemory(0)) as memory:
        writer = subprocess.Popen(
            [sys.executable, STANDIN, str(memory.record_fd)], pass_fds=[memory.record_fd]
        )
        try:
            until(lambda: (beat := memory.read()) is not None and beat.step > 100)
            read = missed = last = 0
            end = time.monotonic() + HAMMERING_S
            while time.monotonic() < end:
                beat = memory.read()
                if beat is None:
                    missed += 1
                    continue
                read += 1
                step = beat.step
                assert (beat.comm, beat.elements, beat.done, beat.total) == (
                    step,
                    3 * step,
                    5 * step,
                    7 * step,
                ), beat
                assert beat.version >= last
                last = beat.version
        finally:
            writer.kill()
            writer.wait()
    print(f"{read} read, {missed} missed, {last} written")
    assert read > 1000
    assert missed < read  # where writer and reader share a processor, about a quarter; a tenth otherwise


def test_rank_stopped_in_the_middle_of_a_record_is_read_as_it_was_before() -> None:
    """Otherwise it would have no record for as long as it is stopped."""
    memory = bytearray(4096)
    beats = Beats(memory)
    beats.begin_step(1)
    beats.begin_step(2)
    beats.enter("compute")
    whole = read_beat(memory)
    assert whole is not None
    (newest,) = [at for at in MAIN_AT if MAIN.unpack_from(memory, at)[0] == whole.version]
    (older,) = set(MAIN_AT) - {newest}
    for written in range(1, 19):  # numbers of the next record that are there already
        torn = bytearray(memory)
        record = [whole.version + 1, *range(100, 117), whole.version + 1]
        for index in range(written):
            torn[older + 8 * index : older + 8 * index + 8] = record[index].to_bytes(8, sys.byteorder)
        assert read_beat(torn) == whole
    for at in PULSE_AT:
        PULSE.pack_into(memory, at, 3, 55, 0, 2)
    found = read_beat(memory)
    assert found is not None
    assert found.pulse_ns == 0, "a pulse that is whole in neither slot is none"


def test_times_are_of_the_current_phase_and_the_first_step_is_left_out(
    memory: BeatMemory,
) -> None:
    beats = Beats.inherited(memory.record_fd)
    beats.enter("evaluate")
    beats.enter("evaluate", done=1, total=2)
    for step in (5, 6, 7):
        beats.begin_step(step)
        for _ in range(3):
            beats.enter("compute")
            with beats.waiting():
                time.sleep(0.01)
        beats.enter("compute")
        now = memory.read()
        assert now is not None
        assert now.phase == "compute"
        if step == 5:
            assert (now.times.count, now.shares_s) == (0, (0.0, 0.0, 0.0, now.shares_s[3]))
    with beats.waiting():
        in_comm = memory.read()
    beats.enter("evaluate")
    after = memory.read()
    assert in_comm is not None
    assert after is not None
    assert in_comm.phase == "comm"
    assert in_comm.times.count == 6, "three collectives in each of two steps"
    assert 0.01 <= in_comm.times.longest_s <= in_comm.times.total_s
    assert in_comm.times.total_s >= 0.06
    assert in_comm.shares_s[2] == pytest.approx(in_comm.times.total_s)
    assert (after.phase, after.times.count) == (
        "evaluate",
        2,
    ), "left twice: for its own next part, and for the first step"


def test_phase_is_restored_after_a_collective_but_stays_comm_if_it_fails(
    memory: BeatMemory,
) -> None:
    """The one that fails stays the rank's last sign of life."""
    beats = Beats.inherited(memory.record_fd)
    beats.enter("evaluate", done=3, total=9)
    phases = []

    def fails() -> None:
        phases.append(beats.phase)
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"), beats.waiting():
        fails()
    assert phases == ["comm"]
    beat = memory.read()
    assert beat is not None
    assert (beat.phase, beat.done, beat.total) == ("comm", 3, 9)


def test_a_name_that_no_phase_has_fails_nobody(memory: BeatMemory) -> None:
    beats = Beats.inherited(memory.record_fd)
    beats.enter("a phase of a newer worker")
    assert beats.phase == "start"


def test_pulse_shows_a_running_interpreter_while_the_main_thread_is_silent(
    memory: BeatMemory,
) -> None:
    beats = Beats.inherited(memory.record_fd)
    first = memory.read()
    assert first is not None
    beats.pulse().start()
    seen: set[int] = set()

    def three_pulses() -> bool:
        beat = memory.read()
        if beat is not None and beat.pulse_ns:
            seen.add(beat.pulse_ns)
        return len(seen) >= 3

    until(three_pulses)
    last = memory.read()
    assert last is not None
    assert last.version == first.version
    assert max(seen) <= time.monotonic_ns()


def test_answer_for_a_front_is_left_once_and_a_second_replaces_the_first(
    memory: BeatMemory,
) -> None:
    beats = Beats.inherited(memory.record_fd)
    texts = [b"a longer first answer", b"second"]
    given_out: list[bytes] = []

    def answer() -> bytes:
        given_out.append(texts[len(given_out)])
        return given_out[-1]

    beats.pulse(answer, answers_fd=memory.answers_fd).start()
    for number, text in enumerate(texts, start=1):
        assert memory.ask() == number

        def answered(number: int = number) -> bool:
            beat = memory.read()
            return beat is not None and beat.answered == number

        until(answered)
        assert memory.answer() == text
    assert given_out == texts


def test_pulse_rests_while_the_main_thread_beats_but_not_if_it_is_silent(memory: BeatMemory) -> None:
    """It is there for silence, and to be woken ten times a second is most of what the watch
    costs.
    """
    beats = Beats.inherited(memory.record_fd)
    beats.pulse().start()

    def pulses(seconds: float, *, beating: bool) -> int:
        seen, end = set[int](), time.monotonic() + seconds
        while time.monotonic() < end:
            if beating:
                beats.enter("compute")
            beat = memory.read()
            seen |= {beat.pulse_ns} if beat is not None else set()
            time.sleep(0.01)
        return len(seen)

    until(lambda: (beat := memory.read()) is not None and beat.pulse_ns > 0)
    assert pulses(2.0, beating=True) <= 2.0 / RESTING_S + 2
    limit = time.monotonic() + 30.0
    while pulses(2.0, beating=False) < 10:  # a machine with too much to do may take some tries
        assert time.monotonic() < limit


def test_an_answer_that_fails_reports_it_and_the_pulse_continues(memory: BeatMemory) -> None:
    def answer() -> bytes:
        raise OSError("no recorder")

    Beats.inherited(memory.record_fd).pulse(answer, answers_fd=memory.answers_fd).start()
    memory.ask()
    until(lambda: (beat := memory.read()) is not None and beat.answered == 1)
    assert memory.answer() == b'{"error": "OSError"}'
    before = memory.read()
    assert before is not None
    until(lambda: (beat := memory.read()) is not None and beat.pulse_ns > before.pulse_ns)


def test_a_full_collection_is_a_sign_of_life_of_the_main_thread_alone(memory: BeatMemory) -> None:
    beats = Beats.inherited(memory.record_fd)
    heard = beat_while_collecting(beats)
    try:
        versions = []
        for collect in (lambda: None, gc.collect, lambda: gc.collect(0), _collect_elsewhere):
            collect()
            beat = memory.read()
            assert beat is not None
            versions.append(beat.version)
        start, full, young, elsewhere = versions
        assert full == start + 2, "one at each end"
        assert young == full
        assert elsewhere == full, "another thread's collection says nothing of the main thread"
    finally:
        gc.callbacks.remove(heard)


def _collect_elsewhere() -> None:
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


def test_a_beat_begins_no_garbage_collection(memory: BeatMemory) -> None:
    """One in the middle of a beat could put an older record in a newer one's place."""
    beats = Beats.inherited(memory.record_fd)
    beats.begin_step(1)
    beats.begin_step(2)
    began = 0

    def count(moment: str, facts: dict[str, int]) -> None:
        nonlocal began
        began += moment == "start" and threading.current_thread() is threading.main_thread()

    for _ in range(
        1000
    ):  # while the interpreter adapts to bytecode that is new to it, it makes objects itself
        beats._write(1)
    before = gc.get_threshold()
    gc.callbacks.append(count)
    try:
        gc.disable()
        due = [[] for _ in range(100)]  # type: ignore[var-annotated] # so many are due that the next container begins one
        gc.set_threshold(1)
        gc.enable()
        for _ in range(100):
            beats._write(1)
        seen = began
        made = [due]
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.callbacks.remove(count)
    assert seen == 0
    assert made
    assert began > 0, "a container does begin one: else nothing was tested"


def test_last_beat_of_a_killed_rank_is_readable_and_closing_frees_memory() -> None:
    gc.collect()  # what earlier tests have left
    before = len(_memory_of(os.getpid()))
    memory = BeatMemory(0)
    assert len(_memory_of(os.getpid())) > before
    rank = subprocess.Popen([sys.executable, STANDIN, str(memory.record_fd)], pass_fds=[memory.record_fd])
    until(lambda: (beat := memory.read()) is not None and beat.step > 100)
    rank.kill()
    assert rank.wait() == -signal.SIGKILL
    last = memory.read()
    assert last is not None
    assert last == memory.read()
    assert last.comm == last.step
    fds = memory.fds
    memory.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert len(_memory_of(os.getpid())) == before


def _memory_of(pid: int) -> list[str]:
    """What a process holds of beats: open files and mapped memory."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(fd.readlink()))
    found += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in found if "memfd:unisono-" in line]


def test_a_front_that_was_killed_leaves_no_memory_behind() -> None:
    """Its rank, which holds the other end, has gone with it."""
    code = (
        "import subprocess, sys\nfrom unisono.guard.watch.views import BeatMemory\nmemory = BeatMemory(0)\nrank ="
        " subprocess.Popen([sys.executable, sys.argv[1], str(memory.record_fd), '--with-front'],"
        " pass_fds=[memory.record_fd])\nwhile memory.read() is None:\n    pass\nprint(rank.pid,"
        " flush=True)\nrank.wait()\n"
    )
    front = subprocess.Popen([sys.executable, "-c", code, STANDIN], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    rank = int(front.stdout.readline())
    assert _memory_of(rank)
    front.kill()
    front.wait()
    front.stdout.close()
    until(lambda: not _lives(rank))
    assert not any("unisono-beat" in name for name in map(str, Path("/dev/shm").iterdir()))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_answer_that_never_comes_does_not_stop_the_pulse(memory: BeatMemory) -> None:
    begun = threading.Event()

    def answer() -> bytes:
        begun.set()
        threading.Event().wait()
        return b""

    Beats.inherited(memory.record_fd).pulse(answer, answers_fd=memory.answers_fd).start()
    memory.ask()
    assert begun.wait(30)
    before = memory.read()
    assert before is not None
    until(lambda: (beat := memory.read()) is not None and beat.pulse_ns > before.pulse_ns)
    memory.ask()
    assert memory.answer() == b""
