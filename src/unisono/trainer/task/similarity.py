"""The part of the task `eval` for embedding models: loss and accuracy of similar texts."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from unisono.base.events import Reporter
from unisono.trainer.batches.table import TableRows
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data import grouped
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.objectives.embed import embed, ranking_losses
from unisono.trainer.task.inference import InferenceModel

_TOKENS = 8_192  # per forward


def similarity_figures(
    opened: InferenceModel,
    config: RunConfig,
    table: TokenTable,
    sequences: Sequence[int],
    report: Reporter,
    *,
    batch: int,
) -> tuple[dict[str, float | None], list[Mapping[str, object]]]:
    """Loss and accuracy, as a run's evaluation has them, and those of every row.

    Args:
        opened: the model.
        config: of the rows.
        table: of the rows.
        sequences: of the table, each a row.
        report: to the front.
        batch: rows whose texts are candidates for each other, in order.
    """
    rows, sides = TableRows(table, opened.device), tuple(range(table.sides))
    lengths = table.sequence_tokens()
    losses: list[float] = []
    right: list[bool] = []
    for first in range(0, len(sequences), batch):
        chosen = sequences[first : first + batch]
        groups = grouped(((one, int(lengths[one])) for one in chosen), most=_TOKENS)
        with torch.no_grad():
            parts = [embed(opened.forward, rows.load(group, sides), config.embed) for group in groups]
            of_batch, are_nearest = ranking_losses(torch.cat(parts), temperature=config.embed.temperature)
        losses += of_batch.tolist()
        right += are_nearest.tolist()
        report.phase("evaluate", "comparing the texts", done=len(losses), total=len(sequences))
    figures: dict[str, float | None] = {
        "rows": len(sequences),
        "tokens": int(lengths[list(sequences)].sum()),
        "loss": float(np.mean(losses)),
        "accuracy": float(np.mean(right)),
    }
    of_rows: list[Mapping[str, object]] = [
        {"row": table.row_id(int(table.rows_of(sequence)[0])), "loss": loss, "right": is_right}
        for sequence, loss, is_right in zip(sequences, losses, right, strict=True)
    ]
    return figures, of_rows
