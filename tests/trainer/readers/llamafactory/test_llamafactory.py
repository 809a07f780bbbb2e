"""A LLaMA-Factory file becomes our config: each of its keys has an effect, does no harm and is
listed, or is refused.

Run: pytest tests/trainer/readers/llamafactory/test_llamafactory.py
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.base.errors import ConfigError, Problem
from unisono.jobs.runs.config_file import load_config
from unisono.trainer.config import RunConfig, config_of
from unisono.trainer.config.translation import Verb
from unisono.trainer.config.yaml_file import parse_yaml
from unisono.trainer.plan.task_requests import SamplingParams
from unisono.trainer.readers.key_table import Key
from unisono.trainer.readers.llamafactory.keys import KEYS
from unisono.trainer.readers.llamafactory.reader import LlamaFactoryFile, llamafactory_version, translate

TEXT = """\
model_name_or_path: models/tiny
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
dataset: identity, alpaca
template: qwen3_nothink
cutoff_len: 2048
output_dir: saves/sft
learning_rate: 1.0e-4
num_train_epochs: 3.0
"""
BASE = yaml.safe_load(TEXT)
INFO = {
    "identity": {"file_name": "identity.json"},
    "alpaca": {"file_name": "alpaca.json"},
    "other": {"file_name": "identity.json", "columns": {"prompt": "q", "response": "a"}},
    "text": {"file_name": "identity.json", "columns": {"prompt": "text"}},
    "pairs": {"file_name": "identity.json", "ranking": True, "columns": {"prompt": "q", "chosen": "c", "rejected": "r"}},
    "rated": {"file_name": "identity.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "good"}},
}  # fmt: skip
PAIRS: dict[str, Any] = {"stage": "dpo", "dataset": "pairs"}
RATED: dict[str, Any] = {"stage": "kto", "dataset": "rated"}


@pytest.fixture(autouse=True)
def _datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has `data` and `other_data`, each with a dataset_info.json, and a
    DeepSpeed file.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "other_data"):
        Path(folder).mkdir()
        Path(folder, "dataset_info.json").write_text(json.dumps(INFO))
        for name in ("identity", "alpaca"):
            Path(folder, f"{name}.json").write_text('[{"instruction": "a", "input": "", "output": "b"}]')
    Path("z3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}))


def read(raw: dict[str, Any], *overrides: str) -> LlamaFactoryFile:
    return translate(raw, {(key,): number for number, key in enumerate(raw, 1)}, "x.yaml", overrides)


def config(*overrides: str, **keys: Any) -> dict[str, Any]:
    """Our config of the base file with these keys, which must be valid."""
    translation = read({**BASE, **keys}, *overrides)
    loaded = config_of(translation, verb="init")
    return loaded.config.model_dump(mode="json", by_alias=True)


def problems(*overrides: str, verb: Verb = "init", **keys: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        config_of(read({**BASE, **keys}, *overrides), verb=verb)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def fate(translation: LlamaFactoryFile, key: str) -> str:
    (found,) = [entry.fate for entry in translation.keys if entry.key == key]
    return found


# ---- every key

WITH: dict[str, dict[str, Any]] = {  # what another key needs to have an effect
    "eval_dataset": {"val_size": None}, "eval_steps": {"eval_strategy": "steps", "val_size": 0.1},
    "eval_strategy": {"val_size": 0.1}, "early_stopping_steps": {"eval_strategy": "epoch", "val_size": 0.1},
    "load_best_model_at_end": {"eval_strategy": "steps", "eval_steps": 500, "val_size": 0.1},
    "interleave_probs": {"mix_strategy": "interleave_under"}, "lr_scheduler_kwargs": {"lr_scheduler_type": "polynomial"},
    "freeze_trainable_layers": {"finetuning_type": "freeze"}, "freeze_trainable_modules": {"finetuning_type": "freeze"},
    "freeze_extra_modules": {"finetuning_type": "freeze"}, "use_llama_pro": {"finetuning_type": "freeze"},
    "use_muon": {"finetuning_type": "full"}, "train_from_scratch": {"finetuning_type": "full"},
    "pissa_iter": {"pissa_init": True}, "loraplus_lr_embedding": {"loraplus_lr_ratio": 4.0},
    "create_new_adapter": {"adapter_name_or_path": "a"}, "gradient_checkpointing": {"disable_gradient_checkpointing": True},
    "fsdp_config": {"fsdp": "full_shard"}, "save_steps": {"save_strategy": "steps"},
    "quantization_type": {"quantization_bit": 4}, "double_quantization": {"quantization_bit": 4},
    "swanlab_project": {"use_swanlab": True}, "max_samples": {"streaming": False},
    **dict.fromkeys(("pref_beta", "pref_ftx", "pref_bco_weight", "pref_loss", "dpo_label_smoothing", "ref_model", "ld_alpha"), PAIRS),
    **dict.fromkeys(("kto_chosen_weight", "kto_rejected_weight"), RATED),
    "simpo_gamma": PAIRS | {"pref_loss": "simpo"},
    "ref_model_adapters": PAIRS | {"ref_model": "a"}, "ref_model_quantization_bit": RATED | {"ref_model": "a"},
}  # fmt: skip
VALUES: dict[str, Any] = {
    "dataset": "other", "eval_dataset": "other", "dataset_dir": "other_data", "stage": "pt", "finetuning_type": "full",
    "template": "llama3", "val_size": 0.1, "interleave_probs": "0.3,0.7", "mix_strategy": "interleave_over",
    "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"power": 2}, "optim": "adafactor", "report_to": "tensorboard",
    "eval_strategy": "epoch", "save_strategy": "epoch", "warmup_ratio": 0.1, "warmup_steps": 10, "deepspeed": "z3.json",
    "fsdp": "full_shard", "fsdp_config": {"offload_params": True}, "adam_beta1": 0.8, "adam_beta2": 0.99,
    "metric_for_best_model": "rouge", "infer_backend": "vllm", "freeze_trainable_layers": -1, "data_seed": 7,
    "quantization_bit": 8, "rope_scaling": "linear", "max_grad_norm": 0.5, "lora_dropout": 0.1, "label_smoothing_factor": 0.1,
    "load_best_model_at_end": True, "bf16": True, "adam_epsilon": 1e-6, "save_steps": 100, "dpo_label_smoothing": 0.1,
}  # fmt: skip


def another(key: Key) -> Any:
    """A value that is not LLaMA-Factory's default."""
    if key.name in VALUES:
        return VALUES[key.name]
    if key.words:
        return next(word for word in key.words if word != key.default)
    simple = {"bool": not key.default, "text": "other", "list": ["other"], "any": "other", "numbers": [1.0]}
    if key.type in simple:
        return simple[key.type]
    return (key.default or 0) + (1 if key.type == "int" else 0.5)


