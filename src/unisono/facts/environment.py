"""What the environment variables say, and which of them one device has no use for."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

# Left behind by launchers and by accelerate; they would make torch or peft look for other ranks.
_LEFTOVER = re.compile(
    r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME|ROLE_WORLD_SIZE"
    r"|NODE_RANK|NNODES|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_NCCL_.*|NCCL_.*|GLOO_.*|PET_.*"
    r"|ACCELERATE_.*|FSDP_.*|DS_.*|DEEPSPEED_.*|MEGATRON_LM_.*|OMPI_COMM_WORLD_.*|PMI_.*|MV2_COMM_WORLD_.*)$"
)


@dataclass(frozen=True)
class Environment:
    """The variables that matter to us."""

    leftovers: dict[str, str] = field(default_factory=dict)
    """Variables of a distributed job. On one device they are ignored, and named."""
    torchelastic_run: str | None = None
    slurm_tasks: int | None = None
    slurm_nodes: int | None = None
    world_size: int | None = None
    omp_num_threads: int | None = None
    cache_dir: Path = Path("~/.cache/unisono")
    settings_dir: Path = Path("~/.config/unisono")
    """The user's own folder: the key that signs checkpoints."""
    visible_devices: str | None = None
    colour: bool = True

    @property
    def live_launcher(self) -> str | None:
        """The launcher that started this process as one of several ranks, or None."""
        if (self.world_size or 1) <= 1:
            return None
        if self.torchelastic_run is not None:
            return "torchrun"
        if (
            self.slurm_tasks is not None
            and self.slurm_nodes is not None
            and self.slurm_tasks > self.slurm_nodes
        ):
            return "srun"
        return None


def read_environment() -> Environment:
    """Reads the process's environment once."""
    env = os.environ
    return Environment(
        leftovers={name: value for name, value in sorted(env.items()) if _LEFTOVER.match(name)},
        torchelastic_run=env.get("TORCHELASTIC_RUN_ID"),
        slurm_tasks=_whole(env.get("SLURM_NTASKS")),
        slurm_nodes=_whole(env.get("SLURM_NNODES")),
        world_size=_whole(env.get("WORLD_SIZE")),
        omp_num_threads=_whole(env.get("OMP_NUM_THREADS")),
        cache_dir=_folder(env.get("XDG_CACHE_HOME"), "~/.cache") / "unisono",
        settings_dir=_folder(env.get("XDG_CONFIG_HOME"), "~/.config") / "unisono",
        visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        colour="NO_COLOR" not in env and env.get("TERM") != "dumb",
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isascii() and text.strip().isdigit() else None


def _folder(text: str | None, default: str) -> Path:
    return Path(text) if text and Path(text).is_absolute() else Path(default).expanduser()
