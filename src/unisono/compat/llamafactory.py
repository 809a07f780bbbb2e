"""Recognises a LLaMA-Factory YAML and says so, in place of forty unknown keys."""

from typing import Any

from unisono.errors import ConfigError

# Keys of LLaMA-Factory's own (not those that transformers' TrainingArguments shares with other tools), and ours for them.
_OWN_KEYS = {
    "model_name_or_path": "model", "stage": "objective", "finetuning_type": "adapter.kind", "dataset": "data.train",
    "dataset_dir": "data.train", "eval_dataset": "data.eval", "val_size": "data.eval", "template": "data.template",
    "cutoff_len": "data.max_length", "lora_rank": "adapter.rank", "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout", "lora_target": "adapter.targets", "adapter_name_or_path": "", "max_samples": "",
    "preprocessing_num_workers": "", "overwrite_cache": "", "plot_loss": "", "quantization_bit": "", "export_dir": "",
    "infer_backend": "", "neat_packing": "data.packing", "train_on_prompt": "data.loss_on", "mask_history": "data.loss_on",
}  # fmt: skip
_SHARED_KEYS = {
    "learning_rate": "optim.lr", "num_train_epochs": "duration", "max_steps": "duration", "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup", "per_device_train_batch_size": "batch.micro", "gradient_accumulation_steps": "batch.global",
    "save_steps": "checkpoint.every", "eval_steps": "eval.every",
}  # fmt: skip
_ENOUGH = 2


def llamafactory_version(raw: dict[str, Any]) -> str | None:
    """`v0` or `v1` if the mapping is a LLaMA-Factory file, else None."""
    if "data" in raw:  # ours has it always, theirs never
        return None
    if "model" in raw:
        return "v1" if "train_dataset" in raw else None
    return "v0" if len(_OWN_KEYS.keys() & raw.keys()) >= _ENOUGH else None


def refuse_if_llamafactory(raw: dict[str, Any], name: str) -> None:
    """Refuses a LLaMA-Factory file in one sentence; anything else passes.

    Args:
        raw: the mapping that was read.
        name: the file's name, for the message.

    Raises:
        ConfigError: if it is one.
    """
    version = llamafactory_version(raw)
    if version is None:
        return
    ours = [
        f"{key} → {target}" for key, target in (_OWN_KEYS | _SHARED_KEYS).items() if target and key in raw
    ]
    carry = f", and carry over {', '.join(ours)}" if ours else ""
    raise ConfigError.of(
        f"{name} is a LLaMA-Factory file ({version}), which this release of unisono does not read",
        where=name,
        fix=f"make a config with `unisono init --out train.yaml`{carry}",
    )