def for_key(key: Key) -> dict[str, Any]:
    base = {**BASE, **WITH.get(key.name, {})}
    if key.name == "stage":
        base |= {"dataset": "text"}
    return {k: v for k, v in base.items() if v is not None}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_refused_or_has_an_effect_or_is_listed_as_ignored(name: str) -> None:
    key = KEYS[KEYS[name].same_as or name]
    base = for_key(key)
    base.pop(key.name, None)
    if key.name in ("model_name_or_path", "dataset", "output_dir"):  # required
        base[key.name] = BASE[key.name]
    elif key.name in BASE and key.name != "do_train" and another(key) == BASE[key.name]:
        raise AssertionError(f"{name}: the value is that of the base")
    given = {**{k: v for k, v in base.items() if k != key.name}, name: another(key)}
    if key.name == "dataset":
        given["dataset"] = "other"
    without, found = read(base), read(given)
    became = fate(found, name)
    if became == "refused":
        assert any(name in problem.what or key.name in problem.what for problem in found.problems)
    elif became == "ignored":
        assert found.config == without.config
        assert next(entry.note for entry in found.keys if entry.key == name)
    else:
        assert not found.problems
        assert config_of(found, verb="init").config != config_of(without, verb="init").config
        for ours in next(entry.ours for entry in found.keys if entry.key == name).split(", "):
            assert ours.split(".")[0] in RunConfig.model_fields


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if not key.same_as])
def test_a_key_at_its_default_is_never_refused(name: str) -> None:
    key = KEYS[name]
    value = "none" if name == "report_to" else key.default
    found = read({**for_key(key), name: value} if value is not None or name not in BASE else BASE)
    assert not any(name in problem.what for problem in found.problems), found.problems


ODD = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3.7,
    10**18,
    "",
    "x",
    "nan",
    "-inf",
    [],
    ["a"],
    [1, None],
    {},
    {"a": 1},
    [[1]],
    "a,b",
    "{",
    "1e-4",
]


@pytest.mark.parametrize("name", KEYS)
def test_no_value_is_a_crash(name: str) -> None:
    """Each is refused with the key's name, or becomes a valid config."""
    key = KEYS[KEYS[name].same_as or name]
    for value in ODD:
        found = read({**for_key(key), name: value})
        try:
            config_of(found)
        except ConfigError as error:
            texts = " ".join(problem.what + problem.where for problem in error.problems)
            assert name in texts or key.name in texts or "x.yaml" in texts


def test_misspelt_keys_are_refused_with_the_nearest() -> None:
    chance = random.Random(5)
    names = [name for name in KEYS if len(name) > 5]
    wrong: dict[str, str] = {}
    while len(wrong) < 200:
        name = chance.choice(names)
        place = chance.randrange(1, len(name) - 1)
        misspelt = chance.choice(
            [name[:place] + name[place + 1 :], name[:place] + "x" + name[place:], name[:place] + name[place + 1] + name[place] + name[place + 2 :]]
        )  # fmt: skip
        if misspelt not in KEYS:
            wrong[misspelt] = name
    near = 0
    for misspelt, name in wrong.items():
        found = read({**BASE, misspelt: 1})
        (problem,) = [p for p in found.problems if p.what == f"unknown key `{misspelt}`"]
        assert problem.where.startswith("x.yaml:")
        assert fate(found, misspelt) == "refused"
        near += problem.fix == f"did you mean `{name}`?"
    assert near > 180


