"""Faults that drills and tests put into a run, in `plan.faults`; a config cannot hold them.

This is all there are:

nan_steps         [step, …]        the gradient of these steps is not a number
die               {rank, step, how: exception | sigkill | exit | refuse}    that rank ends at the start of that step
one_row_more      [rank, …]        these ranks have a row more than the others
unseeded_split    [rank, …]        these ranks have split their rows with a generator that nobody seeded
flip_weight_bit   [rank, …]        these ranks hold a weight with one bit turned
other_tokenizer   [rank, …]        these ranks have another tokenizer
"""

import dataclasses
import math
import os
import random
import signal
from typing import Any

import numpy as np
import torch

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
