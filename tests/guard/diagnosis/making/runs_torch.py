"""Cases from torchrun (and plain python) on gloo: one machine, one or several files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import PROGRAMS, Files, Want, case, neutral, run, squeeze

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = "made: torchrun, torch 2.13 CPU (gloo); paths and hosts rewritten"
PEER = "Connection closed by peer"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the small DDP program."""

    name: str
    want: Want
    fault: str = ""
    world: int = 4
    rank: int = 1
    step: int = 6
    style: str = "log"
    env: tuple[tuple[str, str], ...] = ()
    args: tuple[str, ...] = ()
    files: str = "one"  # one | ranks (a file per rank) | ranks+main (and the launcher's) | logdir names
    program: str = "pretrain.py"
    limit_s: float = 60


def want(cause: str, rank: int | None = None, evidence: str = "", **more: object) -> Want:
    return Want(cause, rank, evidence=evidence, **more)  # type: ignore[arg-type]


USER = "user_code_error"
DIED = "rank_died_first"
RUNS = [
    Run("t-key8", want(USER, 5, "KeyError: 'labels'"), "key", 8, 5, style="rank", program="sft.py"),
    Run("t-key-bar", want(USER, 2, "KeyError: 'labels'"), "key", 3, 2, style="bar"),
    Run("t-json-ansi", want(USER, 3, "JSONDecodeError"), "json", 4, 3, style="ansi", program="finetune.py"),
    Run("t-json-ranks", want(USER, 0, "JSONDecodeError"), "json", 4, 0, files="ranks"),
    Run("t-width", want(USER, 1, "stack expects each tensor to be equal size"), "width", 3, 1, style="json"),
    Run("t-label", want(USER, 4, "out of bounds"), "label", 6, 4, style="rank"),
    Run("t-vocab", want("tokenizer_mismatch", 1, "index out of range in self", also=(USER,)), "vocab", 3, 1),
    Run(
        "t-worker-exc",
        want(USER, 2, "KeyError: 'labels'"),
        "key",
        4,
        2,
        env=(("WORKERS", "1"),),
        style="rank",
    ),
    Run("t-chain", want(USER, 1, "cannot decode shard-00017.bin"), "chain", 4, 1, files="ranks"),
    Run("t-assert", want(USER, 6, "negative token count"), "assert", 8, 6, files="logdir", style="ansi"),
    Run(
        "t-kill4",
        want(DIED, 3, also=("host_oom_killed",), evidence="Signal 9 (SIGKILL) received by PID"),
        "kill",
        4,
        3,
        style="rank",
    ),
    Run("t-kill-ranks", want(DIED, 2, also=("host_oom_killed",)), "kill", 4, 2, files="ranks+main"),
    Run("t-segv", want(DIED, 0, "SIGSEGV"), "segv", 3, 0, style="bar"),
    Run(
        "t-segv-fh",
        want(DIED, 2, "Segmentation fault"),
        "segv",
        4,
        2,
        env=(("PYTHONFAULTHANDLER", "1"),),
        style="rank",
    ),
    Run("t-segv-ranks", want(DIED, 1), "segv", 3, 1, files="ranks+main", style="ansi"),
    Run("t-abort", want(DIED, 1, "SIGABRT"), "abort", 4, 1, style="json"),
    Run("t-bus", want(DIED, 2, "SIGBUS", also=("shm_too_small",)), "bus", 3, 2),
    Run("t-exit0", want(DIED, 2, also=("unequal_steps",)), "exit0", 4, 2, files="ranks+main"),
    Run("t-exit3", want(DIED, 1, "exitcode  : 3"), "exit3", 3, 1, style="rank"),
    Run(
        "t-stall",
        want("rank_stalled", 2, "Timed out waiting"),
        "stall",
        4,
        2,
        files="ranks",
        env=(("LIMIT", "6"), ("STALL", "14")),
    ),
    Run(
        "t-stall-bar",
        want("rank_stalled", 1, "Timed out waiting"),
        "tokenize",
        3,
        1,
        files="ranks",
        env=(("LIMIT", "6"),),
        style="bar",
    ),
    Run(
        "t-stall-get",
        want("rank_stalled", 3, "retrying in 2 s"),
        "download",
        4,
        3,
        files="logdir",
        env=(("LIMIT", "7"),),
    ),
    Run(
        "t-stop",
        want("rank_stalled", 0, "Timed out waiting"),
        "stop",
        3,
        0,
        files="ranks",
        env=(("LIMIT", "6"),),
        limit_s=22,
    ),
    Run(
        "t-late",
        want("rank_stalled", 1, also=("rdzv_timeout",)),
        "late",
        3,
        1,
        files="ranks",
        env=(("LIMIT", "8"),),
        limit_s=26,
    ),
    Run(
        "t-unequal",
        want("unequal_steps", 2, "20 steps", also=("collective_mismatch",)),
        "unequal",
        4,
        2,
        style="rank",
        env=(("LIMIT", "6"),),
    ),
    Run(
        "t-unequal-ranks",
        want("unequal_steps", 0, "20 steps", also=("collective_mismatch",)),
        "unequal",
        3,
        0,
        files="ranks",
        env=(("LIMIT", "6"),),
    ),
    Run(
        "t-size",
        want("collective_mismatch", None, also=("unequal_steps",)),
        "size",
        4,
        3,
        env=(("LIMIT", "6"),),
    ),
    Run(
        "t-unused",
        want("unused_parameters_ddp", None, "Expected to have finished reduction in the prior iteration"),
        "unused",
        4,
        style="rank",
    ),
    Run(
        "t-unused-ranks",
        want("unused_parameters_ddp", None, "Expected to have finished reduction in the prior iteration"),
        "unused",
        3,
        files="ranks",
    ),
    Run("t-twice", want("unused_parameters_ddp", None, "ready", also=(USER,)), "twice", 3),
    Run(
        "t-destroy2",
        want("process_group_destroyed_twice", None, "Process group cannot be None"),
        "destroy_twice",
        4,
        style="rank",
    ),
    Run(
        "t-destroy2-bar",
        want("process_group_destroyed_twice", None, "Process group cannot be None"),
        "destroy_twice",
        2,
        style="bar",
    ),
    Run(
        "t-terminate",
        want("teardown_crash", None, "terminate called without an active exception"),
        "terminate",
        4,
        style="rank",
    ),
    Run(
        "t-terminate-ranks",
        want("teardown_crash", None, "terminate called without an active exception"),
        "terminate",
        3,
        files="ranks+main",
    ),
    Run("t-nccl", want("no_cuda_build", None, "NCCL"), "nccl", 3, style="rank"),
    Run(
        "t-device", want("no_cuda_build", None, "_cuda_setDevice", also=("missing_dependency",)), "device", 2
    ),
    Run(
        "t-import",
        want("missing_dependency", None, "No module named 'flash_linear_attention'"),
        "import",
        4,
        rank=-1,
        style="rank",
    ),
    Run(
        "t-import-one",
        want("missing_dependency", 2, "No module named 'flash_linear_attention'"),
        "",
        4,
        2,
        files="ranks",
        env=(("FAULT_IMPORT", "1"),),
    ),
    Run("t-ok", want("healthy"), "", 4, style="rank"),
    Run("t-ok-bar", want("healthy"), "", 3, style="bar"),
    Run("t-ok-ansi", want("healthy"), "no_barrier", 4, style="ansi", files="ranks"),
    Run("t-ok-json", want("healthy"), "", 8, style="json"),
    Run("t-restart", want("healthy"), "kill", 3, 1, env=(("ONCE", "1"),), args=("--max-restarts", "2")),
    Run(
        "t-restart-exc",
        want("healthy"),
        "key",
        4,
        2,
        style="rank",
        env=(("ONCE", "1"),),
        args=("--max-restarts", "1"),
    ),
    Run("t-restart-spent", want(USER, 1, "KeyError: 'labels'"), "key", 3, 1, args=("--max-restarts", "1")),
    Run(
        "t-restart-kill",
        want(DIED, 2, "SIGKILL", also=("host_oom_killed",)),
        "kill",
        3,
        2,
        args=("--max-restarts", "1"),
        style="rank",
    ),
]


