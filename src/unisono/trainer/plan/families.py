"""Families of models as the plan and the fronts know them: needs, figures and words.

What a family does in a rank or a task, which needs torch, is in `trainer.families`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from unisono.base.errors import UsageError
from unisono.base.files import read_object
from unisono.base.text import show_count
from unisono.guard.rundir import RunDir
from unisono.trainer.config.sections import DIFFUSION
from unisono.trainer.plan.run_plan import DataSummary, ModelFacts, SplitSummary

_VALUES_OF_A_LEVEL = 500
_SHARE_KEPT = 0.4  # with gradient checkpointing: the inputs of blocks, and the values of one block


class FamilyFacts(ABC):
    """What differs between families before a model is loaded.

    Attributes:
        folder: of its modules in `trainer.families`.
        training: of these the one that trains.
        objectives: those that only it has: for each name the class, as `MODULE:NAME`.
        model_types: what the `model_type` of its models begins with.
        packages: needed beside unisono's own dependencies.
        decodes_tokens: whether the model is a decoder of tokens, with layers of attention and MLP
            and logits over a vocabulary.
        draws: whether `generate` draws pictures with its models, and `export` writes their LoRA in
            the formats of image tools.
        described: what its models are.
        can_shard: whether fsdp can shard its weights.
        limits_rows: whether a rehearsal reads the first rows only.
        sequences: what a global batch is counted in.
        positions: what the model computes on.
        unit: the same in one word.
        rows_advice: what to look at when rows are suspected.
    """

    folder: ClassVar[str]
    training: ClassVar[str] = "trained_model"
    objectives: ClassVar[Mapping[str, str]] = {}
    model_types: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    decodes_tokens: ClassVar[bool]
    draws: ClassVar[bool] = False
    described: ClassVar[str]
    can_shard: ClassVar[bool]
    limits_rows: ClassVar[bool]
    sequences: ClassVar[str]
    positions: ClassVar[str]
    unit: ClassVar[str]
    rows_advice: ClassVar[str]

    def is_at(self, path: Path) -> bool:
        """Whether a path that is not a run is a model or an adapter of it."""
        del path
        return False

    def activations(self, model: ModelFacts, positions: int, *, gradient_checkpointing: bool) -> int:
        """Values kept for the backward by what is not a decoder's layer."""
        del model, positions, gradient_checkpointing
        return 0

    @abstractmethod
    def following(self, run: str, *, reward: bool) -> str:
        """The command to use a finished run with."""

    @abstractmethod
    def fit(self, micro: int, longest: int) -> str:
        """Why a micro batch was chosen."""

    @abstractmethod
    def made(self, rows: int, sequences: int, *, packing: bool) -> str:
        """What preparing made of the rows."""

    @abstractmethod
    def step_shape(self, sequences: int, tokens: int, rounds: int) -> str:
        """The size of a step."""

    @abstractmethod
    def micro_shape(self, sequences: int, tokens: int, longest: int) -> str:
        """The size of a micro batch."""

    @abstractmethod
    def shorter_rows(self, max_length: int) -> str:
        """How shorter rows would save memory."""

    @abstractmethod
    def rehearsed(self, rows: int, steps: int) -> str:
        """The main stage of a rehearsal."""

    @abstractmethod
    def used(self, rows: int, used: int) -> str:
        """How many rows are used."""

    @abstractmethod
    def size(self, data: DataSummary) -> str:
        """The size of the training rows."""

    @abstractmethod
    def checked(self, train: SplitSummary, total_steps: int) -> str:
        """The training rows as doctor shows them."""

    @abstractmethod
    def speed(self, tokens_per_second: float, train: SplitSummary) -> str:
        """The throughput."""


class _Text(FamilyFacts):
    """Language models: what no other family is."""

    folder, model_types, described = "text", "", "a language model"
    decodes_tokens = can_shard = limits_rows = True
    sequences, positions, unit = "sequences", "tokens", "tokens"
    rows_advice = "check the rows in the warnings (unisono data preview)"

    def following(self, run: str, *, reward: bool) -> str:
        return f"unisono eval {run} --data PAIRS" if reward else f"unisono chat {run}"

    def made(self, rows: int, sequences: int, *, packing: bool) -> str:
        if packing and sequences < rows:
            return f"packing made {sequences:,} sequences of {rows:,} rows"
        return f"{rows:,} rows"

    def fit(self, micro: int, longest: int) -> str:
        return f"auto: {micro} × {longest} tokens fit"

    def step_shape(self, sequences: int, tokens: int, rounds: int) -> str:
        return f"{sequences} sequences, {tokens} tokens in {rounds} micro batches a rank"

    def micro_shape(self, sequences: int, tokens: int, longest: int) -> str:
        return f"{sequences} sequences, {tokens} tokens, longest row {longest}"

    def shorter_rows(self, max_length: int) -> str:
        return (
            f"data.max_length={max_length // 2} halves the longest sequence; data.too_long"
            " decides what happens to longer rows"
        )

    def rehearsed(self, rows: int, steps: int) -> str:
        return f"{rows} rows, {steps} steps, evaluation, checkpoint"

    def used(self, rows: int, used: int) -> str:
        return f"{show_count(rows)} rows: {show_count(used)} used"

    def size(self, data: DataSummary) -> str:
        return f"{show_count(data.train.tokens)} tokens, {show_count(data.train.loss_tokens)} in the loss"

    def checked(self, train: SplitSummary, total_steps: int) -> str:
        return (
            f"{show_count(train.rows)} rows, {show_count(train.tokens)} tokens, {show_count(train.loss_tokens)}"
            f" of them trained on; {total_steps:,} steps"
        )

    def speed(self, tokens_per_second: float, train: SplitSummary) -> str:
        del train
        return f"{show_count(tokens_per_second)} tokens/s"


