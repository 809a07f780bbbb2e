"""`unisono serve`: answers OpenAI's protocol with a trained model."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.front.cli.generate import Overrides, Step, Target
from unisono.front.cli.output import output

if TYPE_CHECKING:
    from unisono.base.errors import RankDied
    from unisono.trainer.plan.talk_messages import FailedAsk
    from unisono.trainer.plan.task_requests import NamedAdapter


def serve(
    target: Target,
    overrides: Overrides = None,
    host: Annotated[
        str,
        typer.Option(metavar="HOST", help="Address to listen on; any address but the default needs a key."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, metavar="N", help="Port; default: a free one.", show_default=False),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keys of clients, one per line; default: UNISONO_SERVE_KEY.",
            show_default=False,
        ),
    ] = None,
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=DIR",
            help="An adapter of the base model, served as model NAME; repeat it for several.",
            show_default=False,
        ),
    ] = None,
    adapter_folders: Annotated[
        str | None,
        typer.Option(
            metavar="DIR,…",
            help="Directories below which clients with a key may load adapters while the server runs.",
            show_default=False,
        ),
    ] = None,
    prompt_cache: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MB",
            help="Memory that caches recent prompts; prompts with the same beginning are then read faster.",
        ),
    ] = 256,
    image_hosts: Annotated[
        str | None,
        typer.Option(
            metavar="HOST,…",
            help="Hosts from which pictures may be fetched for http and https URLs in requests.",
            show_default=False,
        ),
    ] = None,
    image_folders: Annotated[
        str | None,
        typer.Option(
            metavar="DIR,…",
            help="Directories from which requests may read pictures by file URL.",
            show_default=False,
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="Seconds for running answers after SIGTERM or Ctrl-C."),
    ] = 25.0,
    step: Step = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions,
    /v1/models.
    """
    from unisono.base.errors import RankDied
    from unisono.front.cli.board import refuse_without_extra
    from unisono.front.cli.llamafactory_file import read_inference_file
    from unisono.front.cli.terminal import TaskProgress
    from unisono.guard.facts.environment import take_serve_key

    key = take_serve_key()
    refuse_without_extra("unisono serve", why="the HTTP server is an extra")
    from unisono.front.http_server import address_of
    from unisono.front.serve.adapter_folders import AdapterFolders
    from unisono.front.serve.model_process import ModelProcess
    from unisono.front.serve.picture_addresses import PictureAddresses, listed
    from unisono.front.serve.server import listen, read_keys
    from unisono.front.serve.server import serve as serve_model
    from unisono.trainer.plan.task_requests import RequestedModel

    printer = output()
    given = read_inference_file(target, overrides or [])
    requested = replace(given.model if given else RequestedModel(target), step=step)
    addresses = PictureAddresses.of(image_hosts, image_folders)
    keys = read_keys(key_file, key, warn=printer.warn)
    folders = AdapterFolders.of(map(Path, listed(adapter_folders)), has_keys=bool(keys.values))
    name = target.rstrip("/") or target
    named = _named_adapters(adapters or [], model=name)
    with listen(host, port, keys) as listener, TaskProgress(printer) as progress:
        url = address_of(listener, host)

        def say_ready() -> None:
            progress.close()
            if model.facts.note:
                printer.warn(f"warning: {model.facts.note}")
            if printer.json:
                printer.emit({"kind": "serve", "schema": 1, "url": url, "model": name})
            else:
                names = ", ".join(repr(one) for one in (name, *(adapter.name for adapter in named)))
                printer.result(f"serving {model.facts.description} at {url}/v1 as model {names}")
            printer.notify("Ctrl-C or SIGTERM ends it; running answers are completed")

        model = ModelProcess(
            requested,
            adapters=named,
            takes_adapters=bool(folders.paths),
            prompt_cache_bytes=prompt_cache * 1_000_000,
            on_message=progress.show,
            on_failure=_warn_of_failure,
            on_restart=_say_restart,
        )
        try:
            asyncio.run(
                serve_model(
                    model,
                    listener,
                    name=name,
                    keys=keys,
                    addresses=addresses,
                    folders=folders,
                    grace_s=grace,
                    on_ready=say_ready,
                    created=int(time.time()),
                )
            )
        except RankDied as error:
            progress.close()
            _show_verdict(error)
            raise


def _named_adapters(given: list[str], *, model: str) -> "list[NamedAdapter]":
    """The adapters of `--adapter NAME=DIR`.

    Raises:
        UsageError: if one has no name or directory, or the name of a different one.
    """
    from unisono.base.errors import UsageError
    from unisono.base.text import one_line
    from unisono.trainer.plan.task_requests import NamedAdapter

    adapters: list[NamedAdapter] = []
    for text in given:
        name, _, target = text.partition("=")
        if not name or not target:
            raise UsageError.of(
                f"{one_line(text)!r} is not NAME=DIR", where="--adapter", fix="--adapter NAME=DIR"
            )
        if name == model or any(name == one.name for one in adapters):
            raise UsageError.of(
                f"two models have the name {one_line(name)!r}",
                where="--adapter",
                fix="choose a different name",
            )
        adapters.append(NamedAdapter(name, target))
    return adapters


def _warn_of_failure(failed: "FailedAsk") -> None:
    at = f" ({failed.where})" if failed.where else ""
    output().warn(f"warning: a request failed: {failed.text}{at}")


def _say_restart(error: "RankDied") -> None:
    _show_verdict(error)
    output().warn("the model is loaded again; requests that it was answering got 503")


def _show_verdict(error: "RankDied") -> None:
    for line in error.verdict.lines() if error.verdict else ():
        output().warn(line)
