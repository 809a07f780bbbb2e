"""Configs of tools whose files are not read: recognized by their keys, and answered with the page
that has our key for each of theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.base.errors import ConfigError
from unisono.trainer.config.yaml_file import KeyPath


@dataclass(frozen=True)
class Tool:
    """A tool and the keys by which its files are known.

    Attributes:
        name: of the tool.
        page: what helps.
        model: the key of its model, which each file has.
        keys: one of these is there, too.
        others: none of these, which would make it a file of another tool.
    """

    name: str
    page: str
    model: str
    keys: frozenset[str]
    others: frozenset[str] = frozenset()


_LLAMA_FACTORY = frozenset({"stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "do_train"})
TOOLS = (
    Tool(
        "axolotl",
        "docs/how-to/from-axolotl.md",
        "base_model",
        frozenset(
            {
                *("datasets", "pretraining_dataset", "test_datasets", "dataset_prepared_path"),
                *("sequence_len", "micro_batch_size", "num_epochs", "sample_packing", "val_set_size"),
                *("train_on_inputs", "model_type", "tokenizer_type", "rl", "lora_r", "wandb_project"),
                *("special_tokens", "adapter"),
            }
        ),
    ),
    Tool(
        "TRL",
        "docs/how-to/from-trl.md",
        "model_name_or_path",
        frozenset(
            {
                *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
                *("dataset_text_field", "datasets", "use_peft", "lora_r", "lora_target_modules"),
                *("attn_implementation", "assistant_only_loss", "dtype"),
            }
        ),
        _LLAMA_FACTORY,
    ),
)


def refuse_other_tools(raw: Mapping[str, object], lines: Mapping[KeyPath, int], name: str) -> None:
    """One error for a file of another tool, instead of one for each of its keys.

    Args:
        raw: the mapping in the file.
        lines: the line of each key.
        name: of the file.

    Raises:
        ConfigError: if it is one.
    """
    if "data" in raw or "model" in raw:  # ours
        return
    for tool in TOOLS:
        if tool.model in raw and tool.keys & set(raw) and not tool.others & set(raw):
            raise ConfigError.of(
                f"{name} is a config of {tool.name}",
                where=f"{name}:{lines.get((tool.model,), 1)}",
                why="its files are not read here",
                fix=(
                    f"begin with `unisono init --out train.yaml`, and transfer the values: {tool.page} has"
                    " our key for each of its keys"
                ),
            )
