"""The ladder: a real collective, and where it fails the fewest settings with which it works."""

from unisono.doctor.ladder.checks import check_ladder
from unisono.doctor.ladder.saying import LADDER

CATALOGUE = (LADDER,)
CHECKS = (check_ladder,)

__all__ = ["CATALOGUE", "CHECKS"]