class _Pictures(FamilyFacts):
    """Image models: `hidden_size` are the channels of the first level of the UNet, `layers` its
    levels. A token is a position of the latents.
    """

    folder, model_types, described = "pictures", "stable-diffusion", "an image model"
    objectives: ClassVar = {DIFFUSION: "unisono.trainer.objectives.diffusion:Diffusion"}
    packages = ("diffusers", "pillow")
    decodes_tokens = can_shard = limits_rows = False
    draws = True
    sequences, positions, unit = "pictures", "positions of latents", "positions"
    rows_advice = "check the pictures in the warnings"

    def is_at(self, path: Path) -> bool:
        """A pipeline of diffusers, or a LoRA file."""
        names = ("model_index.json", "pytorch_lora_weights.safetensors")
        return path.suffix == ".safetensors" or any((path / name).is_file() for name in names)

    def activations(self, model: ModelFacts, positions: int, *, gradient_checkpointing: bool) -> int:
        """Values that a UNet keeps for its backward: 500 for each channel of the first level and
        position, and less for the levels below.

        From the shapes of its blocks: five residual blocks with attention in each level, and half
        as many channels for each position from level to level. On a CPU in float32 it is above what
        was measured, with gradient checkpointing and without; in bfloat16 oneDNN keeps about 100 MB
        beside it: bench/results/diffusion.json. It has not been measured on a GPU.
        """
        values = _VALUES_OF_A_LEVEL * model.hidden_size * sum(0.5**level for level in range(model.layers))
        return int(positions * values * (_SHARE_KEPT if gradient_checkpointing else 1))

    def following(self, run: str, *, reward: bool) -> str:
        del reward
        return f'unisono generate {run} "a prompt" --out pictures'

    def fit(self, micro: int, longest: int) -> str:
        return f"auto: {micro} × {longest} positions of latents fit"

    def made(self, rows: int, sequences: int, *, packing: bool) -> str:
        del rows, packing
        return f"{sequences:,} pictures"

    def step_shape(self, sequences: int, tokens: int, rounds: int) -> str:
        return f"{sequences} pictures, {tokens} positions of latents in {rounds} micro batches a rank"

    def micro_shape(self, sequences: int, tokens: int, longest: int) -> str:
        del longest
        return f"{sequences} pictures, {tokens} positions of latents"

    def shorter_rows(self, max_length: int) -> str:
        del max_length
        return "a smaller data.resolution has fewer positions of latents; pictures are then trained smaller"

    def rehearsed(self, rows: int, steps: int) -> str:
        return f"{rows} pictures, {steps} steps, evaluation, checkpoint"

    def used(self, rows: int, used: int) -> str:
        return f"{show_count(rows)} pictures: {show_count(used)} used"

    def size(self, data: DataSummary) -> str:
        return f"{show_count(data.train.sequences)} uses an epoch · {'; '.join(data.formats)}"

    def checked(self, train: SplitSummary, total_steps: int) -> str:
        return (
            f"{show_count(train.rows)} pictures, {show_count(train.sequences)} uses an epoch;"
            f" {total_steps:,} steps"
        )

    def speed(self, tokens_per_second: float, train: SplitSummary) -> str:
        pictures = tokens_per_second * train.sequences / max(1, train.tokens)
        return f"{show_count(pictures) if pictures >= 1000 else f'{pictures:.3g}'} pictures/s"


class _Vision(_Text):
    """Language models that read pictures, with rows that have some."""

    folder, training, described = "vision", "vision_model", "a vision-language model"

    def size(self, data: DataSummary) -> str:
        pictures = data.pictures
        if pictures is None:
            return super().size(data)
        return (
            f"{super().size(data)} · {show_count(pictures.number)} pictures of {pictures.median_tokens:,} tokens"
            f" (median; 99 %: {pictures.p99_tokens:,}, most: {pictures.most_tokens:,})"
        )


TEXT, PICTURES, VISION = _Text(), _Pictures(), _Vision()
_OTHERS: tuple[FamilyFacts, ...] = (PICTURES,)
"""All families but TEXT."""


def family_for(objective: str) -> FamilyFacts:
    """The family that an objective trains."""
    return next((family for family in _OTHERS if objective in family.objectives), TEXT)


def family_of(model: ModelFacts) -> FamilyFacts:
    """The family of a model with the rows of its run."""
    if model.reads_pictures:
        return VISION
    return next((family for family in _OTHERS if model.model_type.startswith(family.model_types)), TEXT)


def family_at(path: Path) -> FamilyFacts:
    """The family of RUN|MODEL."""
    for family in _OTHERS:
        if family.is_at(path):
            return family
    config = read_object(RunDir(path).plan).get("config")
    return family_for(str(config.get("objective"))) if isinstance(config, dict) else TEXT


def need_decoder(target: str, *, where: str) -> None:
    """Refuses RUN|MODEL of a family that decodes no tokens.

    Raises:
        UsageError: with what it is instead.
    """
    family = family_at(Path(target).expanduser())
    if not family.decodes_tokens:
        raise UsageError.of(
            f"{target} is {family.described}",
            where=where,
            why="this needs a language model",
            fix=f"use `{family.following(target, reward=False)}`",
        )
