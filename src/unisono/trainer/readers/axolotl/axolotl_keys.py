"""The keys of axolotl, as `keys.toml` lists them."""

from unisono.trainer.readers.key_table import KeyTable

TOOL = "axolotl"
PAGE = "docs/how-to/from-axolotl.md"
KEYS = KeyTable("unisono.trainer.readers.axolotl")
"""By name."""
