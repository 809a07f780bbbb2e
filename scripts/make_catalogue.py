"""The catalogue of texts in Chinese, src/unisono/base/locale/zh/LC_MESSAGES/unisono.po: its English
side, extracted from the source.

python scripts/make_catalogue.py           adds the texts that are new, without a translation, and removes those that are gone
python scripts/make_catalogue.py --check   changes nothing; exit code 1 and a list if a text of COMPLETE has no translation, an entry
                                           has other values than its text, or there is no such text; the others are only counted
python scripts/make_catalogue.py --fill F  fills in translations from a file of lines `ENGLISH<tab>CHINESE`

An f-string becomes a template: its values are placeholders with the names of their expressions, and
a choice between two texts within it gives two templates. See
docs/decisions/0029-translated-where-it-is-printed.md.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from cause_pages import cause_pages
from translated_pages import translated_pages
from unisono.base.causes import CATALOGUE as CATALOGUE_OF_CAUSES
from unisono.base.causes import Cause
from unisono.base.causes.variables import ADVICE, VALUES, VARIABLES
from unisono.base.locale import LABELS, PLACEHOLDER, escaped, read_entries

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "unisono"
CATALOGUE = SOURCE / "base/locale/zh/LC_MESSAGES/unisono.po"

NOT_SHOWN = ("guard/diagnosis/scan.py", "guard/diagnosis/report_t", "guard/diagnosis/line_prefixes.py", "guard/integrations/inside/", "front/api/", "base/locale/",
             "jobs/runs/curve_drawing.py", "front/board/regions.py", "front/board/page.py")  # fmt: skip
"""Files whose strings are not for people, or that have words of their own: signs that are searched
in logs, and the board's page.
"""
WORDS = (
    "error", "warning", "where", "why", "fix", "next", "result", "checkpoint", "checkpoints", "evaluation", "check", "against",
    "if this", "with unisono", "unlikely", "ruled out", "cause",
    "Usage", "Arguments", "Options", "Commands", "Show this message and exit.",
    "Option {name} requires an argument", "Option {name} does not take a value", "Got unexpected extra argument ({arguments})",
    "Got unexpected extra arguments ({arguments})", "Missing command", "{value} is not a valid integer", "{value} is not a valid float",
    "rank {rank}", "host {host}", "rank {rank}, host {host}", "required", "default", "e.g. {example}",
    "{name} takes a whole number from {low} to {high}", "{name} takes a whole number, at least {low}",
    "{name} takes a number from {low} to {high}", "{name} takes a number, at least {low}", "{number} for evaluation", "{number} cut", "{number} split", "{number} dropped", "{number} bad", "fresh", "flat rows", "padded rows", "sequences", "pictures", "tokens",
    "a value", "text that is not empty", "ledger", "rows", "pairs", "perplexity", "training", "answering", "starting", "evaluating", "leaving",
    *(f"{kind} {bounds}" for kind in ("a number", "a whole number") for bounds in (
        "above {low}", "of at least {low}", "at most {high}", "below {high}", "of at least {low} and at most {high}",
        "of at least {low} and below {high}", "above {low} and at most {high}", "above {low} and below {high}")),
    "{name} must be equal on all ranks.", "{name} differs by design; the launcher sets it.",
    "{name} may differ between nodes, and must be valid on each node.", "{name} may differ freely.",
    "Suspicious: {text}", "Signs:", "Fix:", "Devices", "Network", "Causes", "before", "during", "after", "none", "nothing", "nobody",
    "{n} passed", "{n} warn", "{n} failed", "{n} unknown", "unisono's cache", "the hub's cache", "temporary files",
    "fault", "expected", "reported", "who", "right", "WRONG", "skipped", "intact", "DAMAGED", "forgotten", "(ended)",
    "completed", "refused", "disagreed", "stalled", "died", "unfit", "corrupt", "preempted", "interrupted",
    "No such file or directory", "Permission denied", "No space left on device", "Read-only file system", "File too large", "Is a directory",
    "Not a directory", "File exists", "Too many open files", "Input/output error", "Connection refused", "Connection reset by peer",
    "Connection timed out", "No route to host", "Network is unreachable", "Address already in use", "Disk quota exceeded", "Broken pipe",
    "File name too long", "Stale file handle", "Directory not empty", "Cannot allocate memory", "Name or service not known", "timed out",
)  # fmt: skip
"""Labels, and texts of the parser of command lines and of the system."""
COMPLETE = {
    "causes": ("base/causes/",),
    "verdicts": ("guard/agree/", "guard/watch/", "guard/rendezvous/meeting_rules.py", "guard/supervise/postmortem.py",
                 "guard/supervise/evidence.py", "guard/supervise/stack_collection.py", "guard/programs/program_end.py",
                 "trainer/training/training_checks.py"),
    "help": ("front/cli/app.py", "front/cli/output.py", "front/cli/job_options.py"),
    "first screen, progress": ("front/cli/screen.py", "front/cli/terminal.py", "jobs/runs/start_decision.py"),
    "diagnose, its likelihood words and questions": ("guard/diagnosis/", "front/cli/diagnose.py"),
    "generate": ("front/cli/generate.py", "trainer/task/generation.py", "trainer/task/inference.py",
                 "trainer/task/prompts.py"),
    "runs": ("front/cli/board.py", "guard/rundir/records.py"),
    "doctor": ("front/checks/", "front/cli/doctor.py"),
}  # fmt: skip
"""What must be complete in Chinese: the files, or folders, of each. To it belong labels, the
pages of causes and of the reference, the help of each command, and in any file the arguments of COMPLETE_CALLS. Any
other text may stay English.
"""
COMPLETE_CALLS = ("Verdict", "Evidence", "phase")
"""Calls that make a part of a verdict, or a line of progress."""
_HELP = ("help", "short_help", "epilog")
_VARIABLES = "base/causes/variables.toml"
SHORT_TEXTS = ("front/cli/terminal.py", "front/cli/screen.py", "front/checks/examination.py")
"""Files of which a text of one word counts, too."""

_HEAD = """# Texts in Chinese, by the English text: causes, and what the program shows. One line for each text; unisono.base.locale reads this file.
# scripts/make_catalogue.py adds new texts and removes old ones; its list COMPLETE says which must have a translation.
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\nLanguage: zh_CN\\n"
"""
_WITHOUT = re.compile(rf"^(?:{'|'.join(LABELS)}) |^(?:error|warning|unisono): |^· | \[\{{cause\}}\]$")
"""The program translates labels and ids of causes by themselves."""
_MOST_VARIANTS = 12
_HOW = 3
_RUN = re.compile(rf"(?:{PLACEHOLDER.pattern})+")
_WORD = re.compile(r"(?<![\w./\\-])[A-Za-z][a-z']*(?![\w/=(])")
_TESTS = {"startswith", "endswith", "removeprefix", "removesuffix", "replace", "split", "partition", "rpartition", "compile", "match", "search",
          "fullmatch", "sub", "findall", "read_text", "with_name", "finditer", "getLogger", "find", "index", "strip", "lstrip", "rstrip", "environ", "get", "add_argument",
          "encode", "decode", "debug", "import_module", "getattr", "execute", "cast"}  # fmt: skip
"""Calls whose arguments are compared or parsed, not shown."""
_NO_TEXT = {"pattern", "hints", "source", "example", "sources", "description", "metavar", "how"}
"""Keyword arguments that are not shown by the program."""

Pieces = tuple[str, ...]
"""Literal text and placeholders, alternating from a literal; a placeholder is its name."""


class Texts(ast.NodeVisitor):
    """Collects the templates of one file, and whether each must have a translation."""

    def __init__(self, *, least_words: int, is_complete: bool) -> None:
        self.templates: dict[str, bool] = {}
        self._least_words = least_words
        self._is_complete = is_complete

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """The docstring of a command is its help."""
        told = " ".join(map(ast.unparse, (*node.decorator_list, node.args)))
        if re.search(r"typer\.(?:Argument|Option)\(|app\.command", told):
            for part in (ast.get_docstring(node) or "").split("\n\n"):
                self.templates[" ".join(part.split())] = True
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A docstring is no text."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """A quoted annotation is no text."""
        for name in ("annotation", "returns"):
            if isinstance(getattr(node, name, None), ast.Constant):
                setattr(node, name, None)
        super().generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Compared with, not shown; a call or a choice beside it may be."""
        for part in (node.left, *node.comparators):
            if not isinstance(part, ast.Constant | ast.JoinedStr | ast.Tuple | ast.Set | ast.List):
                self.visit(part)

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        """Nothing: a pattern is compared, not shown."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Types and keys."""
        if isinstance(node.value, ast.Dict):  # {"a": "text"}[kind]
            self.visit(node.value)
        elif isinstance(node.value, ast.Name) and node.value.id == "Annotated":
            self.visit(node.slice)

    def visit_Dict(self, node: ast.Dict) -> None:
        """The keys are not shown."""
        for value in node.values:
            self.visit(value)

    def visit_Call(self, node: ast.Call) -> None:
        """Without the arguments of tests."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        self.visit(node.func)
        is_complete, self._is_complete = self._is_complete, self._is_complete or name in COMPLETE_CALLS
        self._visit_arguments(name, node)
        self._is_complete = is_complete

    def _visit_arguments(self, name: str, node: ast.Call) -> None:
        if (
            name == "DoctorCheck" and len(node.args) > _HOW
        ):  # how a check of doctor works is for its page alone
            for part in (*node.args[:_HOW], *node.args[_HOW + 1 :]):
                self.visit(part)
            return
        if isinstance(node.func, ast.Name) and name in ("count", "_count", "number_list"):
            self._take_noun(name, [part.value for part in node.args if isinstance(part, ast.Constant)])
            return
        if name in _TESTS:
            for part in (*node.args, *(keyword.value for keyword in node.keywords)):
                if not isinstance(part, ast.Constant):
                    self.visit(part)
            return
        for part in node.args:
            self.visit(part)
        is_complete = self._is_complete
        for keyword in node.keywords:
            if keyword.arg not in _NO_TEXT:
                self._is_complete = is_complete or keyword.arg in _HELP
                self.visit(keyword.value)
        self._is_complete = is_complete

    def _add(self, text: str) -> None:
        self.templates[text] = self._is_complete or self.templates.get(text, False)

    def _take_noun(self, name: str, words: list[Any]) -> None:
        """The texts of `count(3, "node")` and `number_list("rank", [1, 2])`."""
        nouns = [word for word in words if isinstance(word, str)]
        if len(nouns) == 1:
            nouns.append(f"{nouns[0]}s")
        for noun in nouns:
            self._add(f"{noun} {{numbers}}" if name == "number_list" else f"{{n}} {noun}")

    def visit_Constant(self, node: ast.Constant) -> None:
        """A text without values."""
        self._take(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text with values."""
        self._take(node)
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """A text in parts."""
        if isinstance(node.op, ast.Add) and _variants(node) is not None:
            self._take(node)
            for part in _values(node):
                self.visit(part)
        else:
            self.generic_visit(node)

    def _take(self, node: ast.expr) -> None:
        for variant in _variants(node) or ():
            self.take(variant)

    def take(self, pieces: Pieces) -> None:
        """Adds a text, if it is one for people."""
        text = _WITHOUT.sub("", template(pieces))
        if self._is_text(text):
            self._add(text)

    def _is_text(self, text: str) -> bool:
        words = _WORD.findall(PLACEHOLDER.sub(" ", text).replace("unisono ", " "))  # commands, versions
        if not any(word.islower() and len(word) > 1 for word in words):
            return False
        least = 1 if PLACEHOLDER.search(text) else self._least_words
        return len(words) >= least and (" " in text or self._least_words == 1)