def launch(r: Run, work: Path, port: int = 0) -> tuple[list[str], dict[str, str]]:
    """The command and environment of a run."""
    env = {"FAULT": r.fault, "FAULT_RANK": str(r.rank), "FAULT_STEP": str(r.step), "STYLE": r.style} | dict(
        r.env
    )
    if r.fault == "import":
        env["FAULT"] = "import"
    if env.pop("FAULT_IMPORT", ""):
        env["FAULT"] = "import_here"
    logs = ["--log-dir", str(work / "logs"), "--redirects", "3"] if r.files != "one" else []
    join = ["--master-port", str(port)] if port else ["--standalone"]
    return [
        "torchrun",
        *join,
        "--nproc-per-node",
        str(r.world),
        *logs,
        *r.args,
        str(PROGRAMS / "pretrain.py"),
    ], env


def gathered(r: Run, work: Path, printed: str) -> Files:
    """The files that a person would have."""
    if r.files == "one":
        return {"train.log": printed}
    files: Files = {}
    found = sorted(work.glob("logs/*/attempt_0/*/stderr.log"), key=lambda p: int(p.parent.name))
    for err in found:
        rank = int(err.parent.name)
        text = (err.parent / "stdout.log").read_text(errors="replace") + err.read_text(errors="replace")
        name = f"rank_{rank:02d}.txt" if r.files == "logdir" else f"rank{rank}.log"
        files[name] = text
    if r.files == "ranks+main":
        files["main.log"] = printed
    return files


def make(r: Run, base: Path, place: int) -> dict[str, object]:
    """Run it and keep what it said."""
    work = base / r.name
    argv, env = launch(r, work)
    printed = run(argv, env, work, r.limit_s)
    files = gathered(r, work, printed)
    most = 19_000 // max(1, len(files))
    files = {n: squeeze(neutral(t, place, work, r.program), most) for n, t in files.items()}
    return case(r.name, r.want, files, SOURCE)


def cases(base: Path) -> Iterator[tuple[str, object]]:
    """Names and how to make them."""
    for place, r in enumerate(RUNS):
        yield r.name, (lambda r=r, place=place: make(r, base, place))
