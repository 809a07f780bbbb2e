"""Faults after the last step."""

import threading
import time

import torch.distributed as dist

from unisono.plan import RunPlan
from unisono.train.faults.marking import mark

_FOR_EVER_S = 3600.0


def at_the_end(plan: RunPlan, rank: int) -> None:
    """hang_in_teardown and destroy_twice. No collective comes after this."""
    if plan.faults.get("hang_in_teardown", {}).get("rank") == rank:
        mark(plan, rank)
        # Python waits for such a thread before it leaves, as for a tracker's that cannot reach its server.
        threading.Thread(target=time.sleep, args=(_FOR_EVER_S,), name="tracker").start()
    if plan.faults.get("destroy_twice", {}).get("rank") == rank:
        mark(plan, rank)
        dist.destroy_process_group()
