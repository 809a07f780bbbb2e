"""A run's directory: the names of its files, its lock, its records, and what state it is in."""

from dataclasses import dataclass
from pathlib import Path

from unisono.base.text import nearest

ROLLOUTS = "rollouts"
"""The folder of sampled answers."""
MODEL_MANIFEST = "unisono_manifest.json"
"""In a directory with a result or an export: the digest of every file as written."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of a run, all below `root`."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config, runnable as it is."""
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        """The plan, decided before anything starts."""
        return self.root / "plan.json"

    @property
    def environment(self) -> Path:
        """All package versions and their digest."""
        return self.root / "environment.json"

    @property
    def agreement(self) -> Path:
        """The reports of all nodes and ranks."""
        return self.root / "agreement.json"

    @property
    def data(self) -> Path:
        """The ledger of rows."""
        return self.root / "data.json"

    @property
    def metrics(self) -> Path:
        """One line per optimizer step.

        `metrics.jsonl.damaged-1` is the original file if a resume found damaged lines.
        """
        return self.root / "metrics.jsonl"

    @property
    def reference(self) -> Path:
        """The log-probabilities that the reference of dpo and kto gives to the answers."""
        return self.root / "reference.safetensors"

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.root / "checkpoints"

    @property
    def result(self) -> Path:
        """The outcome."""
        return self.root / "result.json"

    @property
    def verdict(self) -> Path:
        """The verdict; only if the last start ended with one."""
        return self.root / "verdict.json"

    @property
    def verdicts(self) -> Path:
        """Verdicts of earlier starts."""
        return self.root / "verdicts"

    @property
    def evidence(self) -> Path:
        """Files that verdicts cite."""
        return self.root / "evidence"

    @property
    def curve(self) -> Path:
        """The loss curve."""
        return self.root / "loss.svg"

    @property
    def lock(self) -> Path:
        """The lock that the head holds while it runs."""
        return self.root / "run.lock"

    @property
    def bringing(self) -> Path:
        """Exists only while a run is copied here.

        With it and without a plan, the directory is a partial copy.
        """
        return self.root / ".bringing"

    @property
    def adapter(self) -> Path:
        """The trained adapter in peft's layout, and unisono_manifest.json with the digest of every
        file.

        That of a reward model has the head `score`, too:
        `peft.AutoPeftModelForSequenceClassification.from_pretrained(DIRECTORY, num_labels=1)`.
        """
        return self.root / "adapter"

    @property
    def model(self) -> Path:
        """The trained model in the Hugging Face layout, after full fine-tuning, and
        unisono_manifest.json with the digest of every file.

        A reward model is for `AutoModelForSequenceClassification`.
        """
        return self.root / "model"

    @property
    def result_logits(self) -> Path:
        """The logits of the trained model for three rows, or the predictions of an image model,
        with which adapter/ or model/ and their exports are compared after they are loaded again;
        absent with `checkpoint.read_back: false`.
        """
        return self.root / "result_logits.safetensors"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files, if enabled."""
        return self.root / "tensorboard"

    @property
    def samples(self) -> Path:
        """Sample pictures of a run on pictures, by step and prompt, and `strip.png` with all of
        them.
        """
        return self.root / "samples"

    @property
    def thumbnails(self) -> Path:
        """Small pictures that belong to sample answers, by their digests."""
        return self.samples / "thumbnails"

    @property
    def rollouts(self) -> Path:
        """Sampled answers with their rewards, `step-00000001.0.parquet` and so on; only with
        `objective: grpo`.
        """
        return self.root / ROLLOUTS

    @property
    def slurm(self) -> Path:
        """The batch script, the job id, and the output of its fronts; only with `--launcher
        slurm`.
        """
        return self.root / "slurm"

    def rescued(self, run_id: str) -> "RunDir":
        """Where the last step of the run is saved if this directory disappears while it trains."""
        return RunDir(self.root.with_name(f"{self.root.name}-rescued-{run_id}"))

    def node_plan(self, node_rank: int) -> Path:
        """A node's copy of the plan with its own paths, while its ranks run."""
        return self.root / "nodes" / f"plan-{node_rank:05d}.json"

    def events(self, rank: int) -> Path:
        """Phases, warnings, checkpoints and failures of one rank, in order."""
        return self.root / "events" / f"rank-{rank:05d}.jsonl"

    def timeline(self, node_rank: int) -> Path:
        """The phases of the ranks of one node over time, sampled by its front, and every 10 s how
        long each rank was in data, compute and communication.
        """
        return self.root / "events" / f"timeline-{node_rank:05d}.jsonl"

    def log(self, host: str, rank: int) -> Path:
        """The complete output of the rank."""
        return self.root / "logs" / f"{host}-rank-{rank:05d}.log"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.checkpoints / f"step-{step:08d}"


def runs_beside(path: Path) -> list[Path]:
    """The runs in the directory in which a path would be, by name."""
    try:
        return sorted(folder for folder in path.parent.iterdir() if RunDir(folder).plan.is_file())
    except OSError:
        return []


def or_nearest_run(path: Path, fix: str) -> str:
    """How to name a run that was not found: the run, or directory of runs, beside it that is
    spelled like it, or `fix`.
    """
    try:
        places = [
            folder
            for folder in path.parent.iterdir()
            if RunDir(folder).plan.is_file() or runs_beside(folder / "run")
        ]
    except OSError:
        return fix
    near = None if path.exists() else nearest(path.name, [folder.name for folder in places])
    return f"did you mean {path.with_name(near)}? Or {fix}" if near else fix
