"""`unisono studio`: a page from which runs are started, steered and tried."""

import os
from pathlib import Path
from typing import Annotated

import typer

from unisono.front.cli.job_options import JobOptionGroup, LauncherOptions
from unisono.front.cli.output import output


def studio(
    roots: Annotated[
        list[Path] | None,
        typer.Option(
            "--root",
            metavar="DIR",
            help=(
                "Directory that the page may read and write, may be repeated; the first one gets the runs."
                " Default: the working directory."
            ),
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65_535, metavar="N", help="Port; default: a free one.", show_default=False
        ),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on; an external address needs --tls-cert or --proxy.",
        ),
    ] = "127.0.0.1",
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", metavar="FILE", help="Certificate of the server, in PEM.", show_default=False
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="Key of the certificate, in PEM.", show_default=False),
    ] = None,
    proxy: Annotated[
        str,
        typer.Option(
            "--proxy",
            metavar="URL",
            help="Address of a proxy with TLS that passes requests on, e.g. https://studio.example.org.",
            show_default=False,
        ),
    ] = "",
    launchers: Annotated[
        Path | None,
        typer.Option(
            "--launchers",
            metavar="FILE",
            help="YAML file of named `unisono train` options: other places where runs may start.",
            show_default=False,
        ),
    ] = None,
    allow_push: Annotated[
        bool, typer.Option("--allow-push", help="Allow uploads of results to the Hugging Face hub.")
    ] = False,
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Allow configs with your own `FILE.py:CLASS`, or with a model's own code."
        ),
    ] = False,
) -> None:
    """Start, stop and resume runs in a browser, chat with their results, and export them. Runs
    continue when the page or its server is closed.
    """
    from unisono.front.cli.board import open_browser, refuse_without_extra, settings_key

    refuse_without_extra("unisono studio", why="the server is an extra")
    from unisono.front.studio.owner import OwnerSettings, ServerAccess
    from unisono.front.studio.single import only_server
    from unisono.front.studio.studio_server import serve
    from unisono.guard.facts.network import bind_listener

    access = ServerAccess(host, tls_cert and tls_cert.absolute(), tls_key and tls_key.absolute(), proxy)
    access.check()
    options = _read_launchers(launchers) if launchers is not None else {}
    folders = [_directory(root) for root in roots or [Path()]]
    os.chdir(folders[0])  # relative paths of configs mean the same here as on a command line there
    printer = output()
    with only_server(folders[0]), bind_listener(host, port) as listener:

        def announce(url: str) -> None:
            if printer.json:
                printer.emit(
                    {
                        "kind": "studio",
                        "schema": 1,
                        "url": url,
                        "port": listener.getsockname()[1],
                        "roots": [str(folder) for folder in folders],
                    }
                )
            else:
                printer.result(url)
            if is_opened:
                open_browser(url)

        owner = OwnerSettings(folders, trust_code, allow_push, options, access)
        serve(owner, listener, key=settings_key(), on_start=announce)


def _read_launchers(path: Path) -> dict[str, tuple[str, ...]]:
    """The options of `unisono train` by the name of each launcher in a file.

    Raises:
        UsageError: if it has something else, or cannot be read.
    """
    from unisono.base.errors import ConfigError, UsageError
    from unisono.trainer.config.yaml_file import read_yaml

    try:
        launchers, _ = read_yaml(path)
    except ConfigError as error:
        raise UsageError(*error.problems) from error
    groups = (JobOptionGroup, LauncherOptions)
    known = {each.name for group in groups for each in group.parameters()} - {"launcher_options"}
    example = "as in `cluster: {launcher: slurm, nodes: 2, partition: gpu}`"
    words: dict[str, tuple[str, ...]] = {}
    for name, options in launchers.items():
        if not isinstance(options, dict) or not options:
            raise UsageError.of(f"{name} has no options", where=str(path), fix=example)
        for option, value in options.items():
            if option.replace("-", "_") not in known or isinstance(value, dict | bool | None):
                raise UsageError.of(
                    f"{name}: {option} is not an option for placing ranks",
                    where=str(path),
                    fix=f"{example}; `unisono train --help` lists them",
                )
        words[name] = tuple(_word_of(option, value) for option, value in options.items())
    return words


def _word_of(name: str, value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name.replace('_', '-')}={text}"


def _directory(root: Path) -> Path:
    """The directory of an option.

    Raises:
        UsageError: if it is not a directory that can be written.
    """
    from unisono.base.errors import UsageError

    if not root.is_dir():
        raise UsageError.of(
            f"{root} is not a directory", where="--root", fix=f"mkdir -p {root}, or choose another"
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise UsageError.of(
            f"{root} cannot be written", where="--root", fix="choose a directory that you may write"
        )
    return root.resolve()
