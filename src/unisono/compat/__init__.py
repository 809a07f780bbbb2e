"""Other tools' files: recognised by their keys."""

from unisono.compat.llamafactory import refuse_if_llamafactory

__all__ = ["refuse_if_llamafactory"]
