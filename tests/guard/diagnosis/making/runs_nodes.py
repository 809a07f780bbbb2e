"""Cases from two or three nodes: network namespaces on one machine, torchrun on each."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import PROGRAMS, Want, case, neutral, run, squeeze
from tests.guard.diagnosis.making.spaces import NET, nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SOURCE = "made: torchrun on network namespaces as nodes, torch 2.13 CPU (gloo); paths and hosts rewritten"


def together(
    base: Path,
    name: str,
    nproc: Sequence[int],
    loopback: Sequence[int] = (),
    absent: Sequence[int] = (),
    backend: str = "static",
    **env: str,
) -> list[str]:
    """What torchrun printed on each node."""
    printed = [""] * len(nproc)
    with nodes(len(nproc), loopback) as fronts:

        def one(i: int) -> None:
            join = (
                ["--master-addr", f"{NET}.1", "--master-port", "29500"]
                if backend == "static"
                else [
                    "--rdzv-backend",
                    "c10d",
                    "--rdzv-endpoint",
                    f"{NET}.1:29400",
                    "--rdzv-id",
                    "7",
                    "--rdzv-conf",
                    "join_timeout=12,read_timeout=8",
                ]
            )
            argv = [
                *fronts[i],
                "torchrun",
                "--nnodes",
                str(len(nproc)),
                "--node-rank",
                str(i),
                "--nproc-per-node",
                str(nproc[i]),
                *join,
                str(PROGRAMS / "pretrain.py"),
            ]
            printed[i] = neutral(
                run(argv, {"LIMIT": "12"} | env, base / name / str(i), 75),
                4,
                base / name / str(i),
                "train.py",
            )

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(nproc)) if i not in absent]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    return [t.replace(f"{NET}.", "10.20.0.1") for t in printed]


def files(
    base: Path, name: str, want: Want, nproc: Sequence[int], *, mixed: bool = False, **more: object
) -> dict[str, object]:
    """A file per node, or both in one as srun -l writes them."""
    printed = together(base, name, nproc, **more)  # type: ignore[arg-type]
    if mixed:
        rows = [[f"{i}: {line}" for line in t.splitlines()] for i, t in enumerate(printed)]
        text = (
            "\n".join(line for k in range(max(map(len, rows))) for part in rows for line in part[k : k + 1])
            + "\n"
        )
        return case(name, want, {"slurm-3301.out": squeeze(text, 19_000)}, SOURCE)
    return case(name, want, {f"node{i}.log": squeeze(t, 9_500) for i, t in enumerate(printed) if t}, SOURCE)


def cases(base: Path) -> Iterator[tuple[str, object]]:
    """Names and how to make them."""
    died = "rank_died_first"
    yield (
        "n-key",
        lambda: files(
            base,
            "n-key",
            Want("user_code_error", 3, evidence="KeyError: 'labels'"),
            (2, 2),
            FAULT="key",
            FAULT_RANK="3",
        ),
    )
    yield (
        "n-kill",
        lambda: files(
            base,
            "n-kill",
            Want(died, 2, evidence="SIGKILL", also=("host_oom_killed",)),
            (2, 2),
            backend="c10d",
            FAULT="kill",
            FAULT_RANK="2",
            STYLE="rank",
        ),
    )
    yield (
        "n-srun",
        lambda: files(
            base,
            "n-srun",
            Want("user_code_error", 1, evidence="JSONDecodeError"),
            (1, 1),
            mixed=True,
            FAULT="json",
            FAULT_RANK="1",
            STYLE="rank",
        ),
    )
    yield "n-asym-ok", lambda: files(base, "n-asym-ok", Want("healthy"), (2, 1), backend="c10d", STYLE="rank")
    yield (
        "n-loop-both",
        lambda: files(
            base,
            "n-loop-both",
            Want("hostname_loopback", evidence="127.0.1.1"),
            (1, 1),
            loopback=(0, 1),
            mixed=True,
        ),
    )
    yield (
        "n-absent",
        lambda: files(
            base,
            "n-absent",
            Want("rdzv_timeout", evidence="RendezvousTimeoutError"),
            (1, 1, 1),
            absent=(2,),
            backend="c10d",
        ),
    )
    yield (
        "n-stall",
        lambda: files(
            base,
            "n-stall",
            Want("rank_stalled", 1, evidence="Timed out waiting", also=("undetermined",)),
            (1, 1),
            FAULT="stall",
            FAULT_RANK="1",
            STALL="24",
            LIMIT="8",
        ),
    )
    yield (
        "n-segv3",
        lambda: files(
            base,
            "n-segv3",
            Want(died, 1, evidence="SIGSEGV"),
            (1, 1, 1),
            FAULT="segv",
            FAULT_RANK="1",
            STYLE="ansi",
        ),
    )
