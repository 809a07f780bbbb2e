"""The families of models that are written as GGUF, as `gguf_families.toml` lists them."""

import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

import gguf

_TABLES: dict[str, Any] = tomllib.loads(
    resources.files("unisono.trainer.model").joinpath("gguf_families.toml").read_text(encoding="utf-8")
)
SIZES: list[str] = _TABLES["sizes"]
"""Keys of config.json that are written, or that the tensors show."""
KEYS: dict[str, dict[str, str]] = _TABLES["keys"]
"""By the type of GGUF: keys of config.json, and llama.cpp's names."""
RENAMED: dict[str, str] = _TABLES["tensors"]
"""Parts of names of tensors that the package `gguf` knows by others."""


@dataclass(frozen=True)
class GgufFamily:
    """One family; the file explains the fields."""

    architecture: str
    reads: tuple[str, ...] = ()
    only: dict[str, list[Any]] = field(default_factory=dict)
    rope: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    constants: dict[str, int | float] = field(default_factory=dict)
    interleaved: bool = False
    partial: bool = False
    exact_heads: bool = False
    one_plus: bool = False
    head: bool = False
    windows: bool = False
    transposed: bool = False
    query_key_value: bool = False

    @cached_property
    def number(self) -> gguf.MODEL_ARCH:
        """The constant of the package `gguf`."""
        return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)


FAMILIES = {kind: GgufFamily(**fields) for kind, fields in _TABLES["families"].items()}
"""By the `model_type` of config.json."""
