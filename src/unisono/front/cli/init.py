"""The commands before training: `unisono init`, a commented config to start from, and `unisono data
preview`, the rows as the model sees them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer

from unisono.front.cli.app import refuse_unwritable
from unisono.front.cli.output import output, shown

if TYPE_CHECKING:
    from unisono.base.errors import UnisonoError
    from unisono.trainer.config import LoadedConfig
    from unisono.trainer.config.translation import Translation
    from unisono.trainer.plan import DataSummary
    from unisono.trainer.plan.extent import ProposedExtent
    from unisono.trainer.plan.task_requests import LengthClass, Preview, ShownRow, Survey, TokenRun

_DEFAULT = "lora"


def init(
    template: Annotated[
        str | None,
        typer.Argument(metavar="TEMPLATE", help="One of `unisono init --list`; default: lora."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write to this file, which must not exist; default: stdout.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Read these rows, and fill in their format, a length, a batch and intervals that fit them.",
            show_default=False,
        ),
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
    from_axolotl: Annotated[
        Path | None,
        typer.Option(
            "--from-axolotl", metavar="FILE", help="Translate this axolotl file.", show_default=False
        ),
    ] = None,
    from_trl: Annotated[
        str | None,
        typer.Option(
            "--from-trl",
            metavar="FILE|COMMAND",
            help="Translate this TRL file, or the text of a command: 'trl sft --…'.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a commented config to start from, or a job file for a cluster."""
    foreign = {
        "--from-llamafactory": from_llamafactory, "--from-axolotl": from_axolotl, "--from-trl": from_trl
    }  # fmt: skip
    options = [option for option, value in foreign.items() if value is not None]
    if options:
        others = ["--data"] * (data is not None) + ["a template"] * (template is not None) + options[1:]
        if others:
            raise _exclusive(f"{others[0]} and {options[0]}")
        _translate(options[0], str(foreign[options[0]]), out)
        return
    if listing:
        _list_templates()
        return
    name = template or _DEFAULT
    text, facts = template_text(name), RowFacts()
    if data is not None:
        text, facts = for_rows(name, text, data)
    printer = output()
    if out is None:
        (
            printer.emit({"schema": 1, "template": name, "text": text, **facts})
            if printer.json
            else printer.verbatim(text.rstrip("\n"))
        )
        return
    _write_new(out, text)
    if printer.json:
        printer.emit({"schema": 1, "template": name, "path": str(out), **facts})
    keys = "`model`" if data else "`model` and `data.train`"
    if name in job_names():
        printer.notify(f"wrote {out}: fill in the <…>")
        return
    fits = "" if data else "; with `--data FILE` it gets what fits your rows"
    printer.notify(f"wrote {out}: set {keys} in it, then `unisono train {out}`{fits}")


def _exclusive(what: str) -> "UnisonoError":
    from unisono.base.errors import UsageError

    return UsageError.of(f"{what} are given", where="command line", fix="remove one of them")


class RowFacts(TypedDict, total=False):
    """What is known of rows, for programs; `proposed`: a ProposedExtent."""

    data: "Survey"
    proposed: Mapping[str, object]


def for_rows(name: str, text: str, path: str) -> tuple[str, RowFacts]:
    """A template's text for the rows at a path, and what is known of them, for programs.

    Raises:
        UsageError: if the template is not for rows, or not for these.
        DataError: if they cannot be read, or are of no known format.
    """
    import yaml

    from unisono.base.errors import UsageError
    from unisono.base.requirements import refuse_without_trainer
    from unisono.base.text import Duration
    from unisono.guard.facts import read_environment
    from unisono.guard.supervise.task_process import run_request
    from unisono.trainer.plan.extent import propose_extent
    from unisono.trainer.plan.task_requests import SurveyRequest

    if name in job_names():
        raise UsageError.of(f"{name} is a job file, which has no rows", where="--data", fix="remove --data")
    refuse_without_trainer("command line: --data")
    template = yaml.safe_load(text)
    request = SurveyRequest(path, template["data"].get("packing", True), read_environment().cache_dir)
    rows = run_request(request)
    if template.get("objective") == "pretrain" and rows["format"] != "text":
        raise UsageError.of(
            f"the template {name} is for plain text, and the rows are {rows['format']}",
            where=path,
            why=rows["why"],
            fix="`unisono init lora` or `unisono init full`",
        )
    extent = propose_extent(
        rows["sequences"],
        global_batch=template["batch"]["global"],
        epochs=int(Duration.parse(template["duration"]).amount),
        every=int(Duration.parse(template["eval"]["every"]).amount),
    )
    _say_what_was_found(rows, extent)
    facts: RowFacts = {"data": rows, "proposed": asdict(extent)}
    return _filled(text, _values_for(rows, extent, path, template)), facts


