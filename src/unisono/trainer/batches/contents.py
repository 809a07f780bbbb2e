"""What rows have beside their tokens, e.g. pictures, as part of a micro batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.batches.source import Micro
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families.family import ContentsLoader
from unisono.trainer.model.forward import PictureInputs

_STREAMS = {"train": "pictures", "eval": "evaluation pictures"}
"""Of random numbers; with other names the runs of earlier versions would draw other noise."""


@dataclass(frozen=True)
class ContentsMicro(Micro):
    """A micro batch of rows with contents; an image model's rows are captions.

    Attributes:
        contents: of the units, ready for a forward, as the loader of the family gives them.
        positions: what the model computes on, e.g. positions of latents.
    """

    contents: Any = field(kw_only=True)
    positions: int = field(kw_only=True)

    @property
    def tokens(self) -> int:
        """The positions."""
        return self.positions


@dataclass(frozen=True)
class TableContents:
    """The contents of the rows of a table.

    Attributes:
        table: of the split.
        loader: of the run.
        seed: of the run.
        global_batch: sequences of a step.
    """

    table: TokenTable
    loader: ContentsLoader
    seed: int
    global_batch: int

    def add(self, micro: Micro, units: Sequence[int], sides: Sequence[int], places: Sequence[int]) -> Micro:
        """The micro batch with its contents: a ContentsMicro; or, with pictures in its rows, one
        whose rows have them.

        Args:
            micro: of these units.
            units: rows of the table.
            sides: of each unit, the rows of tokens in the micro batch.
            places: where in the order of the run each of them is used; for evaluation the units
                themselves.
        """
        seeds = [stream_seed(self.seed, _STREAMS[self.table.split], position) for position in places]
        stored = self.table.columns["stored"][list(units)].tolist()
        numbers = [first + side for first in stored for side in sides]
        contents = (
            self.loader.load(numbers, seeds, [position // self.global_batch for position in places])
            if self.table.split == "train"
            else self.loader.load_evaluation(numbers, seeds)
        )
        if contents is None or isinstance(contents, PictureInputs):
            return replace(micro, rows=replace(micro.rows, pictures=contents))
        positions = int(self.table.row_lengths()[list(units)].sum())
        return ContentsMicro(**vars(micro), contents=contents, positions=positions)

    def first(self, limit: int) -> list[int]:
        """The numbers of the first rows, as the loader counts them."""
        numbers: list[int] = self.table.columns["stored"][:limit].tolist()
        return numbers
