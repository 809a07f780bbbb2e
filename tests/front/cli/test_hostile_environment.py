"""No command ends with a traceback, hangs, or says 1, whatever its streams, its directory and the
files of a run are.

Run: pytest tests/front/cli/test_hostile_environment.py; all commands, also those that start torch: -m
long (about ten minutes)
"""

import contextlib
import fnmatch
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from tests import fuse

ROWS = Path(__file__).parents[3] / "examples" / "data" / "train.jsonl"
UNISONO = [sys.executable, "-m", "unisono"]
HANG_S = 20.0
"""Of a machine that does nothing else. A busy one gets five times as long; a hang lasts for
ever.
"""
LIMIT_S = 5 * HANG_S
ZEROS_BYTES = 1 << 30
IN_MEMORY = Path("/dev/shm")
"""A file system that has no pages for what was never written; others fill the page cache with a
gigabyte of zeros each time that one is read.
"""
DEEP = "[" * 2000 + "]" * 2000

# Runs commands in forks of one process that has imported the front, so that one of them costs 50 ms
# and not half a second.
FORKS = """
import gc, importlib, json, os, pkgutil, signal, sys, time, traceback
from tests.front_server import compile_options
from unisono.front.cli.app import main, parser
from unisono.guard.facts import package_versions
for room in ("front.cli", "jobs.runs", "jobs.launchers", "guard.diagnosis", "guard.rundir", "trainer.checkpoint.store"):
    found = importlib.import_module("unisono." + room)
    for one in pkgutil.iter_modules(getattr(found, "__path__", [])):
        importlib.import_module(f"{found.__name__}.{one.name}")
assert "torch" not in sys.modules
compile_options(parser())
package_versions()
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    if not (pid := os.fork()):
        os.setsid()
        fd = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(fd, 1)
        os.dup2(os.open(job["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) if job["err"] else fd, 2)
        for number in job["full"]:
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        os.closerange(3, 64)
        for number in job["closed"]:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)  # as the interpreter does when it starts
        if job["gone"]:
            os.mkdir(job["gone"])
            os.chdir(job["gone"])
            os.rmdir(job["gone"])
        if job["bare"]:
            for name in {*os.environ} - {"PATH"}:
                del os.environ[name]
        sys.argv = ["unisono", *job["words"]]
        code = 1
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        try:  # as the interpreter does when it ends
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120
        finally:
            os._exit(code)
    limit = time.monotonic() + job["limit_s"]
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > limit:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    print(json.dumps(os.waitstatus_to_exitcode(ended[1])), flush=True)
"""


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def nothing(path: Path) -> None:
    path.touch()


def deep_json(path: Path) -> None:
    path.write_text(DEEP)


def zeros(path: Path) -> None:
    path.touch()
    os.truncate(path, ZEROS_BYTES)


