"""Which unisono this is, file by file: a change on one node alone is seen before it trains."""

import hashlib
from pathlib import Path

import unisono


def code_digests(root: Path | None = None) -> dict[str, str]:
    """A digest of each Python file of the package, by its path from the folder that holds it: `unisono/train/loop.py`.

    Nothing is kept between calls: the package is a megabyte, and a kept digest would be the one thing that could be stale.

    Args:
        root: the package's folder; None is this one.
    """
    folder = root or Path(unisono.__file__).parent
    files = sorted(file for file in folder.rglob("*.py") if "__pycache__" not in file.parts)
    return {file.relative_to(folder.parent).as_posix(): _digest(file) for file in files}


def _digest(file: Path) -> str:
    try:
        content = file.read_bytes()
    except FileNotFoundError:  # listed, and gone since: the package is being changed
        return "gone"
    return hashlib.sha256(content).hexdigest()[:16]
