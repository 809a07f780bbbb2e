"""The catalogue of causes, and the Verdict, the common format before, during and after a run."""

from unisono.causes.catalogue import CATALOGUE, find_cause
from unisono.causes.verdict import Cause, Evidence, Verdict

__all__ = ["CATALOGUE", "Cause", "Evidence", "Verdict", "find_cause"]
