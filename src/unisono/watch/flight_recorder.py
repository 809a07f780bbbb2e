"""The dumps of torch's flight recorders in this process, as JSON. torch is never imported here: before it is loaded there are none."""

import json
import sys
from collections.abc import Callable
from typing import Any

_C10D = "torch._C._distributed_c10d"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""The names of torch 2.11 to 2.13. A torch built with NCCL has both: the first holds NCCL's groups, the second those of gloo and others."""


def recorders() -> list[Callable[..., bytes]]:
    """torch's flight recorders; each gives its dump."""
    module = sys.modules.get(_C10D)
    return [getattr(module, name) for name in _DUMPS if hasattr(module, name)]


def flight_record(rank_by: Callable[[Any], int] = lambda dump: 0) -> bytes:
    """The dump of one recorder: of each group what was begun and completed last, and the latest entries; empty where there is none.

    Args:
        rank_by: gives a number for a parsed dump. Of two recorders the one with the larger number is taken; of equal ones, the one whose
            newest entry is later.
    """
    dumps = [dump() for dump in recorders()]
    return max(dumps, key=lambda dump: _rank(dump, rank_by)) if len(dumps) > 1 else b"".join(dumps)


def _rank(dump: bytes, rank_by: Callable[[Any], int]) -> tuple[int, int]:
    read = json.loads(dump or b"{}")
    newest = max((int(entry["time_created_ns"]) for entry in read.get("entries") or ()), default=0)
    return rank_by(read), newest
