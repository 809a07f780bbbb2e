"""Versions that a text states, and which of them have a known bug."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.guard.diagnosis.report_text import Passage

FEATURE = "known_bad_version"
"""The feature of a text that states a version with a known bug."""

_PACKAGES = {"pytorch": "torch", "llama-factory": "llamafactory", "lightning": "lightning"}
_STATED = re.compile(
    r"(?<![\w/-])(?P<package>pytorch[ -]lightning|pytorch|torch|nccl|ray|llama-?factory|lightning)"
    r"(?:\[\w+\])?(?: version)?\s{0,2}(?:==|=|:|@|>=|v|版本(?:为|是|[::])?)?\s{0,2}v?"
    r"(?P<version>\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)"
    r"(?![\d.]\d)",
    re.IGNORECASE,
)
_MOST = 40


@dataclass(frozen=True, slots=True)
class StatedVersion:
    """A version in a text.

    Attributes:
        line: where it is stated; text: the words.
        bug: what is known of it, with the remedy; empty: nothing is known.
    """

    line: int
    text: str
    package: str
    version: str
    bug: str = ""


def stated_versions(passages: Sequence[Passage]) -> list[StatedVersion]:
    """The versions of packages in a text, each once, in its order."""
    stated: dict[tuple[str, str], StatedVersion] = {}
    for passage in passages:
        for match in _STATED.finditer(passage.text):
            name = match["package"].lower().replace(" ", "-")
            package = _PACKAGES.get(name, name)
            bug = "; ".join(known_bugs(package, match["version"]))
            one = StatedVersion(passage.line, match[0], package, match["version"], bug)
            stated.setdefault((package, match["version"]), one)
        if len(stated) >= _MOST:
            break
    return list(stated.values())


def known_bugs(package: str, version: str) -> Iterator[str]:
    """What is known to be wrong with a version, with the command that helps."""
    from unisono.guard.agree.version_rules import KNOWN_BAD

    for entry in KNOWN_BAD:
        if entry.package == package and entry.holds({package: version}):
            yield f"{package} {version}: {entry.what} ({entry.command})"
