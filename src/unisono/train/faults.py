"""Faults that drills and tests put into a run, in `plan.faults`; a config cannot hold them.

This is all there are:

nan_steps         [step, …]        the gradient of these steps is not a number
die               {rank, step, how: exception | sigkill | exit | refuse}    that rank ends at the start of that step
one_row_more      [rank, …]        these ranks have a row more than the others
unseeded_split    [rank, …]        these ranks have split their rows with a generator that nobody seeded
flip_weight_bit   [rank, …]        these ranks hold a weight with one bit turned
other_tokenizer   [rank, …]        these ranks have another tokenizer
write_rows        directory        no fault: every rank writes down which rows went into each of its forwards
"""

import dataclasses
import json
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from unisono.data.batch import Batch
from unisono.data.table import TokenTable
from unisono.errors import UnfitError
from unisono.model.load import LoadedModel
from unisono.plan import RunPlan


def change_loaded(plan: RunPlan, rank: int, loaded: LoadedModel) -> None:
    """flip_weight_bit and other_tokenizer."""
    if rank in plan.faults.get("flip_weight_bit", ()):
        parameters = list(loaded.model.parameters())
        frozen = [p for p in parameters if not p.requires_grad]
        with torch.no_grad():
            (frozen or parameters)[0].data.view(torch.uint8).view(-1)[0] ^= 1
    if rank in plan.faults.get("other_tokenizer", ()):
        loaded.tokenizer.add_tokens(["<|of another tokenizer|>"])


def change_table(plan: RunPlan, rank: int, table: TokenTable) -> TokenTable:
    """one_row_more and unseeded_split."""
    if rank in plan.faults.get("one_row_more", ()):
        table = _with_one_more(table)
    if rank in plan.faults.get("unseeded_split", ()):
        order = list(range(table.rows))
        random.SystemRandom().shuffle(order)
        table = dataclasses.replace(table, columns={name: v[order] for name, v in table.columns.items()})
    return table


def die(plan: RunPlan, rank: int, step: int) -> None:
    """Ends this rank if the plan says so."""
    fault: dict[str, Any] = plan.faults.get("die", {})
    if (fault.get("rank"), fault.get("step")) != (rank, step):
        return
    match fault["how"]:
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)
        case "refuse":
            raise UnfitError.of(f"rank {rank} refuses at step {step}, as the fault wants it")
        case _:
            raise ValueError(f"rank {rank} dies at step {step}, as the fault wants it")


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
        "time": time.time(), "front": os.getppid(), "epoch": plan.epoch, "world_size": plan.world_size, "rank": rank, "step": step,
        "rows": rows,
    }  # fmt: skip
    with (Path(directory) / f"rank-{rank:05d}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def spoil_gradient(plan: RunPlan, step: int, parameter: torch.Tensor) -> None:
    """nan_steps."""
    if step in plan.faults.get("nan_steps", ()):
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, math.nan)
        else:
            parameter.grad.fill_(math.nan)


def _with_one_more(table: TokenTable) -> TokenTable:
    """The last row once more, as a sequence of its own."""
    last = table.rows_of(table.sequences - 1)[-1]
    extra = {"tokens": table.columns["length"][last], "loss_tokens": table.columns["loss"][last]}
    return dataclasses.replace(
        table,
        columns={name: np.append(values, values[last]) for name, values in table.columns.items()},
        sequence_rows=np.append(table.sequence_rows, table.rows),
        sequence_ends=np.append(table.sequence_ends, table.sequence_ends[-1] + 1),
        sequence_columns={
            name: np.append(values, extra[name]) for name, values in table.sequence_columns.items()
        },
    )
