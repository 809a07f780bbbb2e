"""The commands `unisono download`: a model or dataset of the hub into its cache; and `unisono
push`: the result of a run to the hub.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.front.cli.output import output

if TYPE_CHECKING:
    from unisono.front.hub.download import CacheCheck
    from unisono.front.hub.publish import Publication


def download(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|DATA",
            help="A model or dataset of the hub: OWNER/NAME; datasets/OWNER/NAME is always a dataset.",
            show_default=False,
        ),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="A branch, tag or commit.", show_default=False)
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Only compare what is in the cache with its digests; needs no network."
        ),
    ] = False,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Also download pickled weights, which can run code when they are loaded."
        ),
    ] = False,
) -> None:
    """Download a model or dataset into the cache of the Hugging Face hub, and verify every file.

    Files that are there are kept.
    """
    from unisono.front.cli.terminal import ReadingLine
    from unisono.front.hub import download as hub

    printer = output()
    if verify:
        directory, checked = hub.verify_cache(name, revision)
        _show_verified(name, directory, checked)
        return
    repo = hub.find_repo(name, revision)
    selection = hub.select_files(repo, trust=trust)
    printer.notify(hub.describe_selection(repo, selection))
    line = ReadingLine(selection.bytes, verb="downloading")
    try:
        directory = hub.download(repo, revision, selection, line.show)
    finally:
        line.close()
    checked = hub.verify_download(repo, selection, directory)
    if printer.json:
        printer.emit(
            {
                "schema": 1,
                "name": repo.name,
                "kind": repo.kind,
                "commit": repo.commit,
                "path": str(directory),
                "files": len(selection.files),
                "bytes": selection.bytes,
                "verified": checked.verified,
                "skipped": list(selection.skipped),
            }
        )
        return
    _show_verified(repo.name, directory, checked)
    if repo.kind == "dataset":
        printer.result("  name its files in the config, e.g. data.train: that path, a / and the file")
    else:
        printer.result(f"  in a config: model: {repo.name}; HF_HUB_OFFLINE=1 then needs no network")


def _show_verified(name: str, directory: Path, checked: "CacheCheck") -> None:
    from unisono.base.text import show_bytes

    printer = output()
    if printer.json:
        printer.emit(
            {
                "schema": 1,
                "name": name,
                "path": str(directory),
                "verified": checked.verified,
                "bytes": checked.bytes,
                "unverified": checked.unverified,
            }
        )
        return
    more = f"; without a digest: {', '.join(checked.unverified[:5])}" if checked.unverified else ""
    printer.result(
        f"{directory}: {checked.verified} files, {show_bytes(checked.bytes)}, all with their digest{more}"
    )


def push(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME at the hub.", show_default=False)],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the weights of its base model.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(min=0, help="The checkpoint of this step.", show_default=False)
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create a private repository; an existing one stays as it is.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the model card and the files; upload nothing.")
    ] = False,
) -> None:
    """Upload the adapter or model of a run to the Hugging Face hub, with a model card made from the
    run.
    """
    from unisono.base.text import show_bytes
    from unisono.front.cli.terminal import TaskProgress
    from unisono.front.hub import publish

    publish.refuse_unready(run, step)
    if not dry_run:
        publish.refuse_without_token(repo)
    printer = output()
    with tempfile.TemporaryDirectory(prefix="unisono-push-") as folder:
        with TaskProgress(printer) as progress:
            made = publish.prepare(
                run, repo, Path(folder) / "files", merge=merge, step=step, show=progress.show
            )
        if dry_run:
            _show_publication(made)
            return
        printer.notify(f"uploading {len(made.files)} files, {show_bytes(made.bytes)}")
        commit = publish.upload(made, private=private)
    if printer.json:
        printer.emit({"schema": 1, "repo": repo, "commit": commit, "files": _rows(made)})
    else:
        printer.result(
            f"{repo}@{commit[:12]}: {made.what}, {len(made.files)} files, {show_bytes(made.bytes)}, compared"
            " with the hub's digests"
        )


def _show_publication(made: "Publication") -> None:
    from unisono.base.text import show_bytes

    printer = output()
    if printer.json:
        printer.emit({"schema": 1, "repo": made.repo, "card": made.card, "files": _rows(made)})
        return
    printer.verbatim(made.card)
    for file in made.files:
        printer.verbatim(f"{show_bytes(file.bytes):>8}  {file.path}")


def _rows(made: "Publication") -> list[dict[str, object]]:
    return [{"path": file.path, "bytes": file.bytes, "sha256": file.digest} for file in made.files]
