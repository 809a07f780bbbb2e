"""The command `unisono board`: runs in a browser, live or as one file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.cli.output import output

if TYPE_CHECKING:
    from unisono.board.server import Board

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def board(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Directories of runs, or directories with runs in them.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.html",
            help="Write one file instead of starting a server.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=1, max=65_535, metavar="N", help="Port; default: a free one.", show_default=False
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address to listen on; others than this machine's own can be reached by others, unencrypted.",
        ),
    ] = "127.0.0.1",
    is_opened: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Show runs in a browser while they are active or afterwards: status, verdict, curves, ranks, data, checkpoints, samples, config and log."""
    _refuse_other_paths(runs)
    if out is not None:
        _write_file(runs, out)
        return
    _serve(runs, port, host, is_opened=is_opened)


def _refuse_other_paths(runs: list[Path]) -> None:
    from unisono.board.follow import find_runs, is_run
    from unisono.errors import Problem, UsageError

    problems = []
    for path in runs:
        why = "it does not exist" if not path.exists() else "it is a file" if not path.is_dir() else ""
        if not why and not is_run(path) and not any(is_run(root) for _, root in find_runs([path])):
            why = "there is no run in it: no plan.json, metrics.jsonl or result.json"
        if why:
            problems.append(
                Problem(
                    f"{path} is not a run",
                    "command line",
                    why,
                    "name the output_dir of a run, as in `unisono board runs/demo`",
                )
            )
    if problems:
        raise UsageError(*problems)


def _write_file(runs: list[Path], out: Path) -> None:
    from unisono.board.page import runs_file
    from unisono.errors import UsageError
    from unisono.files import write_text
    from unisono.text import show_bytes

    if out.exists() or out.is_symlink():
        raise UsageError.of(
            f"{out} exists",
            where="--out",
            why="nothing is overwritten",
            fix="name a different file, or remove it",
        )
    if not out.absolute().parent.is_dir():
        raise UsageError.of(
            f"{out.absolute().parent} is not a directory",
            where="--out",
            why="the file would be in it",
            fix="create it, or name a file elsewhere",
        )
    found, text = runs_file(runs, key=_key())
    write_text(out, text)
    printer = output()
    if printer.json:
        printer.emit({"kind": "board", "schema": 1, "runs": found})
    else:
        printer.result(
            f"{out}: {len(found)} run{'s' * (len(found) != 1)}, {show_bytes(len(text.encode()))}; open it in a browser"
        )


def _key() -> bytes:
    from unisono.checkpoint.manifest import user_key
    from unisono.facts import read_environment

    return user_key(read_environment().settings_dir)


def _serve(runs: list[Path], port: int | None, host: str, *, is_opened: bool) -> None:
    refuse_without_extra("unisono board", why="the server is an extra; --out FILE.html needs nothing")
    from unisono.board.server import serve
    from unisono.facts.network import bind_listener

    printer = output()
    bound = bind_listener(host, port)

    def announce(url: str, board: "Board") -> None:
        found = [{"name": run.name, "path": str(run.root)} for run in board.runs.values()]
        if printer.json:
            printer.emit(
                {"kind": "board", "schema": 1, "url": url, "port": bound.getsockname()[1], "runs": found}
            )
        else:
            printer.result(url)
        if host not in _LOOPBACK:
            printer.warn(
                f"warning: others can reach {host}, and the line is not encrypted; on the same machine, and through an SSH tunnel, --host is not needed"
            )
        if is_opened:
            _open_browser(url)

    with bound:
        serve(runs, bound, host=host, key=_key(), on_start=announce)


def refuse_without_extra(command: str, *, why: str) -> None:
    """Refuses to start a server, of `board` or `serve`, without its packages.

    Raises:
        UsageError: if one is not installed.
    """
    from importlib.util import find_spec

    from unisono.errors import UsageError

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError.of(
            f"`{command}` needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed",
            where=command,
            why=why,
            fix="pip install 'unisono[board]'",
        )


def _open_browser(url: str) -> None:
    """Opens a browser where there is a screen; never a text browser, which would take the terminal."""
    import threading
    import webbrowser

    from unisono.facts import read_environment

    if read_environment().has_display:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
