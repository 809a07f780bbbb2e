"""The program `unisono`: its commands, global flags, options that several commands share, and the
presentation of errors.
"""

import functools
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from unisono.base._version import __version__
from unisono.base.text import columns, wrapped
from unisono.front.cli.output import (
    GLOBAL_OPTIONS,
    LANGUAGES,
    Output,
    can_show,
    choose_language,
    lost_output,
    open_streams,
    output,
    set_language,
    set_output,
    shown,
    split_globals,
)

_PARSER_ERROR: Any = typer.BadParameter.__base__
"""What the parser of command lines raises: the UsageError of click, or of the copy of click inside
typer. Typer 0.29 exports no other name of it, and none of NoSuchOption, MissingParameter and
NoArgsIsHelpError, which are told apart by their names.
"""

# Command: its module in this room, its function (a group: its Typer), its line in `unisono --help`
# (at most 62 characters, one line in 80 columns), and a command that can be pasted.
_COMMANDS: dict[str, tuple[str, str, str, str]] = {
    "init": (
        "init",
        "init",
        "Write a commented config, or a job file for a cluster.",
        "unisono init > train.yaml",
    ),
    "train": (
        "train",
        "train",
        "Fine-tune a model on one device, several, or several nodes.",
        "unisono train train.yaml optim.lr=1e-4",
    ),
    "run": (
        "train",
        "run",
        "Run and watch an existing, unchanged training script.",
        "unisono run --nodes 2 --node-rank 0 --head a:29500 -- torchrun train.py",
    ),
    "doctor": (
        "doctor",
        "doctor",
        "Check this machine, or all nodes of a job, before a run.",
        "unisono doctor train.yaml",
    ),
    "data": ("init", "app", "Show the rows of a config.", "unisono data preview train.yaml"),
    "chat": ("chat", "chat", "Chat with a model.", "unisono chat runs/demo"),
    "generate": (
        "generate",
        "generate",
        "Answer one prompt, or each prompt of a file.",
        "unisono generate runs/demo 'remind me on Tuesday'",
    ),
    "serve": (
        "serve",
        "serve",
        "Serve a model over HTTP with OpenAI's API.",
        "unisono serve runs/demo --port 8000",
    ),
    "eval": (
        "generate",
        "evaluate",
        "Measure the loss of a model, and compare its answers.",
        "unisono eval runs/demo --data test.jsonl",
    ),
    "export": (
        "checkpoint",
        "export",
        "Write the adapter, or the whole model, for other tools.",
        "unisono export runs/demo merged --merge",
    ),
    "download": (
        "hub",
        "download",
        "Download a model or dataset from the Hugging Face hub.",
        "unisono download Qwen/Qwen3-0.6B",
    ),
    "push": (
        "hub",
        "push",
        "Upload the result of a run to the Hugging Face hub.",
        "unisono push runs/demo OWNER/NAME --dry-run",
    ),
    "checkpoint": (
        "checkpoint",
        "app",
        "List, verify, export and prune the checkpoints of a run.",
        "unisono checkpoint ls runs/demo",
    ),
    "logs": (
        "diagnose",
        "logs",
        "Show the output, events and verdicts of all ranks.",
        "unisono logs runs/demo",
    ),
    "board": (
        "board",
        "board",
        "Show runs in a browser, live or as one file.",
        "unisono board runs/demo",
    ),
    "studio": (
        "studio",
        "studio",
        "Start, steer and try runs in a browser.",
        "unisono studio",
    ),
    "runs": (
        "board",
        "list_",
        "List runs: state, step, loss, age and newest verdict.",
        "unisono runs",
    ),
    "drill": (
        "doctor",
        "drill",
        "Inject faults into a tiny run, and check the verdicts.",
        "unisono drill sigkill sleep",
    ),
    "diagnose": (
        "diagnose",
        "diagnose",
        "Find the cause of a failed run in its logs.",
        "unisono diagnose logs/",
    ),
    "explain": (
        "diagnose",
        "explain",
        "Describe a cause of failure or an environment variable.",
        "unisono explain nan_loss",
    ),
    "completion": (
        "completion",
        "completion",
        "Print the script that completes words with the Tab key.",
        "unisono completion bash",
    ),
}

