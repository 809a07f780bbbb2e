"""The options that say where ranks are, as several commands take them."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="as optim.lr=1e-4", show_default=False)
]
Nproc = Annotated[
    int | None,
    typer.Option(min=1, max=1024, metavar="N", help="Ranks on this node; else one per device.", show_default=False),
]  # fmt: skip
Devices = Annotated[
    str | None, typer.Option(metavar="LIST", help="As 0,1 or UUIDs: one a rank.", show_default=False)
]
NodesOrLeast = Annotated[
    str | None,
    typer.Option(metavar="N|MIN:MAX", help="How many nodes (at least: MIN); run the same on each.", show_default=False),
]  # fmt: skip
NodeRank = Annotated[
    int | None, typer.Option(min=0, metavar="R", help="Which node this is, from 0.", show_default=False)
]
Head = Annotated[str | None, typer.Option(metavar="HOST[:PORT]", help="Where node 0 is.", show_default=False)]
Hosts = Annotated[
    str | None, typer.Option(metavar="A,B,…", help="Start these nodes over ssh.", show_default=False)
]
TokenFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="The job's secret; else UNISONO_TOKEN.", show_default=False)
]
JoinTimeout = Annotated[
    float, typer.Option(min=1.0, metavar="SECONDS", help="How long nodes wait for each other.")
]
DebugComm = Annotated[bool, typer.Option("--debug-comm", help="Ranks say more about their communication.")]
Launcher = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="local, nodes, ray or slurm: who starts the nodes.", show_default=False),
]  # fmt: skip
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="A", help="The Ray cluster; else RAY_ADDRESS, or the one here.", show_default=False),
]  # fmt: skip
Partition = Annotated[str | None, typer.Option(metavar="P", help="Of the Slurm cluster.", show_default=False)]
TimeLimit = Annotated[
    str | None,
    typer.Option("--time", metavar="T", help="Limit of a Slurm job, as 8:00:00.", show_default=False),
]