KINDS: tuple[Callable[[Path], None], ...] = (a_fifo, a_directory, nothing, deep_json, zeros)
of_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("surroundings")
    config = {
        "model": "builtin:tiny", "data": {"train": str(ROWS), "max_length": 64}, "batch": {"global": 4}, "duration": "4 steps",
        "checkpoint": {"every": "2 steps", "keep": 2}, "output_dir": str(folder / "run"),
    }  # fmt: skip
    (folder / "train.yaml").write_text(yaml.safe_dump(config))
    ended = subprocess.run(
        [*UNISONO, "train", str(folder / "train.yaml")], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


class Forks(Protocol):
    """Runs a command in a fork and gives its exit code.

    Its output goes to `out`, of stderr to `err` if that is given.

    Streams by number: closed, full. `gone` is a directory that it is in, and that is gone then; if
    it is `bare`, it has PATH and no other variable.
    """

    def __call__(self, words: list[
        str
    ], out: Path, err: Path | None = None, *, closed: Sequence[int] = (), full: Sequence[
        int
    ] = (), limit_s: float = LIMIT_S, gone: (
        Path | None
    ) = None, bare: bool = False,
    ) -> int: ...  # fmt: skip


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sent, came = process.stdin, process.stdout

        def give(
            words: list[str], out: Path, err: Path | None = None, *, closed: Sequence[int] = (), full: Sequence[int] = (),
            limit_s: float = LIMIT_S, gone: Path | None = None, bare: bool = False,
        ) -> int:  # fmt: skip
            job = {
                "words": words,
                "out": str(out),
                "err": err and str(err),
                "closed": closed,
                "full": full,
                "bare": bare,
            }
            job["gone"] = gone and str(gone)
            sent.write(json.dumps(job | {"limit_s": limit_s}) + "\n")
            sent.flush()
            return int(json.loads(came.readline()))

        yield give
        sent.close()


def files_of(run: Path) -> list[str]:
    """Every file of a run; of its checkpoints, those of the newest."""
    newest = max((run / "checkpoints").glob("step-*")).name
    found = [str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.is_file()]
    kept = [name for name in found if not name.startswith("checkpoints/step-") or newest in name]
    return [*kept, "run.lock", "verdict.json", "checkpoints/verified.json"]


@pytest.fixture
def copies(kind: Callable[[Path], None], tmp_path: Path) -> Iterator[Path]:
    """Where a test copies the run."""
    if kind is not zeros or not os.access(IN_MEMORY, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=IN_MEMORY, prefix="unisono-tests-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def copy_with(run: Path, name: str, kind: Callable[[Path], None], folder: Path) -> Iterator[Path]:
    """A copy of the run in which one file is something else; removed again, for a test makes
    hundreds.
    """
    copy = folder / "copy"
    shutil.copytree(run, copy)
    (copy / name).unlink(missing_ok=True)
    kind(copy / name)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def reading(copy: Path) -> list[list[str]]:
    """Commands of the front that read a run."""
    plan = [str(copy / "config.yaml"), f"output_dir={copy}"]
    return [
        ["checkpoint", "ls", str(copy)], ["checkpoint", "verify", str(copy), "--json"], ["logs", str(copy)],
        ["diagnose", str(copy), "--timeline"], ["train", *plan, "duration=6 steps", "--dry-run", "--resume"],
        ["checkpoint", "prune", str(copy), "--keep", "1"],
    ]  # fmt: skip


def faults_of(words: list[str], code: int, text: str) -> str:
    """What is wrong with how a command ended; empty where nothing is."""
    if code < 0:
        return f"{words}: ended by signal {-code} (9: it hung)\n{text[-2000:]}"
    if code == 1 or "Traceback (most recent call last)" in text or "bug in unisono" in text:
        return f"{words}: exit {code}\n{text[-2000:]}"
    return ""


@pytest.mark.slow
@of_kinds
def test_front_commands_bear_any_file_of_a_run_being_something_else(
    kind: Callable[[Path], None], run: Path, copies: Path, tmp_path: Path, forks: Forks
) -> None:
    wrong = []
    for name in files_of(run):
        with copy_with(run, name, kind, copies) as copy:
            for words in reading(copy):
                if words[0] == "train" and name.startswith(
                    "adapter/"
                ):  # the dearest of them does not look there
                    continue
                code = forks(words, tmp_path / "out")
                if fault := faults_of(words, code, (tmp_path / "out").read_text(errors="replace")[-100_000:]):
                    wrong.append(f"{name}: {fault}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n\n".join(wrong)


def starting_torch(copy: Path) -> list[tuple[list[str], str]]:
    """Commands that read a run and start torch; of which files it is worth to try them."""
    more = [str(copy / "config.yaml"), f"output_dir={copy}", "duration=6 steps", "--resume"]
    final = "adapter/*"
    return [
        (["generate", str(copy), "hello", "--max-tokens", "4"], "[!clem]*"), (["train", *more], "*"), (["export", str(copy), f"{copy}.out"], final),
        (["checkpoint", "export", str(copy), f"{copy}.out"], "*step-*"), (["generate", str(copy), "hello", "--step", "4", "--max-tokens", "4"], "*step-*"),
        (["eval", str(copy), "--data", str(ROWS), "--limit", "2"], final), (["chat", str(copy)], final), (["data", "preview", str(copy / "config.yaml")], "[!ace]*"),
    ]  # fmt: skip


@pytest.mark.long
@of_kinds
@pytest.mark.parametrize("number", range(8))
def test_commands_that_start_torch_bear_any_file_being_something_else(
    number: int, kind: Callable[[Path], None], run: Path, tmp_path: Path, forks: Forks
) -> None:
    out, wrong = tmp_path / "out", []
    for name in files_of(run):
        with copy_with(run, name, kind, tmp_path) as copy:
            words, files = starting_torch(copy)[number]
            if fnmatch.fnmatch(name, files):
                shutil.rmtree(f"{copy}.out", ignore_errors=True)
                code = forks(words, out, limit_s=4 * LIMIT_S)
                if fault := faults_of(words, code, out.read_text(errors="replace")[-100_000:]):
                    wrong.append(f"{name}: {fault}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n\n".join(wrong)


FRONT = (
    ["--help"], ["--version"], ["train", "--help"], ["checkpoint", "ls", "RUN"], ["checkpoint", "verify", "RUN"], ["logs", "RUN"],
    ["diagnose", "RUN"], ["explain", "nan_loss"], ["init"], ["train", "RUN/config.yaml"],
)  # fmt: skip
STREAMS: dict[str, tuple[str, dict[str, list[int]]]] = {
    "stdout closed": (">&-", {"closed": [1]}), "stderr closed": ("2>&-", {"closed": [2]}),
    "all closed": ("<&- >&- 2>&-", {"closed": [0, 1, 2]}), "stdout full": (">/dev/full", {"full": [1]}),
    "both full": (">/dev/full 2>&1", {"full": [1, 2]}),
}  # fmt: skip
"""What a shell writes for it, and how a fork gets it."""


def start(words: list[str], redirect: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    """A command as a shell starts it."""
    command = f"exec {shlex.join([*UNISONO, *words])} {redirect}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=LIMIT_S, **how
    )


def fault_in(words: list[str], ended: subprocess.CompletedProcess[str]) -> str:
    return faults_of(words, ended.returncode, ended.stdout + ended.stderr)


def of_run(words: Iterable[str], run: Path) -> list[str]:
    return [word.replace("RUN", str(run)) for word in words]


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_commands_of_the_front_bear_streams_that_are_closed_or_full(
    name: str, run: Path, forks: Forks, tmp_path: Path
) -> None:
    """A disk that is full under the results is said in one line, and is 6; where all is well
    otherwise.

    An interpreter of its own has the first.
    """
    redirect, streams = STREAMS[name]
    is_full = ">/dev/full" in redirect
    out, err = tmp_path / "out", tmp_path / "err"
    for number, words in enumerate(of_run(words, run) for words in FRONT):
        if number:
            code = forks(words, out, err, closed=streams.get("closed", ()), full=streams.get("full", ()))
            ended = subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())
        else:
            ended = start(words, redirect)
        assert not (fault := fault_in(words, ended)), fault
        is_refused = words[-1].endswith("config.yaml")  # the run is finished; that is said on stderr
        assert ended.returncode == (2 if is_refused else 6 if is_full else 0), (words, ended)
        if redirect == ">/dev/full" and not is_refused:
            assert "stdout cannot be written: No space left on device" in ended.stderr.splitlines()[-1], ended


@pytest.mark.slow
def test_commands_of_the_front_bear_a_directory_that_is_gone_and_no_home(
    run: Path, forks: Forks, tmp_path: Path
) -> None:
    """Two of them, of which one needs its directory, have an interpreter of their own."""
    gone, out = tmp_path / "gone", tmp_path / "out"

    def forked(words: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        code = forks(words, out, **how)
        return subprocess.CompletedProcess(words, code, "", out.read_text())

    for number, words in enumerate(of_run(words, run) for words in FRONT):
        executed = number in (0, 3)
        if executed:
            gone.mkdir()
            place = f"cd {gone} && rmdir {gone} && exec"
            ended = subprocess.run(
                ["bash", "-c", f"{place} {shlex.join([*UNISONO, *words])}"], capture_output=True, text=True, check=False, timeout=LIMIT_S
            )  # fmt: skip
        else:
            ended = forked(words, gone=gone)
        needs_none = "--help" in words or "--version" in words
        assert ended.returncode == (0 if needs_none else 2), (words, ended)
        assert not (fault := fault_in(words, ended)), fault
        assert needs_none or "the working directory cannot be used" in ended.stderr
        ended = start(words, env={"PATH": os.environ["PATH"]}) if executed else forked(words, bare=True)
        assert not (fault := fault_in(words, ended)), fault


@pytest.mark.slow
def test_run_started_with_closed_streams_trains_and_writes_its_logs(run: Path, tmp_path: Path) -> None:
    """As daemons start it.

    The numbers of the streams must not go to files of the run, into which ranks would then write.
    """
    out = tmp_path / "run"
    ended = start(
        ["train", str(run.parent / "train.yaml"), f"output_dir={out}", "duration=2 steps"], "<&- >&- 2>&-"
    )
    assert ended.returncode == 0, ended
    assert json.loads((out / "result.json").read_text())["outcome"] == "completed"
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert list((out / "logs").glob("*-rank-00000.log"))
    for path in out.rglob("*.json*"):  # nothing has got into a file that is not its own
        for text in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            json.loads(text)


BAD_PATHS = {
    "a name of 300 characters": "n" * 300, "one below what is not there": "new/" + "n" * 300,
    "a path of 5,000 characters": "/".join(["d" * 200] * 25), "below a file": "file/x", "a circle of links": "circle",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", BAD_PATHS.values(), ids=BAD_PATHS)
def test_a_path_that_cannot_be_used_is_refused_with_2_wherever_it_is_given(
    path: str, run: Path, tmp_path: Path, forks: Forks
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    path = str(tmp_path / path)
    config, to = str(run.parent / "train.yaml"), f"output_dir={tmp_path / 'out'}"
    several = ["--nodes", "2", "--node-rank", "0", "--head", "127.0.0.1:29999", "--token-file", path]
    given = (
        ["train", path], ["train", config, f"output_dir={path}"], ["train", config, f"output_dir={path}", "--fresh"],
        ["train", config, to, *several], ["run", *several, "--", "true"], ["run", "--output-dir", path, "--", "true"],
        ["doctor", path], ["checkpoint", "ls", path], ["checkpoint", "verify", path], ["checkpoint", "prune", path], ["logs", path],
        ["diagnose", path], ["init", "--out", path],
    )  # fmt: skip
    for words in given:
        code = forks(words, tmp_path / "said")
        text = (tmp_path / "said").read_text(errors="replace")
        assert not (fault := faults_of(words, code, text)), fault
        assert code == 2, (words, text)
        assert path[-60:] in text.replace("\n", ""), (words, text)


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A directory that this user may not enter, root included."""
    folder = tmp_path / "forbidden"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0)
        yield folder
        folder.chmod(0o700)
        return
    if reason := fuse.why_unavailable():
        pytest.skip(reason)
    try:
        device = fuse.mount(folder, user=65534)
    except OSError as error:
        pytest.skip(f"needs mounts: {error}")
    yield folder
    fuse.unmount(folder)
    os.close(device)


def test_a_path_that_this_user_may_not_use_is_refused_with_2(
    forbidden: Path, run: Path, tmp_path: Path, forks: Forks
) -> None:
    config, to = str(run.parent / "train.yaml"), f"output_dir={tmp_path / 'out'}"
    for words in (
        ["train", config, f"output_dir={forbidden / 'out'}"], ["train", config, f"output_dir={forbidden / 'out'}", "--dry-run"],
        ["train", config, to, f"data.train={forbidden / 'rows.jsonl'}"], ["checkpoint", "ls", str(forbidden / "run")],
        ["logs", str(forbidden / "run")], ["diagnose", str(forbidden / "log")], ["run", "--output-dir", str(forbidden / "out"), "--", "true"],
    ):  # fmt: skip
        code = forks(words, tmp_path / "said")
        text = (tmp_path / "said").read_text(errors="replace")
        assert (code, "Permission denied" in text, str(forbidden) in text) == (2, True, True), (words, text)


@pytest.mark.slow
def test_diagnose_reads_pipes_with_a_writer_and_refuses_what_is_not_a_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "pipe", "a named pipe without a writer"),
        (Path("/dev/zero"), "it is a device"),
    ):
        ended = start(["diagnose", str(path)])
        assert ended.returncode == 2, ended
        assert why in ended.stderr
    for redirect in ("<(sleep 0.2; echo CUDA out of memory)", "/dev/stdin < <(echo CUDA out of memory)"):
        ended = start(["diagnose", "--json"], redirect)
        assert json.loads(ended.stdout)["cause"] == "cuda_oom", ended
