"""The checkpoint that a start goes on from; what is wrong with newer ones is told."""

import time
from pathlib import Path

from unisono.checkpoint.resume import resume_point
from unisono.checkpoint.signing import user_key
from unisono.checkpoint.store import CheckpointStore
from unisono.checkpoint.trouble import Damage
from unisono.facts import Environment
from unisono.launch.attempt import Show
from unisono.plan import ResumePoint
from unisono.rundir import RunDir
from unisono.rundir.start import StartDecision


def find_resume_point(
    run: RunDir, decision: StartDecision, environment: Environment, show: Show
) -> tuple[ResumePoint | None, str]:
    """The newest intact checkpoint, what is wrong with newer ones told; None where the run has none yet. And the reason.

    Raises:
        IntegrityError: if there are checkpoints and none can be read.
    """
    store = CheckpointStore(run.checkpoints, key=user_key(environment.settings_dir))

    def on_damage(path: Path, damage: Damage) -> None:
        text = f"{path.name}: {damage}"
        show(
            {
                "kind": "warning",
                "time": time.time(),
                "code": f"checkpoint_{damage.kind}",
                "text": text,
                "fix": "",
            }
        )

    return resume_point(store, decision, on_damage)
