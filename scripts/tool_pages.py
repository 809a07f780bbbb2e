"""The pages docs/reference/llamafactory.md, axolotl.md, trl.md and sd-scripts.md in English and
Chinese: every key of the tools whose files are read, and what it becomes.

Used by scripts/make_reference.py.
"""

from collections.abc import Iterable

from page_parts import Translate, as_written, heading, table, word
from unisono.trainer.readers.axolotl.axolotl_keys import KEYS as AXOLOTL_KEYS
from unisono.trainer.readers.key_table import Key
from unisono.trainer.readers.llamafactory.keys import KEYS
from unisono.trainer.readers.llamafactory.reader import SWITCHES, V1_KEYS
from unisono.trainer.readers.sd_scripts.keys import KEYS as SD_SCRIPTS_KEYS
from unisono.trainer.readers.trl.trl_keys import OWN as TRL_KEYS

GROUP_TITLES = {
    "ModelArguments": "Model", "QuantizationArguments": "Quantization", "ProcessorArguments": "Images, videos, audio",
    "ExportArguments": "Export", "VllmArguments": "vLLM", "SGLangArguments": "SGLang", "KTransformersArguments": "KTransformers",
    "DataArguments": "Data", "FreezeArguments": "Freeze", "LoraArguments": "LoRA", "OFTArguments": "OFT",
    "RLHFArguments": "Preferences", "GaloreArguments": "GaLore", "ApolloArguments": "APOLLO", "BAdamArgument": "BAdam",
    "SwanLabArguments": "SwanLab", "FinetuningArguments": "Training method", "GeneratingArguments": "Generation",
    "RayArguments": "Ray", "ProfilerArguments": "Profiler", "Fp8Arguments": "FP8", "TrainingArguments": "Training",
    "EvaluationArguments": "Evaluation (its `eval` command)", "MegatronBridgeArguments": "Megatron",
    "Seq2SeqTrainingArguments": "Hugging Face's TrainingArguments", "OldNames": "Old names",
}  # fmt: skip
_FATES = {
    "carried": "the same value, in a key of unisono",
    "translated": "the same meaning, in keys of unisono",
    "ignored": "has no effect on the result, and is listed once",
    "refused": "known, but not supported: exit code 2, with the alternative",
}
_CHINESE = {"carried": "沿用", "translated": "翻译", "ignored": "忽略", "refused": "拒绝"}
_HEAD = ["key", "default", "handling", "unisono", "note"]


def llamafactory_page(t: Translate, language: str) -> list[str]:
    """Every key of a LLaMA-Factory file, and what it becomes."""
    lines = [
        f"# {t('LLaMA-Factory keys')}", "",
        t("Every key of LLaMA-Factory 0.9.5, and of Hugging Face's TrainingArguments that it takes, with its default there and what unisono does with it."
          " How to use it: [from LLaMA-Factory](../how-to/from-llamafactory.md)."), "",
        *_handling(KEYS.values(), t, language), "",
        t("A refused key is accepted at its default. For an unknown key, the error shows the nearest known one. "
          "`unisono init --from-llamafactory FILE --json` shows the handling of each key of a file."),
    ]  # fmt: skip
    for group in dict.fromkeys(key.group for key in KEYS.values()):
        rows = [_row(key, t, language) for key in KEYS.values() if key.group == group]
        lines += [*heading(GROUP_TITLES[group], language), *table(_HEAD, rows, language)]
    lines += [
        *heading("Environment variables", language),
        t("Variables that LLaMA-Factory's launcher reads, and how unisono handles them."),
        "",
    ]
    lines += table(
        ["variable", "unisono"], [[f"`{name}`", t(text)] for name, text in SWITCHES.items()], language
    )
    lines += heading("Files of the generation v1", language)
    lines += [t("These files are refused. The table shows the key of unisono for each of their keys."), ""]
    rows = [[f"`{name}`", f"`{ours}`" if ours else word("none", language)] for name, ours in V1_KEYS.items()]
    return lines + table(["key", "unisono"], rows, language)


