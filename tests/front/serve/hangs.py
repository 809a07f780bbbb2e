"""The task `serve` with a forward that never returns for a prompt of one token: `python -m
tests.front.serve.hangs`, as tests/front/serve/test_ends.py starts it.
"""

import sys
import time

from unisono.trainer.model.engine import Engine, GeneratedAnswer
from unisono.trainer.task.entry import main

_step = Engine.step


def step(self: Engine) -> list[GeneratedAnswer]:
    if self.waiting and len(self.waiting[0].prompt) == 1:
        while True:
            time.sleep(0.01)
    return _step(self)


Engine.step = step  # type: ignore[method-assign]
main(sys.argv[1:])
