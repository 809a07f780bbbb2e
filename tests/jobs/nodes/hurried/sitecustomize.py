"""Makes the limits of a rank shorter: Python imports this file where PYTHONPATH names its folder.

HURRIED is {"module.NAME": seconds}.
"""

import importlib
import json
import os
import sys
from datetime import timedelta

if {"unisono.worker", "unisono.trainer.worker.fork_server"} & {
    *sys.orig_argv
}:  # a rank, or what ranks are forked from
    for _name, _seconds in json.loads(os.environ["HURRIED"]).items():
        _module, _, _attribute = _name.rpartition(".")
        _found = importlib.import_module(_module)
        _is_delta = isinstance(getattr(_found, _attribute), timedelta)
        setattr(_found, _attribute, timedelta(seconds=_seconds) if _is_delta else _seconds)
