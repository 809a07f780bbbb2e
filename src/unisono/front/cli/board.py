"""The commands `unisono board`: runs in a browser, live or as one file; and `unisono runs`: a list
of them.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.front.cli.app import refuse_unwritable
from unisono.front.cli.output import output, terminal_width

if TYPE_CHECKING:
    from unisono.front.board.regions import RowVerdict, RunRow
    from unisono.front.board.server import Board

_DEFAULT = [Path("runs")]


def board(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Directories of runs, or directories with runs in them; default: runs.",
            show_default=False,
        ),
    ] = None,
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
            help="Address to listen on; others can reach an external address, without encryption.",
        ),
    ] = "127.0.0.1",
    is_opened: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Show runs in a browser while they are active or afterwards: status, verdict, curves, ranks,
    data, checkpoints, samples, config and log.
    """
    runs = runs or _DEFAULT
    _refuse_other_paths(runs, "unisono board runs/demo")
    if out is not None:
        _write_file(runs, out)
        return
    _serve(runs, port, host, is_opened=is_opened)


def list_(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR]...", help="Directories with runs in them; default: runs.", show_default=False
        ),
    ] = None,
) -> None:
    """List the runs in a directory, most recently updated first: state, step, loss, age and the
    newest verdict.
    """
    from unisono.front.board.follow import find_runs
    from unisono.front.board.regions import summarize_run

    paths = folders or _DEFAULT
    _refuse_other_paths(paths, "unisono runs DIR")
    now = time.time()
    rows = [summarize_run(name, root, now=now) for name, root in find_runs(paths)]
    rows.sort(key=lambda row: (row["age_s"] is None, row["age_s"]))
    printer = output()
    if printer.json:
        printer.emit({"schema": 1, "runs": rows})
        return
    for line in _table(rows, terminal_width(sys.stdout)):
        printer.verbatim(line)


def _table(rows: "list[RunRow]", width: int) -> list[str]:
    """The rows under a line of titles; on a terminal of `width` columns the last column is cut."""
    from unisono.base.text import columns, one_line, shortened
    from unisono.guard.rundir.records import shown_outcome

    cells = [("RUN", "STATE", "STEP", "LOSS", "AGE", "VERDICT")]
    for row in rows:
        total = "" if row["total_steps"] is None else f"/{row['total_steps']}"
        cells.append(
            (
                one_line(row["name"], limit=60),
                shown_outcome(row["state"] or "?", _verdict_of_last_start(row["verdict"])),
                "?" if row["step"] is None else f"{row['step']}{total}",
                "" if row["loss"] is None else f"{row['loss']:.4f}",
                "?" if row["age_s"] is None else _age(row["age_s"]),
                _verdict_or_problem(row),
            )
        )
    widths = [max(columns(line[column]) for line in cells) for column in range(5)]
    lines = [
        "  ".join(
            [
                *(text + " " * (most - columns(text)) for text, most in zip(line, widths, strict=False)),
                line[5],
            ]
        ).rstrip()
        for line in cells
    ]
    return [shortened(line, width) for line in lines] if width else lines


def _verdict_of_last_start(verdict: "RowVerdict | None") -> "RowVerdict | None":
    return verdict if verdict is not None and verdict["of_last_start"] else None


def _age(seconds: float) -> str:
    from unisono.base.text import show_seconds

    return f"{seconds / 86_400:.0f} days" if seconds >= 2 * 86_400 else show_seconds(round(seconds))


def _verdict_or_problem(row: "RunRow") -> str:
    verdict = row["verdict"]
    texts = [f"cannot be read: {problem}" for problem in row["problems"][:1]]
    if verdict is not None:
        earlier = "" if verdict["of_last_start"] else "earlier: "
        texts.insert(0, f"{earlier}{verdict['cause']}: {verdict['summary']}")
    return "; ".join(texts)


def _refuse_other_paths(runs: list[Path], example: str) -> None:
    from unisono.base.errors import Problem, UsageError
    from unisono.front.board.follow import find_runs, is_run
    from unisono.guard.rundir import or_nearest_run

    problems = []
    for path in runs:
        why = "it does not exist" if not path.exists() else "it is a file" if not path.is_dir() else ""
        if not why and not is_run(path) and [root for _, root in find_runs([path])] == [path]:
            why = "there is no run in it: no plan.json, metrics.jsonl or result.json"
        if why:
            problems.append(
                Problem(
                    f"{path} is not a run",
                    "command line",
                    why,
                    or_nearest_run(
                        path, f"name the output_dir of a run, or a directory with runs, as in `{example}`"
                    ),
                )
            )
    if problems:
        raise UsageError(*problems)


def _write_file(runs: list[Path], out: Path) -> None:
    from unisono.base.files import write_text
    from unisono.base.text import show_bytes
    from unisono.front.board.page import runs_file

    refuse_unwritable(out, "--out")
    described, text = runs_file(runs, key=settings_key())
    write_text(out, text)
    printer = output()
    if printer.json:
        printer.emit({"kind": "board", "schema": 1, "runs": described})
    else:
        printer.result(
            f"{out}: {len(described)} {'run' if len(described) == 1 else 'runs'},"
            f" {show_bytes(len(text.encode()))}; open it in a browser"
        )


def settings_key() -> bytes:
    """The key of this user."""
    from unisono.base.user_key import user_key
    from unisono.guard.facts import read_environment

    return user_key(read_environment().settings_dir)


def _serve(runs: list[Path], port: int | None, host: str, *, is_opened: bool) -> None:
    refuse_without_extra("unisono board", why="the server is an extra; --out FILE.html needs nothing")
    from unisono.front.board.server import serve
    from unisono.front.http_headers import LOOPBACK
    from unisono.guard.facts.network import bind_listener

    printer = output()
    listener = bind_listener(host, port)

    def announce(url: str, board: "Board") -> None:
        served = [{"name": run.name, "path": str(run.root)} for run in board.runs.values()]
        if printer.json:
            printer.emit(
                {"kind": "board", "schema": 1, "url": url, "port": listener.getsockname()[1], "runs": served}
            )
        else:
            printer.result(url)
        if host not in LOOPBACK:
            printer.warn(
                f"warning: others can reach {host}, and the line is not encrypted; on the same machine, and"
                " through an SSH tunnel, --host is not needed"
            )
        if is_opened:
            open_browser(url)

    with listener:
        serve(runs, listener, host=host, key=settings_key(), on_start=announce)


def refuse_without_extra(command: str, *, why: str) -> None:
    """Refuses to start a server, of `board` or `serve`, without its packages.

    Raises:
        UsageError: if one is not installed.
    """
    from importlib.util import find_spec

    from unisono.base.errors import UsageError

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError.of(
            f"`{command}` needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not"
            " installed",
            where=command,
            why=why,
            fix="pip install 'unisono[board]'",
        )


def open_browser(url: str) -> None:
    """Opens a browser where there is a screen; never a text browser, which would take the
    terminal.
    """
    import threading
    import webbrowser

    from unisono.guard.facts import read_environment

    if read_environment().has_display:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
