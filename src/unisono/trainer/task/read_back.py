"""The task `read_back`: loads what a run has written as its users will, in plain transformers, peft
and diffusers, and compares what it computes.

Request: output_dir. Result: compared (`logits`, `predictions` or `digests`), why (if only digests),
differs_by (null for digests), tolerance, seconds.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from unisono.base.errors import IntegrityError
from unisono.base.events import Reporter
from unisono.base.files import read_json
from unisono.base.text import library_words, show_bytes
from unisono.guard.facts.limits import available_memory
from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.verify import check_model
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import DIFFUSION
from unisono.trainer.model.adapter import fit_base_to_adapter
from unisono.trainer.model.file_settings import ADAPTER_FILE, ADAPTER_SETTINGS
from unisono.trainer.model.files import read_safetensors_header, weight_files
from unisono.trainer.model.layers import take_rope
from unisono.trainer.model.load import DTYPES, load_base
from unisono.trainer.model.quantization import quantized_load
from unisono.trainer.model.result_logits import ResultLogits
from unisono.trainer.model.result_outputs import ResultOutputs
from unisono.trainer.plan import RunPlan

_ROOM = 1.3  # times the weights: buffers of loading, and of three rows


@dataclass(frozen=True)
class ReadBack:
    """How written files compare with the model that they are of.

    Attributes:
        compared: `logits`; of an image model `predictions`; or `digests`, with names and shapes,
            where neither can be computed.
        why: they cannot.
        differs_by: root mean square of the difference of these, relative to their spread; None for
            digests.
        tolerance: what rounding explains.
    """

    compared: str
    why: str = ""
    differs_by: float | None = None
    tolerance: float = 0.0


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
        """Of all weights in a dtype."""

    def load(self, *, dtype: str, device: torch.device) -> Any:
        """The model as its users load it, in evaluation mode."""


@dataclass(frozen=True)
class WrittenModel:
    """A language model, or an adapter of one.

    Attributes:
        directory: of a model or an adapter.
        base: of the base model; for a model the same.
        config: of the run; None if nothing is known of one.
        reward: whether it is a reward model.
    """

    directory: Path
    base: Path
    config: RunConfig | None
    reward: bool

    rounding = 0.0

    @property
    def weights(self) -> Path:
        """The file of trained weights, or the first of several."""
        return self.directory / ADAPTER_FILE if self.is_adapter else weight_files(self.directory)[0]

    @property
    def trusts_code(self) -> bool:
        """Whether the model's own code may run."""
        return self.config is not None and self.config.model.trust_remote_code

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter."""
        return (self.directory / ADAPTER_SETTINGS).is_file()

    def bytes_in_memory(self, dtype: str) -> int:
        """Of all weights in a dtype, if none is quantized."""
        files = weight_files(self.base) + ([self.directory / ADAPTER_FILE] if self.is_adapter else [])
        shapes = [header.shape for file in files for header in read_safetensors_header(file)]
        return DTYPES[dtype].itemsize * sum(torch.Size(shape).numel() for shape in shapes)

    def load(self, *, dtype: str, device: torch.device) -> Any:
        """The model of transformers, or of peft on its base."""
        return load_as_users_do(self, dtype=dtype, device=device)


def run(request: dict[str, Any], report: Reporter) -> dict[str, Any]:
    """Reads the result of a run back.

    Raises:
        IntegrityError: if a file differs from its digest, cannot be loaded, or gives other logits.
    """
    began = time.monotonic()
    files = RunDir(Path(request["output_dir"]))
    plan = RunPlan.model_validate(read_json(files.plan))
    directory = files.adapter if plan.config.adapter is not None else files.model
    base = Path(plan.model.directory) if plan.config.adapter is not None else directory
    report.phase("verify", f"reading {directory} back")
    written: Written
    outputs: type[ResultOutputs]
    if plan.config.objective == DIFFUSION:
        from unisono.trainer.families.pictures.pipeline_files import read_pipeline
        from unisono.trainer.families.pictures.result_predictions import ResultPredictions
        from unisono.trainer.task.picture_read_back import WrittenLora

        written, outputs = WrittenLora(directory, read_pipeline(base)), ResultPredictions
    else:
        reward = plan.config.objective == "reward"
        written, outputs = WrittenModel(directory, base, plan.config, reward=reward), ResultLogits
    if files.result_logits.is_file():
        found = read_back(written, outputs.read(files.result_logits))
    else:
        found = by_digests(directory, "what the trained model computes was not kept")
    return {**asdict(found), "seconds": time.monotonic() - began}


def by_digests(directory: Path, why: str) -> ReadBack:
    """Compares the files with the list that was written with them: names, and of each file its
    digest, hence its tensors' shapes.

    Raises:
        IntegrityError: with each damaged file.
    """
    checked = check_model(directory)
    if not checked.intact:
        raise checked.refusal(restore="its checkpoint has the weights: `unisono export RUN OUT --step N`")
    return ReadBack("digests", why)


def read_back(written: Written, wanted: ResultOutputs) -> ReadBack:
    """Loads files again, and compares what their model computes with what the model gave that they
    are of.

    Raises:
        IntegrityError: if a file differs from its digest, cannot be loaded, or computes something
            else; nothing is deleted.
    """
    by_digests(written.directory, "")  # names a damaged file, which the libraries below do not
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    needed, free = int(_ROOM * written.bytes_in_memory(wanted.dtype)), _free(device)
    if needed > free:
        return by_digests(
            written.directory,
            f"loading it again takes {show_bytes(needed)} of memory, and {show_bytes(free)} are free",
        )
    file = written.weights
    try:
        found = wanted.again(written.load(dtype=wanted.dtype, device=device), dtype=wanted.dtype)
    except torch.OutOfMemoryError:
        return by_digests(written.directory, "there is no memory to load it again")
    except Exception as error:  # whatever transformers, peft, diffusers and the model's own code raise
        raise _damaged(f"{file} cannot be loaded again", file, library_words(error)) from error
    difference, tolerance = wanted.difference(found), max(written.rounding, wanted.tolerance(found))
    if difference > tolerance and wanted.dtype != "float32" and 2 * needed <= free:
        precise = wanted.again(written.load(dtype="float32", device=torch.device("cpu")), dtype="float32")
        tolerance = max(tolerance, wanted.tolerance(found, precise))
    if not difference <= tolerance:
        why = (
            f"its {'logits' if wanted.name == 'logits' else 'predictions'} differ by {difference:.2g} of"
            f" their spread; rounding in {wanted.dtype} explains {tolerance:.2g}"
        )
        raise _damaged(f"{file} is not the model that was trained", file, why)
    return ReadBack(wanted.name, "", difference, tolerance)


def _damaged(what: str, file: Path, why: str) -> IntegrityError:
    return IntegrityError.of(
        what,
        where=str(file),
        why=why,
        fix=(
            "nothing was deleted, and the checkpoints have the trained weights: please report it, with"
            " config.yaml and environment.json of the run"
        ),
    )


def _free(device: torch.device) -> int:
    """Bytes of memory for weights."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else available_memory()


