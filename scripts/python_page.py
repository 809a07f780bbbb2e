"""The page docs/reference/python.md in English and Chinese, from the names of `unisono.__all__`,
their signatures and docstrings.

Used by scripts/make_reference.py.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, is_typeddict

import unisono
from page_parts import Translate, heading, table, word
from unisono.front.api.calls import DoctorOptions, Keys, TrainOptions

_PARTS = re.compile(r"^(Args|Attributes|Raises):$", re.MULTILINE)
_ENTRY = re.compile(r"^(?=\w+: )", re.MULTILINE)
"""Where a member of a list begins; the lines that continue it are indented."""


def python_page(t: Translate, language: str) -> list[str]:
    """Every public name, in the order of use."""
    lines = [
        f"# {word('Python interface', language)}", "",
        t("`import unisono` takes 20 ms and imports no torch; names are imported on first use. [How to use it](../how-to/python.md)."),
    ]  # fmt: skip
    names = [name for name in unisono.__all__ if name not in ("__version__", "guarded")]
    calls = [name for name in names if not isinstance(_value(name), type)]
    for title, chosen in (
        ("Functions", calls),
        ("Config and results", [name for name in names if name not in calls and _kind(name) == "value"]),
        ("Events", [name for name in names if _kind(name) == "event"]),
        ("Errors", [name for name in names if _kind(name) == "error"]),
    ):
        lines += ["", f"## {word(title, language)}"]
        for name in chosen:
            lines += ["", f"### `unisono.{name}`", "", *_entry(_value(name), t, language)]
    for title, options in (
        ("The keys of `Config`", Keys),
        ("The options of `train` and `stream`", TrainOptions),
        ("The options of `doctor`", DoctorOptions),
    ):
        lines += [*heading(title, language), *_typed_dict(options, t, language)]
    lines += [
        "",
        t("`unisono.guarded` is for the loops of other trainers: [your own loop](../how-to/run/loop.md)."),
    ]
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


def _entry(value: Any, t: Translate, language: str) -> Iterator[str]:
    """The signature, the text and the members."""
    if not isinstance(value, type):
        yield from ("```python", f"{value.__name__}{_signature(value)}", "```", "")
    yield from _text(inspect.getdoc(value) or "", t, language)
    if isinstance(value, type) and issubclass(value, unisono.UnisonoError):
        yield from ("", t("Exit code {code}.").format(code=value.exit_code))
    if isinstance(value, type):
        rows = [*_fields(value), *_methods(value, t, language)]
        yield from ("", *rows) if rows else ()


def _fields(value: type) -> Iterator[str]:
    """The fields without a word in the docstring."""
    told = set(re.findall(r"^\s+(\w+): ", value.__doc__ or "", re.MULTILINE))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in told and field.name != "time":
                yield f"- `{field.name}`: {_type(field.type)}"
    if issubclass(value, unisono.Verdict):
        own = value.__annotations__ if value is not unisono.Verdict else value.model_fields
        for name in own:
            if name not in told:
                yield f"- `{name.rstrip('_')}`: {_type(value.model_fields[name].annotation)}"


def _methods(value: type, t: Translate, language: str) -> Iterator[str]:
    """Properties and methods of the class itself."""
    for name, member in vars(value).items():
        function = member.__func__ if isinstance(member, classmethod) else member
        if name.startswith("_") and not (name == "__init__" and value is unisono.Config):
            continue
        if isinstance(member, property):
            yield _row(name, _first(member), t, language)
        elif (
            inspect.isfunction(function)
            and inspect.getdoc(function)
            and function.__module__.startswith("unisono")
        ):
            shown = value.__name__ if name == "__init__" else name
            yield _row(f"{shown}{_signature(function, is_method=True)}", _first(function), t, language)


def _row(name: str, text: str, t: Translate, language: str) -> str:
    return f"- `{name}`{word(': ', language)}{t(text)}"


def _typed_dict(options: type, t: Translate, language: str) -> Iterator[str]:
    assert is_typeddict(options)
    meanings = dict(_attributes(options))
    if options is DoctorOptions:
        meanings = {**dict(_attributes(TrainOptions)), **meanings}
    rows = [[f"`{name}`", f"`{_type(kind)}`"] for name, kind in options.__annotations__.items()]
    if meanings:
        rows = [[*row, t(meanings[name])] for row, name in zip(rows, options.__annotations__, strict=True)]
    yield from table(["name", "type", "meaning"][: len(rows[0])], rows, language)
    if options is Keys:
        yield from ("", t("For their meaning, and for the keys of sections, see [the config](config.md)."))


def _text(doc: str, t: Translate, language: str) -> Iterator[str]:
    """The docstring: paragraphs, and its lists."""
    pieces = _PARTS.split(doc)
    for number, paragraph in enumerate(pieces[0].strip().split("\n\n")):
        yield from ("", t(_joined(paragraph))) if number else (t(_joined(paragraph)),)
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        yield from ("", f"{word(title, language)}{word(': ', language).strip()}", "")
        for name, text in _list(body):
            yield _row(name, text, t, language)


def _list(body: str) -> Iterator[tuple[str, str]]:
    """The names of a list in a docstring, with their texts."""
    for entry in _ENTRY.split(inspect.cleandoc(body))[1:]:
        name, _, text = entry.partition(": ")
        yield name, _joined(text)


def _attributes(options: type) -> Iterator[tuple[str, str]]:
    yield from _list((inspect.getdoc(options) or "").partition("Attributes:")[2])


def _joined(text: str) -> str:
    return " ".join(text.split())


def _first(value: Any) -> str:
    """The first paragraph of a docstring."""
    return _joined((inspect.getdoc(value) or "").partition("\n\n")[0])


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
