"""The page docs/reference/models.md in English and Chinese, from bench/results/models.json.

Used by scripts/make_reference.py.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from page_parts import Translate, heading, table, word
from unisono.base.locale import Chinese, read_entries

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "models.json"
_CELLS = ("lora", "full", "packed", "two_ranks", "generate", "merge", "gguf", "quantized")
_HEADS = ("LoRA", "full", "packed", "2 ranks", "generate", "merge", "GGUF", "nf4")


def models_page(t: Translate, language: str) -> list[str]:
    """Every architecture, what was tried with it, and why a try was refused."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    types: dict[str, dict[str, Any]] = results["types"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    reasons = _Reasons()
    rows = [
        [
            f"`{name}`",
            tried["class"],
            f"{tried['cells']['lora'].get('figures', {}).get('adapted', '–')}",
            *(_shown(tried["cells"][cell], reasons) for cell in _CELLS),
        ]
        for name, tried in types.items()
    ]
    counts = ", ".join(
        f"{head} {sum(_is_yes(tried, cell) for tried in types.values())}"
        for cell, head in zip(_CELLS, _HEADS, strict=True)
    )
    return [
        f"# {t('Model architectures')}", "",
        t("Every architecture that transformers can load as a causal language model, "
          "tried with two layers of random weights and three training steps on a CPU, in float32."
          " Types of encoders are tried as decoders, with `is_decoder: true`."), "",
        f"- {t('number of architectures')}: {len(types)} ({versions})",
        f"- {t('trained with LoRA and with full fine-tuning')}: {trained(types)}",
        f"- {t('yes in each column')}: {counts}", "",
        t("✓: yes. A number: refused before the first step, for the reason with this number below the table."), "",
        "- *LoRA*: "
        + t("an adapter on all linear layers and experts (`all-linear`); *adapted*: how many weights have one"),
        f"- *{word('full', language)}*:"
        f" {t('losses as in transformers with each row alone, to 1e-5')}",
        f"- *{word('packed', language)}*: "
        + t("the same with packed rows; ▭: rows are padded instead, as they would influence each other"),
        f"- *{word('2 ranks', language)}*: {t('two processes have the losses of one, to 1e-5')}",
        f"- *{word('generate', language)}*: {t('`unisono generate` answers with the adapter')}",
        f"- *{word('merge', language)}*: "
        + t("`unisono export --merge` is base plus adapter in plain transformers, to 1e-5 of the spread of"
            " logits, with the tensors of the original"),
        f"- *GGUF*: {t('`unisono export --format gguf` writes it')}",
        f"- *nf4*: {t('LoRA on weights in 4 bits')}", "",
        *table(["model type", "class", "adapted", *_HEADS], rows, language),
        *heading("Reasons", language),
        *reasons.lines(language),
    ]  # fmt: skip


def trained(types: dict[str, dict[str, Any]]) -> int:
    """How many architectures train with LoRA and with full fine-tuning."""
    return sum(_is_yes(tried, "lora") and _is_yes(tried, "full") for tried in types.values())


def _is_yes(tried: dict[str, Any], cell: str) -> bool:
    return bool(tried["cells"].get(cell, {}).get("outcome") == "yes")


class _Reasons:
    """Numbers the reasons in the order of their first use."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._uses: Counter[str] = Counter()

    def number(self, reason: str) -> int:
        reason = re.sub(r" of type \w[\w-]*", "", reason)
        self._uses[reason] += 1
        return self._numbers.setdefault(reason, len(self._numbers) + 1)

    def lines(self, language: str) -> list[str]:
        chinese = Chinese(read_entries()) if language == "zh" else None
        return [
            f"{number}. {chinese(reason) if chinese else reason}" for reason, number in self._numbers.items()
        ]


def _shown(cell: dict[str, Any], reasons: _Reasons) -> str:
    """A mark, or the number of a reason."""
    if cell["outcome"] == "yes":
        return "▭" if cell.get("figures", {}).get("flat") == 0.0 else "✓"
    return f"{reasons.number(cell['reason'])}" if cell["outcome"] == "refused" else f"✗ {cell['reason']}"
