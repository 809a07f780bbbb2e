"""What a start goes on from: the checkpoint, what has changed since, and the files that a start which comes to nothing puts back."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.manifest import user_key
from unisono.checkpoint.resume import resume_point
from unisono.checkpoint.store import CheckpointStore
from unisono.checkpoint.verify import Damage
from unisono.facts import Environment
from unisono.files import read_text, write_text
from unisono.launch.asked import TrainRequest
from unisono.launch.attempt import Show
from unisono.plan import ResumePoint, RunPlan
from unisono.rundir import RunDir
from unisono.rundir.continuing import check_same_run, unneeded
from unisono.rundir.start import StartDecision


def find_resume_point(
    run: RunDir, decision: StartDecision, environment: Environment, show: Show, *, trust: bool = False
) -> tuple[ResumePoint | None, str]:
    """The newest intact checkpoint, what is wrong with newer ones told; None where the run has none yet. And the reason.

    Args:
        run: its directory.
        decision: what the start is.
        environment: for the user's key.
        show: sees a warning for each finding.
        trust: `--trust`: take one that is not signed by this user, too.

    Raises:
        IntegrityError: if there are checkpoints and none can be read.
    """
    store = CheckpointStore(run.checkpoints, key=user_key(environment.settings_dir))

    def on_damage(path: Path, damage: Damage) -> None:
        if damage.kind == "foreign" and trust:  # it is gone on from, and the reason of the start says so
            return
        fix = "pass --trust to go on from it all the same" if damage.kind == "foreign" else ""
        text = f"{path.name}: {damage}"
        show(
            {"kind": "warning", "time": time.time(), "code": f"checkpoint_{damage.kind}", "text": text, "fix": fix}
        )  # fmt: skip

    return resume_point(store, decision, on_damage, trust=trust)


def with_changes(plan: RunPlan, run: RunDir, decision: StartDecision, request: TrainRequest) -> RunPlan:
    """The plan with a line for each thing that has changed since the start before, and with what was allowed.

    Raises:
        UsageError: if it would be another run, and that was not allowed.
    """
    lines: list[str] = []
    allowed = plan.allowed
    if plan.resume is not None:
        found = check_same_run(run, plan.to_json(), request.probes.packages(), allow=request.allowed)
        lines, allowed = found.lines, found.allowed
    elif decision.kind == "fresh":
        lines = unneeded(request.allowed)
    if request.trust and (plan.resume is None or not plan.resume.trust):
        lines = [*lines, "--trust was not needed: there is no checkpoint of somebody else to go on from"]
    return plan.model_copy(update={"warnings": [*plan.warnings, *lines], "allowed": allowed})


@dataclass(frozen=True)
class Earlier:
    """What a start writes over before its ranks train, as the start before has left it.

    The next start compares with what really ran. So a start that came to nothing puts these files back.
    """

    files: dict[Path, str]

    @classmethod
    def of(cls, run: RunDir) -> "Earlier":
        """Reads them; those that are not there are left out."""
        found = {}
        for path in (run.config, run.environment, run.data, run.plan):
            with contextlib.suppress(OSError, ValueError):
                found[path] = read_text(path)
        return cls(found)

    def put_back(self) -> None:
        """Writes back what has changed, the plan last."""
        for path, text in self.files.items():
            with contextlib.suppress(OSError):  # a full disk: the next start then compares with this one
                if read_text(path) != text:
                    write_text(path, text, mode=0o600)
