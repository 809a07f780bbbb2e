"""Code that runs inside the ranks of a foreign program under `unisono run`. The program is unchanged; only Python's start differs.

`path/sitecustomize.py` is found because its folder is first in PYTHONPATH. It hooks the import of some modules of torch: once one is
loaded, it is passed to the function of this package that `HOOKS` there names. Nothing here imports torch: the program does.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from unisono.integrations.border import VARIABLE

PATH = Path(__file__).parent / "path"
"""The folder that is first in PYTHONPATH; it contains only sitecustomize.py."""

_UNGUARDABLE = {
    "I": "isolated (-I): it reads neither PYTHONPATH nor sitecustomize",
    "E": "started with -E: it reads no PYTHONPATH",
    "S": "started with -S: it reads no sitecustomize",
}


def injected(environment: Mapping[str, str], guard_file: Path) -> dict[str, str]:
    """An environment in which every Python process is guarded, unless its options disable sitecustomize.

    Args:
        guard_file: the border's guard.json.
    """
    path = os.pathsep.join(part for part in (str(PATH), environment.get("PYTHONPATH", "")) if part)
    return {**environment, "PYTHONPATH": path, VARIABLE: str(guard_file)}


def why_unguardable(words: Sequence[str]) -> str | None:
    """Why the Python of a command line cannot be guarded; None if it can, or is not Python.

    Args:
        words: the command line, at least one word.
    """
    if not PurePath(words[0]).name.startswith(("python", "pypy")):
        return None
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return None
        for at, letter in enumerate(word[1:], 2):
            if letter in _UNGUARDABLE:
                return f"this Python is {_UNGUARDABLE[letter]}"
            if letter in "cm":  # the program follows
                return None
            if letter in "WX":  # its value is the rest of the word, or the next one
                if not word[at:]:
                    next(rest, "")
                break
    return None
