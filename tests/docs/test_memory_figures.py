"""The memory figures of the page about 24 GB GPUs are those that the estimate gives.

Run: pytest tests/docs/test_memory_figures.py
"""

import re
from pathlib import Path
from typing import Any

import pytest

from memory_page import SHAPES
from unisono.trainer.model.directory import facts_of_shape
from unisono.trainer.plan import estimate_memory

PAGES = [Path(__file__).parents[2] / "docs" / place / "how-to" / "7b-on-24gb.md" for place in ("", "zh")]
TOKENS = (1024, 2048, 4096, 8192)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", SHAPES["8 B"]),
    "Qwen3 8B": ("qwen3", SHAPES["14 B"] | {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288, "num_attention_heads": 32}),
    "Qwen2.5 7B": ("qwen2", SHAPES["8 B"] | {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18_944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064}),
}  # fmt: skip
"""The architecture of each, from its published config.json."""
CHANGES: dict[str, dict[str, Any]] = {
    "model.quantize: nf4": {"quantize": None},
    "model.quantize: int8": {"quantize": "int8"},
    "model.quantize_double: false": {"double": False},
    "model.quantize_embeddings: true": {"embeddings": True},
    "memory.gradient_checkpointing: false": {"checkpointing": False},
    "batch.micro: 4": {"micro": 4},
    "data.max_length: 4096": {"tokens": 4096},
    "adapter.rank: 64": {"rank": 64},
    "optim.state_dtype: bfloat16": {"state_bytes": 4},
}


def gigabytes(
    model: str,
    *,
    quantize: str | None = "nf4",
    double: bool = True,
    embeddings: bool = False,
    checkpointing: bool = True,
    micro: int = 1,
    tokens: int = 2048,
    rank: int = 16,
    state_bytes: int = 8,
) -> float:
    """The estimate for one GPU with the fast layers."""
    kind, shape = MODELS[model]
    facts = facts_of_shape(shape, model_type=kind).model_copy(
        update={"quantized": quantize, "quantized_double": double, "quantized_embeddings": embeddings}
    )
    return (
        estimate_memory(
            facts,
            dtype="bfloat16",
            adapter_rank=rank,
            micro_tokens=micro * tokens,
            longest_row=tokens,
            gradient_checkpointing=checkpointing,
            on_gpu=True,
            fast_layers=True,
            optimizer_bytes=state_bytes,
        ).total
        / 1e9
    )


def rows(page: Path, *, columns: int) -> list[list[str]]:
    """The rows of the tables with so many columns, without their heads."""
    lines = [
        line[2:-2].split(" | ") for line in page.read_text("utf-8").splitlines() if line.startswith("| ")
    ]
    return [line for line in lines if len(line) == columns and "GB" not in line[0]]


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_table_of_what_fits_is_that_of_the_estimate(page: Path) -> None:
    found = [row for row in rows(page, columns=5) if re.fullmatch(r"[\d.]+", row[1])]
    assert len(found) == 6
    for name, *shown in found:
        model = re.split("[,，]", name)[0]
        settings: dict[str, Any] = {
            "quantize": next((kind for kind in ("nf4", "int8") if kind in name), None),
            "checkpointing": "gradient checkpointing" in name or "梯度检查点" in name,
        }
        assert shown == [f"{gigabytes(model, tokens=tokens, **settings):.1f}" for tokens in TOKENS], name


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_what_a_key_saves_is_the_difference_of_two_estimates(page: Path) -> None:
    found = {row[0].split("`")[1]: row[1] for row in rows(page, columns=3) if row[0].startswith("`")}
    for key, settings in CHANGES.items():
        difference = abs(gigabytes("Qwen3 8B", **settings) - gigabytes("Qwen3 8B"))
        assert re.search(r"([\d.]+) GB", found[key])[1] == f"{difference:.1f}", key  # type: ignore[index]
