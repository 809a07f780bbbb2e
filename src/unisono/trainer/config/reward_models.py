"""Reward models that a config names: finished runs with `objective: reward`. Read from their
records, without torch.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.base.errors import ConfigError
from unisono.base.files import read_bytes, read_object
from unisono.base.text import one_line
from unisono.guard.rundir import MODEL_MANIFEST, RunDir, or_nearest_run
from unisono.trainer.config.rollout_sections import RewardSection

MODEL = "model"
"""The reward that is given by a reward model."""
MOST_TOKENS = 8_192
"""Of answers with their prompts that a reward model reads at once, if there is more than one."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TRAIN = "train one with `objective: reward`, and name its output_dir"


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A finished run whose model gives rewards.

    Attributes:
        key: of its path in the config, e.g. `rewards.0.path`.
        path: of the run.
        device: `cpu` or `cuda`.
        digest: of the files of its result, and of the model it started from.
        memory_bytes: estimate for its weights, and for the activations of MOST_TOKENS. A quantized
            model counts as if it were not.
    """

    key: str
    path: Path
    device: str
    digest: str
    memory_bytes: int


def reward_models_of(rewards: Sequence[RewardSection]) -> Iterator[RewardModel]:
    """The reward models among the entries of `rewards`.

    Raises:
        ConfigError: if one is not a finished run with `objective: reward`, or lacks files.
    """
    for number, entry in enumerate(rewards):
        if entry.use == MODEL:
            yield reward_model(Path(entry.path or ""), f"rewards.{number}.path", device=entry.device)


def reward_model(path: Path, key: str, *, device: str) -> RewardModel:
    """A reward model by the directory of its run.

    Raises:
        ConfigError: as `reward_models_of`.
    """
    run = RunDir(path.expanduser())
    plan = read_object(run.plan)
    config = plan.get("config")
    if not isinstance(config, dict):
        raise ConfigError.of(
            f"{path} is not a run",
            where=key,
            why="it has no plan.json" if run.root.is_dir() else "there is no such directory",
            fix=or_nearest_run(run.root, _TRAIN),
        )
    if config.get("objective") != "reward":
        objective = one_line(str(config.get("objective")), limit=60)
        raise ConfigError.of(
            f"the run {path} is not a reward model",
            where=key,
            why=f"its objective is {objective}",
            fix=_TRAIN,
        )
    outcome = read_object(run.result).get("outcome")
    if outcome != "completed":
        raise ConfigError.of(
            f"the reward model {path} is not finished",
            where=key,
            why=f"its outcome is {outcome}" if outcome else "it has no result.json",
            fix=f"finish it: unisono train {run.config}",
        )
    weights = run.model if config.get("adapter") is None else run.adapter
    try:
        manifest = read_bytes(weights / MODEL_MANIFEST)
    except (OSError, ValueError):
        raise ConfigError.of(
            f"the reward model {path} lacks files",
            where=key,
            why=f"there is no {weights.name}/{MODEL_MANIFEST}",
            fix="copy the whole run again",
        ) from None
    base = json.dumps(_section(plan, "model").get("digest")).encode()
    digest = hashlib.sha256(manifest + base).hexdigest()[:16]
    return RewardModel(key, run.root, device, digest, _memory_bytes(plan, device))


def _memory_bytes(plan: Mapping[str, Any], device: str) -> int:
    """An estimate; on another kind of device than that of its training the dtype is that of the
    files, and counts as float32.
    """
    trained_on, model = _section(plan, "device").get("kind"), _section(plan, "model")
    size = _BYTES.get(str(plan.get("dtype")), 4) if device == trained_on else 4
    of_token = 10 * int(model.get("hidden_size") or 0) + 4 * int(model.get("intermediate_size") or 0)
    return size * (int(model.get("parameters") or 0) + MOST_TOKENS * of_token)


def _section(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = plan.get(name)
    return section if isinstance(section, dict) else {}
