"""One rank that holds a part of a model and takes part in writing it whole: `gather_rank.py MODEL
OUT RANK WORLD STORE MAX_FILE_BYTES DTYPE WAY`.

WAY is `ours`, or `torch` for what torch and transformers have for it. Prints a JSON line with what
its memory did meanwhile, in bytes as the kernel counts them.
"""

import ctypes
import gc
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from unisono.trainer.model.load import LoadedModel, load_base
from unisono.trainer.training.sharding import shard_model
from unisono.trainer.training.weights import write_model


def memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def as_torch_has_it(base: Any, directory: Path | None, limit: int) -> None:
    """All tensors whole on rank 0 first."""
    wanted = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(base, options=wanted)
    if directory is not None:
        base.save_pretrained(str(directory), state_dict=state, max_shard_size=limit)


def main() -> None:
    model, out, rank, world, store, limit, dtype, way = sys.argv[1:]
    bare = memory("VmRSS")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    base = load_base(Path(model), dtype=torch.float32)
    loaded = LoadedModel(base, base, None, dict(base.named_parameters()), 0)
    shard_model(loaded, init_device_mesh("cpu", (int(world),)))
    own = sum(p.to_local().untyped_storage().nbytes() for p in set(base.parameters()))
    dist.barrier()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what loading has left free must not hide what writing takes
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    began = time.perf_counter()
    directory = Path(out) if rank == "0" else None
    if directory is not None:
        directory.mkdir()
    if way == "ours":
        write_model(base, directory, dtype=dtype, max_file_bytes=int(limit))
    else:
        as_torch_has_it(base, directory, int(limit))
    seconds = time.perf_counter() - began
    peak = memory("VmHWM")
    print(
        json.dumps({"own_part": own, "bare": bare, "before": before, "peak": peak, "seconds": seconds}),
        flush=True,
    )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
