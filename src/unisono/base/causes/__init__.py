"""The catalogue of causes: what can go wrong in a job, its symptoms, and its fix; and the types of
a verdict.

Ids are stable; texts are for people.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

from unisono.base.causes.entries import all_entries, cause_ids, read_entry
from unisono.base.causes.verdict import Cause, Evidence, OwnRunOnly, Verdict

__all__ = ["CATALOGUE", "Cause", "Evidence", "Verdict", "find_cause"]


class _Catalogue(Mapping[str, Cause]):
    """All causes by id, in the order in which `explain` lists them.

    A file of the catalogue is read when its cause is needed.
    """

    def __getitem__(self, cause_id: str) -> Cause:
        return read_entry(cause_id).cause

    def __contains__(self, cause_id: object) -> bool:
        return cause_id in cause_ids()

    def __iter__(self) -> Iterator[str]:
        return (entry.cause.id for entry in all_entries())

    def __len__(self) -> int:
        return len(cause_ids())


CATALOGUE: Mapping[str, Cause] = _Catalogue()


def find_cause(cause_id: str) -> Cause | None:
    """The cause with this id, or None."""
    return CATALOGUE.get(cause_id)


RESUMES = OwnRunOnly("It was stopped with the run; the same command resumes from the newest checkpoint.")
"""For a rank that was stopped."""
MORE_PATIENCE = OwnRunOnly("If such collectives are expected to take this long, set watch.stall_after.")
"""For ranks that wait for each other."""


@functools.cache
def _own_run_lines() -> frozenset[str]:
    """All lines of remedies for `unisono train` alone."""
    remedies = (line for cause in CATALOGUE.values() for line in cause.remedy)
    return frozenset({RESUMES, MORE_PATIENCE, *(line for line in remedies if isinstance(line, OwnRunOnly))})


_TRAINER = "trainer.train(resume_from_checkpoint=True) resumes from the newest checkpoint in its output_dir"
_RESUME_HINTS = {
    "llamafactory": (
        "LLaMA-Factory: set resume_from_checkpoint to the newest checkpoint-N in output_dir, and"
        " overwrite_output_dir: false"
    ),
    "axolotl": (
        "Axolotl: set resume_from_checkpoint to the newest checkpoint-N, or auto_resume_from_checkpoints:"
        " true"
    ),
    "torchtune": (
        "torchtune: set resume_from_checkpoint=True, and name the checkpoint's files under checkpointer"
    ),
    "lightning": 'Lightning: trainer.fit(model, ckpt_path="last") resumes from the last checkpoint',
    "trl": f"TRL: {_TRAINER}",
    "transformers": f"Hugging Face Trainer: {_TRAINER}",
}


def resume_hint(framework: str) -> tuple[str, ...]:
    """How a foreign program resumes, as a line of a remedy; empty for an unknown framework.

    Args:
        framework: llamafactory, axolotl, torchtune, lightning, trl, transformers.
    """
    hint = _RESUME_HINTS.get(framework)
    return (f"To resume, if it had saved a checkpoint: {hint}.",) if hint else ()


def remedy_for_foreign_program(fix: Sequence[str], framework: str) -> tuple[str, ...]:
    """A remedy for a foreign program: without the lines for `unisono train` alone, and with the way
    that this program resumes.

    Args:
        fix: the remedy for a run of `unisono train`.
        framework: the one that the program uses; empty: unknown.
    """
    lines = [line for line in fix if line not in _own_run_lines()]
    return (*lines, *(line for line in resume_hint(framework) if line not in lines))
