"""Problems for the page, in both languages."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from unisono.base.errors import Problem
from unisono.base.locale import Chinese, chinese
from unisono.front.board.regions import harmless


@functools.cache
def _translator() -> Chinese:
    return chinese()


def translated(text: str) -> dict[str, str]:
    """A text of the program in both languages, by language."""
    return {"en": text, "zh": _translator()(text)}


def shown_problem(problem: Problem | Mapping[str, Any]) -> dict[str, Any]:
    """The four parts of a problem, each in both languages; without control characters."""
    parts = asdict(problem) if isinstance(problem, Problem) else problem
    texts = {name: str(parts.get(name) or "") for name in ("what", "where", "why", "fix")}
    shown: dict[str, Any] = harmless({name: translated(text) for name, text in texts.items()})
    return shown


def shown_problems(problems: Iterable[Problem | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Several problems."""
    return [shown_problem(problem) for problem in problems]