def test_the_table_has_every_key_of_llama_factory_once() -> None:
    """269 rows, of which two names are shared by LoRA and OFT, and one by the evaluation and the
    training.
    """
    own = [key for key in KEYS.values() if key.group not in ("Seq2SeqTrainingArguments", "OldNames")]
    assert len(own) == 269 - 3
    for key in KEYS.values():
        assert key.same_as or key.note or key.fate in ("carried", "translated"), key.name


# ---- what the values mean


def test_what_llama_factory_does_by_default_is_written_out() -> None:
    found = config()
    assert (
        found["adapter"] | {"rank": 8, "alpha": 16.0, "dropout": 0.0, "targets": "all-linear"}
        == found["adapter"]
    )
    optim = {"lr": 1e-4, "schedule": "linear", "warmup": "0 steps", "betas": [0.9, 0.999], "eps": 1e-8, "schedule_start": 0,
             "weight_decay": 0.0, "max_grad_norm": 1.0, "kind": "adamw"}  # fmt: skip
    assert found["optim"] | optim == found["optim"]
    data = {"template": "lf:qwen3_nothink", "max_length": 2048, "too_long": "balanced", "on_bad_row": "skip", "packing": False,
            "loss_on": "answers", "eval": None, "thinking": True}  # fmt: skip
    assert found["data"] | data == found["data"]
    assert (found["duration"], found["seed"], config(val_size=0.1)["eval"]["every"]) == ("3 epochs", 42, None)
    assert found["batch"] | {"per_rank": 8, "accumulate": 1} == found["batch"]
    assert found["checkpoint"] | {"every": "500 steps", "keep_every": "500 steps"} == found["checkpoint"]
    assert found["memory"] == {"gradient_checkpointing": True}
    assert found["model"]["dtype"] == "float32"
    assert [source["path"] for source in found["data"]["train"]] == ["data/identity.json", "data/alpaca.json"]


