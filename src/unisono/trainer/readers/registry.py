"""The readers of other tools' configs by name: those of this room, and those that other packages
install.

Another package names an object with the methods of ConfigReader (a module has them, too) in its
entry points:

    [project.entry-points."unisono.config_readers"]
    torchtune = "some_package.torchtune_config"
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Protocol

from unisono.base.extensions import CONFIG_READERS, extensions, load_extension
from unisono.trainer.config.translation import Translation
from unisono.trainer.config.yaml_file import KeyPath
from unisono.trainer.readers.axolotl import axolotl_file as axolotl
from unisono.trainer.readers.llamafactory import reader as llamafactory
from unisono.trainer.readers.sd_scripts import reader as sd_scripts
from unisono.trainer.readers.trl import trl_file as trl


class ConfigReader(Protocol):
    """Reads the configs of one tool."""

    def recognizes(self, raw: Mapping[str, object], path: Path) -> bool:
        """Whether a file is of the tool; `raw` is its mapping, empty for a file whose suffix is not
        YAML's.
        """
        ...

    def to_config(
        self, raw: Mapping[str, object], lines: Mapping[KeyPath, int], path: Path, overrides: tuple[str, ...]
    ) -> Translation:
        """The file in our terms; its `problems` are not raised.

        Args:
            raw: the mapping, as for `recognizes`.
            lines: the line of each key.
            path: of the file.
            overrides: `key=value` from the command line, in the tool's names or ours.

        Raises:
            ConfigError: if the file cannot be read.
        """
        ...


BUILT_IN: dict[str, ConfigReader] = {
    "axolotl": axolotl,  # first: its own `base_model` is no key of the others
    "trl": trl,
    "llamafactory": llamafactory,
    "sd_scripts": sd_scripts,
}


def read_foreign_config(
    raw: Mapping[str, object], lines: Mapping[KeyPath, int], path: Path, overrides: tuple[str, ...]
) -> Translation | None:
    """The file in our terms, by the first reader that recognizes it; None if none does.

    Args:
        raw: its mapping; empty for a file whose suffix is not YAML's.
        lines: the line of each key.
        path: of the file.
        overrides: from the command line.

    Raises:
        ConfigError: if it cannot be read.
    """
    for reader in chain(BUILT_IN.values(), _installed()):
        if reader.recognizes(raw, path):
            return reader.to_config(raw, lines, path, overrides)
    return None


def _installed() -> Iterator[ConfigReader]:
    """The readers of other packages, each loaded when those before it have not recognized the
    file.
    """
    yield from map(load_extension, extensions(CONFIG_READERS).values())
