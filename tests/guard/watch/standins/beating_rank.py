"""A rank that does nothing but beat: `python beating_rank.py RECORD_FD [--with-front]`.

Every number of a record follows from its step.
"""

import os
import sys

from unisono.base.child import end_with_front
from unisono.guard.watch import Beats


def main(argv: list[str]) -> None:
    if "--with-front" in argv:
        end_with_front(os.getppid())
    beats = Beats.inherited(int(argv[0]))
    while True:
        step = beats.step = beats.step + 1
        beats._comm, beats._elements = step, 3 * step
        beats.enter("compute", done=5 * step, total=7 * step)


if __name__ == "__main__":
    main(sys.argv[1:])
