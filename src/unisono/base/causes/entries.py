"""Reads the catalogue of causes: `catalogue/ID.toml` has what the package knows about one cause.

A file is read when its cause is needed. A string of several lines is one line: a line break and the
indentation after it count as a space, and in a `pattern` as nothing.

    order                           its position in the list of `explain`
    title, meaning, when, …         the fields of `Cause`; a line `{ train = "…" }` of a remedy is
                                    for `unisono train` alone
    seen_with = ["ID", …]           log lines that are seen with it and do not prove it, since they
                                    have other causes, too
    [neighbours]                    similar causes: ID = "the difference"
    [judgement]                     how `diagnose` judges it: the fields of `Judgement`
    [signs]                         what in a report speaks for it: the fields of `Signs`
    [[signatures]]                  log lines that indicate it: the fields of `Signature`
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.base.causes.verdict import Cause, OwnRunOnly

_FOLDER = Path(__file__).with_name("catalogue")
_OTHER_LINES = Path(__file__).with_name("other_lines.toml")

Kind = Literal["warning", "error", "consequence", "progress", "finished", "death"]


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of log line.

    It is a hint and never a verdict: the same words occur in healthy logs, and in logs of affected
    ranks.

    Attributes:
        id: the stable name.
        order: its precedence: of the signatures that match a line, the lowest comes first.
        hints: the line must contain at least one of these strings; checked first, since that is
            fast.
        pattern: a regular expression to search in the line. Every repetition is bounded and none is
            nested, so that its time is bounded, too.
        kind: warning: possibly harmless; error: something failed here; consequence: a different
            rank failed, and this rank noticed or timed out; progress: work continues; finished: the
            work is done; death: how a process ended, reported by its launcher.
        cause: the id of the cause that it indicates; None: none in particular.
        source: the program with its version, or a link.
        example: a line that it must match.
        look_alike: a similar line that it must not match.
        beside: ids of signatures of other causes that match the example, too.
    """

    id: str
    order: int
    hints: tuple[str, ...]
    pattern: str
    kind: Kind
    cause: str | None
    source: str
    example: str
    look_alike: str
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """How `diagnose` judges log lines that state a cause.

    Attributes:
        specificity: of several stated causes the lowest comes first: it explains the others.
        culprit: ranks: those that report it; lone rank: a rank that is the only one to report it,
            since all ranks of a host share the cause; nobody, even if only one rank reports it.
        one_host: it may affect one host only.
        one_environment: it is in the environment of one node as often as in that of all.
        has_rules: rules of its own find it; log lines alone do not lead to it.
        counts_as_warning: it is valid even if it is only in a warning.
        explains_exceptions: its lines explain the exceptions beside them.
        needs_whole_logs: it shows by what a whole log lacks; a few quoted lines prove it less.
        proves_less: ids of its signatures whose lines have other causes, too, as often.
        harmless: the result of the run is complete.
    """

    specificity: float = math.inf
    culprit: Literal["ranks", "lone rank", "nobody"] = "ranks"
    one_host: bool = False
    one_environment: bool = False
    has_rules: bool = False
    counts_as_warning: bool = False
    explains_exceptions: bool = True
    needs_whole_logs: bool = False
    proves_less: tuple[str, ...] = ()
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Signs:
    """What in a report speaks for a cause, and what against it.

    Features are those of diagnose/terms/*.toml; `helped:X` and `useless:X` are settings that were
    tried, `believed:X` a feature in a sentence in which the reporter states a belief, `one:X` log
    lines that `diagnose` knows. diagnose/weights.json has the numbers behind the words, and the
    corrections that scripts/fit_hypotheses.py fitted on cases.

    Attributes:
        common, rare: raise and lower a cause that many or few reports have.
        own: features that speak for this cause alone.
        strong, some, weak: how much a feature speaks for the cause; against, excludes: how much it
            speaks against it.
        check: commands that would tell.
        here: what to do about it with unisono.
    """

    common: int = 0
    rare: int = 0
    own: tuple[str, ...] = ()
    strong: tuple[str, ...] = ()
    some: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    here: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A cause with what `diagnose` needs to find it: the contents of a file of the catalogue.

    Attributes:
        signs: None if no report is about it.
    """

    cause: Cause
    order: int
    judgement: Judgement
    signs: Signs | None
    signatures: tuple[Signature, ...]
    seen_with: tuple[str, ...]


@functools.cache
def cause_ids() -> frozenset[str]:
    """The ids of all causes, in no order: the names of the files."""
    return frozenset(path.stem for path in _FOLDER.glob("*.toml"))


@functools.cache
def read_entry(cause_id: str) -> Entry:
    """The entry with this id.

    Raises:
        KeyError: if there is none.
    """
    if cause_id not in cause_ids():
        raise KeyError(cause_id)
    table = read_table(_FOLDER / f"{cause_id}.toml")
    order, seen_with = table.pop("order"), table.pop("seen_with", ())
    judgement, signs = table.pop("judgement", {}), table.pop("signs", None)
    signatures = table.pop("signatures", ())
    neighbours = tuple(table.pop("neighbours").items())
    return Entry(
        cause=Cause(id=cause_id, neighbours=neighbours, **table),
        order=order,
        judgement=Judgement(**judgement),
        signs=None if signs is None else Signs(**signs),
        signatures=tuple(Signature(cause=cause_id, **row) for row in signatures),
        seen_with=seen_with,
    )


@functools.cache
def all_entries() -> tuple[Entry, ...]:
    """All entries, in the order in which `explain` lists them."""
    return tuple(sorted(map(read_entry, cause_ids()), key=lambda entry: (entry.order, entry.cause.id)))


def judgement_of(cause_id: str) -> Judgement:
    """How to judge a cause; an unknown one, e.g. of a newer version, like any other."""
    return read_entry(cause_id).judgement if cause_id in cause_ids() else Judgement()


def read_other_lines() -> list[Signature]:
    """The log lines that indicate no cause in particular."""
    return [Signature(cause=None, **row) for row in read_table(_OTHER_LINES)["signatures"]]


def read_table(path: Path) -> dict[str, Any]:
    """The contents of a TOML file: lists as tuples, texts of several lines as one line."""
    import tomllib  # most processes read no entry

    return _value(tomllib.loads(path.read_text(encoding="utf-8")))


def _value(value: Any, joint: str = " ") -> Any:
    """A value of TOML with lists as tuples, and each text on one line."""
    match value:
        case str():
            lines = [line.lstrip() for line in value.splitlines() if line.strip()]
            return joint.join(lines) if "\n" in value else value
        case list():
            return tuple(map(_value, value))
        case {"train": line}:
            return OwnRunOnly(_value(line))
        case dict():
            return {key: _value(inner, "" if key == "pattern" else " ") for key, inner in value.items()}
        case _:
            return value
