"""Options for nodes, ranks and launchers that several commands share, and a check of the files that commands write."""

import os
from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. optim.lr=1e-4", show_default=False)
]
Nproc = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, metavar="N", help="Ranks on this node; default: one per device.", show_default=False
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Devices, one per rank: e.g. 0,1, or UUIDs.", show_default=False),
]
NodesOrLeast = Annotated[
    str | None,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Number of nodes (at least MIN); run the same command on each.",
        show_default=False,
    ),
]
NodeRank = Annotated[
    int | None, typer.Option(min=0, metavar="R", help="Number of this node, from 0.", show_default=False)
]
Head = Annotated[
    str | None, typer.Option(metavar="HOST[:PORT]", help="Address of node 0.", show_default=False)
]
Hosts = Annotated[
    str | None, typer.Option(metavar="A,B,…", help="Start these nodes over SSH.", show_default=False)
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="File with the job's token; default: UNISONO_TOKEN.", show_default=False
    ),
]
JoinTimeout = Annotated[
    float, typer.Option(min=1.0, metavar="SECONDS", help="How long nodes wait for each other.")
]
DebugComm = Annotated[bool, typer.Option("--debug-comm", help="Enable verbose communication logs.")]
Launcher = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Start nodes with local, nodes, ray or slurm.", show_default=False),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="A", help="Ray cluster; default: RAY_ADDRESS, or the local cluster.", show_default=False
    ),
]
Partition = Annotated[str | None, typer.Option(metavar="P", help="Slurm partition.", show_default=False)]
TimeLimit = Annotated[
    str | None,
    typer.Option("--time", metavar="T", help="Time limit of a Slurm job, e.g. 8:00:00.", show_default=False),
]


def refuse_unwritable(path: Path, option: str, *, replaces: bool = False) -> None:
    """Checks a file that a command writes at its end, before the work for it.

    Args:
        path: the file.
        option: that names it.
        replaces: whether an existing file may be replaced.

    Raises:
        UsageError: if it exists, or nothing can be written there.
    """
    from unisono.errors import UsageError

    folder, fix = path.absolute().parent, "name a file in a directory that can be written"
    if path.is_dir():
        raise UsageError.of(f"{path} is a directory", where=option, fix=fix)
    if path.exists() and not replaces:
        raise UsageError.of(
            f"{path} exists", where=option, why="it would be overwritten", fix="name a new file"
        )
    if not folder.is_dir():
        why = f"there is no directory {folder}"
        raise UsageError.of(
            f"{path} cannot be written", where=option, why=why, fix=f"mkdir -p {folder}; or {fix}"
        )
    if not os.access(folder, os.W_OK | os.X_OK):  # also says no on a read-only file system
        why = f"files cannot be made in {folder}"
        raise UsageError.of(f"{path} cannot be written", where=option, why=why, fix=fix)
