"""What a job has saved so far, as it stands in its output_dir."""

from tests.jobs.nodes.harness import Job


def published(job: Job) -> list[str]:
    """Names of the checkpoints that are whole, the oldest first."""
    folder = job.out / "checkpoints"
    return sorted(path.name for path in folder.glob("step-*") if ".tmp-" not in path.name)


def newer(job: Job, than: str) -> None:
    """Waits until there is a newer checkpoint in the head's directory."""
    job.until(lambda: any(name > than for name in published(job)), what=f"a checkpoint after {than}")
