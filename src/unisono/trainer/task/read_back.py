"""The task `read_back`: loads what a run has written as its users will, in plain transformers, peft
and diffusers, and compares what it computes.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from unisono.base.errors import IntegrityError
from unisono.base.events import Reporter
from unisono.base.files import read_json
from unisono.base.text import library_words, show_bytes
from unisono.guard.facts.limits import available_memory
from unisono.guard.rundir import RunDir
from unisono.trainer.checkpoint.verify import check_model
from unisono.trainer.families import training_of
from unisono.trainer.families.family import Written
from unisono.trainer.model.result_outputs import ResultOutputs
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.task_requests import ReadBackJson, ReadBackRequest, ResultComparison

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

    def to_json(self) -> ReadBackJson:
        """The fields by name."""
        return {
            "compared": self.compared,
            "why": self.why,
            "differs_by": self.differs_by,
            "tolerance": self.tolerance,
        }


def run(request: ReadBackRequest, report: Reporter) -> ResultComparison:
    """Reads the result of a run back.

    Raises:
        IntegrityError: if a file differs from its digest, cannot be loaded, or gives other logits.
    """
    began = time.monotonic()
    files = RunDir(request.output_dir)
    plan = RunPlan.model_validate(read_json(files.plan))
    directory = files.adapter if plan.config.adapter is not None else files.model
    base = Path(plan.model.directory) if plan.config.adapter is not None else directory
    report.phase("verify", f"reading {directory} back")
    family = training_of(plan)
    written = family.written(directory, base, plan.config)
    if files.result_logits.is_file():
        result = read_back(written, family.read_outputs(files.result_logits))
    else:
        result = by_digests(directory, "what the trained model computes was not kept")
    return {**result.to_json(), "seconds": time.monotonic() - began}


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
        outputs = wanted.again(written.load(dtype=wanted.dtype, device=device), dtype=wanted.dtype)
    except torch.OutOfMemoryError:
        return by_digests(written.directory, "there is no memory to load it again")
    except Exception as error:  # whatever transformers, peft, diffusers and the model's own code raise
        raise _damaged(f"{file} cannot be loaded again", file, library_words(error)) from error
    difference, tolerance = wanted.difference(outputs), max(written.rounding, wanted.tolerance(outputs))
    if difference > tolerance and wanted.dtype != "float32" and 2 * needed <= free:
        precise = wanted.again(written.load(dtype="float32", device=torch.device("cpu")), dtype="float32")
        tolerance = max(tolerance, wanted.tolerance(outputs, precise))
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
