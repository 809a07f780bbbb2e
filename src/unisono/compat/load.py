"""Reads a config of ours; another tool's is recognised and refused in one sentence."""

from pathlib import Path

from unisono.compat.llamafactory import refuse_if_llamafactory
from unisono.config.load import LoadedConfig, build_config
from unisono.config.yaml_file import read_yaml


def load_own_config(path: Path, overrides: tuple[str, ...] = ()) -> LoadedConfig:
    """The config in a file with `key.sub=value` laid over it: what every command reads its config with.

    Raises:
        ConfigError: with every problem that was found, or with the one that it is another tool's.
    """
    raw, lines = read_yaml(path)
    refuse_if_llamafactory(raw, str(path))
    return build_config(raw, lines=lines, name=str(path), path=path, overrides=overrides)
