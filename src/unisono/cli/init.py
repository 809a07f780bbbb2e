"""`unisono init`: a commented config to start from."""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.output import output

if TYPE_CHECKING:
    from unisono.config import LoadedConfig
    from unisono.config.llamafactory import Translation
    from unisono.errors import UnisonoError

_DEFAULT = "lora"


def init(
    template: Annotated[
        str | None,
        typer.Argument(metavar="TEMPLATE", help="One of `unisono init --list`; default: lora."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write to this file, which must not exist; default: stdout.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the templates.")] = False,
    from_llamafactory: Annotated[
        Path | None,
        typer.Option(
            "--from-llamafactory",
            metavar="FILE",
            help="Translate this LLaMA-Factory file (YAML or JSON).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a commented config to start from, or a job file for a cluster."""
    if from_llamafactory is not None:
        _translate(from_llamafactory, template, out)
        return
    if listing:
        _list_templates()
        return
    name = template or _DEFAULT
    text = template_text(name)
    if out is None:
        printer = output()
        printer.emit({"schema": 1, "template": name, "text": text}) if printer.json else printer.verbatim(
            text.rstrip("\n")
        )
        return
    _write_new(out, text)
    if output().json:
        output().emit({"schema": 1, "template": name, "path": str(out)})
    rest = (
        "fill in the <…>"
        if name in job_names()
        else f"set `model` and `data.train` in it, then `unisono train {out}`"
    )
    output().notify(f"wrote {out}: {rest}")


def template_names() -> list[str]:
    """The names of all configs, the default first."""
    return sorted(_names_in(_configs()), key=lambda name: name != _DEFAULT)


def job_names() -> list[str]:
    """The names of templates for job files of clusters."""
    return sorted(_names_in(_configs() / "jobs"))


def template_text(name: str) -> str:
    """The YAML of one template.

    Raises:
        UsageError: if there is none of this name.
    """
    names = [*template_names(), *job_names()]
    if name not in names:
        from unisono.errors import UsageError
        from unisono.text import nearest

        near = nearest(name, names)
        raise UsageError.of(
            f"there is no template {name}",
            fix=f"did you mean `{near}`?" if near else f"choose one of {', '.join(names)}",
        )
    folder = _configs() / "jobs" if name in job_names() else _configs()
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def _configs() -> Traversable:
    return resources.files("unisono.cli") / "templates"


def _names_in(folder: Traversable) -> list[str]:
    return [item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")]


def _translate(path: Path, template: str | None, out: Path | None) -> None:
    """Writes the config of a LLaMA-Factory file; with --json lists the fate of each key.

    Raises:
        UnisonoError: with all that is wrong with the file.
    """
    from unisono.config.load import config_of, read_llamafactory
    from unisono.errors import UnisonoError, UsageError

    if template is not None:
        raise UsageError.of(
            "a template and --from-llamafactory are given", where="command line", fix="remove one of them"
        )
    translation = read_llamafactory(path)
    try:
        loaded = config_of(translation, verb="init")
    except UnisonoError as error:
        if not output().json:
            raise
        _list_refused_keys(translation, error)
        return
    text = _config_text(translation, loaded)
    if output().json:
        output().emit({"schema": 1, **translation.to_json()})
    elif out is None:
        output().verbatim(text.rstrip("\n"))
    if out is not None:
        _write_new(out, text)
        output().notify(f"wrote {out}: `unisono train {out}` starts it")
    for line in filter(None, [*translation.warnings, translation.epoch_ends]):
        output().notify(line)


def _list_refused_keys(translation: "Translation", error: "UnisonoError") -> None:
    """Emits the keys also where there is no config; a file of a different verb has none, and yet its keys may all be fine."""
    for line in error.lines():
        output().warn(line)
    output().emit({"schema": 1, **translation.to_json(), "problems": error.to_json()["problems"]})
    if translation.is_refused:
        raise typer.Exit(error.exit_code)


def _list_templates() -> None:
    about = {
        name: template_text(name).splitlines()[0].removeprefix("# ")
        for name in [*template_names(), *job_names()]
    }
    if output().json:
        output().emit(
            {"schema": 1, "templates": [{"name": name, "about": text} for name, text in about.items()]}
        )
        return
    for name, text in about.items():
        output().result(f"{name:<10} {text}")


def _write_new(path: Path, text: str) -> None:
    """Writes a new file; an existing one is never touched."""
    from unisono.errors import UsageError

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError.of(
            f"{path} exists", why="nothing is overwritten", fix="give a different name"
        ) from None
    except OSError as error:
        raise UsageError.of(
            f"{path} cannot be written", why=str(error), fix="give a file in a directory that you may write"
        ) from error


_COMMENT_AT = 48  # the column of comments


def _config_text(translation: "Translation", loaded: "LoadedConfig") -> str:
    """YAML in our keys, and only those; a comment names the key of the file, or LLaMA-Factory's default."""
    assert loaded.translation is translation
    ignored = [key.key for key in translation.keys if key.fate == "ignored"]
    lines = [f"# Translated from {translation.name}, a file of LLaMA-Factory."]
    if ignored:
        lines.append(f"# Ignored, since they change nothing here: {', '.join(ignored)}.")
    return "\n".join([*lines, *_lines(translation.config, "", translation)]) + "\n"


def _lines(section: dict[str, Any], prefix: str, translation: "Translation") -> list[str]:
    import yaml

    found: list[str] = []
    indent = "  " * prefix.count(".")
    for name, value in section.items():
        key = prefix + name
        if isinstance(value, dict) and key not in translation.origins:
            found += [f"{indent}{name}:", *_lines(value, f"{key}.", translation)]
            continue
        text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000)
        first, *rest = text.rstrip("\n").split("\n")
        comment = f"# {translation.names.get(key, 'the default there')}"
        found += [f"{indent + first:<{_COMMENT_AT}} {comment}", *(indent + line for line in rest)]
    return found
