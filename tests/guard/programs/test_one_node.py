"""`unisono run` on one node: what passes through, what is named, and that nothing is left.

Run: pytest tests/guard/programs/test_one_node.py
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from unisono.guard.diagnosis.own_runs import diagnose_run
from unisono.guard.facts.processes import processes_below

UNISONO = str(Path(sys.executable).parent / "unisono")
LIMIT_S = 240.0
# A program that starts its ranks by itself, as launchers do, without anything of torch's.
LAUNCHER = """
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2"})
         for r in range(2)]
codes = [rank.wait() for rank in ranks]
sys.exit(next((1 for code in codes if code), 0))
"""
RANK = (
    "import os, sys, time; open(f'pid-{os.environ[\"RANK\"]}', 'w').write(str(os.getpid())); time.sleep(600)"
)


@contextlib.contextmanager
def run(folder: Path, words: Sequence[str], *flags: str, **more: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """`unisono run FLAGS -- WORDS` in a folder; a front that is still there at the end, as when a
    test fails, is killed.
    """
    command = [sys.executable, "-m", "unisono", "run", "--output-dir", "out", *flags, "--", *words]
    with front_server.start(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more
    ) as front:
        try:
            yield front
        finally:
            if front.poll() is None:
                front.kill()  # its guard ends the program


def until(seen: Callable[[], Any], what: str) -> Any:
    """Waits for an event."""
    limit = time.monotonic() + LIMIT_S
    while not (found := seen()):
        assert time.monotonic() < limit, what
        time.sleep(0.02)
    return found


def number_in(path: Path) -> int:
    """The number in a file, once it is there; else 0."""
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def pidfds_of(pid: int) -> int:
    """How many processes a front holds."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "pidfd" in str(fd.readlink())
    return count


def own_folders(pid: int) -> list[Path]:
    """Borders of a front."""
    found = []
    for guard in Path("/dev/shm").glob("unisono-*/guard.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(guard.read_text())["front_pid"] == pid:
                found.append(guard.parent)
    return found


def read_until(front: "subprocess.Popen[bytes]", word: bytes) -> bytes:
    """What a front says, up to a word; `communicate` gives the rest."""
    assert front.stderr is not None
    printed = b""
    while word not in printed:
        one = os.read(front.stderr.fileno(), 1)
        assert one, printed
        printed += one
    return printed


def result(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text())
    return value


def test_output_and_exit_code_pass_through_byte_by_byte(tmp_path: Path) -> None:
    body = (
        "import os; os.write(1, bytes(range(256)) * 1000); os.write(2, b'to stderr\\r\\n\\xff'); raise"
        " SystemExit(7)"
    )
    with run(tmp_path, [sys.executable, "-c", body], "--uneven") as front:
        out, err = front.communicate(timeout=LIMIT_S)
    assert front.returncode == 7
    assert out == bytes(range(256)) * 1000
    assert b"to stderr\r\n\xff" in err
    assert (result(tmp_path)["outcome"], result(tmp_path)["exit_code"]) == ("failed", 7)
    (log,) = (tmp_path / "out" / "logs").glob("*.log")
    assert log.read_bytes().count(bytes(range(256))) >= 999
    assert own_folders(front.pid) == []


def test_program_that_ends_well_is_completed_with_merged_streams_in_order(
    tmp_path: Path,
) -> None:
    body = "import sys\nfor i in range(200):\n print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    command = [UNISONO, "--quiet", "run", "--output-dir", "out", "--", sys.executable, "-c", body]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert [line for line in done.stdout.split("\n") if line.isdigit()] == [str(i) for i in range(200)]
    assert result(tmp_path)["outcome"] == "completed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_program_which_decides_what_comes_of_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    body = (
        f"import signal, sys, time; signal.signal({int(number)}, lambda *_: sys.exit(21)); open('ready',"
        " 'w').close()\nwhile True: time.sleep(0.1)"
    )
    with run(tmp_path, [sys.executable, "-c", body]) as front:
        until((tmp_path / "ready").exists, "the program has begun")
        front.send_signal(number)
        front.communicate(timeout=LIMIT_S)
    assert front.returncode == 21


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "SIGKILL"),
        (
            [sys.executable, "-c", "import ctypes; print('step 3', flush=True); ctypes.string_at(0)"],
            "SIGSEGV",
        ),
        (["sh", "-c", f"{sys.executable} -c 'import os; os.kill(os.getpid(), 9)'; exit $?"], "SIGKILL"),
    ],
)
def test_a_program_that_a_signal_ends_gets_a_verdict_that_names_the_signal(
    tmp_path: Path, words: list[str], name: str
) -> None:
    with run(tmp_path, words) as front:
        _, err = front.communicate(timeout=LIMIT_S)
    assert front.returncode == 5
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert verdict["cause"] == "rank_killed"
    assert f"was killed by {name}" in verdict["summary"]
    assert verdict["summary"] in err.decode()
    assert verdict["evidence"]
    assert not any("the run resumes" in line for line in verdict["fix"]), "of this program that is not known"
    assert (result(tmp_path)["outcome"], result(tmp_path)["exit_code"]) == ("died", 5)


