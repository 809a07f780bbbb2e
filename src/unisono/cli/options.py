"""Options for nodes, ranks and launchers that several commands share."""

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
