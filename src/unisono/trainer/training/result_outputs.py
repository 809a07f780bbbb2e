"""What the trained model computes for fixed inputs, kept beside the result: files that are loaded
again must compute the same.
"""

from unisono.base.text import one_line
from unisono.trainer.families import training_of
from unisono.trainer.training.evaluation import evaluating
from unisono.trainer.training.run import Run
from unisono.trainer.training.weights import round_as_stored


def write_outputs(run: Run) -> None:
    """Writes what the trained model gives for fixed inputs beside the result.

    All ranks must call it; of replicas one computes.
    """
    if not run.group.is_main and run.sharded is None:
        return
    family = training_of(run.plan)
    run.saver.before_update()  # a stuck save may still read the live tensors
    round_as_stored(run.forward.loaded, run.plan)
    try:
        with evaluating(run), run.forward.ready_to_generate() as model:
            outputs = run.forward.within(lambda: family.outputs(model, run.plan, run.source.examples))
        if run.group.is_main:
            outputs.write(run.files.result_logits)
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
