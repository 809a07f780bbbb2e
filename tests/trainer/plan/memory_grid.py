"""Settings of which the estimate of memory is frozen in memory_figures.json.

`python -m tests.trainer.plan.memory_grid` writes the figures.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.trainer.plan import ModelFacts, estimate_memory

FIGURES = Path(__file__).parent / "memory_figures.json"
_LLM = {
    "directory": "", "model_type": "qwen3", "parameters": 596_049_920, "hidden_size": 1024, "layers": 28, "intermediate_size": 3072,
    "vocab_size": 151_936, "linear_parameters": 440_401_920, "linear_in_out": 630_784, "weight_bytes": 0, "digest": "",
}  # fmt: skip
_MODELS: dict[str, dict[str, Any]] = {
    "plain": _LLM,
    "norms of heads": {**_LLM, "norms_heads": True},
    "narrow": {**_LLM, "hidden_size": 48, "layers": 3, "intermediate_size": 100, "linear_parameters": 71_000, "linear_in_out": 1900,
               "parameters": 7_400_000},
    "picture": {**_LLM, "model_type": "stable-diffusion-v1", "hidden_size": 320, "layers": 4},
}  # fmt: skip
_QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4": {"quantized": "nf4"},
    "fp4, double": {"quantized": "fp4", "quantized_double": True},
    "int8, embeddings": {"quantized": "int8", "quantized_embeddings": True},
    "gptq": {"quantized": "gptq", "quantized_bits": 4, "quantized_bytes": 0.5234375},
}


def settings() -> Iterator[tuple[str, ModelFacts, dict[str, Any]]]:
    """Name, model and arguments of each setting."""
    models = {**_MODELS, **{name: {**_LLM, **quantized} for name, quantized in _QUANTIZED.items()}}
    for (name, facts), dtype, rank, shards, device in itertools.product(
        models.items(), ("float32", "bfloat16"), (None, 12, 16), (1, 3), ("cpu", "gpu", "fast")
    ):
        if ("quantized" in facts and rank is None) or (device == "fast" and dtype == "float32"):
            continue  # refused, or never so
        model = ModelFacts.model_validate(facts)
        common = {
            "dtype": dtype,
            "adapter_rank": rank,
            "longest_row": 301,
            "shards": shards,
            "on_gpu": device != "cpu",
        }
        for number, (tokens, checkpointing) in enumerate(itertools.product((100, 5000), (False, True))):
            extra = {
                "fast_layers": device == "fast",
                "one_backward": shards == 1 and rank is None and number % 2 == 0,
                "optimizer_bytes": (8, 4)[number // 2],
                "logits": number != 1,
                "micro_tokens": tokens,
                "gradient_checkpointing": checkpointing,
            }
            yield f"{name}, {dtype}, {rank}, {shards}, {device}, {number}", model, common | extra


def figures() -> dict[str, list[int]]:
    """The estimate of each setting: the fields of `MemoryEstimate` in order, but those of models
    that none of them has.
    """
    return {
        name: list(estimate_memory(model, **given).model_dump(exclude={"other_models"}).values())
        for name, model, given in settings()
    }


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in figures().items())
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
