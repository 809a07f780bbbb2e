"""`unisono studio`: a page from which runs are started, steered and tried."""

import os
from pathlib import Path
from typing import Annotated

import typer

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
    trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code", help="Allow configs with your own `FILE.py:CLASS`, or with a model's own code."
        ),
    ] = False,
) -> None:
    """Start, stop and resume runs in a browser, chat with their results, and export them. Runs
    continue without the page and its server.
    """
    from unisono.front.cli.board import open_browser, refuse_without_extra, settings_key

    refuse_without_extra("unisono studio", why="the server is an extra")
    from unisono.front.studio.single import only_server
    from unisono.front.studio.studio_server import serve
    from unisono.guard.facts.network import bind_listener

    folders = [_directory(root) for root in roots or [Path()]]
    os.chdir(folders[0])  # relative paths of configs mean the same here as on a command line there
    printer = output()
    with only_server(folders[0]), bind_listener("127.0.0.1", port) as listener:

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

        serve(
            folders,
            listener,
            host="127.0.0.1",
            key=settings_key(),
            trusts_code=trust_code,
            on_start=announce,
        )


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
