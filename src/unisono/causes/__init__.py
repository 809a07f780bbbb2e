"""The catalogue of causes, and the Verdict through which before, during and after speak."""

from unisono.causes.catalogue import CATALOGUE, find_cause
from unisono.causes.cause import Cause
from unisono.causes.verdict import Evidence, Verdict

__all__ = ["CATALOGUE", "Cause", "Evidence", "Verdict", "find_cause"]