def _say_what_was_found(rows: "Survey", extent: "ProposedExtent") -> None:
    from unisono.base.text import one_line

    printer = output()
    printer.notify(
        f"{rows['rows']:,} rows, {rows['format']}: {one_line(rows['why'])}; the longest has about"
        f" {rows['longest']:,} tokens"
    )
    if rows["bad"]:
        printer.warn(
            f"warning: {rows['bad']:,} rows cannot be used, the first at {one_line(rows['first_bad'])} (fix"
            " them, or set data.on_bad_row: skip)"
        )
    printer.notify(
        f"about {rows['sequences']:,} sequence{'' if rows['sequences'] == 1 else 's'} of up to"
        f" {rows['max_length']:,} tokens, {extent.global_batch} a step: about {extent.steps:,} optimizer"
        f" steps in {extent.epochs} epoch{'' if extent.epochs == 1 else 's'}"
    )


def _values_for(
    rows: "Survey", extent: "ProposedExtent", path: str, template: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """The values for keys of a template, each with its comment."""
    from unisono.base.text import Duration

    columns = ", ".join(f"{ours}: {_scalar(theirs)}" for ours, theirs in rows["columns"].items())
    train = f"[{{path: {_scalar(path)}, columns: {{{columns}}}}}]" if columns else _scalar(path)
    values = {
        "data.train": (train, f"{rows['rows']:,} rows"),
        "data.format": (rows["format"], "of these rows"),
        "data.max_length": (
            str(rows["max_length"]),
            f"tokens; the longest row has about {rows['longest']:,}",
        ),
        "batch.global": (
            str(extent.global_batch),
            f"sequences per step: about {extent.steps:,} steps",
        ),
        "duration": (str(Duration(extent.epochs, "epochs")), "or `500 steps`, or `2M tokens`"),
        "eval.every": (f"{extent.every} steps", ""),
        "checkpoint.every": (f"{extent.every} steps", ""),
    }
    if rows["rows"] * template["data"]["eval"] < 1:
        values |= {
            "data.eval": ("null", "too few rows to hold some out"),
            "eval.stop_after": ("null", "only with data.eval"),
            "checkpoint.best": ("null", "only with data.eval"),
        }
    if rows["beyond"] and template["data"]["too_long"] != "split":
        values["data.too_long"] = ("cut", f"about {rows['beyond']:,} rows are longer")
    if rows["objective"] != "sft":
        lower = template["optim"]["lr"] / 10
        values |= {
            "objective": (rows["objective"], "the rows have answers to compare"),
            "optim.lr": (f"{lower:.1e}", "a tenth of the rate for fine-tuning"),
        }
    return values


def _scalar(value: str) -> str:
    """A text as YAML, also inside brackets."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=1000).strip()[1:-1]


_COMMENTS_OF_TEMPLATES_AT = 35  # their column


def _filled(text: str, values: dict[str, tuple[str, str]]) -> str:
    """The text of a template with values and comments in place of its own; a section's new key
    `objective` stands before `data`.
    """
    lines, section = [], ""
    for line in text.splitlines():
        key, colon, _ = line.partition(":")
        name = key.strip()
        if colon and not line.startswith((" ", "#")):
            section = name
        if line == "data:" and "objective" in values:
            lines += [_setting("objective", *values["objective"]), ""]
        dotted = f"{section}.{name}" if line.startswith(" ") else name
        is_new = colon and dotted in values and dotted != "objective"
        lines.append(_setting(key, *values[dotted]) if is_new else line)
    return "\n".join(lines) + "\n"


def _setting(key: str, value: str, comment: str) -> str:
    setting = f"{key}: {value}"
    return f"{setting:<{_COMMENTS_OF_TEMPLATES_AT - 1}} # {comment}" if comment else setting


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
        from unisono.base.errors import UsageError
        from unisono.base.text import nearest

        near = nearest(name, names)
        raise UsageError.of(
            f"there is no template {name}",
            fix=f"did you mean `{near}`?" if near else f"choose one of {', '.join(names)}",
        )
    folder = _configs() / "jobs" if name in job_names() else _configs()
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")


def _configs() -> Traversable:
    return resources.files("unisono.front.cli") / "templates"


def _names_in(folder: Traversable) -> list[str]:
    return [item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")]


def _read_foreign(option: str, source: str) -> "Translation":
    """The file, or command, of another tool in our terms."""
    from unisono.base.errors import ConfigError
    from unisono.trainer.config.yaml_file import read_yaml

    if option == "--from-llamafactory":
        from unisono.trainer.readers.llamafactory.reader import read_llamafactory

        return read_llamafactory(Path(source))
    if option == "--from-trl":
        from unisono.trainer.readers.trl.trl_file import read_trl

        return read_trl(source)
    from unisono.trainer.readers.axolotl.axolotl_file import recognizes, to_config

    path = Path(source)
    raw, lines = read_yaml(path)
    if not recognizes(raw, path):
        raise ConfigError.of(
            f"{path} is not a file of axolotl",
            where=source,
            why="it has no `base_model` with one of its other keys",
            fix="pass such a file; our own config needs no translation",
        )
    return to_config(raw, lines, path, ())


_TOOLS = {"--from-llamafactory": "LLaMA-Factory", "--from-axolotl": "axolotl", "--from-trl": "TRL"}


def _translate(option: str, source: str, out: Path | None) -> None:
    """Writes the config of a file of another tool; with --json lists the fate of each key.

    Raises:
        UnisonoError: with all that is wrong with the file.
    """
    from unisono.base.errors import UnisonoError
    from unisono.trainer.config import config_of

    translation = _read_foreign(option, source)
    try:
        loaded = config_of(translation, verb="init")
    except UnisonoError as error:
        if not output().json:
            raise
        _list_refused_keys(translation, error)
        return
    text = _config_text(translation, loaded, tool=_TOOLS[option])
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
    """Emits the keys also where there is no config; a file of a different verb has none, and yet
    its keys may all be fine.
    """
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
    from unisono.base.files import write_text

    refuse_unwritable(path, "--out")
    write_text(path, text)


_COMMENT_AT = 48  # the column of comments


def _config_text(translation: "Translation", loaded: "LoadedConfig", *, tool: str) -> str:
    """YAML in our keys, and only those; a comment names the key of the file, or the tool's
    default.
    """
    assert loaded.translation is translation
    ignored = [key.key for key in translation.keys if key.fate == "ignored"]
    lines = [f"# Translated from {translation.name}, of {tool}."]
    if ignored:
        lines.append(f"# Ignored, since they change nothing here: {', '.join(ignored)}.")
    return "\n".join([*lines, *_lines(translation.config, "", translation)]) + "\n"


def _lines(section: Mapping[str, object], prefix: str, translation: "Translation") -> list[str]:
    import yaml

    lines: list[str] = []
    indent = "  " * prefix.count(".")
    for name, value in section.items():
        key = prefix + name
        if isinstance(value, dict) and key not in translation.origins:
            lines += [f"{indent}{name}:", *_lines(value, f"{key}.", translation)]
            continue
        text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000)
        first, *more = text.rstrip("\n").split("\n")
        comment = f"# {translation.names.get(key, 'the default there')}"
        lines += [f"{indent + first:<{_COMMENT_AT}} {comment}", *(indent + line for line in more)]
    return lines


app = typer.Typer(help="Show the rows of a config.", rich_markup_mode=None)

_BAR = 40  # characters of the longest bar of the histogram
_VALUE = 80  # characters of a column's name or value
_BESIDE_BAR = 26  # characters in front of a bar


@app.callback()
def _group() -> None:
    """Makes `data` a group of commands."""


@app.command("preview", epilog="For example: unisono data preview train.yaml data.max_length=512 --rows 3")
def preview(
    config: Annotated[Path, typer.Argument(help="The config, as for `unisono train`.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides of config keys, e.g. data.max_length=512.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Number of rows to show.")] = 5,
    ids: Annotated[
        bool,
        typer.Option("--ids", help="With --json: add the token ids, and which of them count in the loss."),
    ] = False,
) -> None:
    """Show the first rows as the model sees them.

    Loss tokens are marked; the lengths and the data report follow the rows.
    """
    from unisono.base.errors import UsageError
    from unisono.front.cli.output import output
    from unisono.guard.facts import read_environment
    from unisono.guard.supervise.task_process import run_request
    from unisono.jobs.runs.config_file import load_config
    from unisono.trainer.plan import DataSummary
    from unisono.trainer.plan.task_requests import PreviewRequest

    printer = output()
    if ids and not printer.json:
        raise UsageError.of("ids are given as JSON only", where="--ids", fix="add --json, or omit --ids")
    loaded = load_config(config, tuple(overrides or ()), verb="preview")
    translation = loaded.translation
    for text in translation.notes() if translation else []:
        printer.notify(text)
    previewed = run_request(PreviewRequest(loaded.config, read_environment().cache_dir, rows, ids))
    if printer.json:
        printer.emit({"schema": 1, **previewed})
        return
    for warning in DataSummary.model_validate(previewed["data"]).warnings:
        printer.warn(f"warning: {warning}")
    _show(previewed)


def _show(previewed: "Preview") -> None:
    """Writes the preview to stdout: coloured on a terminal, with ⟦brackets⟧ around loss tokens
    elsewhere.
    """
    import sys

    from rich.console import Console
    from rich.text import Text

    from unisono.base.text import plain
    from unisono.front.cli.output import output, styled, terminal_width
    from unisono.guard.facts import read_environment

    width = terminal_width(sys.stdout)
    coloured = sys.stdout.isatty() and read_environment().colour and not output().json
    if not coloured:
        for line in preview_lines(previewed, width=width):
            output().quote("".join(_BRACKETS[kind].format(part) for part, kind in line))
        return
    console = Console(
        width=width or None, file=styled(sys.stdout), highlight=False, markup=False, emoji=False
    )
    for line in preview_lines(previewed, width=width):
        if not any(kind for _, kind in line):
            output().quote("".join(part for part, _ in line))
            continue
        console.print(Text.assemble(*((plain(part), _STYLES[kind]) for part, kind in line)))


Kind = Literal["", "loss", "lost"]
Line = list[tuple[str, Kind]]
"""Parts of a line: text, tokens that count in the loss, and parts of a row that are in no token."""
_BRACKETS: dict[Kind, str] = {"": "{}", "loss": "⟦{}⟧", "lost": "not rendered: {}"}
_STYLES: dict[Kind, str] = {"": "", "loss": "bold green", "lost": "strike"}


def preview_lines(previewed: "Preview", *, width: int = 0) -> list[Line]:
    """The lines of a preview, without control characters; bars fit a terminal of `width` columns if
    not 0.
    """
    from unisono.trainer.plan import DataSummary

    lines: list[Line] = []
    for row in previewed["rows"]:
        for part in _parts(row):
            lines += [*_row_lines(part), [("", "")]]
    data = DataSummary.model_validate(previewed["data"])
    lines += [
        [(shown(text), "")]
        for text in (
            *_length_lines(previewed["lengths"], width, is_unit=_is_unit(previewed["rows"])),
            "",
            *_figure_lines(data),
            *_ledger_lines(previewed, data),
        )
    ]
    return lines


def _parts(row: "ShownRow") -> "list[ShownRow]":
    """The rows to show of a row: of a preference row both."""
    if "chosen" in row:
        lost, pictures = row.get("not_rendered", []), row.get("pictures", [])  # the same prompt
        sides: list[ShownRow] = [
            {**side, "row": f"{row['row']} {name}"}
            for name, side in (("chosen", row["chosen"]), ("rejected", row["rejected"]))
        ]
        return [sides[0], {**sides[1], "not_rendered": lost, "pictures": pictures}]
    if "kl" in row:
        name = "desirable" if row["desirable"] else "undesirable"
        rated: ShownRow = {**row, "row": f"{row['row']} {name}"}
        return [rated, {**row["kl"], "row": f"{row['row']} mismatched"}]
    return [row]


def _row_lines(row: "ShownRow") -> list[Line]:
    import json

    from unisono.base.text import one_line, plain

    share = row["loss_tokens"] / max(1, row["tokens"])
    spans = " + ".join(shown(_span(run)) for run in row["runs"])
    head = (
        f"── {one_line(row['row'])}: {row['tokens']} tokens, {row['loss_tokens']} in the loss ({share:.0%}) ="
        f" {spans}"
    )
    lines: list[Line] = [[(shown(head), "")], []]
    for run in row["runs"]:
        kind: Kind = "loss" if run["loss"] else ""
        first, *more = plain(run["text"]).split("\n")
        lines[-1].append((first, kind))
        lines += [[(text, kind)] for text in more]
    lines += [[(f"picture {words}", "")] for words in row.get("pictures", ())]
    lines += [[(one_line(part), "lost")] for part in row.get("not_rendered", ())]
    if "columns" in row:
        given = (
            f"{one_line(name, limit=_VALUE)} = {one_line(json.dumps(value, ensure_ascii=False), limit=_VALUE)}"
            for name, value in row["columns"].items()
        )
        lines.append([(f"rewards get: {', '.join(given) or 'no columns'}", "")])
    return [[(part, kind) for part, kind in line if part] for line in lines]


def _span(run: "TokenRun") -> str:
    """The tokens of a run, and whether and how much they count in the loss."""
    if not run["loss"]:
        return str(run["tokens"])
    weight = run["weight"]
    return (
        f"{run['tokens']} in the loss"
        if weight == 1
        else f"{run['tokens']} in the loss with weight {weight:g}"
    )


def _is_unit(rows: "list[ShownRow]") -> bool:
    return bool(rows) and ("chosen" in rows[0] or "kl" in rows[0])


def _length_lines(classes: "list[LengthClass]", width: int, *, is_unit: bool) -> list[str]:
    longest = min(_BAR, max(1, width - _BESIDE_BAR)) if width else _BAR
    most = max(entry["rows"] for entry in classes)
    lines = ["tokens per row" + (", both sides together" if is_unit else "")]
    for entry in classes:
        bar = "█" * -(-longest * entry["rows"] // most)
        lines.append(f"{entry['first']:>7}–{entry['last']:<7} {entry['rows']:>9,} {bar}".rstrip())
    return lines


def _figure_lines(data: "DataSummary") -> list[str]:
    from unisono.base.text import one_line

    lines = [f"format    {one_line(text)}" for text in data.formats]
    lines.append(f"template  {one_line(data.template)}")
    for split, part in (("train", data.train), ("eval", data.eval)):
        if part:
            counts = (
                f"{part.rows:,} rows in {part.sequences:,} sequences, {part.tokens:,} tokens,"
                f" {part.loss_tokens / part.tokens:.1%} in the loss; longest row {part.longest_row:,}"
            )
            lines.append(split.ljust(10) + counts)
    use = f"{'hit' if data.cache_hit else 'miss'}: {one_line(data.cache_reason)}"
    return [*lines, "cache".ljust(10) + use]


def _note_lines(previewed: "Preview") -> list[str]:
    from unisono.base.text import one_line

    return [
        f"  {note['what']:<12} {one_line(note['file'])}:{note['line']}: {one_line(note['why'], limit=160)}"
        for note in previewed["notes"]
    ]


def _ledger_lines(previewed: "Preview", data: "DataSummary") -> list[str]:
    from unisono.base.text import one_line

    lines = []
    for source in previewed["ledger"]["sources"]:
        dropped = "".join(f", {n:,} dropped ({why})" for why, n in source["dropped"].items())
        counts = (
            f"{one_line(source['path'])}: {source['rows']:,} rows = {source['used']:,}"
            f" used, {source['bad']:,} bad{dropped}; of the used {source['cut']:,} cut"
            f" ({source['tokens_cut']:,} tokens lost), {source['split']:,} split, {source['not_rendered']:,}"
            f" with parts not rendered, {source['eval']:,} for evaluation"
        )
        lines.append("ledger".ljust(10) + counts)
    lines += _note_lines(previewed)
    unlisted = sum(data.ledger[name] for name in ("bad", "dropped", "cut", "split", "not_rendered")) - len(
        previewed["notes"]
    )
    return lines + ([f"  and {unlisted:,} more: they are in the run's data.json"] if unlisted > 0 else [])
