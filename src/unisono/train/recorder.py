"""What torch's flight recorder knows of this rank's collectives, as JSON."""

from torch.distributed import is_available


def flight_record() -> bytes:
    """The recorder's dump: of each group what was begun and completed last, and the latest entries; empty where there is none."""
    if not is_available():
        return b""
    from torch._C import (
        _distributed_c10d as c10d,
    )  # the only way to it; the names are those of torch 2.11 to 2.13

    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    found = dump() if dump is not None else b""
    return found if isinstance(found, bytes) else str(found).encode()