@pytest.mark.parametrize(
    ("keys", "ours", "value"),
    [
        ({"lora_rank": 4}, "adapter.alpha", 8.0),
        ({"lora_alpha": 5}, "adapter.alpha", 5.0),
        ({"lora_target": "q_proj,v_proj"}, "adapter.targets", [r"(^|\.)q_proj$", r"(^|\.)v_proj$"]),
        ({"use_dora": True}, "adapter.kind", "dora"),
        ({"use_rslora": True}, "adapter.kind", "rslora"),
        ({"pissa_init": True}, "adapter.init", "pissa"),
        ({"pissa_init": True}, "adapter.init_steps", 16),
        ({"pissa_init": True, "pissa_iter": -1}, "adapter.init_steps", None),
        ({"adapter_name_or_path": "a, b"}, "adapter.merge", ["a"]),
        ({"adapter_name_or_path": "a, b"}, "adapter.from", "b"),
        ({"adapter_name_or_path": "a", "create_new_adapter": True}, "adapter.merge", ["a"]),
        ({"loraplus_lr_ratio": "16"}, "optim.lora_b_ratio", 16.0),
        ({"learning_rate": "1e-4"}, "optim.lr", 1e-4),
        ({"neftune_noise_alpha": 5}, "model.embedding_noise", 5.0),
        ({"rope_scaling": "yarn"}, "model.rope", {"kind": "yarn", "factor": "auto"}),
        ({"moe_aux_loss_coef": 0.01}, "optim.router_loss", {"load_balancing": 0.01, "z_loss": 0.0, "layers": "together"}),
        ({"moe_aux_loss_coef": 0.01, "label_smoothing_factor": 0.1}, "optim.router_loss", None),
        ({"moe_aux_loss_coef": 0.01, "use_dft_loss": True}, "optim.router_loss", None),
        (PAIRS | {"moe_aux_loss_coef": 0.01}, "optim.router_loss", None),
        ({"moe_aux_loss_coef": 0}, "optim.router_loss", None),
        ({"bf16": True}, "model.dtype", "bfloat16"),
        ({"quantization_bit": 4}, "model.quantize", "nf4"),
        ({"quantization_bit": 4, "quantization_type": "fp4"}, "model.quantize", "fp4"),
        ({"quantization_bit": 4, "double_quantization": False}, "model.quantize_double", False),
        ({"quantization_bit": 8}, "model.quantize", "int8"),
        ({"fp16": True}, "model.dtype", "auto"),
        ({"pure_bf16": True}, "model.dtype", "bfloat16"),
        ({"train_on_prompt": True}, "data.loss_on", "all"),
        ({"mask_history": True}, "data.loss_on", "last-answer"),
        ({"enable_thinking": None}, "data.thinking", None),
        ({"enable_thinking": False}, "data.thinking", False),
        ({"default_system": "Be brief."}, "data.system", "Be brief."),
        ({"default_system": ""}, "data.system", ""),
        ({"packing": True}, "data.max_length", 2047),
        ({"neat_packing": True}, "data.packing", True),
        ({"neat_packing": True}, "data.max_length", 2047),
        ({"stage": "pt", "dataset": "text"}, "data.packing", True),
        ({"stage": "pt", "dataset": "text"}, "data.max_length", 2048),
        ({"stage": "pt", "dataset": "text"}, "data.too_long", "split"),
        ({"stage": "pt", "dataset": "text", "packing": False}, "data.too_long", "cut"),
        ({"stage": "pt", "dataset": "text"}, "objective", "pretrain"),
        ({"val_size": 0.1}, "data.eval", 0.1),
        ({"val_size": 20}, "data.eval", 20),
        ({"max_samples": 7}, "data.train.0.rows", 7),
        ({"mix_strategy": "interleave_over", "interleave_probs": "0.3, 0.7"}, "data.mix.probabilities", [0.3, 0.7]),
        ({"max_steps": 9}, "duration", "9 steps"),
        ({"num_train_epochs": 0.5}, "duration", "0.5 epochs"),
        ({"warmup_ratio": 0.1}, "optim.warmup", "10%"),
        ({"warmup_ratio": 0.03, "warmup_steps": 5}, "optim.warmup", "3%"),
        ({"warmup_steps": 5}, "optim.warmup", "5 steps"),
        ({"warmup_steps": 0.2}, "optim.warmup", "20%"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "optim.warmup", "0 steps"),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}, "optim.warmup", "5 steps"),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}, "optim.cycles", 3),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": '{"power": 2}'}, "optim.power", 2.0),
        ({"lr_scheduler_type": "polynomial"}, "optim.min_lr", pytest.approx(1e-3)),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}, "optim.min_lr", pytest.approx(0.1)),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, "optim.min_lr", 0.2),
        ({"lr_scheduler_type": "inverse_sqrt"}, "optim.schedule", "inverse_sqrt"),
        ({"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, "optim.min_lr", 0.2),
        ({"max_grad_norm": 0}, "optim.max_grad_norm", None),
        ({"save_strategy": "epoch"}, "checkpoint.every", "1 epochs"),
        ({"save_strategy": False}, "checkpoint.every", "3 epochs"),
        ({"save_steps": 0.25}, "checkpoint.every", "0.75 epochs"),
        ({"save_steps": 0.25, "max_steps": 10}, "checkpoint.every", "3 steps"),
        ({"save_total_limit": 2}, "checkpoint.keep", 2),
        ({"save_total_limit": 2}, "checkpoint.keep_every", None),
        ({"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50}, "eval.every", "50 steps"),
        ({"val_size": 0.1, "evaluation_strategy": "epoch"}, "eval.every", "1 epochs"),
        ({"disable_gradient_checkpointing": True}, "memory.gradient_checkpointing", False),
        ({"finetuning_type": "full"}, "adapter", None),
        ({"finetuning_type": "oft"}, "adapter.kind", "oft"),
        ({"finetuning_type": "oft", "oft_block_size": 16}, "adapter.rank", 16),
        ({"finetuning_type": "full", "use_muon": True}, "optim.kind", "muon"),
        ({"optim": "adamw_8bit"}, "optim.kind", "adamw_8bit"),
        ({"optim": "paged_adamw_8bit"}, "optim.kind", "adamw_8bit_paged"),
        ({"optim": "paged_adamw_32bit"}, "optim.kind", "adamw_paged"),
        ({"optim": "adafactor"}, "optim.kind", "adafactor"),
        ({"optim": "lion_32bit"}, "optim.kind", "lion"),
        ({"optim": "schedule_free_adamw"}, "optim.kind", "schedule_free"),
        ({"optim": "adamw_8bit", "fsdp": "full_shard"}, "optim.state_dtype", "bfloat16"),
        ({"optim": "adamw_torch"}, "optim.state_dtype", "float32"),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": -3}, "train_only.layers", -3),
        ({"finetuning_type": "freeze", "freeze_trainable_modules": "mlp, self_attn"}, "train_only.modules", ["mlp", "self_attn"]),
        ({"finetuning_type": "freeze"}, "train_only.layers", 2),
        ({"finetuning_type": "freeze", "use_llama_pro": True}, "train_only.spread", True),
        ({"finetuning_type": "full", "use_muon": True}, "optim.muon_scale", "adamw"),
        ({"finetuning_type": "full", "use_muon": True}, "optim.muon_lr", 1e-4),
        ({"deepspeed": "z3.json"}, "parallel.strategy", "fsdp"),
        ({"deepspeed": {"zero_optimization": {"stage": 0}}}, "parallel.strategy", "ddp"),
        ({"fsdp": "full_shard auto_wrap"}, "parallel.strategy", "fsdp"),
        ({"stage": "rm", "dataset": "pairs"}, "objective", "reward"),
        (PAIRS, "objective", "dpo"),
        (PAIRS, "preference.loss", "sigmoid"),
        (PAIRS, "preference.reference", "auto"),
        (PAIRS | {"packing": True}, "data.packing", False),
        (PAIRS | {"lora_dropout": 0.1}, "adapter.dropout", 0.0),
        (PAIRS | {"pref_loss": "ipo"}, "preference.loss", "ipo"),
        (PAIRS | {"dpo_loss": "hinge"}, "preference.loss", "hinge"),
        (PAIRS | {"pref_loss": "orpo"}, "objective", "orpo"),
        (PAIRS | {"pref_loss": "simpo"}, "objective", "simpo"),
        (PAIRS | {"pref_loss": "simpo", "simpo_gamma": 1.2}, "preference.gamma", 1.2),
        (PAIRS | {"pref_beta": 0.3}, "preference.beta", 0.3),
        (PAIRS | {"pref_loss": "orpo", "pref_beta": 0.3}, "preference.beta", 0.3),
        (PAIRS | {"pref_ftx": 0.2}, "preference.sft_weight", 0.2),
        (PAIRS | {"dpo_label_smoothing": 0.2}, "preference.label_smoothing", 0.2),
        (PAIRS | {"ref_model": "models/other"}, "preference.reference", "models/other"),
        (PAIRS | {"label_smoothing_factor": 0.1}, "optim.label_smoothing", 0.0),
        (
            PAIRS
            | {
                "val_size": 0.1, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
                "metric_for_best_model": "eval_rewards/accuracies", "greater_is_better": True,
            },
            "checkpoint.best",
            "reward_accuracy",
        ),
        (RATED, "objective", "kto"),
        (RATED | {"pref_beta": 0.3}, "preference.beta", 0.3),
        (RATED | {"kto_chosen_weight": 2}, "preference.desirable_weight", 2.0),
        (RATED | {"kto_rejected_weight": 3}, "preference.undesirable_weight", 3.0),
        (RATED | {"ref_model": "models/other"}, "preference.reference", "models/other"),
        ({"use_dft_loss": True}, "optim.loss_weight", "dft"),
        ({"use_dft_loss": True, "label_smoothing_factor": 0.1}, "optim.label_smoothing", 0.0),
        ({"report_to": ["tensorboard", "none"]}, "track", ["tensorboard"]),
        ({"use_cpu": True}, "device", "cpu"),
    ],
)  # fmt: skip
def test_a_value_is_carried_over(keys: dict[str, Any], ours: str, value: Any) -> None:
    found: Any = config(**keys)
    for part in ours.split("."):
        found = found[int(part) if part.isdigit() else part]
    assert found == value


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"finetuning_type": "full", "adapter_name_or_path": "a"}, "adapter_name_or_path: only with"),
        ({"finetuning_type": "full", "use_dora": True}, "use_dora: only with"),
        ({"finetuning_type": "full", "loraplus_lr_ratio": 4}, "loraplus_lr_ratio: only with"),
        ({"use_llama_pro": True}, "use_llama_pro: only with"),
        ({"use_dora": True, "use_rslora": True}, "use_rslora: an adapter is"),
        ({"stage": "pt", "dataset": "text", "mask_history": True}, "mask_history: only with `stage: sft`"),
        ({"stage": "pt", "dataset": "text", "neat_packing": True}, "neat_packing: only with"),
        ({"mask_history": True, "train_on_prompt": True}, "mask_history: it trains"),
        ({"streaming": True}, "streaming: it needs max_steps"),
        ({"streaming": True, "max_steps": 5, "val_size": 0.1}, "val_size: with streaming"),
        ({"streaming": True, "max_steps": 5, "max_samples": 5}, "max_samples: not with streaming"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy: rows are shuffled"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config: split_batches"),
        ({"eval_dataset": "other", "val_size": 0.1}, "val_size: eval_dataset is set"),
        ({"interleave_probs": "0.5,0.5"}, "interleave_probs: only with"),
        ({"mix_strategy": "interleave_under", "interleave_probs": "0.5"}, "interleave_probs: 1 probabilities for 2"),
        ({"do_eval": True}, "do_eval: there are no rows"),
        ({"eval_strategy": "epoch"}, "eval_strategy: there are no rows"),
        ({"bf16": True, "fp16": True}, "fp16: bf16 is set"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end: save_strategy is steps"),
        ({"dataset": "pairs"}, "the dataset pairs has pairs"),
        (PAIRS | {"pref_loss": "kto_pair"}, "`pref_loss: kto_pair` is not available"),
        (PAIRS | {"pref_bco_weight": 0.5}, "`pref_bco_weight: 0.5` is not available"),
        (PAIRS | {"ld_alpha": 0.5}, "`ld_alpha: 0.5` is not available"),
        (PAIRS | {"ref_model": "a", "ref_model_adapters": "b"}, "`ref_model_adapters: b` is not available"),
        (RATED | {"ref_model": "a", "ref_model_quantization_bit": 4}, "`ref_model_quantization_bit: 4` is not available"),
        (PAIRS | {"pref_beta": 0}, "pref_beta → preference.beta: must be"),
        (PAIRS | {"dpo_label_smoothing": 0.5}, "dpo_label_smoothing → preference.label_smoothing: must be"),
        (PAIRS | {"pref_loss": "ipo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing → preference.label_smoothing: ipo has none"),
        ({"stage": "rm", "dataset": "rated"}, "the dataset rated has no pairs"),
        ({"stage": "kto", "dataset": "pairs"}, "the dataset pairs has pairs"),
        ({"metric_for_best_model": "eval_rewards/accuracies"}, "`metric_for_best_model: eval_rewards/accuracies` is not available"),
        ({"greater_is_better": True}, "`greater_is_better: True` is not available"),
        ({"template": "qwen3_nothnk"}, "`template: qwen3_nothnk` is not available"),
        ({"stage": "ppo"}, "`stage: ppo` is not available"),
        ({"finetuning_type": "oft", "oft_rank": 4}, "`oft_rank: 4` is not available"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "`lr_scheduler_type: warmup_stable_decay` is not available"),
        ({"optim": "lomo"}, "`optim: lomo` is not available"),
        ({"report_to": "mlflow"}, "`report_to: mlflow` is not available"),
        ({"deepspeed": "none.json"}, "deepspeed: there is no file none.json"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}}, "deepspeed: `offload_param` to cpu"),
        ({"deepspeed": {"zero_optimization": {"stage": [3]}}}, "deepspeed: stage [3] is unknown"),
        ({"deepspeed": {"zero_optimization": 3}}, "deepspeed: `zero_optimization` is not an object"),
        ({"deepspeed": {"zero_optimization": {"offload_param": "cpu"}}}, "deepspeed: `offload_param` is not an object"),
        ({"deepspeed": {"optimizer": {"type": "AdamW"}}}, "deepspeed: its own `optimizer`"),
        ({"deepspeed": {"gradient_clipping": 0.5}}, "deepspeed: `gradient_clipping` is 0.5, and max_grad_norm is 1"),
        ({"deepspeed": "/dev/zero"}, "deepspeed: /dev/zero is a character device"),
        ({"fsdp": "full_shard", "fsdp_config": "/dev/zero"}, "fsdp_config: /dev/zero is a character device"),
        ({"lr_scheduler_kwargs": "[" * 50_000}, "lr_scheduler_kwargs: must be a mapping"),
        ({"max_samples": 0}, "max_samples: must be at least 1"),
        ({"quantization_bit": 3}, "`quantization_bit: 3` is not available"),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, "`quantization_method: hqq` is not available"),
        ({"quantization_bit": 4, "finetuning_type": "full"}, "quantization_bit → model.quantize: nf4 weights cannot be trained"),
        ({"default_system": "a", "template": None}, "`default_system: a` is not available"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be above 0"),
        ({"fsdp": "full_shard offload"}, "fsdp: offloading"),
        ({"learning_rate": -1}, "learning_rate → optim.lr: must be a number above 0"),
        ({"use_muon": True}, "use_muon → optim.kind: muon orthogonalizes the updates of full matrices"),
        ({"cutoff_len": "long"}, "cutoff_len: must be a whole number"),
        ({"packing": "perhaps"}, "packing: must be true or false"),
        ({"stage": "stf"}, "stage: must be one of pt, sft, rm, ppo, dpo, kto, got 'stf'; did you mean `sft`?"),
        ({"evaluation_strategy": "no", "eval_strategy": "no"}, "eval_strategy: also given as"),
        ({"model_name_or_path": None}, "the key `model_name_or_path` is missing"),
        ({"output_dir": None}, "the key `output_dir` is missing"),
        ({"dataset": None}, "dataset: there is no dataset"),
        ({"dataset": "identiti"}, "there is no dataset 'identiti'"),
    ],
)  # fmt: skip
def test_one_problem_is_named_once(keys: dict[str, Any], what: str) -> None:
    (problem,) = problems(**keys)
    assert problem.what.startswith(what)
    given = [key for key, value in keys.items() if value is not None]
    assert problem.where.startswith("x.yaml:" if given else "x.yaml") or problem.where.startswith("data/")


