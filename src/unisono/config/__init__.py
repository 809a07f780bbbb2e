"""What was asked: the sections of a config, and the reader that refuses what it does not know."""

from unisono.config.load import LoadedConfig, load_config
from unisono.config.schema import RunConfig, config_digest

__all__ = ["LoadedConfig", "RunConfig", "config_digest", "load_config"]
