"""What the trained model computes for fixed inputs, kept beside the result: files that are loaded
again must compute the same.
"""

from typing import Any

from unisono.base.text import one_line
from unisono.trainer.config.sections import DIFFUSION
from unisono.trainer.model.result_logits import ResultLogits
from unisono.trainer.model.result_outputs import ResultOutputs
from unisono.trainer.training.evaluation import evaluating
from unisono.trainer.training.run import Run
from unisono.trainer.training.weights import round_as_stored


def write_outputs(run: Run) -> None:
    """Writes what the trained model gives for fixed inputs beside the result.

    All ranks must call it; of replicas one computes.
    """
    if not run.group.is_main and run.sharded is None:
        return
    run.saver.before_update()  # a stuck save may still read the live tensors
    round_as_stored(run.forward.loaded, run.plan)
    try:
        with evaluating(run), run.forward.ready_to_generate() as model:
            found = run.forward.within(lambda: _outputs(run, model))
        if run.group.is_main:
            found.write(run.files.result_logits)
    except (
        Exception
    ) as error:  # whatever the model's own code raises: the result is written, only its comparison is lost
        if run.sharded is not None and not isinstance(error, OSError):  # the others wait in a collective
            raise
        run.report.warning(
            "no_logits",
            "the logits of three rows are not kept, so the result is read back by its digests alone:"
            f" {one_line(str(error), limit=200)}",
        )


def _outputs(run: Run, model: Any) -> ResultOutputs:
    if run.plan.config.objective == DIFFUSION:
        from unisono.trainer.families.pictures.pipeline import trains_text
        from unisono.trainer.families.pictures.result_predictions import ResultPredictions

        trained = model.text_names if trains_text(run.plan.config) else ()
        return ResultPredictions.of(model, dtype=run.plan.dtype, text_encoders=trained)
    return ResultLogits.of(model, run.source.examples(), dtype=run.plan.dtype)