def sd_scripts_page(t: Translate, language: str) -> list[str]:
    """Every key of a configuration of sd-scripts, and what it becomes."""
    keys = SD_SCRIPTS_KEYS.values()
    lines = [
        f"# {t('Keys of sd-scripts and LoRA-Scripts')}", "",
        t("Every key of a configuration of sd-scripts (train_network.py), as LoRA-Scripts writes it to a TOML file, with its default there and what unisono"
          " does with it. How to use it: [from LoRA-Scripts](../how-to/from-lora-scripts.md)."), "",
        *_handling(keys, t, language), "",
        t("A refused key is accepted at its default. FLUX, Stable Diffusion 3 and modules of LyCORIS are refused with one sentence."),
    ]  # fmt: skip
    for group in dict.fromkeys(key.group for key in keys):
        rows = [_row(key, t, language) for key in keys if key.group == group]
        lines += [*heading(group, language), *table(_HEAD, rows, language)]
    return lines


def axolotl_page(t: Translate, language: str) -> list[str]:
    """Every key of an axolotl file, and what it becomes."""
    introduction = (
        "Every key of axolotl 0.17, with its default there and what unisono does with it."
        " How to use it: [from axolotl](../how-to/from-axolotl.md)."
    )
    return _plain_page("axolotl keys", introduction, AXOLOTL_KEYS.values(), t, language)


def trl_page(t: Translate, language: str) -> list[str]:
    """Every key of TRL's trainers, and what it becomes."""
    introduction = (
        "Every key of TRL 1.16 for SFT, DPO, KTO, reward models, GRPO, RLOO, ORPO and SimPO, with its default there and what unisono does"
        " with it. Those of Hugging Face's TrainingArguments are on the page of"
        " [LLaMA-Factory's keys](llamafactory.md). How to use it: [from TRL](../how-to/from-trl.md)."
    )
    return _plain_page("TRL keys", introduction, TRL_KEYS.values(), t, language)


def _plain_page(title: str, introduction: str, keys: Iterable[Key], t: Translate, language: str) -> list[str]:
    keys = list(keys)
    refused = t("A refused key is accepted at its default. For an unknown key, the error shows the nearest known one.")  # fmt: skip
    lines = [f"# {t(title)}", "", t(introduction), "", *_handling(keys, t, language), "", refused]
    for group in dict.fromkeys(key.group for key in keys):
        rows = [_row(key, t, language) for key in keys if key.group == group]
        lines += [*heading(t(group), language), *table(_HEAD, rows, language)]
    return lines


def _handling(keys: Iterable[Key], t: Translate, language: str) -> list[str]:
    """What each kind of handling means, and how many keys have it."""
    named = [key for key in keys if not key.same_as]
    lines = []
    for fate, meaning in _FATES.items():
        number = sum(key.fate == fate for key in named)
        lines.append(
            f"- **{_CHINESE[fate]}**（{number} 个键）：{t(meaning)}"
            if language == "zh"
            else f"- **{fate}** ({number} keys): {t(meaning)}"
        )
    return lines


def _row(key: Key, t: Translate, language: str) -> list[str]:
    """A line of a table of keys."""
    if key.same_as:
        return [f"`{key.name}`", "", word("as its new name", language), f"`{key.same_as}`", ""]
    comma, semicolon, only, one = ("、", "；", "仅与 {} 一起使用", "{} 之一") if language == "zh" else (", ", "; ", "only with {}", "one of {}")  # fmt: skip
    needs = only.format(f"`{key.needs}`") if key.needs else ""
    choice = one.format(comma.join(key.words)) if key.words else ""
    here = comma.join(t(ours) if " " in ours else f"`{ours}`" for ours in key.ours.split(", ") if ours)
    default = as_written(key.default)
    fate = _CHINESE[key.fate] if language == "zh" else key.fate
    note = semicolon.join(filter(None, (t(key.note) if key.note else "", needs, choice)))
    return [f"`{key.name}`", f"`{default}`" if default else "", fate, here, note]
