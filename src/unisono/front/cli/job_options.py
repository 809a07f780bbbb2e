"""Options that `train`, `doctor` and `run` share, declared once as the fields of dataclasses: where
the ranks of a job are, and its launcher.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Self

import typer

from unisono.front.cli.output import output
from unisono.jobs.launchers.launchers import LAUNCHERS


class OptionGroup:
    """A dataclass whose fields are options of a command; see `with_groups`."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """A command's parameter for each field."""
        return [_parameter(each.name, each.type, each.default) for each in fields(cls)]  # type: ignore[arg-type]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The group of the values that a command was given."""
        return cls(**given)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has the options of its groups in place of the parameters of these types."""
    signature = inspect.signature(command)
    groups: dict[str, type[OptionGroup]] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if inspect.isclass(parameter.annotation) and issubclass(parameter.annotation, OptionGroup)
    }

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            options = {each.name: given.pop(each.name) for each in group.parameters()}
            given[name] = group.read(options)
        command(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        is_group = name in groups
        parameters += (
            groups[name].parameters() if is_group else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        )
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True)
class JobOptionGroup(OptionGroup):
    """Where the ranks of a job are."""

    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            help="Ranks on this node; default: one per device.",
            show_default=False,
        ),
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Devices, one per rank: e.g. 0,1, or UUIDs.", show_default=False),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Number of nodes (at least MIN); run the same command on each.",
            show_default=False,
        ),
    ] = None
    node_rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Number of this node, from 0.", show_default=False)
    ] = None
    head: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Address of node 0.", show_default=False)
    ] = None
    hosts: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Start these nodes over SSH.", show_default=False)
    ] = None
    nnodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Same as --nodes N (torchrun's spelling).", show_default=False),
    ] = None
    nproc_per_node: Annotated[
        str | None,
        typer.Option(metavar="N|auto|gpu", help="Same as --nproc (torchrun's spelling).", show_default=False),
    ] = None
    master_addr: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="The host in --head (torchrun's spelling).", show_default=False),
    ] = None
    master_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            help="The port in --head (torchrun's spelling).",
            show_default=False,
        ),
    ] = None
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Same as --head (torchrun's spelling).", show_default=False),
    ] = None
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File with the job's token; default: UNISONO_TOKEN.", show_default=False
        ),
    ] = None
    join_timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="How long nodes wait for each other.")
    ] = 300.0
    launcher: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Start nodes with local, nodes, ray or slurm.", show_default=False),
    ] = None

    def request_fields(self) -> Mapping[str, Any]:
        """The fields of a request, in which torchrun's options stand by our names.

        Raises:
            UsageError: if options contradict each other, or the environment.
        """
        given = asdict(self)
        torchrun = [given.pop(name) for name in _TORCHRUN]
        given["join_timeout_s"] = given.pop("join_timeout")
        if any(value is not None for value in torchrun):
            from unisono.guard.facts import read_environment
            from unisono.guard.places.topology import (
                TopologyRequest,
                TorchrunOptions,
                parse_hosts,
                with_torchrun_options,
            )

            ours = TopologyRequest(
                nproc=self.nproc, nodes=self.nodes, head=self.head, hosts=parse_hosts(self.hosts)
            )
            read, notes = with_torchrun_options(
                ours, TorchrunOptions(*torchrun), read_environment().leftovers
            )
            for note in notes:
                output().notify(note)
            given |= {"nproc": read.nproc, "nodes": read.nodes, "head": read.head}
        return given


_TORCHRUN = ("nnodes", "nproc_per_node", "master_addr", "master_port", "rdzv_endpoint")
"""In the order of `TorchrunOptions`."""


@dataclass(frozen=True)
class ProgramJobOptions(JobOptionGroup):
    """Where the ranks of an existing program are."""

    nproc: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Ranks on this node.", show_default=False)
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Devices that the program may use, e.g. 0,1.", show_default=False),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Number of nodes; run the same command on each.", show_default=False),
    ] = None
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="local or nodes; ray and slurm only show the command to type.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class LauncherOptions(OptionGroup):
    """The options of all launchers: those of the table by their names, those of other packages by
    `--launcher-option`.

    Attributes:
        given: by the names of the launchers' fields.
    """

    given: dict[str, str]

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """An option for each field of each launcher, and one for all others."""
        others = typer.Option(
            "--launcher-option",
            metavar="KEY=VALUE",
            help="Option of a launcher of another package.",
            show_default=False,
        )
        return [
            *(
                _parameter(each.name, Annotated[str | None, _option(each.name, each.metadata)], None)
                for launcher in LAUNCHERS.values()
                for each in fields(launcher)
            ),
            _parameter("launcher_options", Annotated[list[str] | None, others], None),
        ]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The options that were given.

        Raises:
            UsageError: if a `--launcher-option` has no name or no value.
        """
        options = {name: value for name, value in given.items() if value is not None}
        return cls(options | dict(map(_read_pair, options.pop("launcher_options", ()))))


def _option(name: str, metadata: Any) -> Any:
    return typer.Option(f"--{name.replace('_', '-')}", show_default=False, **metadata)


def _read_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        from unisono.base.errors import UsageError

        raise UsageError.of(
            f"--launcher-option {text!r} has no name, or no value",
            where="command line",
            fix="as in --launcher-option queue=night",
        )
    return name.replace("-", "_"), value
