"""One task: `python -m unisono.task NAME request.json`."""

import sys

from unisono.base.child import leave
from unisono.trainer.task.entry import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
