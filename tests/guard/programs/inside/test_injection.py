"""How a program's Pythons come to be guarded, and which cannot be.

Run: pytest tests/guard/programs/inside/test_injection.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guard.programs.inside.conftest import PROGRAMS
from tests.guard.programs.inside.front import TORCHRUN, Played
from unisono.guard.integrations.border import VARIABLE, Guard
from unisono.guard.integrations.inside import PATH, injected, why_unguardable

Start = Callable[..., Played]
_TRIES = 12


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a guarded program; its front is this process."""
    return injected(os.environ, Guard(tmp_path / "guard", "one", os.getpid()).write())


def python(environment: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_existing_sitecustomize_runs_after_ours_and_is_the_one_seen(
    environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\nmine = [type(f).__module__ for f in sys.meta_path]\nsaid = 'theirs'\n"
    )
    environment = injected({**environment, "PYTHONPATH": str(folder)}, Path(environment[VARIABLE]))
    show = (
        "import sys, sitecustomize as s; print(s.said, 'sitecustomize' in s.mine, s.__file__, sys.path[1:3])"
    )
    done = python(environment, "-c", show)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:3] == ["theirs", "True", str(folder / "sitecustomize.py")]
    assert str([str(PATH), str(folder)]) in done.stdout, "the paths are as they were"


def test_error_in_an_existing_sitecustomize_is_reported_as_without_us(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs is wrong')\n")
    ours = {**environment, "PYTHONPATH": environment["PYTHONPATH"] + os.pathsep + str(tmp_path)}
    alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with_us, without = (python(env, "-c", "print('runs')") for env in (ours, alone))
    assert with_us.stdout == without.stdout == "runs\n"
    assert with_us.stderr == without.stderr
    assert "theirs is wrong" in with_us.stderr


def test_a_python_that_loads_no_torch_pays_less_than_for_an_argparse(environment: dict[str, str]) -> None:
    """The cheapest of some starts, beside the import of a module of the standard library: what else
    the machine does, and how fast it is, is not what the guard costs.
    """
    timed = (
        "import sys, time; sys.path.insert(1, sys.argv[1]); t = time.process_time(); import {};"
        " print(time.process_time() - t)"
    )
    guard, other = (
        min(
            float(python(environment, "-S", "-c", timed.format(module), str(PATH)).stdout)
            for _ in range(_TRIES)
        )
        for module in ("sitecustomize", "argparse")
    )
    assert guard < other, f"{guard * 1000:.1f} ms, argparse {other * 1000:.1f} ms"
    show = "import sys; print(*sorted(sys.modules))"
    loaded, alone = (set(python(env, "-c", show).stdout.split()) for env in (environment, {**os.environ}))
    assert not {name for name in loaded - alone if name.startswith(("unisono", "json", "typing", "torch"))}


def test_a_program_whose_front_is_gone_runs_as_without(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    file = Guard(tmp_path / "guard", "one", gone.pid).write()
    done = python(
        injected(os.environ, file),
        "-c",
        "import torch.distributed as d; print(d.all_reduce.__code__.co_filename)",
    )
    assert "/unisono/guard/integrations/" not in done.stdout, (
        done.stderr
    )  # the clone may be called unisono, too
    assert done.returncode == 0
    assert not list(file.parent.glob("rank-*"))


def test_what_cannot_be_hooked_is_reported_and_the_program_runs(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """As with a torch of which we do not know enough: here one in which nothing is where it should
    be.
    """
    package = tmp_path / "strange" / "torch"
    for folder in (package, package / "distributed"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    (package / "distributed" / "distributed_c10d.py").write_text("all_reduce = None\n")
    environment |= {"PYTHONPATH": environment["PYTHONPATH"] + os.pathsep + str(package.parent)}
    done = python(environment, "-c", "import torch.distributed.distributed_c10d; print('runs')")
    assert (done.stdout, done.returncode) == ("runs\n", 0), done.stderr
    (events,) = Path(environment[VARIABLE]).parent.glob("events-*.jsonl")
    reported = json.loads(events.read_text().splitlines()[-1])
    assert (reported["kind"], "is not guarded" in reported["text"]) == ("unguarded", True)


@pytest.mark.parametrize(
    ("words", "deaf"),
    [
        ("python -I train.py", True), ("python3.11 -uE train.py", True), ("python -S -m train", True), ("python -Bs train.py -I", False),
        ("python -m train -E", False), ("python -c pass -S", False), ("python -W error train.py", False), ("torchrun -I", False),
        ("python -X dev -I x.py", True),
    ],
)  # fmt: skip
def test_a_python_that_reads_no_pythonpath_is_known_by_its_options(words: str, *, deaf: bool) -> None:
    assert (why_unguardable(words.split()) is not None) is deaf
    if words.startswith("python -I"):
        done = python(
            injected(os.environ, Path("/nowhere")),
            "-I",
            "-c",
            "import sys; print([type(f).__name__ for f in sys.meta_path])",
        )
        assert "_Finder" not in done.stdout


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*TORCHRUN, "--nproc-per-node", "2", "--standalone"), id="torchrun", marks=pytest.mark.long),
        pytest.param(
            (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
            id="accelerate", marks=pytest.mark.long,
        ),
        pytest.param((sys.executable, PROGRAMS / "launcher.py", "2"), id="a launcher of its own"),
    ],
)  # fmt: skip
def test_ranks_of_any_launcher_register_and_the_launcher_does_not(
    guarded: Start, command: tuple[object, ...]
) -> None:
    played = guarded(*command, PROGRAMS / "collect.py", forked=False)
    code = played.until_ended()
    assert code == 0, played.printed
    assert sorted(played.ranks.known) == [0, 1]
    assert {one.world_size for one in played.ranks.known.values()} == {2}
    assert all(one.stacks_signal > 0 for one in played.ranks.known.values())
    assert played.process.pid not in {one.pid for one in played.ranks.known.values()}
