"""The version of this package, and where its files are."""

from pathlib import Path
from typing import Final

__version__: Final = "0.1.0"
PACKAGE: Final = Path(__file__).parents[1]
"""The directory of `unisono`."""
