"""One rank: `python -m unisono.worker plan.json`."""

import sys

from unisono.base.child import leave
from unisono.trainer.worker.entry import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