def load_as_users_do(written: WrittenModel, *, dtype: str, device: torch.device) -> Any:
    """The model of transformers, or of peft on its base, as their own `from_pretrained` loads it;
    in evaluation mode.
    """
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()  # the front shows the progress
    auto = AutoModelForSequenceClassification if written.reward else AutoModelForCausalLM
    place = written.directory if (written.directory / "config.json").is_file() else written.base
    settings = AutoConfig.from_pretrained(str(place), trust_remote_code=written.trusts_code)
    if written.reward:
        settings.num_labels = 1
    quantized = quantized_load(written.config, written.base, dtype=dtype, device=device)
    if quantized is not None:  # as it was trained; transformers alone reads no GPTQ
        model = load_base(
            written.base,
            dtype=DTYPES[dtype],
            trust_remote_code=written.trusts_code,
            adjust=lambda config: take_rope(config, directory=written.directory),
            reward=written.reward,
            quantized=quantized,
        )
    else:
        model = auto.from_pretrained(
            str(written.base), config=settings, dtype=DTYPES[dtype], trust_remote_code=written.trusts_code
        )
    model.to(device)
    if not written.is_adapter:
        return model.eval()
    header = read_safetensors_header(written.directory / ADAPTER_FILE)
    fit_base_to_adapter(model, {tensor.name: tuple(tensor.shape) for tensor in header})
    return PeftModel.from_pretrained(model, str(written.directory), torch_device=str(device)).eval()