@pytest.mark.parametrize(
    ("keys", "ignored"),
    [
        ({}, ["pref_beta", "pref_ftx", "pref_loss", "dpo_label_smoothing", "simpo_gamma", "ref_model", "ld_alpha", "kto_chosen_weight"]),
        (PAIRS, ["simpo_gamma", "kto_chosen_weight", "kto_rejected_weight", "use_dft_loss", "lora_dropout"]),
        (PAIRS | {"pref_loss": "orpo"}, ["dpo_label_smoothing", "simpo_gamma", "ref_model", "pref_bco_weight", "ref_model_adapters"]),
        (PAIRS | {"pref_loss": "simpo"}, ["dpo_label_smoothing", "ref_model", "kto_rejected_weight"]),
        (RATED, ["pref_loss", "dpo_label_smoothing", "simpo_gamma", "pref_bco_weight", "ld_alpha", "ref_model_adapters"]),
        ({"stage": "rm", "dataset": "pairs"}, ["pref_beta", "pref_ftx", "pref_loss", "ref_model", "simpo_gamma", "label_smoothing_factor"]),
    ],
)  # fmt: skip
def test_a_preference_key_that_a_stage_does_not_use_is_ignored(
    keys: dict[str, Any], ignored: list[str]
) -> None:
    without = config(**keys)
    for name in ignored:
        given = {**BASE, **keys, name: another(KEYS[name])}
        found = read(given)
        assert (fate(found, name), found.problems) == ("ignored", []), name
        assert config_of(found, verb="init").config.model_dump(mode="json", by_alias=True) == without


