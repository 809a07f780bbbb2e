"""Writes down which rows were trained on."""

import json
import time
from pathlib import Path

import numpy as np
import xxhash

from unisono.data.batch import Batch
from unisono.plan import RunPlan


def write_rows(plan: RunPlan, rank: int, step: int, batch: Batch) -> None:
    """write_rows: a line for a forward whose loss counts, with each row's id and the digest of the tokens that went in.

    A line is on its way to the disk before the forward begins, so that a kill hides nothing that was trained on.
    """
    directory = plan.faults.get("write_rows")
    if directory is None:
        return
    ends = np.cumsum(batch.lengths)
    tokens = [ids.tobytes() for ids in np.split(batch.input_ids, ends[:-1])]
    rows = [[name, xxhash.xxh3_64_hexdigest(ids)] for name, ids in zip(batch.row_ids, tokens, strict=True)]
    line = {
        "time": time.time(), "epoch": plan.epoch, "world_size": plan.world_size, "rank": rank, "step": step,
        "rows": rows,
    }  # fmt: skip
    with (Path(directory) / f"rank-{rank:05d}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
