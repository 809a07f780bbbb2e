"""The page docs/reference/commands.md in English and Chinese, from the parser of the command line.

Used by scripts/make_reference.py. The Chinese texts are those of `--help --lang zh`.
"""

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from unisono.base.locale import chinese
from unisono.front.cli.app import build_app
from unisono.front.cli.output import GLOBAL_OPTIONS

_KINDS = {"<int range>": "N", "<float range>": "X", "<str>": "TEXT", "<path>": "PATH"}
"""What stands for a value that has no name in the help."""
_EXAMPLE = "For example: "
_LABELS = {
    "en": {
        "title": "Commands", "common": "Options of all commands", "usage": "Usage", "arguments": "Arguments", "options": "Options", "example": "Example",
        "command": "command", "what": "what it does", "required": "Required.", "default": "Default: {}.", "between": "From {} to {}.",
        "least": "At least {}.", "colon": ": ",
        "about": "Every command takes these options, before or after its own. They are not repeated below. `--help` behind a command shows the same texts.",
        "help": "Show the help of a command and exit.",
    },
    "zh": {
        "title": "命令", "common": "所有命令的选项", "usage": "用法", "arguments": "参数", "options": "选项", "example": "示例",
        "command": "命令", "what": "作用", "required": "必填。", "default": "默认：{}。", "between": "取值 {} 到 {}。", "least": "至少 {}。", "colon": "：",
        "about": "每个命令都接受以下选项，写在自己的选项之前或之后均可，下文不再重复。在命令之后加 `--help --lang zh` 显示同样的文字。",
        "help": "显示命令的帮助并退出。",
    },
}  # fmt: skip


class _Page:
    """Writes commands in one language."""

    def __init__(self, language: str) -> None:
        self.label = _LABELS[language]
        self._translator = chinese() if language == "zh" else None

    def text(self, english: str) -> str:
        """A paragraph of a help."""
        plain = " ".join(english.split())
        return _marked(self._translator.beginning(plain) if self._translator else plain)

    def help(self, english: str) -> str:
        """The help of an option, with its default and bounds as sentences."""
        match = re.fullmatch(
            r"(.*?)(?:\s+\[default: ([^;\]]*[a-z ]+)\])?(?:\s+\[(.*)\])?", english, re.DOTALL
        )
        assert match is not None
        described, by_hand, extra = match.groups()
        if by_hand:  # words, written into the text
            return self.text(re.sub(r"  \[x.*", "", english))
        bounds = filter(None, map(self._bound, (extra or "").split("; ")))
        return _escaped(("" if self._translator else " ").join([self.text(described), *bounds]))

    def _bound(self, part: str) -> str:
        """`default: 5`, `x>=0` or `1<=x<=9` as a sentence."""
        if part == "required":
            return self.label["required"]
        if part.startswith("default: "):
            return self.label["default"].format(f"`{_number(part.removeprefix('default: '))}`")
        low, _, high = part.partition("<=x<=")
        if high:
            return self.label["between"].format(_number(low), _number(high))
        least = part.removeprefix("x>=")
        return self.label["least"].format(_number(least)) if least.strip("0.") else ""


def commands_page(language: str) -> list[str]:
    """Every command: usage, arguments, options, an example."""
    page, group = _Page(language), typer.main.get_command(build_app())
    assert group.help is not None
    commands = list(_commands("unisono", group))
    common = {
        "--help": page.label["help"],
        **{name: page.text(text) for name, text in GLOBAL_OPTIONS.items()},
    }
    lines = [f"# {page.label['title']}", "", page.text(group.help), ""]
    lines += [f"| {page.label['command']} | {page.label['what']} |", "|---|---|"]
    lines += [
        f"| [`{name}`](#{name.replace(' ', '-')}) | {_summary(page, command)} |" for name, command in commands
    ]
    lines += ["", f"## {page.label['common']}", "", page.label["about"], ""]
    lines += [f"- `{name}`{page.label['colon']}{text}" for name, text in common.items()]
    for name, command in commands:
        lines += ["", f"## {name}", "", *_command(page, name, command)]
    return lines


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:  # a command of typer's
    """The commands by their full names, those of groups in place of the groups."""
    for sub, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {sub}", inner)
    if not hasattr(command, "commands"):
        yield name, command


def _summary(page: _Page, command: Any) -> str:
    """One line."""
    return page.text(command.short_help or command.help.partition("\n\n")[0])


def _command(page: _Page, name: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    for paragraph in command.help.split("\n\n"):
        yield from (page.text(paragraph), "")
    usage = " ".join([name, *map(_usage, command.collect_usage_pieces(context))])
    yield from (f"**{page.label['usage']}**", "", "```bash", usage, "```")
    records = [(one.param_type_name, one.get_help_record(context)) for one in command.params]
    for kind, title in (("argument", "arguments"), ("option", "options")):
        rows = [record for of_kind, record in records if of_kind == kind and record]
        if rows:
            yield from ("", f"**{page.label[title]}**", "")
            yield from (
                f"- `{_name(spelling, kind)}`{page.label['colon']}{page.help(text)}"
                for spelling, text in rows
            )
    example = (command.epilog or "").removeprefix(_EXAMPLE)
    yield from ("", f"**{page.label['example']}**", "", "```bash", example, "```")


def _usage(piece: str) -> str:
    """`{config}` as `CONFIG`, `[[KEY=VALUE]...]...` as `[KEY=VALUE]...`."""
    inner = re.sub(r"^\{(.*?)\}(?:\.\.\.)?$|^\[(\[.*?\]\.\.\.)\]\.\.\.$", r"\1\2", piece)
    return re.sub(r"^\[?[a-z]+\]?$", lambda one: one[0].upper(), inner)


def _name(spelling: str, kind: str) -> str:
    """The name of an option with a word for its value; of an argument without its type."""
    if kind == "argument":
        name = re.sub(r" <.*>$", "", spelling)
        return name.upper() if name.islower() else name
    return re.sub(r"<[a-z ]+>", lambda one: _KINDS[one[0]], spelling)


def _marked(text: str) -> str:
    """Names of options as code, so that no line breaks behind their hyphens."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])--[a-z][a-z-]+", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def _escaped(text: str) -> str:
    """Words in angle brackets would be tags."""
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _number(text: str) -> str:
    """A number as one writes it: 300 for 300.0, 10,000 for 10000."""
    if not re.fullmatch(r"-?\d+(\.\d+)?", text):
        return text
    return f"{int(float(text)):,}" if float(text).is_integer() else text