def test_an_exit_code_like_that_of_a_signal_is_a_python_programs_own(tmp_path: Path) -> None:
    with run(tmp_path, [sys.executable, "-c", "raise SystemExit(137)"]) as front:
        front.communicate(timeout=LIMIT_S)
    assert front.returncode == 137
    assert not (tmp_path / "out" / "verdict.json").exists()


def test_no_rank_is_blamed_after_its_launcher_is_killed(tmp_path: Path) -> None:
    """The guard ends the ranks afterwards; that is no fault of theirs."""
    body = f"open('launcher', 'w').write(str(__import__('os').getpid()))\n{LAUNCHER}"
    with run(tmp_path, [sys.executable, "-c", body, RANK]) as front:
        pids = [until(partial(number_in, tmp_path / f"pid-{r}"), "ranks") for r in (0, 1)]
        until(lambda: pidfds_of(front.pid) >= 2, "the front has found both ranks")
        os.kill(number_in(tmp_path / "launcher"), signal.SIGKILL)
        front.communicate(timeout=LIMIT_S)
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["cause"], verdict["ranks"]) == ("rank_killed", [])
    assert "the program was killed by SIGKILL" in verdict["summary"]
    assert all(map(is_gone, pids))


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_program_that_ignores_signals_is_killed_with_its_children_in_time(
    tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    """Within the time that was reported when the signal was passed on."""
    body = (
        "import signal, subprocess, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\np ="
        " subprocess.Popen(['sleep', '600'], start_new_session=True); open('left',"
        " 'w').write(str(p.pid))\nwhile True: time.sleep(1)"
    )
    grace = "3" if len(numbers) == 1 else "600"
    with run(tmp_path, [sys.executable, "-c", body], "--grace", grace) as front:
        left = until(partial(number_in, tmp_path / "left"), "the program has begun")
        front.send_signal(numbers[0])
        read_until(front, b"was passed on to the program")
        reported = time.monotonic()
        for number in numbers[1:]:
            until(lambda: time.monotonic() - reported > 1.2, "what counts as a second signal")
            front.send_signal(number)
        _, rest = front.communicate(timeout=LIMIT_S)
    assert b"killing it and its child processes" in rest
    assert front.returncode == 137
    assert result(tmp_path)["outcome"] == ("preempted" if numbers[0] is signal.SIGTERM else "interrupted")
    assert is_gone(left)


def test_a_rank_that_is_killed_is_named_though_its_program_reports_nothing(tmp_path: Path) -> None:
    with run(tmp_path, [sys.executable, "-c", LAUNCHER, RANK], "--debug-comm") as front:
        pids = [until(partial(number_in, tmp_path / f"pid-{r}"), "ranks") for r in (0, 1)]
        (border,) = until(lambda: own_folders(front.pid), "the border")
        assert border.stat().st_mode & 0o777 == 0o700
        until(lambda: pidfds_of(front.pid) >= 2, "the front has found both ranks")
        os.kill(pids[1], signal.SIGKILL)
        _, err = front.communicate(timeout=LIMIT_S)
    reported = err.decode()
    assert "rank 1, node 0" in reported
    assert "[rank_killed]" in reported
    assert front.returncode == 5
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["cause"], verdict["ranks"], verdict["when"]) == ("rank_killed", [1], "during")
    until(lambda: all(map(is_gone, pids)), "no rank is left")
    assert not border.exists()


def test_a_front_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    with run(tmp_path, [sys.executable, "-c", LAUNCHER, RANK]) as front:
        pids = [until(partial(number_in, tmp_path / f"pid-{r}"), "ranks") for r in (0, 1)]
        (border,) = until(lambda: own_folders(front.pid), "the border")
        front.kill()
        until(lambda: all(map(is_gone, pids)), "the ranks are gone")
        until(lambda: not border.exists(), "the border is gone")


