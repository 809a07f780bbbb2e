"""A child's messages, output and end, with real processes.

Run: pytest tests/jobs/runs/test_process.py
"""

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from unisono.guard.supervise.child_process import ChildProcess

ENVIRONMENT = {"PATH": os.defpath}


def start(script: str, output: IO[bytes], *, has_input: bool = False) -> ChildProcess:
    def command(fd: int) -> list[str]:
        return [sys.executable, "-c", f"import os, sys, json, signal, time\nfd = {fd}\n{script}"]

    return ChildProcess(command, environment=ENVIRONMENT, output=output, has_input=has_input)


def read_all(child: ChildProcess) -> list[Any]:
    found = []
    limit = time.monotonic() + 30
    while not child.ended:
        assert time.monotonic() < limit
        found += child.read()
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_messages_come_in_order_and_torn_or_foreign_lines_are_left_out(tmp_path: Path) -> None:
    script = 'os.write(fd, b\'{"kind":"a"}\\nnoise\\n{"kind":\'); os.write(fd, b\'"b"}\\n{"kind":"torn\')'
    with (tmp_path / "log").open("w+b") as log, start(script, log) as child:
        assert [message["kind"] for message in read_all(child)] == ["a", "b"]
        assert child.returncode == 0


def test_a_flood_of_messages_and_of_print_blocks_nobody(tmp_path: Path) -> None:
    script = (
        "line = json.dumps({'kind': 'step', 'text': 'x' * 1000}).encode() + b'\\n'\n"
        "for _ in range(5000):\n    os.write(fd, line)\n    print('y' * 500)"
    )
    with (tmp_path / "log").open("w+b") as log:
        with start(script, log) as child:
            assert len(read_all(child)) == 5000
        assert (tmp_path / "log").stat().st_size > 5000 * 500


def test_the_signal_that_ended_it_is_known(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log, start("os.kill(os.getpid(), signal.SIGKILL)", log) as child:
        read_all(child)
        assert child.returncode == -signal.SIGKILL


def test_a_grandchild_that_holds_the_pipe_is_ended_and_not_waited_for(tmp_path: Path) -> None:
    script = (
        "pid = os.fork()\n"
        "if pid == 0:\n    signal.pause()\n"
        "os.write(fd, json.dumps({'kind': 'child', 'pid': pid}).encode() + b'\\n')"
    )
    with (tmp_path / "log").open("w+b") as log, start(script, log) as child:
        (message,) = read_all(child)
    wait_for(lambda: not _lives(message["pid"]))


def test_leaving_the_context_leaves_no_process(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as log:
        with start('os.write(fd, b\'{"kind":"here"}\\n\'); signal.pause()', log) as child:
            wait_for(lambda: bool(child.read()))
        assert not _lives(child.pid)
        assert child.returncode == -signal.SIGKILL


def test_patience_lets_it_end_by_itself(tmp_path: Path) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        'os.write(fd, b\'{"kind":"here"}\\n\')\nwhile True: signal.pause()'
    )
    with tempfile.TemporaryFile() as log, start(script, log) as child:
        wait_for(lambda: bool(child.read()))
        child.end(patience_s=20)
        assert child.returncode == 3


def test_it_hears_what_is_sent_until_its_input_is_closed() -> None:
    script = (
        "\nfor line in sys.stdin:\n    os.write(fd, json.dumps({'kind': 'echo', 'line':"
        " json.loads(line)}).encode() + b'\\n')"
    )
    with tempfile.TemporaryFile() as log, start(script, log, has_input=True) as child:
        child.send({"kind": "say", "text": "ü"})
        child.close_input()
        assert [message["line"]["text"] for message in read_all(child)] == ["ü"]


def test_it_leads_a_session_of_its_own_so_ctrl_c_does_not_reach_it() -> None:
    script = "os.write(fd, json.dumps({'kind': 'ids', 'sid': os.getsid(0)}).encode() + b'\\n')"
    with tempfile.TemporaryFile() as log, start(script, log) as child:
        (message,) = read_all(child)
        assert message["sid"] == child.pid != os.getsid(0)


def test_no_other_descriptor_of_the_front_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as held, tempfile.TemporaryFile() as log:
        os.set_inheritable(held.fileno(), True)
        script = (
            "os.write(fd, json.dumps({'kind': 'fds', 'fds': os.listdir('/proc/self/fd')}).encode() + b'\\n')"
        )
        with start(script, log) as child:
            (message,) = read_all(child)
    assert len(message["fds"]) <= 5  # 0, 1, 2, the report pipe, the listing itself


def test_a_program_that_is_not_there_leaks_nothing() -> None:
    gc.collect()  # what earlier tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))
    with tempfile.TemporaryFile() as log, pytest.raises(FileNotFoundError):
        ChildProcess(lambda _: ["/no/such/program"], environment=ENVIRONMENT, output=log)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_telling_a_deaf_child_blocks_nobody_and_the_words_arrive_later(
    tmp_path: Path,
) -> None:
    script = (
        'os.write(fd, b\'{"kind":"here"}\\n\'); os.kill(os.getpid(), signal.SIGSTOP)\n'
        "sizes = [len(json.loads(sys.stdin.readline())['text']) for _ in range(4)]\n"
        "os.write(fd, json.dumps({'kind': 'heard', 'sizes': sizes}).encode() + b'\\n')"
    )
    with (tmp_path / "log").open("w+b") as log, start(script, log, has_input=True) as child:
        wait_for(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
        for _ in range(4):
            child.send({"kind": "shard_written", "text": "x" * (1 << 20)})
        child.signal(signal.SIGCONT)
        assert [message.get("sizes") for message in read_all(child)] == [None, [1 << 20] * 4]
