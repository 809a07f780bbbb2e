"""Reward functions in their processes: what they get, what ends them, and what is known then.

Run: pytest tests/trainer/objectives/rewards/test_pool.py
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import ConfigError
from unisono.trainer.config.rollout_sections import RewardSection
from unisono.trainer.objectives.rewards.calls import RewardCall, RewardError, Scored
from unisono.trainer.objectives.rewards.pool import RewardPool

LIMIT_S = 60.0  # of a wait; a test that works needs a second or two
FUNCTIONS = """
import asyncio, dataclasses, os, re, resource, time
import beside

@dataclasses.dataclass
class Settings:
    right: "float" = 1.0

# as TRL documents them
def exact(prompts, completions, answer, **kwargs):
    assert prompts == [prompts[0]] * len(completions)
    return [1.0 if text == right else 0.0 for text, right in zip(completions, answer)]

async def later(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [float(text == right) for text, right in zip(completions, answer)]

class Judge:
    def __init__(self):
        self.calls = 0
        self.__name__ = "judge"
    def __call__(self, completions, answer, **kwargs):
        self.calls += 1
        return [float(text == right) for text, right in zip(completions, answer)]

class LaterJudge:
    async def __call__(self, completions, answer, **kwargs):
        self.loop = getattr(self, "loop", None) or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return [float(text == right) for text, right in zip(completions, answer)]

def messages(prompts, completions, completion_ids):
    assert prompts[0][0]["role"] == "user"
    return [len(m[0]["content"]) + len(ids) for m, ids in zip(completions, completion_ids)]

def sometimes(completions):
    return [None if text == "b" else Settings().right for text in completions]

def notes(completions, log_metric, log_extra):
    log_metric("chars", len(completions[0]))
    log_metric("chars", float("nan"))
    log_extra("upper", [text.upper() for text in completions])
    return beside.ONE * len(completions)

def bounded(completions):
    return [float(0 < resource.getrlimit(resource.RLIMIT_AS)[0] < 8 << 30)] * len(completions)

def prints(completions, **kwargs):
    print("printed by the function")
    os.write(1, b"written by the function\\n")
    return [1.0] * len(completions)

def raises(completions, **kwargs):
    if "b" in completions:
        raise ValueError("b is bad")
    return [1.0] * len(completions)

def exits(completions, **kwargs):
    return raise_exit() if "b" in completions else [1.0] * len(completions)

def raise_exit():
    raise SystemExit(0)

def reads(completions, **kwargs):
    return [float(input())] * len(completions)

def too_few(completions, **kwargs):
    return [1.0]

def one_number(completions, **kwargs):
    return 1.0

def nan(completions, **kwargs):
    return [float("nan") if text == "b" else 1.0 for text in completions]

def infinite(completions, **kwargs):
    return [float("inf") if text == "b" else 1.0 for text in completions]

def booleans(completions, **kwargs):
    return [text == "b" if text == "b" else 1.0 for text in completions]

def texts(completions, **kwargs):
    return ["1.0" if text == "b" else 1 for text in completions]

def bomb(completions, **kwargs):
    return [float(len(bytearray(10**11))) if text == "b" else 1.0 for text in completions]

def dies(completions, **kwargs):
    if "b" in completions:
        os._exit(3)
    return [1.0] * len(completions)

def crashes(completions, **kwargs):
    if "b" in completions:
        os.kill(os.getpid(), 11)
    return [1.0] * len(completions)

def only_together(completions, **kwargs):
    if len(completions) > 1:
        raise RuntimeError("more than one")
    return [1.0]

def sleeps(completions, **kwargs):
    while "b" in completions: time.sleep(0.1)  # sleeps
    return [1.0] * len(completions)

def loops(completions, **kwargs):
    while "b" in completions: pass
    return [1.0] * len(completions)

def in_c(completions, **kwargs):
    if "b" in completions:
        re.match("(a*)*c", "a" * 40)
    return [1.0] * len(completions)

def sums(completions, **kwargs):
    if "b" in completions:
        sum(range(10**12))
    return [1.0] * len(completions)

def raises_then_hangs(completions, **kwargs):
    if len(completions) > 1:
        raise ValueError("first")
    while True: time.sleep(0.1)

def starts_a_process(completions, path, **kwargs):
    import subprocess
    other = subprocess.Popen(["sleep", "1000"])
    open(path[0], "w").write(f"{os.getpid()} {other.pid}")
    while "b" in completions: time.sleep(0.1)
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the user's functions, with one that it imports."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "beside.py").write_text("ONE = [1.0]\n")
    (folder / "rewards.py").write_text(FUNCTIONS)
    return folder / "rewards.py"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def pool_of(
    file: Path, *names: str, on_wait: Callable[[str], None] | None = None, processes: int = 1, **keys: Any
) -> RewardPool:
    entries = [RewardSection.model_validate({"use": f"{file}:{name}", **keys}) for name in names]
    digests = {f"rewards.{index}": digest(file) for index in range(len(entries))}
    return RewardPool(entries, digests, on_wait, processes=processes)


def group(texts: Sequence[str], *, row: str = "train.jsonl:17", **columns: object) -> RewardCall:
    return RewardCall(row, "question", list(texts), [[1]] * len(texts), columns)


def line_of(file: Path, words: str) -> str:
    lines = file.read_text().splitlines()
    return f"{file}:{next(n for n, line in enumerate(lines, 1) if words in line)}"


def by_function(scored: Scored) -> dict[str, list[float | None]]:
    return {name: [rewards[name] for rewards in scored.rewards] for name in scored.rewards[0]}


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children() -> set[int]:
    """The processes of rewards that this process has."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"unisono.trainer.objectives.rewards.child" in words and str(os.getpid()).encode() in words:
                pids.add(int(folder.name))
    return pids


# ---- what functions get


def test_functions_of_trl_work_unchanged(file: Path) -> None:
    names = ("exact", "later", "Judge", "LaterJudge")
    with pool_of(file, *names, processes=2) as pool:
        calls = [group(["a", "b", "a"], answer=right) for right in ("a", "b", "c")]
        scored = pool.score(calls)
        assert pool.score(calls[::-1]) == scored[::-1]
    for right, result in zip("abc", scored, strict=True):
        expected = [float(text == right) for text in "aba"]
        assert by_function(result) == dict.fromkeys(names, expected)
        assert result.totals == [4 * value for value in expected]
        assert result.failures == []


def test_a_prompt_of_messages_has_answers_of_messages(file: Path) -> None:
    prompt: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    answers: list[Any] = [[{"role": "assistant", "content": text}] for text in ("a", "bcd")]
    with pool_of(file, "messages") as pool:
        (scored,) = pool.score([RewardCall("a:1", prompt, answers, [[1, 2], []])])
    assert scored.totals == [3.0, 3.0]


def test_none_applies_to_no_sum_and_notes_are_kept(file: Path) -> None:
    with pool_of(file, "sometimes", "notes", weight=0.5) as pool:
        (scored,) = pool.score([group(["aa", "b"], unused=1)])
    assert by_function(scored) == {"sometimes": [1.0, None], "notes": [1.0, 1.0]}
    assert scored.totals == [1.0, 0.5]
    assert scored.metrics == {"chars": 2.0}
    assert scored.extras == {"upper": ["AA", "B"]}


def test_prints_go_to_the_log_and_memory_is_bounded(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of(file, "prints", "bounded") as pool:
        (scored,) = pool.score([group("ab")])
    assert scored.totals == [2.0, 2.0]
    captured = capfd.readouterr()
    assert "printed by the function\n" in captured.err
    assert "written by the function\n" in captured.err
    assert captured.out == ""


def test_built_in_rewards_run_in_the_same_processes(file: Path) -> None:
    entries = [
        RewardSection.model_validate({"use": "exact", "column": "target", "on_error": -1.0}),
        RewardSection.model_validate({"use": "regex", "pattern": "^a"}),
        RewardSection.model_validate({"use": f"{file}:prints"}),
    ]
    with RewardPool(entries, {"rewards.2": digest(file)}, processes=1) as pool:
        right, missing = pool.score(
            [group(["a", "b"], target="b"), group(["a", "b"], row="b.jsonl:2", answer="b")]
        )
    assert by_function(right) == {"exact": [0.0, 1.0], "regex": [1.0, 0.0], "prints": [1.0, 1.0]}
    assert by_function(missing)["exact"] == [-1.0, -1.0]
    (failure,) = missing.failures
    assert (failure.row, failure.kind, failure.answer) == ("b.jsonl:2", "value", None)
    assert "no column `target`" in failure.text


# ---- what fails

BAD = {
    "raises": ("error", "ValueError: b is bad", "raise ValueError"),
    "exits": ("error", "SystemExit: 0", "raise SystemExit"),
    "nan": ("value", "it gives nan", "def nan"),
    "infinite": ("value", "it gives inf", "def infinite"),
    "booleans": ("value", "it gives True: give 1.0 or 0.0", "def booleans"),
    "texts": ("value", "it gives '1.0', where a number is expected", "def texts"),
    "bomb": ("memory", "MemoryError", "bytearray"),
    "dies": ("died", "its process ended with exit code 3", "def dies"),
    "crashes": ("died", "its process ended by SIGSEGV", "os.kill(os.getpid(), 11)"),
}
ALL_BAD = {
    "too_few": ("value", "it gives 1 values for 3 answers"),
    "one_number": ("value", "it gives float, not a list of 3 numbers"),
    "only_together": ("error", "RuntimeError: more than one"),
}


def test_the_answer_that_fails_is_known_and_the_others_keep_their_reward(file: Path) -> None:
    with pool_of(file, *BAD, processes=2, on_error=-1.0) as pool:
        bad, good = pool.score([group("abc"), group("aca", row="train.jsonl:18")])
    assert by_function(bad) == {name: [1.0, -1.0, 1.0] for name in BAD}
    assert by_function(good) == {name: [1.0, 1.0, 1.0] for name in BAD}
    assert good.failures == []
    assert len(bad.failures) == len(BAD)
    for failure in bad.failures:
        kind, text, words = BAD[failure.function]
        assert (failure.row, failure.answer, failure.kind) == ("train.jsonl:17", 1, kind)
        assert failure.completion == "b"
        assert failure.text == text
        assert failure.where == line_of(file, words)


def test_what_fails_for_all_answers_has_no_answer(file: Path) -> None:
    with pool_of(file, *ALL_BAD, "reads", on_error="skip") as pool:
        (scored,) = pool.score([group("abc")])
    assert scored.totals == [None] * 3
    failures = {failure.function: failure for failure in scored.failures if failure.answer is None}
    assert {name: (failure.kind, failure.text) for name, failure in failures.items()} == ALL_BAD
    reads = [failure for failure in scored.failures if failure.function == "reads"]
    assert [failure.answer for failure in reads] == [0, 1, 2]
    assert all("EOFError" in failure.text for failure in reads)


NEVER = {
    "sleeps": "time.sleep(0.1)  # sleeps",
    "loops": "pass",
    "in_c": "re.match",
    "sums": "sum(range",
}


def test_functions_that_never_return_end_at_their_deadline(file: Path) -> None:
    with pool_of(file, *NEVER, processes=2, deadline="1 second", on_error="skip") as pool:
        (late,) = pool.score([group("abc")])
        (after,) = pool.score([group("aca")])
    assert late.totals == [None] * 3
    assert after.totals == [4.0] * 3
    assert {failure.function for failure in late.failures} == set(NEVER)
    for failure in late.failures:
        assert 1.0 <= failure.seconds < 3.0
        assert (failure.kind, failure.answer, failure.text) == ("timeout", None, "no reward within 1 second")
        assert failure.where == line_of(file, NEVER[failure.function])


def test_the_calls_for_single_answers_share_a_deadline(file: Path) -> None:
    with pool_of(file, "raises_then_hangs", deadline="1 second", on_error=0.0) as pool:
        (scored,) = pool.score([group("abcdefgh")])
    assert [failure.kind for failure in scored.failures] == ["timeout"] * 8
    assert sum(failure.seconds for failure in scored.failures) < 3.0


def test_an_error_ends_the_scoring_and_names_the_answer(file: Path) -> None:
    with pool_of(file, "raises", "sleeps", processes=2) as pool:
        with pytest.raises(RewardError) as raised:
            pool.score([group("ab"), group("aa", row="train.jsonl:18")])
        assert raised.value.failure.answer == 1
        where = line_of(file, "raise ValueError")
        assert str(raised.value) == f"raises on train.jsonl:17, answer 1: ValueError: b is bad ({where})"
        (after,) = pool.score([group("aa")])
    assert after.totals == [2.0, 2.0]


def test_who_waits_is_told_the_row_and_the_function_and_may_end_it(file: Path) -> None:
    words: list[str] = []

    def note(text: str) -> None:
        words.append(text)
        if text.endswith("for 2 s"):
            raise KeyboardInterrupt

    with pool_of(file, "sleeps") as pool:
        pool._on_wait = note
        with pytest.raises(KeyboardInterrupt):
            pool.score([group("b")])
        pool._on_wait = None
        assert pool.score([group("a")])[0].totals == [1.0]
    assert words == [f"rewards.py:sleeps on train.jsonl:17 for {seconds} s" for seconds in (1, 2)]


def test_a_process_that_ended_between_two_calls_fails_no_function(file: Path) -> None:
    with pool_of(file, "prints", "sleeps") as pool:
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        assert pool.score([group("a")])[0].totals == [2.0]
        assert children() != {pid}


# ---- what is refused before the first call


@pytest.mark.parametrize(
    ("source", "words", "line"),
    [
        ("import nothing_of_this_name\n", "ModuleNotFoundError", 1),
        ("import sys\n\nsys.exit(0)\n", "SystemExit", 3),
        ("def exat(completions): return []\n", "has no function exact", None),
        ("class exact:\n    def __init__(self, model): pass\n", "TypeError", None),
        ("exact = 3\n", "cannot be called", None),
        ("import os\nos._exit(4)\n", "ended with exit code 4 while it loaded", None),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused(
    tmp_path: Path, source: str, words: str, line: int | None
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=words) as refused, pool_of(file, "exact"):
        pass
    assert str(file) in refused.value.problems[0].where
    if line is not None:
        assert refused.value.problems[0].where == f"{file}:{line}"
    assert children() == set()


def test_a_file_that_changed_is_refused_but_may_change_while_it_is_used(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def dies(completions):\n    if 'b' in completions: import os; os._exit(1)\n    return [1.0]\n"
    )
    pool = pool_of(file, "dies", on_error="skip")
    with pool:
        file.write_text("no python")
        assert pool.score([group("b")])[0].totals == [None]
        assert pool.score([group("a")])[0].totals == [1.0]
    with pytest.raises(ConfigError, match="has changed since the plan was made"), pool:
        pass


# ---- what is left


def test_a_pool_leaves_no_process(file: Path, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    with pool_of(file, "starts_a_process", deadline="1 second", on_error="skip") as pool:
        late, ended = pool.score([group("b", path=str(note)), group("a", path=str(tmp_path / "pids2"))])
        assert (late.totals, ended.totals) == ([None], [1.0])
        pids = [int(pid) for pid in note.read_text().split()]
        wait_until(lambda: not any(map(is_running, pids)))
    pids = [int(pid) for pid in (tmp_path / "pids2").read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)))
    assert children() == set()


@pytest.fixture
def rank(file: Path, tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A process with a pool, and the pid of its process of rewards, whose C code never returns."""
    program = tmp_path / "rank.py"
    program.write_text(
        "import sys\n"
        "from unisono.trainer.config.rollout_sections import RewardSection\n"
        "from unisono.trainer.objectives.rewards.calls import RewardCall\n"
        "from unisono.trainer.objectives.rewards.pool import RewardPool\n"
        "entries = [RewardSection(use=sys.argv[1])]\n"
        "with RewardPool(entries, {'rewards.0': sys.argv[2]}, print, processes=1) as pool:\n"
        "    print('pid', pool._workers[0].process.pid, flush=True)\n"
        "    pool.score([RewardCall('a:1', 'q', ['b'], [[1]])])\n"
    )
    words = [sys.executable, str(program), f"{file}:sums", digest(file)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = next(int(line.split()[1]) for line in process.stdout if line.startswith(b"pid"))
    yield process, pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_rank_leaves_no_process(rank: tuple["subprocess.Popen[bytes]", int]) -> None:
    process, pid = rank
    assert is_running(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_running(pid))