def test_orpo_says_in_what_it_differs() -> None:
    sharded = read({**BASE, "optim": "adamw_bnb_8bit", "fsdp": "full_shard"})
    assert "optim: adamw_bnb_8bit: the state is AdamW's in bfloat16" in sharded.warnings[0]
    assert "pref_loss: orpo" in read({**BASE, **PAIRS, "pref_loss": "orpo"}).warnings[0]


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"),
    [(3, 5, "makes 3 steps"), (3, 1001, "makes 378 steps"), (1.5, 20, "makes 5 steps"), (3, 16, ""), (1, 5, ""), (0.5, 7, "")],
)  # fmt: skip
def test_the_number_of_steps_is_compared_where_epochs_end_with_a_short_one(
    epochs: float, rows: int, steps: str
) -> None:
    """As transformers counts: the steps of one epoch, rounded up, times the epochs, rounded up."""
    line = read(BASE).fewer_steps(epochs, sequences=rows, global_batch=8)
    assert steps in line
    assert bool(line) == bool(steps)


def test_all_problems_come_at_once_each_with_its_line() -> None:
    text = TEXT + "use_galore: true\nlearning_rat: 1\nlora_dropout: 2\nuse_kt: true\n"
    raw, lines = parse_yaml(text, name="x.yaml")
    with pytest.raises(ConfigError) as caught:
        config_of(translate(raw, lines, "x.yaml", ("nonsense=1",)))
    assert [problem.where for problem in caught.value.problems] == [
        "x.yaml:12", "x.yaml:13", "x.yaml:14", "x.yaml:15", "command line",
    ]  # fmt: skip


