"""The command `unisono completion`: scripts for bash, zsh and fish, and the words that they offer
for a command line.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from unisono.front.cli.output import GLOBAL_FLAGS, output

Word = tuple[str, str]
"""A word to offer, and its description. A word that ends with `=`, `.` or `/` is to be
continued.
"""

_BASH = """\
_unisono() {
  local word
  COMPREPLY=()
  while IFS= read -r word; do
    COMPREPLY+=("$(printf '%q' "$word")")
  done < <("$1" completion bash --line "${COMP_LINE:0:COMP_POINT}" --breaks "$COMP_WORDBREAKS" 2>/dev/null)
  if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]]; then compopt -o nospace; fi
}
complete -F _unisono unisono
"""
_ZSH = """\
#compdef unisono
_unisono() {
  local line word
  local -a open done open_texts done_texts
  for line in "${(@f)$("${words[1]}" completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}"; do
    [[ -n $line ]] || continue
    word="${line%%$'\\t'*}"
    if [[ $word == *[=./] ]]; then open+=("$word"); open_texts+=("${line/$'\\t'/  -- }")
    else done+=("$word"); done_texts+=("${line/$'\\t'/  -- }"); fi
  done
  (( $#open )) && compadd -l -S '' -d open_texts -a open
  (( $#done )) && compadd -l -d done_texts -a done
}
if [[ $funcstack[1] == _unisono ]]; then _unisono "$@"; else compdef _unisono unisono; fi
"""
_FISH = """\
function __unisono_words
  set -l words (commandline -opc)
  $words[1] completion fish --line (commandline -cp | string collect) 2>/dev/null
end
complete -c unisono -f -a '(__unisono_words)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_VALUES = {
    "--format": ("gguf", "diffusers", "kohya"),
    "--quantize": ("f16", "bf16", "f32", "q8_0", "q4_k_m", "q5_k_m", "q6_k"),
    "--nproc-per-node": ("auto", "gpu"),
}
_PATHS = ("FILE", "DIR")


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
    line: Annotated[str | None, typer.Option("--line", hidden=True)] = None,
    breaks: Annotated[str, typer.Option("--breaks", hidden=True)] = "",
) -> None:
    """Print the script that makes the Tab key complete commands, options, config keys, runs and
    files.
    """
    from unisono.base.errors import UsageError

    if shell not in _SCRIPTS:
        raise UsageError.of(
            f"there is no completion for {shell}", where="SHELL", fix=f"choose {', '.join(_SCRIPTS)}"
        )
    printer = output()
    if line is None:
        printer.verbatim(_SCRIPTS[shell].rstrip("\n"))
        return
    for word, text in shown(words_for(line), line, shell=shell, breaks=breaks):
        printer.verbatim(f"{word}\t{text}" if text and shell != "bash" else word)


def shown(words: Iterable[Word], line: str, *, shell: str, breaks: str) -> Iterator[Word]:
    """The words as a shell takes them: bash replaces only what follows the last of its `breaks`,
    e.g. `=`.
    """
    current = split(line)[1]
    cut = 1 + max((current.rfind(mark) for mark in breaks if mark in "=:"), default=-1)
    for word, text in words:
        yield (word[cut:] if shell == "bash" else word), text


def split(line: str) -> tuple[list[str], str]:
    """The finished words of a command line, without the program, and the word at the cursor."""
    for end in (
        ("x", "'", '"', "") if line.endswith("\\") else ("", "'", '"')
    ):  # an open quote, or a backslash
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        if end == "x":
            words[-1] = words[-1][:-1]
        is_new = not end and line[-1:].isspace()
        return (words[1:], "") if is_new or len(words) < 2 else (words[1:-1], words[-1])
    return [], ""


def words_for(line: str) -> list[Word]:
    """What may stand at the end of a command line, in place of its last word."""
    from unisono.front.cli.app import parser

    words, current = split(line)
    command = parser()
    remaining = [word for word in words if word not in GLOBAL_FLAGS]
    while remaining and remaining[0] in getattr(command, "commands", {}):
        command = command.commands[remaining.pop(0)]
    if "--" in remaining:  # the program of `run`
        return list(_paths(current))
    options = {name: param for param in command.params for name in param.opts if name.startswith("-")}
    before = remaining[-1].replace("_", "-") if remaining else ""
    if before in options and not options[before].is_flag:
        return _values(before, options[before], current)
    option, equals, value = current.partition("=")
    if equals and option in options:
        return [(f"{option}={word}", text) for word, text in _values(option, options[option], value)]
    if current.startswith("-"):
        named = [(name, param.help or "") for name, param in options.items() if not param.hidden]
        return _starting([*named, *GLOBAL_FLAGS.items()], current)
    if commands := getattr(command, "commands", None):
        return _starting([(name, inner.get_short_help_str(90)) for name, inner in commands.items()], current)
    return _arguments(command, _positional(remaining, options), current)


def _starting(words: Iterable[Word], current: str) -> list[Word]:
    return [word for word in words if word[0].startswith(current)]


def _positional(words: list[str], options: Mapping[str, Any]) -> list[str]:
    """The arguments among the words: neither options nor their values."""
    arguments, is_value = [], False
    for word in words:
        if not is_value and not word.startswith("-"):
            arguments.append(word)
        option = options.get(word.replace("_", "-"))
        is_value = not is_value and option is not None and not option.is_flag
    return arguments


def _values(option: str, param: Any, current: str) -> list[Word]:
    """Values of an option."""
    if option == "--launcher":
        from unisono.jobs.launchers.launchers import launcher_names

        return _starting([(name, "") for name in launcher_names()], current)
    if option in _VALUES:
        return _starting([(value, "") for value in _VALUES[option]], current)
    takes_path = any(word in (param.metavar or "") for word in _PATHS) or option == "--out"
    return list(_paths(current)) if takes_path else []


def _arguments(command: Any, before: list[str], current: str) -> list[Word]:
    """Values of the next argument of a command."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    position = min(len(before), len(arguments) - 1)
    if position < 0 or (len(before) > position and arguments[position].nargs == 1):
        return []
    name = arguments[position].name
    return _ARGUMENTS.get(f"{command.name} {name}", _ARGUMENTS.get(name, _no_words))(current)


def _no_words(_current: str) -> list[Word]:
    return []


def _configs(current: str) -> list[Word]:
    return list(_paths(current, (".yaml", ".yml", ".json", ".toml", ".sh", ".ps1")))


def _runs(current: str) -> list[Word]:
    """Directories of runs in runs/ and here, or below what was typed; and all paths."""
    from unisono.front.board.follow import is_run

    runs: dict[str, str] = {}
    folders = (
        [Path("runs"), Path()] if not current else [Path(current.rpartition("/")[0] or ".").expanduser()]
    )
    for folder in folders:
        for path in _entries(folder):
            text = (
                str(path) if not current else current.rpartition("/")[0] + "/" * ("/" in current) + path.name
            )
            if text.startswith(current) and path.is_dir() and is_run(path):
                runs[text] = "run"
    return [*runs.items(), *(word for word in _paths(current) if word[0].rstrip("/") not in runs)]


def _paths(current: str, suffixes: tuple[str, ...] = ()) -> Iterator[Word]:
    """Files, and directories with a `/` at their end."""
    folder, slash, start = current.rpartition("/")
    for path in _entries(Path(folder + slash or ".").expanduser()):
        is_shown = path.name.startswith(start) and (start.startswith(".") or not path.name.startswith("."))
        if is_shown and path.is_dir():
            yield f"{folder}{slash}{path.name}/", ""
        elif is_shown and (not suffixes or path.suffix in suffixes):
            yield f"{folder}{slash}{path.name}", ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _overrides(current: str) -> list[Word]:
    """Config keys, one level at a time, with `=` at their end; behind it the values of a key."""
    from unisono.trainer.config.schema import RunConfig
    from unisono.trainer.config.yaml_file import section_in

    key, equals, value = current.partition("=")
    *sections, last = key.split(".")
    fields: Any = RunConfig.model_fields
    for name in sections:
        field = _field(fields, name)
        inner = section_in(field.annotation) if field is not None else None
        if inner is None:
            return []
        fields = inner.model_fields
    if equals:
        field = _field(fields, last)
        choices = _choices(field.annotation) if field is not None else []
        words = _starting([(choice, "") for choice in choices], value) if choices else list(_paths(value))
        return [(f"{key}={word}", text) for word, text in words]
    prefix = "".join(f"{name}." for name in sections)
    overrides = []
    for name, field in fields.items():
        end = "." if section_in(field.annotation) is not None else "="
        overrides.append(
            (f"{prefix}{field.alias or name}{end}", (field.description or "").partition(". ")[0])
        )
    return _starting(overrides, current)


def _field(fields: Any, name: str) -> Any:
    return next((field for known, field in fields.items() if name in (known, field.alias)), None)


def _choices(annotation: Any) -> list[str]:
    """The words that a type has for its values: of a Literal, true and false, null."""
    if annotation is bool:
        return ["true", "false"]
    if annotation is type(None):
        return ["null"]
    inner = get_args(annotation)
    words = [word for member in inner if not isinstance(member, str) for word in _choices(member)]
    return [*(member for member in inner if isinstance(member, str)), *words]


def _names(current: str) -> list[Word]:
    """What `explain` describes."""
    from unisono.base.causes import CATALOGUE
    from unisono.base.causes.variables import VARIABLES

    return _starting(
        [*((c.id, c.title) for c in CATALOGUE.values()), *((v.name, v.meaning) for v in VARIABLES)], current
    )


def _faults(current: str) -> list[Word]:
    from unisono.front.drill.drills import DRILLS

    return _starting([(drill.fault, drill.text) for drill in DRILLS], current)


def _templates(current: str) -> list[Word]:
    folder = Path(__file__).parent / "templates"
    return _starting([(path.name.partition(".")[0], "") for path in _entries(folder)], current)


def _shells(current: str) -> list[Word]:
    return _starting([(shell, "") for shell in _SCRIPTS], current)


_ARGUMENTS: dict[str, Callable[[str], list[Word]]] = {
    "config": _configs,
    "overrides": _overrides,
    "run": _runs,
    "runs": _runs,
    "target": _runs,
    "folders": lambda current: list(_paths(current)),
    "paths": lambda current: list(_paths(current)),
    "out": lambda current: list(_paths(current)),
    "explain name": _names,
    "faults": _faults,
    "template": _templates,
    "shell": _shells,
}
"""Words for an argument, by its name, or by command and name."""
