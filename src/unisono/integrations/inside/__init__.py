"""What runs inside the ranks of somebody else's program under `unisono run`: the program is unchanged, and only Python's start is.

`path/sitecustomize.py` is found because its folder leads PYTHONPATH. It hooks the import of some modules of torch, and each of them, once it
is loaded, is given to the module here that `HOOKS` there names. Nothing here imports torch: the program does.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from unisono.integrations.border import VARIABLE

PATH = Path(__file__).parent / "path"
"""The folder that leads PYTHONPATH; all that is in it is a sitecustomize.py."""

_DEAF = {
    "I": "isolated (-I): it reads neither PYTHONPATH nor sitecustomize",
    "E": "started with -E: it reads no PYTHONPATH",
    "S": "started with -S: it reads no sitecustomize",
}


def injected(environment: Mapping[str, str], guard_file: Path) -> dict[str, str]:
    """An environment in which every Python is guarded from within, unless it is started so that it does not look.

    Args:
        environment: of the program.
        guard_file: the border's guard.json.
    """
    path = os.pathsep.join(part for part in (str(PATH), environment.get("PYTHONPATH", "")) if part)
    return {**environment, "PYTHONPATH": path, VARIABLE: str(guard_file)}


def why_deaf(words: Sequence[str]) -> str | None:
    """Why the Python of a command line cannot be guarded from within; None where it can, or is no Python.

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
            if letter in _DEAF:
                return f"this Python is {_DEAF[letter]}"
            if letter in "cm":  # from here on it is the program
                return None
            if letter in "WX":  # the rest of the word is its value, or else the next one
                if not word[at:]:
                    next(rest, "")
                break
    return None
