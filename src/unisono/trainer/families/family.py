"""What a family of models provides: its module `input_files` has the functions of `Files`, `rows`
those of `Preparation`, `trained_model` those of `Training`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unisono.base.events import Reporter
from unisono.base.files import make_private_dir
from unisono.guard.rundir import RunDir
from unisono.trainer.config.data_sections import sources_of
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.plan import DataSummary, ModelFacts, RunPlan
from unisono.trainer.plan.task_requests import PrepareRequest

if TYPE_CHECKING:  # tasks without torch use `Files` and `Preparation`
    import torch

    from unisono.trainer.checkpoint.manifest import FileEntry
    from unisono.trainer.model.forward import Forward, PictureProbe
    from unisono.trainer.model.load import LoadedModel
    from unisono.trainer.model.result_outputs import ResultOutputs


@dataclass
class InputFiles:
    """The files of a run by their labels, and notes on what could not be listed."""

    data: list[tuple[str, Path]] = field(default_factory=list)
    tokenizer: list[tuple[str, Path]] = field(default_factory=list)
    model: list[tuple[str, Path]] = field(default_factory=list)
    code: list[tuple[str, Path]] = field(default_factory=list)
    weights: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def everything(self) -> list[Path]:
        """All files whose contents are compared."""
        return [path for _, path in (*self.data, *self.tokenizer, *self.model, *self.code)]


class Files(Protocol):
    """Finds files, without torch."""

    def list_inputs(self, config: RunConfig) -> InputFiles:
        """The files that a run on this node would read; refuses nothing."""

    def find_base(self, config: RunConfig) -> Path:
        """The directory of the model that a run starts from.

        Raises:
            ModelError: if it is not on this machine.
        """

    def check_adapter(self, directory: Path) -> None:
        """Refuses a written adapter that lacks files.

        Raises:
            ModelError: with the missing file.
        """


class Preparation(Protocol):
    """Prepares rows."""

    def prepare(self, request: PrepareRequest, report: Reporter) -> tuple[DataSummary, ModelFacts]:
        """Writes the table of a run, and inspects its model.

        Raises:
            UnisonoError: if data or model are refused.
        """

    def check_preview(self) -> None:
        """Refuses rows that cannot be shown as text.

        Raises:
            UsageError: with another way to see them.
        """


class Written(Protocol):
    """Files that somebody will load."""

    @property
    def directory(self) -> Path:
        """Where they are, with the list of their digests."""

    @property
    def weights(self) -> Path:
        """The file of trained weights, or the first of several."""

    @property
    def rounding(self) -> float:
        """The difference that was made on purpose, as weights were written in fewer bits than they
        were trained in; usually 0.
        """

    def bytes_in_memory(self, dtype: str) -> int:
        """The size of all weights in a dtype."""

    def load(self, *, dtype: str, device: "torch.device") -> Any:
        """The model as its users load it, in evaluation mode."""


Prompt = tuple[str, tuple[int, int]]
"""A prompt of a sample picture, and its size in pixels."""


class ContentsLoader(Protocol):
    """Loads what rows have beside their tokens, e.g. pictures. Rows are numbered as in the file of
    tokens, both splits together.
    """

    @property
    def feature_ids(self) -> Sequence[int]:
        """The tokens of which each stands for a part of contents; no loss counts them."""

    def load(self, numbers: Sequence[int], seeds: Sequence[int], steps: Sequence[int], /) -> Any:
        """The contents of some rows in training, ready for a forward.

        Args:
            numbers: of the rows.
            seeds: of the random numbers of each use of a row.
            steps: in which each is used, from 0.
        """

    def load_evaluation(self, numbers: Sequence[int], seeds: Sequence[int], /) -> Any:
        """Those of rows in an evaluation, the same in each."""


class Sampler(Protocol):
    """Draws sample pictures with the model that is being trained."""

    def prompts(self, numbers: Sequence[int]) -> list[Prompt]:
        """What to draw: the prompts of the config, and captions of some rows."""

    def draw_all(
        self,
        prompts: list[Prompt],
        folder: Path,
        *,
        step: int,
        seed: int,
        name: str,
        is_over: Callable[[int], bool],
    ) -> Iterator[tuple[str, Path]]:
        """Draws a sample of each prompt into a file; gives prompts and files."""


class Training(Protocol):
    """Trains, and loads what was trained."""

    def load(self, plan: RunPlan, device: "torch.device") -> "LoadedModel":
        """The model that a run trains.

        Raises:
            ModelError: if the model or its tokenizer is refused.
        """

    def choose_forward(
        self, plan: RunPlan, loaded: "LoadedModel", root: "torch.nn.Module | None"
    ) -> "Forward":
        """The forward of a run; `root` is the model whose weights are sharded."""

    def probe(self, plan: RunPlan, device: "torch.device") -> "PictureProbe | None":
        """Rows with pictures on which implementations of a forward are compared; None without
        any.
        """

    def open_contents(
        self, plan: RunPlan, forward: "Forward", device: "torch.device", *, draws: bool
    ) -> tuple[ContentsLoader | None, Sampler | None]:
        """The loader of what rows have beside their tokens, and with `draws` what draws sample
        pictures; None for rows of tokens.
        """

    def write_result(
        self, loaded: "LoadedModel", plan: RunPlan, directory: Path | None, *, step: int
    ) -> "dict[str, FileEntry] | None":
        """Writes trained weights in a format of the family, on ranks with a directory; None if the
        format is that of transformers and peft.
        """

    def outputs(self, model: Any, plan: RunPlan, examples: Callable[[], list[list[int]]]) -> "ResultOutputs":
        """What the trained model computes for fixed inputs."""

    def read_outputs(self, file: Path) -> "ResultOutputs":
        """Those that `outputs` gave, from their file."""

    def written(self, directory: Path, base: Path, config: RunConfig) -> Written:
        """The result of a run, to load it again."""


def make_ledger(request: PrepareRequest) -> Path | None:
    """Makes the directory of the run that a task prepares for; gives its data.json."""
    if not request.output_dir:
        return None
    directory = RunDir(Path(request.output_dir))
    make_private_dir(directory.root)
    return directory.data


def labelled_sources(config: RunConfig) -> list[tuple[str, str, str]]:
    """Label, key and name of every source of rows."""
    labelled = []
    for key, section in sources_of(config.data):
        _, role, *number = key.split(".")
        label = f"{role}[{number[0]}]" if number else {"train": "train[0]"}.get(role, role)
        labelled.append((label, key, section.path))
    return labelled


def present(directory: Path, names: "tuple[str, ...]") -> list[tuple[str, Path]]:
    """Those of some files that exist, with their names as labels."""
    return [(name, directory / name) for name in names if (directory / name).is_file()]