def template(pieces: Pieces) -> str:
    """The text with placeholders, each name once; white space as it is shown."""
    names: list[str] = []
    shown = []
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            shown.append(piece)
            continue
        names.append(
            next(
                name for name in (piece, *(f"{piece}{count}" for count in range(2, 99))) if name not in names
            )
        )
        shown.append(f"{{{names[-1]}}}")
    return " ".join("".join(shown).split())


def _values(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions within a text."""
    if isinstance(node, ast.BinOp):
        yield from _values(node.left)
        yield from _values(node.right)
    elif isinstance(node, ast.JoinedStr):
        yield from (value.value for value in node.values if isinstance(value, ast.FormattedValue))
    elif not isinstance(node, ast.Constant):
        yield node


def _variants(node: ast.expr) -> list[Pieces] | None:
    """The texts that an expression can give; None if it holds no literal text."""
    if isinstance(node, ast.Constant):
        return [(node.value,)] if isinstance(node.value, str) else None
    if isinstance(node, ast.IfExp):
        first, second = _variants(node.body), _variants(node.orelse)
        return [*first, *second] if first is not None and second is not None else None
    if isinstance(node, ast.JoinedStr):
        parts = [_variants_of_part(value) for value in node.values]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_variants(node.left), _variants(node.right)]
        if sides == [None, None]:
            return None
        parts = [
            side if side is not None else [("", _name(of), "")]
            for side, of in zip(sides, (node.left, node.right), strict=True)
        ]
    else:
        return None
    return [_joined(combination) for combination in islice(product(*parts), _MOST_VARIANTS)] or [("",)]


def _variants_of_part(node: ast.expr) -> list[Pieces]:
    if not isinstance(node, ast.FormattedValue):
        return _variants(node) or [("",)]
    inner = node.value
    chosen = (
        _variants(inner)
        if isinstance(inner, ast.IfExp | ast.JoinedStr) and node.format_spec is None
        else None
    )
    return chosen or [("", _name(inner), "")]


def _joined(parts: tuple[Pieces, ...]) -> Pieces:
    pieces = [""]
    for part in parts:
        pieces[-1] += part[0]
        pieces += part[1:]
    return tuple(pieces)


def _name(node: ast.expr) -> str:
    """A name for a value: of the variable, the attribute, or the function and what it is called
    with.
    """
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower() or "value"
        case ast.Subscript(slice=ast.Constant(value=str(key))) if key.isidentifier():
            return key.lower()
        case ast.Call(func=function, args=arguments):
            return _name(arguments[0] if arguments else function)
        case ast.Starred(value=inner) | ast.Subscript(value=inner) | ast.UnaryOp(operand=inner):
            return _name(inner)
        case (
            ast.BinOp(left=inner)
            | ast.IfExp(body=inner)
            | ast.GeneratorExp(elt=inner)
            | ast.ListComp(elt=inner)
        ):
            return _name(inner)
        case ast.BoolOp(values=[inner, *_]):
            return _name(inner)
        case _:
            return "value"


def texts_of_source() -> dict[str, dict[str, bool]]:
    """The templates, by file, and whether each must have a translation."""
    by_file: dict[str, dict[str, bool]] = {}
    complete = tuple(place for places in COMPLETE.values() for place in places)
    for path in sorted((*SOURCE.rglob("*.py"), *SOURCE.rglob("catalogue/*.toml"), SOURCE / _VARIABLES)):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(NOT_SHOWN):
            continue
        texts = Texts(least_words=1 if name in SHORT_TEXTS else 2, is_complete=name.startswith(complete))
        if path.suffix == ".toml":
            is_cause = path.parent.name == "catalogue"
            for text in (
                _texts_of_cause(CATALOGUE_OF_CAUSES[path.stem]) if is_cause else _texts_of_variables()
            ):
                texts.take((text,))
        else:
            texts.visit(ast.parse(path.read_text("utf-8")))
        by_file[name] = texts.templates
    return by_file


def _texts_of_cause(cause: Cause) -> Iterator[str]:
    yield from (cause.title, cause.meaning, *cause.telltales)
    yield from (difference for _, difference in cause.neighbours)
    yield from cause.remedy


def _texts_of_variables() -> Iterator[str]:
    for variable in VARIABLES:
        yield from (variable.meaning, variable.suspicious)
    for values in VALUES.values():
        yield from (values.text, values.otherwise)
    for advice in ADVICE.values():
        yield from (advice.costs, advice.right)


@dataclass(slots=True)
class Text:
    """A text of the catalogue.

    Attributes:
        origin: the part of the project that it comes from.
        is_complete: whether it must have a translation.
    """

    origin: str
    is_complete: bool = True


def catalogue_texts() -> dict[str, Text]:
    """Every text that has an entry in the catalogue."""
    pages: list[str] = []

    def collect(text: str) -> str:
        pages.append(str(text))
        return str(text)

    cause_pages(collect, "zh")
    of_causes = set(pages)
    translated_pages(collect, "zh")
    texts = {text: Text("labels, and words of other programs") for text in (*LABELS, *WORDS)}
    by_shape: dict[str, Text] = {}
    for path, templates in texts_of_source().items():
        for text, is_complete in templates.items():
            shape = re.sub(r"\{(?!n\})[a-z_0-9]+\}", "{}", text)
            if shape in by_shape:  # with other names of its values: the first one matches it, too
                by_shape[shape].is_complete |= is_complete
            else:
                by_shape[shape] = texts.setdefault(text, Text(path, is_complete))
    for text in pages:
        origin = "pages of causes" if text in of_causes else "reference pages"
        texts.setdefault(text, Text(origin)).is_complete = True
    return texts


def _renamed(texts: dict[str, Text], known: dict[str, str]) -> dict[str, str]:
    """The translations of texts of which only the names of values have changed."""
    by_shape = {PLACEHOLDER.sub("{}", english): english for english in known}
    renamed = {}
    for text in texts:
        old = by_shape.get(PLACEHOLDER.sub("{}", text))
        if text not in known and old is not None:
            names = dict(zip(PLACEHOLDER.findall(old), PLACEHOLDER.findall(text), strict=True))
            renamed[text] = PLACEHOLDER.sub(lambda one, names=names: names.get(one[0], one[0]), known[old])  # type: ignore[misc]
    return renamed


def texts_of_catalogue(texts: dict[str, Text], known: dict[str, str]) -> str:
    """The file: texts by their origin, with the known translations."""
    parts = [_HEAD]
    for origin in dict.fromkeys(text.origin for text in texts.values()):
        parts.append(f"# ---- {origin}\n")
        parts += [
            f'msgid "{escaped(text)}"\nmsgstr "{escaped(known.get(text, ""))}"\n'
            for text, about in texts.items()
            if about.origin == origin
        ]
    return "\n".join(parts)


def has_same_values(english: str, chinese: str) -> bool:
    """Whether a translation has the placeholders of its text; those without text between them stay
    together, as they match as one.
    """
    return sorted(PLACEHOLDER.findall(english)) == sorted(PLACEHOLDER.findall(chinese)) and all(
        run in chinese for run in _RUN.findall(english)
    )


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--fill", type=Path)
    options = parser.parse_args()
    texts, known = catalogue_texts(), read_entries(CATALOGUE)
    if options.check:
        complaints = mistakes(texts, known)
        print("\n".join(complaints), file=sys.stderr)
        print(_count(texts, known))
        return 1 if complaints else 0
    if options.fill:
        known |= dict(
            line.split("\t") for line in options.fill.read_text("utf-8").splitlines() if "\t" in line
        )
    known |= _renamed(texts, known)
    CATALOGUE.write_text(texts_of_catalogue(texts, known), "utf-8")
    print(_count(texts, known))
    return 0


def mistakes(texts: dict[str, Text], known: dict[str, str]) -> list[str]:
    """What `--check` refuses."""
    return [
        *(
            f"no translation: {text} ({about.origin})"
            for text, about in texts.items()
            if about.is_complete and text not in known
        ),
        *(
            f"other values in the translation: {text}"
            for text in texts
            if not has_same_values(text, known.get(text, text))
        ),
        *(f"no such text: {text}" for text in known if text not in texts),
    ]


def _count(texts: dict[str, Text], known: dict[str, str]) -> str:
    missing = [about.is_complete for text, about in texts.items() if text not in known]
    complete = sum(about.is_complete for about in texts.values())
    return (
        f"{len(texts)} texts; {sum(missing)} of {complete} that must have a translation have none;"
        f" {len(missing) - sum(missing)} others are English only"
    )


if __name__ == "__main__":
    sys.exit(main())
