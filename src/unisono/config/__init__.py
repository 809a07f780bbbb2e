"""The configuration of a run: its schema, and the loader that rejects unknown keys."""

from unisono.config.load import LoadedConfig, load_config
from unisono.config.schema import RunConfig, config_digest

__all__ = ["LoadedConfig", "RunConfig", "config_digest", "load_config"]
