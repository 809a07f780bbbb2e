"""In place of `python -m unisono.worker` or `-m unisono.task`: several ranks on one device, each a
host of its own for NCCL.

NCCL refuses two ranks of one host on one device ("Duplicate GPU detected"). Ranks of different
hosts (NCCL_HOSTID) exchange over a network, here the loopback, and their kernels take turns on the
device. Agreement would refuse them, too, so they do not report which device they have bound.

ONE_HOST: NCCL is not told so.
"""

import json
import os
import runpy
import sys
from pathlib import Path

from unisono.base.child import loading_modules

is_task = not sys.argv[1].endswith(".json")
rank = json.loads(Path(sys.argv[2]).read_text()).get("rank", 0) if is_task else os.environ.get("RANK", "0")
if "ONE_HOST" not in os.environ:
    os.environ["NCCL_HOSTID"] = f"host of rank {rank}"
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
if not is_task:
    with loading_modules():  # torch; a signal until then simply ends the process
        from unisono.trainer.training import join
    join.bound_uuid = lambda device: None
runpy.run_module("unisono.task" if is_task else "unisono.worker", run_name="__main__", alter_sys=True)
