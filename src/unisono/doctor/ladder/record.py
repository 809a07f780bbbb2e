"""With --debug-comm: what the libraries say in each attempt of the ladder is kept in files."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from unisono.files import make_private_dir

_NAME = re.compile(r"doctor-[0-9A-Za-z-]{1,60}")
_OTHER = re.compile(r"[^a-z0-9]+")


def record_name(mark: str) -> str:
    """Of a folder for all attempts of this look.

    Args:
        mark: what another look of the same second has not: a process number, or what the nodes of a job have drawn.
    """
    return f"doctor-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{_OTHER.sub('', mark.lower())[:12]}"


@dataclass
class Record:
    """A folder with one for each attempt, and in that a file for each rank: made when it is needed, so that what cannot be kept costs no attempt.

    Attributes:
        folder: `runs/doctor-…`, where the command was typed.
        trouble: why nothing is kept; empty: it is.
        elsewhere: the same of other nodes, by their names; only of those that have such a trouble.
    """

    folder: Path
    trouble: str = ""
    elsewhere: dict[str, str] = field(default_factory=dict)
    _attempts: int = 0

    @classmethod
    def of(cls, name: object) -> Self | None:
        """For a name that the head has given; None: it has given none, or what is none."""
        return cls(Path("runs") / name) if isinstance(name, str) and _NAME.fullmatch(name) else None

    def attempt(self, name: str) -> Path | None:
        """The next attempt's folder, as `runs/doctor-…/02-interface-pinned-to-lo`; None: it cannot be made."""
        self._attempts += 1
        path = self.folder / f"{self._attempts:02d}-{_OTHER.sub('-', name.lower()).strip('-')[:60]}"
        try:
            make_private_dir(self.folder)
            make_private_dir(path)
        except OSError as error:
            self.trouble = f"{path}: {error.strerror or error}"
            return None
        return path

    def said(self) -> str:
        """For the finding: where it is kept, or why not."""
        here = f" is not kept: {self.trouble}" if self.trouble else f": {self.folder}/"
        there = (f"; on {node} it is not kept: {trouble}" for node, trouble in sorted(self.elsewhere.items()))
        return f"what the libraries said{here}{''.join(there)}"
