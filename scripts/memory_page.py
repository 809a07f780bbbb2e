"""The page docs/reference/memory.md: the formula of the estimate, and a table of models and
devices, from the code that makes plans.
"""

import inspect
import re
from typing import Any

from page_parts import Translate, heading, table, word
from unisono.trainer.model.directory import facts_of_shape
from unisono.trainer.plan import MemoryEstimate, ModelFacts, estimate_memory
from unisono.trainer.plan.memory import packed_bytes

TOKENS = 2048
RANK = 16
SHARE = 0.8
DEVICES_GB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
_QWEN = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False}
# fmt: off
SHAPES: dict[str, dict[str, Any]] = {
    "0.6 B": {**_QWEN, "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
    "1.7 B": {**_QWEN, "hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16, "tie_word_embeddings": True},
    "4 B": {**_QWEN, "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32, "tie_word_embeddings": True},
    "8 B": {**_LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336, "num_attention_heads": 32},
    "14 B": {**_QWEN, "hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17_408, "num_attention_heads": 40, "tie_word_embeddings": False},
    "32 B": {**_QWEN, "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25_600, "num_attention_heads": 64, "tie_word_embeddings": False},
    "70 B": {**_LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28_672, "num_attention_heads": 64},
}
# fmt: on
"""Shapes of published models: Qwen3, and Llama 3.1 of 8 B and 70 B."""
WAYS = ("full", "full, compact", "LoRA", "QLoRA")
_WAYS_ZH = dict(zip(WAYS, ("全参数", "全参数，紧凑", "LoRA", "QLoRA"), strict=True))


def estimate(shape: str, way: str, *, devices: int) -> MemoryEstimate:
    """The estimate for one device: full fine-tuning, with AdamW's moments in bfloat16 if it is
    compact, LoRA in bfloat16, or LoRA on nf4 with quantized scales; fsdp with several devices.
    """
    return estimate_memory(
        facts(shape, way),
        dtype="bfloat16",
        adapter_rank=None if way.startswith("full") else RANK,
        micro_tokens=TOKENS,
        longest_row=TOKENS,
        gradient_checkpointing=True,
        shards=devices,
        on_gpu=True,
        fast_layers=True,
        optimizer_bytes=4 if way == "full, compact" else 8,
    )


def facts(shape: str, way: str) -> ModelFacts:
    """The figures of a model."""
    found = facts_of_shape(SHAPES[shape], model_type="qwen3" if "head_dim" in SHAPES[shape] else "llama")
    quantized = {"quantized": "nf4", "quantized_double": True} if way == "QLoRA" else {}
    return found.model_copy(update=quantized)


def memory_page(t: Translate, language: str) -> list[str]:
    """The page, line by line."""
    formula, _, _ = (inspect.getdoc(estimate_memory) or "").partition("\nArgs:")
    packed = f"{packed_bytes(facts('8 B', 'QLoRA')):.4f}"
    return [
        f"# {t('Memory estimate')}", "",
        t("How `unisono train` and `--dry-run` estimate the memory of a rank before anything starts. The trial of the largest batch before step 1"
          " measures it."),
        *heading("The formula", language),
        *_formula(formula, t), "",
        t("`packed_bytes` of nf4 and fp4 are 0.5 + (1 + 4 / 256) / 64 = {packed} with `model.quantize_double`, else 0.5 + 4 / 64 = 0.5625;"
          " for int8, 1 + 4 / hidden; for GPTQ and AWQ files, bits / 8 + 3 / group size; for fp8, MXFP4 and"
          " compressed-tensors files, the bytes of their weights and scales.").format(packed=packed),
        *heading("Which device for which model", language),
        t("GB for one device, and in brackets the smallest usual size of a device whose memory is used to at most {share}. One row of {tokens}"
          " tokens at once, gradient checkpointing, bfloat16; LoRA with rank {rank} on all linear layers; QLoRA: the same with `model.quantize: nf4`; compact: `optim.state_dtype: bfloat16`."
          " Eight devices: fsdp. With the fast layers.").format(share=f"{SHARE:.0%}", tokens=f"{TOKENS:,}", rank=RANK), "",
        *_table(language), "",
        t("No row of this table was measured on a GPU. On one H100, LoRA without gradient checkpointing took 18.6 GB where 19.8 are estimated at"
          " 1 B parameters (16 × 1,024 tokens at once), and 32.2 where 32.2 are at 8 B (4 × 1,024). The estimate of these activations was made afterwards, from what"
          " the code keeps, and not from these two figures. Full fine-tuning was not measured on a GPU."), "",
        t("Below 1 B parameters a GPU's steps are CUDA graphs if the memory of one more step is free"
          " ([decision 33]({decision})). The estimate does not count it: without that memory a run trains as well, only slower.").format(decision=f"{'../' if language == 'zh' else ''}../decisions/0033-cuda-graphs.md"), "",
        t("The plan counts on the fast layers if every rank has an NVIDIA GPU, Triton, a C compiler and Python's headers, the MLPs are SwiGLU without bias, and the adapter is plain: no DoRA, no dropout, no `modules_to_save`. If nodes differ, it counts without them. Where a rank finds"
          " that it cannot use them after all (the `ready` event has the reason), the trial of the largest batch shows whether memory suffices nevertheless;"
          " if not, the run ends before step 1, and the message names the reason and the settings that save memory."), "",
        t("To see the estimate for a model without its weights: `unisono train CONFIG --dry-run model.weights=random`."),
    ]  # fmt: skip


def _formula(text: str, t: Translate) -> list[str]:
    """The docstring of the estimate: a line and a list, each item as one text."""
    first, *items = re.split(r"\n- ", text.strip())
    return [t(first.strip()), "", *(f"- {t(' '.join(item.split()))}" for item in items)]


def _table(language: str) -> list[str]:
    """A line for each model."""
    head = [
        "model",
        *(f"{_WAYS_ZH[way]}，{n} 卡" if language == "zh" else f"{way}, {n}" for n in (1, 8) for way in WAYS),
    ]
    rows = []
    for shape in SHAPES:
        cells = [_cell(estimate(shape, way, devices=n).total) for n in (1, 8) for way in WAYS]
        rows.append([shape, *(cell.replace("none", word("none", language)) for cell in cells)])
    return table(head, rows, language)


def _cell(size: int) -> str:
    """E.g. `7.9 (12)`."""
    gigabytes = size / 1e9
    fits = next((device for device in DEVICES_GB if gigabytes <= SHARE * device), None)
    shown = f"{gigabytes:.1f}" if gigabytes < 100 else f"{gigabytes:,.0f}"
    return f"{shown} ({fits if fits is not None else 'none'})"