def test_overrides_use_its_names_and_those_with_a_dot_are_ours() -> None:
    found = config(
        "learning_rate=1e-4", "lora_rank=4", "optim.weight_decay=0.5", "dataset=[identity]", "restarts=7"
    )
    assert found["optim"]["lr"] == 1e-4
    assert found["adapter"] | {"rank": 4, "alpha": 8.0} == found["adapter"]
    assert (found["optim"]["weight_decay"], found["restarts"]) == (0.5, 7)
    assert len(found["data"]["train"]) == 1
    (problem,) = problems("optim.lr=-1")
    assert problem.where == "command line"


def test_a_global_batch_of_ours_replaces_the_batch_of_the_file() -> None:
    found = config("batch.global=64", "batch.micro=2")["batch"]
    assert found == {"global": 64, "micro": 2}


def test_a_secret_is_refused_and_never_shown() -> None:
    (problem,) = problems(hf_hub_token="hf_" + "a" * 30)
    assert "token" in problem.what
    assert "HF_TOKEN" in problem.fix
    shown = json.dumps(read({**BASE, "swanlab_api_key": "abc123"}).to_json())
    assert "abc123" not in shown


def test_added_tokens_are_no_secret() -> None:
    (problem,) = problems(add_special_tokens="<a>,<b>")
    assert "is not available" in problem.what


def test_an_adapter_that_is_continued_keeps_its_own_shape() -> None:
    """As in LLaMA-Factory, which reads r and lora_alpha from the adapter, whatever the file
    says.
    """
    stored = {
        "r": 4,
        "lora_alpha": 12,
        "use_rslora": True,
        "lora_dropout": 0.1,
        "modules_to_save": ["lm_head"],
    }
    Path("saved").mkdir()
    Path("saved/adapter_config.json").write_text(json.dumps(stored))
    translation = read({**BASE, "adapter_name_or_path": "saved", "lora_rank": 8})
    adapter = config_of(translation).config.adapter
    assert adapter is not None
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.dropout) == ("rslora", 4, 12.0, 0.1)
    assert (adapter.from_, adapter.modules_to_save) == ("saved", ["lm_head"])
    assert fate(translation, "lora_rank") == "ignored"
    new = config(adapter_name_or_path="saved", create_new_adapter=True)["adapter"]
    assert (new["rank"], new["merge"], new["from"]) == (8, ["saved"], None)


# ---- files

V1 = {
    "model": "Qwen/Qwen3-4B",
    "train_dataset": "data/v1.yaml",
    "micro_batch_size": 1,
    "peft_config": {"name": "lora"},
}
CHAT = {"model_name_or_path": "Qwen/Qwen3-4B", "template": "qwen3_nothink", "infer_backend": "huggingface"}


