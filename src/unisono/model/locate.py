"""Finds a model's or tokenizer's files: a directory, `builtin:NAME`, or a hub id that is downloaded."""

from functools import cache
from importlib import resources
from pathlib import Path

from unisono.config.schema import RunConfig
from unisono.errors import ModelError
from unisono.facts import read_environment
from unisono.facts.hub import Hub, probe_url, read_hub
from unisono.model.files import check_tokenizer_files
from unisono.text import library_words, nearest

_BUILTIN = "builtin:"
_ANSWER_S = 5.0
"""How long the hub may be silent before what is in its cache has to do."""


def locate_model(path: str, revision: str | None = None) -> Path:
    """The directory with the model's files.

    Raises:
        ModelError: if there is no such directory, no such built-in model, or the hub does not give it.
    """
    if path.startswith(_BUILTIN):
        return _builtin(path)
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file() and not (directory / "adapter_config.json").is_file():
            raise ModelError.of(
                f"{path} holds no model", where=str(directory), why="there is no config.json in it",
                fix="give the directory with config.json, the weights and the tokenizer",
            )  # fmt: skip
        return directory.resolve()
    if _names_a_place(path):
        raise ModelError.of(
            f"there is no model directory {path}",
            where="model.path",
            fix="check the path; relative ones start at the working directory",
        )
    return _from_hub(path, revision)


def locate_tokenizer(config: RunConfig) -> Path:
    """The directory with the tokenizer's files: the model's own unless `model.tokenizer` names another.

    Raises:
        ModelError: as locate_model, or if the directory holds no tokenizer, or a file of it cannot be read.
    """
    named = config.model.tokenizer
    directory = (
        _tokenizer_directory(named) if named else locate_model(config.model.path, config.model.revision)
    )
    known = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "spiece.model",
    )
    if not any((directory / name).is_file() for name in known):
        raise ModelError.of(
            f"{directory} holds no tokenizer", where="model.tokenizer" if named else "model.path",
            why=f"none of {', '.join(known)} is in it", fix="set model.tokenizer to the directory or hub id of one",
        )  # fmt: skip
    check_tokenizer_files(directory)
    return directory


def _tokenizer_directory(named: str) -> Path:
    directory = Path(named).expanduser()
    return directory.resolve() if directory.is_dir() else locate_model(named)


def _builtin(path: str) -> Path:
    name = path.removeprefix(_BUILTIN)
    root = resources.files("unisono") / "builtin"
    with resources.as_file(root) as folder:
        known = (
            sorted(entry.name for entry in folder.iterdir() if (entry / "config.json").is_file())
            if folder.is_dir()
            else []
        )
        if name in known:
            return folder / name
    near = nearest(name, known)
    raise ModelError.of(
        f"there is no built-in model {name!r}", where="model.path",
        fix=f"did you mean builtin:{near}?" if near else f"one of {', '.join(_BUILTIN + entry for entry in known)}",
    )  # fmt: skip


def is_hub_id(path: str) -> bool:
    """Whether a model's or tokenizer's name leads to the hub: there is no such directory here, and it can be no path."""
    return not (path.startswith(_BUILTIN) or Path(path).expanduser().is_dir() or _names_a_place(path))


def _names_a_place(path: str) -> bool:
    """Whether it can only be a path: a hub id is NAME or OWNER/NAME of letters, digits, `-`, `_` and `.`."""
    parts = path.split("/")
    return len(parts) > 2 or path.startswith((".", "/", "~")) or not all(parts)


def _from_hub(path: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (  # fmt: skip
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
    folder = read_environment().hub_cache
    hub = read_hub(folder)
    silent = "" if hub.offline else _why_silent(hub.endpoint)
    try:
        return Path(
            snapshot_download(path, revision=revision, allow_patterns=patterns, local_files_only=bool(silent))
        )
    except GatedRepoError as error:
        raise ModelError.of(
            f"the hub does not give {path} to everybody", where="model.path", why="the model is gated",
            fix="accept its terms on its page, and set HF_TOKEN in the environment",
        ) from error  # fmt: skip
    except RevisionNotFoundError as error:
        raise ModelError.of(
            f"{path} has no revision {revision!r}",
            where="model.revision",
            fix="give a branch, tag or commit of it",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError.of(
            f"{path} is neither a directory here nor a model that {hub.endpoint} shows", where="model.path",
            why="it does not exist there, or it is private" + ("" if hub.token else ", and there is no token here"),
            fix="check the spelling; for a private one set HF_TOKEN; for a directory write ./NAME",
        ) from error  # fmt: skip
    except LocalEntryNotFoundError as error:
        raise ModelError.of(
            f"{path} is neither a directory here nor to be had from the hub", where="model.path",
            why=f"it is not in {folder}, and {_not_asked(hub, silent, error)}",
            fix=f"unset {hub.offline}, or copy the hub's cache from a machine that has it" if hub.offline else
            "check the spelling and the network (a proxy is named by HTTPS_PROXY, a mirror by HF_ENDPOINT); for a directory write ./NAME",
        ) from error  # fmt: skip
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError.of(
            f"{path} is neither a directory here nor to be had from the hub", where="model.path", why=library_words(error, library="huggingface_hub"),
            fix="check the spelling and the network; for a directory write ./NAME",
        ) from error  # fmt: skip


@cache
def _why_silent(endpoint: str) -> str:
    """Asked once in a process: the hub's own client tries a server that is silent again and again, for minutes."""
    return probe_url(endpoint, limit_s=_ANSWER_S)


def _not_asked(hub: Hub, silent: str, error: Exception) -> str:
    if hub.offline:
        return f"{hub.offline} forbids to ask the hub"
    return f"{hub.endpoint} does not answer: {silent}" if silent else str(error)
