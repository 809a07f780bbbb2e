"""The keys of LLaMA-Factory and of Hugging Face's TrainingArguments, as `keys.toml` lists them."""

from unisono.trainer.readers.key_table import KeyTable

TOOL = "LLaMA-Factory"
KEYS = KeyTable("unisono.trainer.readers.llamafactory")
"""By name, in the order of LLaMA-Factory's classes."""
PREFERENCE_STAGES = ("rm", "dpo", "kto")
"""LLaMA-Factory's stages on rows of preferences."""
