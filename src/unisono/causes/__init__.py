"""The catalogue of causes, and the Verdict, the common format before, during and after a run."""

from unisono.causes.catalogue import CATALOGUE, find_cause
from unisono.causes.cause import Cause
from unisono.causes.verdict import Evidence, Verdict

__all__ = ["CATALOGUE", "Cause", "Evidence", "Verdict", "find_cause"]