_TRAINER_COMMANDS = frozenset(
    (
        *("chat", "checkpoint export", "data preview", "download", "drill", "eval", "export"),
        *("generate", "push", "serve"),
    )
)
"""Commands that always need the extra `train`. `train` is refused where its nodes would hear of it,
`init --data` and `checkpoint verify --replay` by themselves.
"""


class _Context(typer.Context):
    """The context of all commands; its formatter writes help in the language of the command."""


class _WithGlobalFlags:
    """Help that lists the flags of every command; `split_globals` takes them before the parser sees
    them.
    """

    context_class: Any = _Context

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)  # type: ignore[misc]
        with formatter.section("Options of every command"):
            formatter.write_dl(list(GLOBAL_OPTIONS.items()))


_AS_TORCHRUN = {"token_normalize_func": lambda option: option.replace("_", "-")}
"""`--nproc_per_node` is `--nproc-per-node`, as torchrun has it; here for all options."""
parser: Any = functools.cache(lambda: typer.main.get_command(build_app()))
"""Gives the parser of all commands; a process that forks many of them builds it once."""


class _Command(_WithGlobalFlags, TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        if ctx.command_path.removeprefix("unisono ") in _TRAINER_COMMANDS:
            from unisono.base.requirements import refuse_without_trainer

            refuse_without_trainer(f"command line: {ctx.command_path}")
        return super().invoke(ctx)


class _Group(_WithGlobalFlags, TyperGroup):
    pass


def build_app() -> typer.Typer:
    """The Typer application with all commands."""
    app = typer.Typer(
        name="unisono",
        cls=_Group,
        help=(
            "Fine-tune language models. Runs show their plan before they start, and report the cause when"
            " they fail."
        ),
        epilog="For example: unisono train train.yaml",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    for name, command in _commands().items():
        _, _, short_help, example = _COMMANDS[name]
        epilog = f"For example: {example}"
        if isinstance(command, typer.Typer):
            app.add_typer(
                command, name=name, cls=_Group, short_help=short_help, epilog=epilog, no_args_is_help=True
            )
            for inner in command.registered_commands:
                inner.cls = _Command
        else:
            app.command(
                name, cls=_Command, short_help=short_help, epilog=epilog, context_settings=_AS_TORCHRUN
            )(command)
    app.callback()(_nothing_of_its_own)
    return app


def _commands() -> Mapping[str, Any]:
    """The commands by name: functions, and Typers of groups."""
    return {
        name: getattr(importlib.import_module(f"unisono.front.cli.{module}"), attribute)
        for name, (module, attribute, _, _) in _COMMANDS.items()
    }


def command_names() -> list[tuple[str, ...]]:
    """Every command as a tuple of words: `("train",)`, `("checkpoint", "ls")`."""
    names: list[tuple[str, ...]] = [()]
    for name, command in _commands().items():
        names.append((name,))
        if isinstance(command, typer.Typer):
            names += [
                (name, str(inner.name or inner.callback.__name__))
                for inner in command.registered_commands
                if inner.callback
            ]
    return names


def _nothing_of_its_own() -> None:
    """Makes `unisono` a group of commands."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its exit code."""
    if arguments is None:  # as a program; tests keep their own streams
        open_streams()
    words, flags, language = split_globals(sys.argv[1:] if arguments is None else arguments)
    if "--version" in flags:
        sys.stdout.write(f"unisono {__version__}\n")
        sys.exit(_with_lost_output(0, words))
    set_output(Output(json="--json" in flags, quiet="--quiet" in flags, debug="--debug" in flags))
    try:
        _speak(language)
        _refuse_without_directory(words)
        ended = parser()(args=words, prog_name="unisono", standalone_mode=False)
        code = ended if isinstance(ended, int) else 0  # the code of a typer.Exit
    except KeyboardInterrupt:
        code = 130
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except Exception as error:  # noqa: BLE001 - the edge of the process
        code = _show(error, words)
    sys.exit(_with_lost_output(code, words))


def _speak(requested: str | None) -> None:
    """Sets the language of what is printed.

    Raises:
        UsageError: if `--lang` or UNISONO_LANG names none that the program has.
    """
    set_language(None)
    _Context.formatter_class = typer.Context.formatter_class
    try:
        language = choose_language(requested, os.environ)  # noqa: TID251 - the facts come later
    except ValueError as error:
        from unisono.base.errors import UsageError

        raise UsageError.of(
            f"{str(error) or repr(str(error))} is not a language of this program",
            where="--lang" if requested is not None else "UNISONO_LANG",
            why=f"the languages are {', '.join(LANGUAGES)}",
            fix="use en or zh",
        ) from None
    if language == "zh" and can_show("中文"):
        from unisono.base.locale import chinese

        translator = chinese()
        set_language(translator)
        _Context.formatter_class = _formatter(translator)


def _formatter(translator: Any) -> Any:
    """A writer of help in the language of the command, whose characters may take two columns."""
    english: Any = typer.Context.formatter_class

    class Formatter(english):
        def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
            self.write(wrapped(f"{shown('Usage')}：{prog} {args}", self.width) + "\n")

        def write_heading(self, heading: str) -> None:
            self.write(f"{'':>{self.current_indent}}{shown(heading)}：\n")

        def write_text(self, text: str) -> None:
            for part in text.split("\n\n"):
                lead = "\n" + " " * self.current_indent
                lines = _help_lines(translator, " ".join(part.split()), self.width - self.current_indent)
                self.write(lead[1:] + lead.join(lines) + "\n")

        def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
            gap = min(max(columns(name) for name, _ in rows), col_max) + col_spacing + self.current_indent
            for name, text in rows:
                lead, next_line = f"{'':>{self.current_indent}}{name}", "\n" + " " * gap
                fits = columns(lead) <= gap - col_spacing
                lines = _help_lines(translator, text, self.width - gap)
                self.write(
                    lead + (" " * (gap - columns(lead)) if fits else next_line) + next_line.join(lines) + "\n"
                )

    return Formatter


def _help_lines(translator: Any, text: str, width: int) -> list[str]:
    """The help of an option or a command, with its default in brackets."""
    match = re.fullmatch(r"(.*?)(  \[.*\])?", text, re.DOTALL)
    assert match is not None
    described, extra = match.groups(default="")
    for word in ("required", "default"):
        extra = extra.replace(word, shown(word))
    return wrapped(translator.beginning(described) + extra, width, hanging=0).split("\n")


def _refuse_without_directory(words: list[str]) -> None:
    """Refuses to run without a usable working directory, which paths and child processes depend on.

    Help needs none.

    Raises:
        UsageError: if it is gone.
    """
    try:
        os.getcwd()  # noqa: PTH109 - only whether it works matters
    except OSError as error:
        if not words or "--help" in words:
            return
        from unisono.base.errors import UsageError

        raise UsageError.of(
            f"the working directory cannot be used: {error.strerror}",
            where="working directory",
            why="paths are relative to it; it was removed or renamed, or may not be read",
            fix="cd into a directory that exists, and run the command again",
        ) from None


def _with_lost_output(code: int, words: list[str]) -> int:
    """The exit code; 6 if the results of a command could not be written.

    The outcome of a run stands: its directory has it.
    """
    lost = lost_output()
    if lost is None:
        return code
    runs = words[:1] in (["train"], ["run"]) and not {"--help", "--dry-run"} & set(words)
    what = "the messages are in the run's directory" if runs else "the result is lost"
    output().warn(f"error: stdout cannot be written: {lost.strerror}; {what}")
    return code if code or runs else 6


def _show(error: Exception, words: list[str]) -> int:
    """Shows an error for the user in plain lines, and a bug with its traceback; returns the exit
    code.
    """
    from unisono.base.errors import UnisonoError, storage_failure, unusable_path

    printer, command = output(), words[0] if words else ""
    if isinstance(error, _PARSER_ERROR):
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return error.exit_code
        error = _in_our_words(error, words)
    if not isinstance(error, UnisonoError):
        error = (
            unusable_path(error, has_started=command in ("train", "run")) or storage_failure(error) or error
        )
    defect = not isinstance(error, UnisonoError)
    if printer.debug or defect:
        printer.warn(traceback.format_exc().rstrip())
    body: Mapping[str, Any]
    if isinstance(error, UnisonoError):
        body = error.to_json()
        for line in error.lines():
            printer.warn(line)
    else:
        body = {"exit_code": 1, "problems": [{"what": repr(error)}], "verdict": None}
        printer.warn("This is a bug in unisono, not your mistake. Please report it with the lines above.")
    if printer.json:
        _emit_refusal(body, command=command)
    return error.exit_code if isinstance(error, UnisonoError) else 1


def _in_our_words(error: Any, words: list[str]) -> Exception:
    """An error of the parser of command lines as a UsageError, with the nearest option or command.

    Args:
        error: click's UsageError, whose subclasses have `option_name` or `param`.
    """
    from unisono.base.errors import Problem, UsageError

    known = error.ctx is None and words and words[0] in _COMMANDS
    path = error.ctx.command_path if error.ctx else f"unisono {words[0]}" if known else "unisono"
    kind = type(error).__name__
    if kind == "NoSuchOption":
        problem = _unknown_option(error, path)
    elif kind == "MissingParameter":
        problem = _missing_parameter(error.param, path)
    elif kind == "BadParameter" and error.param is not None:
        problem = _invalid_value(error, path, words)
    elif match := re.match(r"No such command '(.*?)'", error.message):
        problem = _unknown_command(match[1], path, list(error.ctx.command.commands))
    else:  # an option without a value, or with one that it does not take; too many arguments
        message = error.format_message().rstrip(".")
        problem = {
            "what": f"`{path}`: {message}",
            "where": path,
            "why": "options and arguments follow the usage of the command",
        }
        problem["fix"] = f"`{path} --help` shows its options and arguments"
    return UsageError(Problem(**problem | {"where": f"command line: `{problem['where']}`"}))


_TORCHRUN_ALONE = dict.fromkeys(
    (
        "--rdzv-backend",
        "--rdzv-id",
        "--rdzv-conf",
        "--standalone",
        "--local-addr",
        "--monitor-interval",
        "--start-method",
        "--role",
    ),
    "omit it",
) | {
    "--max-restarts": "--restarts N, or `restarts` in the config",
    "--log-dir": "each rank's output is in logs/ of the run",
}


def _unknown_option(error: Any, path: str) -> dict[str, str]:
    from unisono.base.text import nearest

    option = error.option_name
    known = [name for each in error.ctx.command.params for name in each.opts if name.startswith("-")]
    near = nearest(option, [*known, *(name.split()[0] for name in GLOBAL_OPTIONS)])
    fix = f"did you mean {near}? " if near else ""
    fix += f"`{path} --help` lists the options"
    if option in _TORCHRUN_ALONE:
        fix = f"it is an option of torchrun that unisono does not need: {_TORCHRUN_ALONE[option]}"
    if "." in option:
        fix = f"a config key has no dashes: {option.lstrip('-')}=VALUE"
    return {
        "what": f"{option} is not an option of `{path}`",
        "where": f"{path} {option}",
        "why": "an unknown option is refused, not ignored",
        "fix": fix,
    }


_OTHER_WORDS = {
    "preview": "data preview",
    "ls": "checkpoint ls",
    "verify": "checkpoint verify",
    "prune": "checkpoint prune",
    "sft": "train",
    "finetune": "train",
    "resume": "train CONFIG --resume",
    "infer": "generate",
    "predict": "generate",
    "test": "eval",
    "evaluate": "eval",
    "list": "runs",
    "ui": "studio",
    "webui": "studio",
    "merge": "export RUN OUT --merge",
    "help": "--help",
    "version": "--version",
}
"""Commands of a group typed without it, and words of other programs."""
_OF_A_GROUP = {"unisono data": "preview", "unisono checkpoint": "ls"}
"""The command that is meant where a group is given a path."""


def _unknown_command(word: str, path: str, known: list[str]) -> dict[str, str]:
    from unisono.base.text import nearest

    near = _OTHER_WORDS.get(word) if path == "unisono" else None
    if path in _OF_A_GROUP and Path(word).exists():
        near = f"{_OF_A_GROUP[path]} {shlex.quote(word)}"
    near = near or nearest(word, known)
    return {
        "what": f"`{word}` is not a command of `{path}`",
        "where": f"{path} {word}",
        "why": f"the commands are {', '.join(known)}",
        "fix": f"did you mean `{path} {near}`?" if near else f"`{path} --help` describes the commands",
    }


def _missing_parameter(param: Any, path: str) -> dict[str, str]:
    name, description = param.metavar or param.name, getattr(param, "help", None)
    example = next(
        (each[3] for each in _COMMANDS.values() if each[3].startswith(f"{path} ")), f"{path} --help"
    )
    return {
        "what": f"`{path}` needs {name}, which is missing",
        "where": path,
        "why": f"{name}: {description}" if description else f"{name} has no default",
        "fix": f"e.g. `{example}`",
    }


def _invalid_value(error: Any, path: str, words: list[str]) -> dict[str, str]:
    name = error.param.opts[0]
    given = f"{name} {_value_of(error.param.opts, words)}".rstrip()
    takes = _range_of(error.param, error.message)
    return {
        "what": f"{given} is not valid",
        "where": f"{path} {given}",
        "why": f"{name} takes {takes}",
        "fix": f"give {name} {takes}; `{path} --help` describes it",
    }


def _value_of(names: list[str], words: list[str]) -> str:
    """What a command line gives for an option; empty if it is not found."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in names:
            return following
        if word.partition("=")[0] in names:
            return word.partition("=")[2]
    return ""


def _range_of(param: Any, message: str) -> str:
    """What values an option takes: `a whole number from 1 to 1024`; else the parser's words."""
    low, high = getattr(param, "min", None), getattr(param, "max", None)
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    whole = annotation is int or "integer" in message
    if not whole and annotation is not float and "number" not in message:
        return f"other values: {message}"
    kind = "a whole number" if whole else "a number"
    if low is None:
        return kind
    return f"{kind} from {low:g} to {high:g}" if high is not None else f"{kind}, at least {low:g}"


def _emit_refusal(body: Mapping[str, Any], *, command: str) -> None:
    """Emits the error as JSON: `train` and `run` emit lines that end with a result, other commands
    a single object.
    """
    if command not in ("train", "run"):
        output().emit({"kind": "refused", "schema": 1, **body})
        return
    from unisono.jobs.runs.run_records import refused_result

    if body["verdict"]:
        output().emit({"kind": "verdict", **body["verdict"]})
    result = refused_result(body["exit_code"], body["problems"], body["verdict"])
    output().emit({"kind": "result", **result.to_json()})


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides of config keys, e.g. optim.lr=1e-4.", show_default=False
    ),
]
DebugComm = Annotated[bool, typer.Option("--debug-comm", help="Enable verbose communication logs.")]


def refuse_unwritable(path: Path, option: str, *, replaces: bool = False) -> None:
    """Checks a file that a command writes at its end, before the work for it.

    Args:
        replaces: whether an existing file may be replaced.

    Raises:
        UsageError: if it exists, or nothing can be written there.
    """
    from unisono.base.errors import UsageError, require_writable
    from unisono.base.files import kind_of

    folder, fix = path.absolute().parent, "name a file in a directory that can be written"
    if path.exists() and not path.is_file():  # a rename would replace a device, e.g. /dev/null
        raise UsageError.of(f"{path} is {kind_of(path.stat().st_mode)}", where=option, fix=fix)
    if (path.exists() or path.is_symlink()) and not replaces:
        raise UsageError.of(
            f"{path} exists", where=option, why="nothing is overwritten", fix="name a new file, or remove it"
        )
    if not os.path.lexists(folder):
        raise UsageError.of(
            f"there is no directory {folder}",
            where=option,
            why=f"{path} would be in it",
            fix=f"mkdir -p {folder}; or {fix}",
        )
    require_writable(folder, where=option, why=f"{path} would be in it", fix=fix)
