"""Loads the config that a command names: ours, or a file of another tool, which a reader translates
first.
"""

from pathlib import Path

from unisono.trainer.config import LoadedConfig, RunConfig, build_config, config_of
from unisono.trainer.config.translation import Translation, Verb
from unisono.trainer.config.yaml_file import KeyPath, keys_of, read_yaml

_YAML = ("", ".yaml", ".yml", ".json")
"""Suffixes of files whose keys are looked at before any reader of other tools is imported."""


def load_config(path: Path, overrides: tuple[str, ...] = (), *, verb: Verb = "train") -> LoadedConfig:
    """Reads a config file and applies overrides of the form `key.sub=value`, the value in YAML.

    Args:
        path: our config, or a file of LLaMA-Factory or sd-scripts (also a script of its command),
            whose overrides without a dot use its names.
        overrides: from the command line.
        verb: what a LLaMA-Factory file is read for; `preview` also takes one that cannot be trained
            here.

    Raises:
        ConfigError: with all problems found.
    """
    raw, lines, translation = _read(path, overrides)
    if translation is not None:
        return config_of(translation, path=path, verb=verb)
    return build_config(raw, lines=lines, name=str(path), path=path, overrides=overrides)


def read_translation(path: Path, overrides: tuple[str, ...] = ()) -> Translation | None:
    """A file of another tool in our terms; None if the file is ours. Its `problems` are not raised.

    Raises:
        ConfigError: if it cannot be read.
    """
    return _read(path, overrides)[2]


def _read(
    path: Path, overrides: tuple[str, ...]
) -> tuple[dict[str, object], dict[KeyPath, int], Translation | None]:
    """The mapping with its lines; or, of a file of another tool, its translation."""
    if path.suffix.lower() not in _YAML and (translation := _translated({}, {}, path, overrides)):
        return {}, {}, translation
    raw, lines = read_yaml(path)
    if set(raw) <= set(keys_of(RunConfig)):
        return raw, lines, None
    return raw, lines, _translated(raw, lines, path, overrides)


def _translated(
    raw: dict[str, object], lines: dict[KeyPath, int], path: Path, overrides: tuple[str, ...]
) -> Translation | None:
    from unisono.trainer.readers.registry import read_foreign_config  # a config of ours enters none of it

    return read_foreign_config(raw, lines, path, overrides)
