"""Puts the wall clock of every Python process of a node forward: Python imports this file where
PYTHONPATH names its folder.

SKEW_S says by how many seconds. Clocks for waiting are left alone, as they are on a machine whose
time of day is wrong.
"""

import os
import time

AHEAD_S = float(os.environ.get("SKEW_S", "0"))
_right = time.time


def _skewed() -> float:
    return _right() + AHEAD_S


time.time = _skewed
