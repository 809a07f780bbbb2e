"""Cases from single machines: joining, files, limits, the hub, signals, several runs in a file, cut
files.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from tests.guard.diagnosis.making.record import PROGRAMS, Want, case, neutral, run, squeeze, when

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SOURCE = "made: torch 2.13 CPU (gloo); paths and hosts rewritten"
SCRIPT = str(PROGRAMS / "pretrain.py")


def keep(
    name: str, want: Want, files: dict[str, str], work: Path, place: int, program: str = "train.py"
) -> dict[str, object]:
    return case(
        name,
        want,
        {n: squeeze(neutral(t, place, work, program), 19_000 // len(files)) for n, t in files.items()},
        SOURCE,
    )


def simple(
    work: Path,
    *args: str,
    limit_s: float = 60,
    world: int = 2,
    during: Callable[[subprocess.Popen[bytes]], None] | None = None,
    **env: str,
) -> str:
    """torchrun with the small program."""
    return run(
        ["torchrun", "--standalone", "--nproc-per-node", str(world), *args, SCRIPT],
        env,
        work,
        limit_s,
        during,
    )


def port(base: Path) -> dict[str, object]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        p = str(held.getsockname()[1])
        text = run(
            ["torchrun", "--nproc-per-node", "3", "--master-addr", "127.0.0.1", "--master-port", p, SCRIPT],
            {},
            base / "port",
        )
    return keep(
        "m-port",
        Want("port_in_use", evidence="EADDRINUSE"),
        {"train.log": text.replace(p, "29501")},
        base / "port",
        0,
    )


def port_env(base: Path) -> dict[str, object]:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        p = str(held.getsockname()[1])
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": p, "RANK": "0", "WORLD_SIZE": "2", "STYLE": "ansi"}
        text = run([sys.executable, SCRIPT], env, base / "portenv")
    return keep(
        "m-port-plain",
        Want("port_in_use", evidence="EADDRINUSE"),
        {"rank0.log": text.replace(p, "6000")},
        base / "portenv",
        1,
    )


def missing(base: Path) -> dict[str, object]:
    text = run(
        [
            "torchrun",
            "--nnodes",
            "2",
            "--node-rank",
            "0",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
            "--rdzv-conf",
            "join_timeout=8",
            SCRIPT,
        ],
        {},
        base / "missing",
    )
    return keep(
        "m-missing-c10d",
        Want("rdzv_timeout", evidence="RendezvousTimeoutError"),
        {"node0.log": text},
        base / "missing",
        2,
    )


def missing_plain(base: Path) -> dict[str, object]:
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877", "RANK": "0", "WORLD_SIZE": "4", "LIMIT": "8"}
    text = run([sys.executable, SCRIPT], env, base / "missing2")
    return keep(
        "m-missing-clients",
        Want("rdzv_timeout", evidence="clients joined"),
        {"rank0.log": text},
        base / "missing2",
        3,
    )


def dns(base: Path) -> dict[str, object]:
    env = {
        "MASTER_ADDR": "head-0.train.svc.invalid",
        "MASTER_PORT": "29500",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LIMIT": "8",
    }
    text = run([sys.executable, SCRIPT], env, base / "dns")
    return keep(
        "m-dns",
        Want("dns_failure", evidence="gai error", also=("rdzv_timeout",)),
        {"worker-1.log": text},
        base / "dns",
        0,
    )


def dns_torchrun(base: Path) -> dict[str, object]:
    text = run(
        [
            "torchrun",
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--nproc-per-node",
            "1",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "gpu-master.cluster.invalid:29400",
            "--rdzv-conf",
            "read_timeout=6",
            SCRIPT,
        ],
        {},
        base / "dns2",
    )
    return keep(
        "m-dns-c10d",
        Want("dns_failure", evidence="gpu-master.cluster.invalid"),
        {"node1.log": text},
        base / "dns2",
        1,
    )


def full(fault: str, base: Path, name: str, evidence: str) -> dict[str, object]:
    work, disk = base / name, base / f"{name}-disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)
    try:
        text = simple(work, world=3, FAULT=fault, TARGET=str(disk), STYLE="rank")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    return keep(
        name,
        Want("disk_full", 0, evidence=evidence),
        {"train.log": text.replace(str(disk), "/mnt/out")},
        work,
        2,
        "sft.py",
    )


def files_limit(base: Path) -> dict[str, object]:
    argv = ["prlimit", "--nofile=64", "torchrun", "--standalone", "--nproc-per-node", "2", SCRIPT]
    text = run(argv, {"WORKERS": "24", "STYLE": "rank"}, base / "ulimit")
    return keep(
        "m-ulimit", Want("ulimit", evidence="Too many open files"), {"train.log": text}, base / "ulimit", 3
    )


def resume(kind: str, base: Path, name: str, want: Want) -> dict[str, object]:
    work = base / name
    work.mkdir(parents=True)
    path = work / "last.pt"
    sizes = {
        "embed.weight": (32, 16),
        "up.weight": (64, 128),
        "up.bias": (64,),
        "adapter.weight": (64, 64),
        "adapter.bias": (64,),
        "head.weight": (4, 64),
        "head.bias": (4,),
    }
    state = {name: torch.zeros(size) for name, size in sizes.items()}
    if kind == "other":
        state["adapter.weight"], state["adapter.bias"] = torch.zeros(32, 64), torch.zeros(32)
    if kind == "missing":
        del state["head.weight"]
    torch.save({"model": state}, path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:9000])
    if kind == "pickle":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9912\n")
    text = simple(work, world=2 if kind != "cut" else 4, RESUME=str(path), STYLE="rank")
    return keep(name, want, {"train.log": text}, work, 4)


def preempt(base: Path, name: str, style: str, sign: int) -> dict[str, object]:
    work = base / name

    def during(child: subprocess.Popen[bytes]) -> None:
        when(work / "stdout", "step 4/" if style != "bar" else "%|")
        os.kill(child.pid, sign)

    text = simple(work, world=3, during=during, STYLE=style, STEPS="600")
    word = "got signal: 15" if sign == signal.SIGTERM else "Signal"
    return keep(name, Want("preempted_sigterm", evidence=word), {"train.log": text}, work, 0, "sft.py")


def two_runs(base: Path, first: str, second: str, name: str, want: Want) -> dict[str, object]:
    work = base / name
    a = simple(work / "a", world=2, FAULT=first, FAULT_RANK="1", STYLE="rank")
    b = simple(work / "b", world=2, FAULT=second, FAULT_RANK="0", STYLE="rank")
    text = neutral(a, 1, work / "a", "train.py") + "+ torchrun --standalone --nproc-per-node 2 train.py\n" + b
    return keep(name, want, {"nohup.out": text}, work / "b", 1)


def spawn(base: Path, name: str, fault: str, want: Want) -> dict[str, object]:
    """Ranks started by hand, a file each."""
    work = base / name
    work.mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        p = str(s.getsockname()[1])
    shell = " ".join(f"(RANK={r} {sys.executable} {SCRIPT} >r{r} 2>&1) &" for r in range(3)) + " wait"
    run(
        ["sh", "-c", shell],
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": p,
            "WORLD_SIZE": "3",
            "FAULT": fault,
            "FAULT_RANK": "2",
            "LIMIT": "8",
            "STALL": "20",
        },
        work,
        45,
    )
    return keep(
        name,
        want,
        {f"host{r}-rank-{r}.log": (work / f"r{r}").read_text(errors="replace") for r in range(3)},
        work,
        2,
    )


def cases(base: Path) -> Iterator[tuple[str, object]]:
    """Names and how to make them."""
    user = "user_code_error"
    yield "m-port", lambda: port(base)
    yield "m-port-plain", lambda: port_env(base)
    yield "m-missing-c10d", lambda: missing(base)
    yield "m-missing-clients", lambda: missing_plain(base)
    yield "m-dns", lambda: dns(base)
    yield "m-dns-c10d", lambda: dns_torchrun(base)
    yield "m-full-save", lambda: full("save_full", base, "m-full-save", "iostream error")
    yield "m-full-write", lambda: full("write_full", base, "m-full-write", "No space left on device")
    yield "m-ulimit", lambda: files_limit(base)
    yield (
        "m-resume-cut",
        lambda: resume(
            "cut",
            base,
            "m-resume-cut",
            Want("corrupt_checkpoint", evidence="torch.load(path)", also=("user_code_error",)),
        ),
    )
    yield (
        "m-resume-lfs",
        lambda: resume(
            "pickle",
            base,
            "m-resume-lfs",
            Want(
                "corrupt_checkpoint",
                evidence="Weights only load failed",
                also=("user_code_error", "version_mismatch"),
            ),
        ),
    )
    yield (
        "m-resume-other",
        lambda: resume(
            "other",
            base,
            "m-resume-other",
            Want("checkpoint_mismatch", evidence="size mismatch for adapter.weight"),
        ),
    )
    yield (
        "m-resume-missing",
        lambda: resume(
            "missing",
            base,
            "m-resume-missing",
            Want("checkpoint_mismatch", evidence="Missing key(s) in state_dict"),
        ),
    )
    yield "m-term", lambda: preempt(base, "m-term", "rank", signal.SIGTERM)
    yield "m-term-bar", lambda: preempt(base, "m-term-bar", "bar", signal.SIGTERM)
    yield (
        "m-two-key-kill",
        lambda: two_runs(
            base, "key", "kill", "m-two-key-kill", Want("rank_died_first", 0, also=("host_oom_killed",))
        ),
    )
    yield "m-two-kill-ok", lambda: two_runs(base, "kill", "", "m-two-kill-ok", Want("healthy"))
    yield "m-hand-key", lambda: spawn(base, "m-hand-key", "key", Want(user, 2, evidence="KeyError: 'labels'"))
    yield (
        "m-hand-kill",
        lambda: spawn(base, "m-hand-kill", "kill", Want("rank_died_first", 2, also=("host_oom_killed",))),
    )
    yield (
        "m-hand-stop",
        lambda: spawn(base, "m-hand-stop", "stop", Want("rank_stalled", 2, evidence="Timed out waiting")),
    )
    yield (
        "m-hand-exit",
        lambda: spawn(base, "m-hand-exit", "exit0", Want("rank_died_first", 2, also=("unequal_steps",))),
    )
