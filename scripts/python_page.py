"""The page of the Python interface, from the names of `unisono.__all__`, their signatures and
docstrings.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, is_typeddict

import unisono
from unisono.front.api.calls import DoctorOptions, Keys, TrainOptions

_PARTS = re.compile(r"^(Args|Attributes|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+): (.*)$")


def python_page() -> list[str]:
    """Every public name, in the order of use."""
    lines = [
        "# Python interface", "",
        "`import unisono` takes 20 ms and imports no torch; names are imported on first use. [How to use it](../how-to/python.md).",
    ]  # fmt: skip
    names = [name for name in unisono.__all__ if name not in ("__version__", "guarded")]
    calls = [name for name in names if not isinstance(_value(name), type)]
    for title, chosen in (
        ("Functions", calls),
        ("Config and results", [name for name in names if name not in calls and _kind(name) == "value"]),
        ("Events", [name for name in names if _kind(name) == "event"]),
        ("Errors", [name for name in names if _kind(name) == "error"]),
    ):
        lines += ["", f"## {title}"]
        for name in chosen:
            lines += ["", f"### `unisono.{name}`", "", *_entry(_value(name))]
    for title, options in (
        ("The keys of `Config`", Keys),
        ("The options of `train` and `stream`", TrainOptions),
        ("The options of `doctor`", DoctorOptions),
    ):
        lines += ["", f"## {title}", "", *_typed_dict(options)]
    lines += ["", "`unisono.guarded` is for loops of other trainers: [your own loop](../how-to/run/loop.md)."]
    return lines


def _value(name: str) -> Any:
    value = getattr(unisono, name)
    return value.__wrapped__ if inspect.ismodule(value) else value  # a room of that name


def _kind(name: str) -> str:
    value = _value(name)
    if not isinstance(value, type):
        return "function"
    if issubclass(value, BaseException) or value is unisono.Problem:
        return "error"
    return "event" if issubclass(value, unisono.Event) else "value"


def _entry(value: Any) -> Iterator[str]:
    """The signature, the text and the members."""
    if not isinstance(value, type):
        yield from ("```python", f"{value.__name__}{_signature(value)}", "```", "")
    yield from _text(inspect.getdoc(value) or "")
    if isinstance(value, type) and issubclass(value, BaseException) and "exit_code" in vars(value):
        yield from ("", f"Exit code {vars(value)['exit_code']}.")
    if isinstance(value, type):
        yield from _members(value)


def _members(value: type) -> Iterator[str]:
    """Fields without a word in the docstring, properties and methods of the class itself."""
    told = set(re.findall(r"^\s+(\w+): ", value.__doc__ or "", re.MULTILINE))
    rows = []
    if dataclasses.is_dataclass(value):
        rows += [
            f"- `{field.name}`: {_type(field.type)}"
            for field in dataclasses.fields(value)
            if field.name not in told and field.name != "time"
        ]
    if issubclass(value, unisono.Verdict):
        own = value.__annotations__ if value is not unisono.Verdict else value.model_fields
        rows += [
            f"- `{name.rstrip('_')}`: {_type(value.model_fields[name].annotation)}"
            for name in own
            if name not in told
        ]
    for name, member in vars(value).items():
        function = member.__func__ if isinstance(member, classmethod) else member
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            rows.append(f"- `{name}`: {_first(member)}")
        elif (
            inspect.isfunction(function)
            and inspect.getdoc(function)
            and function.__module__.startswith("unisono")
        ):
            shown = value.__name__ if name == "__init__" else f"{name}"
            if value.__name__ != "Config" and name == "__init__":
                continue
            rows.append(f"- `{shown}{_signature(function, is_method=True)}`: {_first(function)}")
    if rows:
        yield from ("", *rows)


def _typed_dict(options: type) -> Iterator[str]:
    assert is_typeddict(options)
    meanings = dict(_attributes(inspect.getdoc(options) or ""))
    if options is DoctorOptions:
        meanings = {**dict(_attributes(inspect.getdoc(TrainOptions) or "")), **meanings}
    has_meanings = bool(meanings)
    yield from (
        ("| name | type | meaning |", "|---|---|---|") if has_meanings else ("| name | type |", "|---|---|")
    )
    for name, kind in options.__annotations__.items():
        shown = _type(kind).replace("|", "\\|")
        yield f"| `{name}` | `{shown}` |" + (f" {meanings.get(name, '')} |" if has_meanings else "")
    if options is Keys:
        yield from ("", "Their meaning, and the keys of sections: [the config](config.md).")


def _text(doc: str) -> Iterator[str]:
    """The docstring: paragraphs, and its lists."""
    pieces = _PARTS.split(doc)
    yield from pieces[0].strip().splitlines()
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        yield from ("", f"{title}:", "")
        for line in inspect.cleandoc(body).splitlines():
            entry = _ENTRY.match(line)
            yield f"- `{entry[1]}`: {entry[2]}" if entry else f"  {line.strip()}"


def _attributes(doc: str) -> Iterator[tuple[str, str]]:
    for line in doc.partition("Attributes:")[2].splitlines():
        if entry := _ENTRY.match(line.strip()):
            yield entry[1], entry[2]


def _first(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _signature(function: Any, *, is_method: bool = False) -> str:
    shown = str(inspect.signature(function))
    if is_method:
        shown = re.sub(r"^\((self|cls)(, )?", "(", shown)
    shown = re.sub(r"\*<class '?(?:[\w.]+\.)?(\w+)'?>", r"Unpack[\1]", shown)
    return _short(re.sub(r"-> '(.*)'$", r"-> \1", shown))


def _short(shown: str) -> str:
    """Types without their modules."""
    return re.sub(r"(?:unisono|pathlib|os|collections|typing)(?:\.[a-z_]+)*\.(?=[A-Z])", "", shown)


def _type(kind: Any) -> str:
    is_plain = isinstance(kind, type) and not hasattr(kind, "__args__")
    return _short(kind if isinstance(kind, str) else kind.__name__ if is_plain else str(kind))
