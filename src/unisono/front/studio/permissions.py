"""What a config may ask for: files below the studio's directories, and code only if the server was
started with `--trust-code`.
"""

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import Problem, UsageError
from unisono.base.text import one_line
from unisono.front.studio.folders import Folders
from unisono.trainer.config.own_code import own_code_of
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import NamesFile, Section, lf_name

_SCHEMES = ("https", "http", "s3", "gs", "hf", "az", "abfs", "abfss", "oss")
_LONGEST = 120


@dataclass(frozen=True)
class Permissions:
    """What the server's owner allows.

    Attributes:
        folders: the directories that may be read and written.
        trusts_code: whether configs may name Python code that is executed.
    """

    folders: Folders
    trusts_code: bool = False

    def refusals(self, config: RunConfig) -> list[tuple[str, Problem]]:
        """What a config may not have, with its key; also below `--trust-code` only files inside."""
        paths = [*_paths(config), *_storage(config)]
        refused = [(key, _outside(value, self.folders)) for key, value in paths if not self._may_use(value)]
        code = own_code_of(config)
        if self.trusts_code:
            outside = [one for one in code if not self.folders.holds(self.folders.first / one.path)]
            return [*refused, *((one.key, _outside(str(one.path), self.folders)) for one in outside)]
        keys = [one.key for one in code]
        keys += ["model.trust_remote_code"] if config.model.trust_remote_code else []
        return [*refused, *((key, _untrusted(key)) for key in keys)]

    def require(self, model: str) -> None:
        """Refuses a model that is outside of the directories.

        Raises:
            UsageError: if it is.
        """
        if model.startswith("-") or not self._may_use(model):
            raise UsageError(_outside(model, self.folders))

    def _may_use(self, value: str) -> bool:
        scheme, is_url, _ = value.partition("://")
        if is_url or "::" in value:
            return scheme in _SCHEMES and "::" not in value
        if value.startswith("builtin:") or lf_name(value) is not None:
            return True
        path = self.folders.first / Path(value).expanduser()
        matches = glob.glob(str(path), recursive=True) if glob.has_magic(value) else []  # noqa: PTH207 - a pattern
        return self.folders.holds(path) and all(self.folders.holds(Path(one)) for one in matches)


def _paths(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values that name files, with their keys."""
    for name, info in type(section).model_fields.items():
        key, mark = f"{prefix}{info.alias or name}", NamesFile.of(info)
        for value in _flat(getattr(section, name)):
            if isinstance(value, Section):
                yield from _paths(value, f"{key}.")
            elif mark is not None and isinstance(value, str) and value != mark.besides:
                yield key, value


def _flat(value: Any) -> list[Any]:
    return [inner for one in value for inner in _flat(one)] if isinstance(value, list) else [value]


def _storage(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.checkpoint.storage:
        yield "checkpoint.storage", config.checkpoint.storage


def _outside(value: str, folders: Folders) -> Problem:
    return Problem(
        f"{one_line(value, limit=_LONGEST)} is outside of the studio's directories",
        why=f"the studio reads and writes only below {', '.join(map(str, folders.roots))}",
        fix="start it with `--root DIR` for that directory, too, or choose another path",
    )


def _untrusted(key: str) -> Problem:
    return Problem(
        f"{key} names Python code, which this studio does not execute",
        why="the server was started without --trust-code",
        fix="start `unisono studio --trust-code` if you trust the code, or use `unisono train`",
    )