def test_a_front_and_its_subreaper_that_are_killed_together_leave_no_rank(tmp_path: Path) -> None:
    """One that has loaded torch; nothing guards other processes then."""
    with run(tmp_path, [sys.executable, "-c", LAUNCHER, f"import torch; {RANK}"]) as front:
        pids = [until(partial(number_in, tmp_path / f"pid-{r}"), "ranks") for r in (0, 1)]
        until(lambda: pidfds_of(front.pid) >= 2, "the front has found both ranks")
        os.kill(front.pid, signal.SIGSTOP)  # it must not see that its subreaper ends
        os.kill(_subreaper_of(front.pid), signal.SIGKILL)
        front.kill()
        until(lambda: all(map(is_gone, pids)), "the ranks are gone")


def _subreaper_of(front: int) -> int:
    (subreaper,) = [
        pid
        for pid, parent in processes_below(front)
        if parent == front and b"subreaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return subreaper


def test_killed_subreaper_leaves_nothing_behind_and_no_rank_is_blamed(tmp_path: Path) -> None:
    with run(tmp_path, [sys.executable, "-c", LAUNCHER, RANK]) as front:
        pids = [until(partial(number_in, tmp_path / f"pid-{r}"), "ranks") for r in (0, 1)]
        until(lambda: pidfds_of(front.pid) >= 2, "the front has found both ranks")
        living = diagnose_run(tmp_path / "out").verdict
        os.kill(_subreaper_of(front.pid), signal.SIGKILL)
        front.communicate(timeout=LIMIT_S)
    assert (living.cause, living.when) == ("healthy", "during")
    assert all(map(is_gone, pids))
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["cause"], verdict["ranks"]) == ("rank_killed", [])
    assert "subreaper" in verdict["evidence"][0]["text"]
    assert not any("unisono train" in line for line in diagnose_run(tmp_path / "out").verdict.fix)


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path) -> None:
    body = (
        "import os, subprocess, sys; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        " open('left', 'w').write(str(p.pid))"
    )
    with run(tmp_path, [sys.executable, "-c", body]) as front:
        front.communicate(timeout=LIMIT_S)
    assert front.returncode == 0
    assert is_gone(number_in(tmp_path / "left"))


def test_json_keeps_stdout_for_the_verdict_and_the_result(tmp_path: Path) -> None:
    body = "print('from the program'); raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')"
    command = [UNISONO, "run", "--json", "--output-dir", "out", "--", sys.executable, "-c", body]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert "from the program" in done.stderr
    assert lines[-1]["kind"] == "result"
    assert {line["kind"] for line in lines} <= {"verdict", "result"}
    assert lines[-1]["exit_code"] == done.returncode
    assert lines[0]["kind"] == "verdict", "what it printed names the cause"
    assert lines[0]["when"] == "after"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no-such-program"], "program not found: no-such-program"),
        (["./not-executable"], "./not-executable is not executable"),
        (["./folder"], "./folder is a directory"),
        (["./of-nothing"], "names the interpreter /no/such/interpreter, which does not exist"),
        (["torchrun", "--nnodes", "1:4", "x.py"], "fixed number of nodes"),
        (
            ["torchrun", "--nproc-per-node", "2", "x.py"],
            "--nproc 3 and --nproc-per-node 2 contradict each other",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is_made(
    tmp_path: Path, words: list[str], says: str
) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "folder").mkdir()
    (tmp_path / "not-executable").write_text("print(1)")
    (tmp_path / "of-nothing").write_text("#!/no/such/interpreter -u")
    (tmp_path / "of-nothing").chmod(0o700)
    with run(tmp_path, words, "--nproc", "3", env={**os.environ, "PATH": path}) as front:
        _, err = front.communicate(timeout=LIMIT_S)
    assert front.returncode == 2
    assert says in err.decode()
    assert not (tmp_path / "out").exists()


def test_program_that_cannot_be_started_leaves_its_directory_to_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / "odd").write_bytes(b"\x01\x02 of no known format")
    (tmp_path / "odd").chmod(0o700)
    with run(tmp_path, ["./odd"]) as front:
        _, err = front.communicate(timeout=LIMIT_S)
    assert front.returncode == 2
    assert "./odd cannot be started: Exec format error" in err.decode()
    with run(tmp_path, ["true"]) as front:
        front.communicate(timeout=LIMIT_S)
    assert front.returncode == 0
