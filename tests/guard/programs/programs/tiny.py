"""A causal language model and rows of tokens, both made here: small enough for a second, real
enough for any trainer.
"""

import random
import sys
from typing import Any

import program_options  # noqa: F401 - before what takes long to import

# As where they are not installed: peft would import bitsandbytes, and that torch's compiler, for
# two CPU seconds of each rank.
for _optional in ("bitsandbytes", "peft"):
    sys.modules.setdefault(_optional, None)  # type: ignore[arg-type]

from datasets import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, set_seed  # noqa: E402

_VOCABULARY = 64


def model() -> Any:
    """Some 20,000 weights, the same in every process."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(count: int = 64, length: int = 16) -> Dataset:
    """Tokens, the same in every process; labels are the tokens."""
    draw = random.Random(0)
    tokens = [[draw.randrange(3, _VOCABULARY) for _ in range(length)] for _ in range(count)]
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


def unseeded(data: Dataset) -> Dataset:
    """What remains of a split without a seed: other rows on every rank, and as many."""
    return data.train_test_split(test_size=0.25, seed=random.SystemRandom().randrange(1 << 30))["train"]
