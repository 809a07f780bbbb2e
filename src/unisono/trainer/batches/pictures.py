"""The pictures of an image model as part of a micro batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.trainer.batches.seeds import stream_seed
from unisono.trainer.batches.source import Micro
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.families.pictures.latents import PictureBatch, PictureLoader


@dataclass(frozen=True)
class PictureMicro(Micro):
    """A micro batch of pictures; its rows are their captions.

    Attributes:
        pictures: of the units, ready for a forward.
        positions: of their latents.
    """

    pictures: PictureBatch = field(kw_only=True)
    positions: int = field(kw_only=True)

    @property
    def tokens(self) -> int:
        """Positions of latents."""
        return self.positions


@dataclass(frozen=True)
class TablePictures:
    """The pictures of the rows of a table.

    Attributes:
        table: of the split.
        loader: of the run.
        seed: of the run.
        global_batch: sequences of a step.
    """

    table: TokenTable
    loader: PictureLoader
    seed: int
    global_batch: int

    def add(self, micro: Micro, units: Sequence[int], places: Sequence[int]) -> PictureMicro:
        """The micro batch with its pictures.

        Args:
            micro: of these units.
            units: rows of the table.
            places: where in the order of the run each of them is used; for evaluation the units
                themselves.
        """
        is_training = self.table.split == "train"
        name = "pictures" if is_training else "evaluation pictures"
        seeds = [stream_seed(self.seed, name, position) for position in places]
        numbers = self.table.columns["picture"][list(units)].tolist()
        pictures = (
            self.loader.load(numbers, seeds, [position // self.global_batch for position in places])
            if is_training
            else self.loader.load_evaluation(numbers, seeds)
        )
        positions = int(self.table.row_lengths()[list(units)].sum())
        return PictureMicro(**vars(micro), pictures=pictures, positions=positions)

    def samples(self, limit: int) -> list[tuple[str, tuple[int, int]]]:
        """Captions and sizes of the first pictures."""
        return [self.loader.sample(number) for number in self.table.columns["picture"][:limit].tolist()]