@pytest.mark.parametrize(
    ("raw", "version"),
    [
        (BASE, "v0"),
        (CHAT, "v0"),
        (V1, "v1"),
        ({}, None),
        ({"model": "m", "data": {"train": "d"}, "output_dir": "o"}, None),
        ({"model": "m", "data": {"train": "d"}, "stage": "sft", "template": "x"}, None),
        (
            {"model_name_or_path": "m", "dataset_name": "d", "learning_rate": 1e-4, "max_length": 5},
            None,
        ),  # TRL's
        ({"template": "x"}, None),
    ],
)
def test_both_generations_are_recognised(raw: dict[str, Any], version: str | None) -> None:
    assert llamafactory_version(raw) == version


def test_a_v1_file_is_refused_with_our_names_for_its_keys() -> None:
    Path("v1.yaml").write_text(yaml.safe_dump(V1))
    with pytest.raises(ConfigError) as caught:
        load_config(Path("v1.yaml"))
    (problem,) = caught.value.problems
    assert "is a LLaMA-Factory v1 file" in problem.what
    for pair in ("train_dataset → data.train", "micro_batch_size → batch.micro", "peft_config → adapter"):
        assert pair in problem.fix


def test_json_is_read_too() -> None:
    Path("x.json").write_text(json.dumps(BASE, indent="\t"))
    assert load_config(Path("x.json")).config.optim.lr == 1e-4


@pytest.mark.parametrize(
    ("keys", "verb", "command"),
    [
        ({"export_dir": "merged"}, "export", "unisono export x.yaml"),
        ({"do_predict": True, "predict_with_generate": True, "eval_dataset": "other"}, "predict", "unisono eval x.yaml"),
        ({}, "chat", "unisono chat x.yaml"),
    ],
)  # fmt: skip
def test_a_file_of_another_verb_names_its_command(keys: dict[str, Any], verb: str, command: str) -> None:
    raw = {key: value for key, value in BASE.items() if key not in ("do_train", "dataset")} | keys
    translation = read(raw)
    assert translation.verb == verb
    with pytest.raises(ConfigError) as caught:
        config_of(translation)
    (problem,) = caught.value.problems
    assert f"`{command}`" in problem.fix


def test_what_other_verbs_need_is_there() -> None:
    raw = {key: value for key, value in BASE.items() if key != "do_train"}
    found = read(
        raw
        | {
            "adapter_name_or_path": "a, b",
            "temperature": 0.5,
            "top_p": 0.9,
            "max_new_tokens": 9,
            "export_dir": "m",
        }
    )
    assert (found.model, found.adapters, found.template) == ("models/tiny", ["a", "b"], "lf:qwen3_nothink")
    assert found.max_tokens == 9
    assert found.sampling == SamplingParams(0.5, 0.9, 50, seed=found.values["seed"])
    assert read(raw | {"do_sample": False}).sampling.temperature == 0.0
    beams = {"do_sample": False, "num_beams": 4, "length_penalty": 0.5, "repetition_penalty": 1.2}
    searched = read(raw | beams)
    assert not searched.problems
    sampling = searched.sampling
    assert (sampling.beams, sampling.length_penalty, sampling.repetition_penalty) == (4, 0.5, 1.2)
    chat = {key: value for key, value in raw.items() if key != "dataset"}
    (problem,) = read(chat | {"num_beams": 4}).problems
    assert problem.what == "num_beams: beam search does not sample"
    assert fate(read(BASE | {"num_beams": 4}), "num_beams") == "ignored"  # a training has no answers
    assert (found.values["export_dir"], found.values["export_size"]) == ("m", 5)


@pytest.mark.parametrize("stage", ["rm", "dpo", "kto"])
@pytest.mark.parametrize("verb", ["train", "preview", "init"])
def test_a_preference_file_is_for_all_that_takes_a_file_for_training(stage: str, verb: Verb) -> None:
    translation = read({**BASE, "stage": stage, "dataset": "rated" if stage == "kto" else "pairs"})
    loaded = config_of(translation, verb=verb)
    assert loaded.translation is translation
    assert translation.stage == stage


def test_the_origin_of_a_value_is_its_line_there() -> None:
    Path("x.yaml").write_text(TEXT)
    loaded = load_config(Path("x.yaml"), ("lora_rank=4",))
    assert loaded.origins["optim.lr"] == "x.yaml:10"
    assert loaded.origins["adapter.rank"] == "command line"
    assert "default" in loaded.origins["optim.eps"]


def test_the_config_is_runnable_as_it_is() -> None:
    Path("x.yaml").write_text(TEXT)
    loaded = load_config(Path("x.yaml"))
    Path("ours.yaml").write_text(yaml.safe_dump(loaded.config.model_dump(mode="json", by_alias=True)))
    again = load_config(Path("ours.yaml"))
    assert (again.config, again.translation) == (loaded.config, None)
