"""Faults in what a rank brings to the others."""

import dataclasses
import random

import numpy as np
import torch

from unisono.data.table import TokenTable
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


def believed(plan: RunPlan, rank: int) -> RunPlan:
    """one_step_less: the plan as this rank believes it to be once all have agreed on it."""
    if rank not in plan.faults.get("one_step_less", ()):
        return plan
    return plan.model_copy(update={"total_steps": plan.total_steps - 1})


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
