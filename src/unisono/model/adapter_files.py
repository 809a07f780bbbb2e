"""Finds and reads without torch the adapters that a config starts from, and compares them with its `adapter` section."""

from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from unisono.config.schema import AdapterSection
from unisono.errors import ModelError, Problem
from unisono.model.files import read_json_object

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_SETTINGS = "adapter_config.json"
_FIX = "copy adapter_config.json again"
_REWARD = "SEQ_CLS"
_REWARD_HEADS = {"score", "classifier"}
"""Heads that peft stores with every adapter of a classifier, whether they are listed or not."""


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in a directory.

    Attributes:
        key: the config key that names it.
        directory: with ADAPTER_FILE and ADAPTER_SETTINGS.
        settings: the contents of ADAPTER_SETTINGS.
    """

    key: str
    directory: Path
    settings: dict[str, Any]

    @property
    def files(self) -> list[Path]:
        """The files that decide what it does."""
        return [self.directory / ADAPTER_SETTINGS, self.directory / ADAPTER_FILE]

    @property
    def rank(self) -> int:
        """r."""
        return int(self.settings["r"])

    @property
    def kind(self) -> str:
        """As in `adapter.kind`."""
        if self.settings.get("use_dora"):
            return "dora"
        return "rslora" if self.settings.get("use_rslora") else "lora"

    @property
    def is_reward(self) -> bool:
        """Whether it belongs to a reward model, or to another classifier."""
        return bool(self.settings.get("task_type") == _REWARD)

    @property
    def scaling(self) -> float:
        """The factor of B·A."""
        alpha = float(self.settings["lora_alpha"])
        return alpha / (sqrt(self.rank) if self.kind == "rslora" else self.rank)


def find_adapters(section: AdapterSection, *, reward: bool) -> list[StoredAdapter]:
    """The adapters of `adapter.merge` in order, and that of `adapter.from` last, if there are any.

    Args:
        section: `adapter` of the config.
        reward: whether a reward model is trained.

    Raises:
        ModelError: if one is missing, is not a LoRA adapter, or differs from what the section says.
    """
    found = [_read(name, f"adapter.merge.{i}") for i, name in enumerate(section.merge)]
    for adapter in found:
        _refuse_unmergeable(adapter)
    if section.from_ is not None:
        found.append(_read(section.from_, "adapter.from"))
        _refuse_other_task(found[-1], reward=reward)
        _refuse_differences(found[-1], section)
    return found


def adapter_directory(name: str, key: str) -> Path:
    """The directory of an adapter: the one that is named, or `adapter` in that of a run.

    Raises:
        ModelError: if there is none.
    """
    directory = Path(name).expanduser()
    for place in (directory, directory / "adapter"):
        if (place / ADAPTER_SETTINGS).is_file() and (place / ADAPTER_FILE).is_file():
            return place.resolve()
    raise ModelError.of(
        f"there is no adapter in {name}",
        where=key,
        why=f"neither it nor its folder `adapter` has {ADAPTER_SETTINGS} and {ADAPTER_FILE}"
        if directory.is_dir()
        else "there is no such directory; relative paths start at the working directory",
        fix="pass the directory of an adapter in peft's layout, or of a finished run",
    )


def _read(name: str, key: str) -> StoredAdapter:
    directory = adapter_directory(name, key)
    file = directory / ADAPTER_SETTINGS
    settings = read_json_object(file, fix=_FIX)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ModelError.of(
            f"{name} is an adapter of type {kind!r}",
            where=key,
            why="only LoRA, rsLoRA and DoRA are trained",
            fix="use a LoRA adapter, or merge it into the model first",
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise ModelError.of(
            f"r is {rank!r} and lora_alpha {alpha!r}",
            where=str(file),
            why="both must be numbers above 0",
            fix=_FIX,
        )
    uneven = [name for name in ("rank_pattern", "alpha_pattern") if settings.get(name)]
    if uneven:
        raise ModelError.of(
            f"the modules of {name} have different ranks or scales ({uneven[0]} in {ADAPTER_SETTINGS})",
            where=key,
            why="an adapter has one rank and one alpha here",
            fix="`unisono export --merge` writes the model with this adapter merged; train on that",
        )
    return StoredAdapter(key, directory, settings)


def _refuse_unmergeable(adapter: StoredAdapter) -> None:
    """Refuses an adapter whose change of the base weights is more than B·A: the result could not be stored as an adapter."""
    what = None
    if adapter.kind == "dora":
        what = "it is a DoRA adapter"
    elif adapter.settings.get("modules_to_save"):
        what = f"it has fully trained modules ({', '.join(adapter.settings['modules_to_save'])})"
    if what is not None:
        raise ModelError.of(
            f"{adapter.directory} cannot be merged in memory",
            where=adapter.key,
            why=f"{what}, which an adapter on the unchanged base model cannot express",
            fix="`unisono export --merge` writes the model with this adapter merged; set model.path to that",
        )


def _refuse_other_task(adapter: StoredAdapter, *, reward: bool) -> None:
    """Refuses to continue an adapter of a language model as that of a reward model, and the reverse."""
    if adapter.is_reward == reward:
        return
    kinds = ("a language model", "a reward model")
    raise ModelError.of(
        f"{adapter.directory} is an adapter of {kinds[adapter.is_reward]}, and {kinds[reward]} is trained",
        where=adapter.key,
        why=f"task_type is {adapter.settings.get('task_type')!r} in {ADAPTER_SETTINGS}",
        fix="move it to adapter.merge: training starts from the model with it merged"
        if reward
        else "set objective: reward, or use an adapter of a language model",
    )


def _refuse_differences(adapter: StoredAdapter, section: AdapterSection) -> None:
    """Refuses what `adapter` says differently from the adapter that training continues with."""
    implied = _REWARD_HEADS if adapter.is_reward else set()
    modules = sorted({*(adapter.settings.get("modules_to_save") or [])} - implied)
    pairs: list[tuple[str, Any, Any]] = [
        ("kind", section.kind, adapter.kind),
        ("rank", section.rank, adapter.rank),
        ("alpha", float(section.alpha), float(adapter.settings["lora_alpha"])),
        ("modules_to_save", sorted({*section.modules_to_save} - implied), modules),
    ]
    problems = [
        Problem(
            f"adapter.{key} is {_shown(mine)}, and {_shown(theirs)} in {adapter.directory / ADAPTER_SETTINGS}",
            f"adapter.{key}",
            "training continues with that adapter's weights",
            f"set adapter.{key}: {_shown(theirs)}",
        )
        for key, mine, theirs in pairs
        if mine != theirs
    ]
    if problems:
        raise ModelError(*problems)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
