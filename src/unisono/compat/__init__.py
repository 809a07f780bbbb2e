"""Other tools' files: recognised by their keys."""

from unisono.compat.llamafactory import refuse_if_llamafactory
from unisono.compat.load import load_own_config

__all__ = ["load_own_config", "refuse_if_llamafactory"]
