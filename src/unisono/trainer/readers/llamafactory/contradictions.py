"""Keys of a LLaMA-Factory file that contradict each other."""

from unisono.base.errors import Problem
from unisono.trainer.readers.key_table import Values

Rule = tuple[bool, str, str, str]
"""Whether it is broken; the key; what is wrong; the remedy."""


def find_contradictions(values: Values, verb: str) -> dict[str, Problem]:
    """By key, a problem for each pair of keys that contradict each other.

    Args:
        values: of the file, or LLaMA-Factory's defaults.
        verb: what the file is for.
    """
    rules = [*_of_method(values), *_of_data(values, verb), *_of_evaluation(values, verb)]
    return {key: _problem(values, key, what, fix) for is_broken, key, what, fix in rules if is_broken}


def _problem(values: Values, key: str, what: str, fix: str) -> Problem:
    return Problem(f"{key}: {what}", values.place(key), "", fix)


def _of_method(values: Values) -> list[Rule]:
    is_lora = values["finetuning_type"] == "lora"
    kind = values["finetuning_type"]
    only_lora = [
        (key, values[key] not in (None, False))
        for key in ("adapter_name_or_path", "loraplus_lr_ratio", "use_rslora", "use_dora", "pissa_init")
    ]
    return [
        *(
            (given and not is_lora, key, f"only with `finetuning_type: lora`, not {kind}", "remove it")
            for key, given in only_lora
        ),
        (
            values["use_dora"] and values["use_rslora"],
            "use_rslora",
            "an adapter is DoRA or rsLoRA, not both",
            "remove one of use_dora and use_rslora",
        ),
        (
            values["use_llama_pro"] and kind != "freeze",
            "use_llama_pro",
            "only with `finetuning_type: freeze`",
            "remove it",
        ),
        (values["bf16"] and values["fp16"], "fp16", "bf16 is set, too", "remove one of them"),
        (
            values["max_samples"] is not None and values["max_samples"] < 1,
            "max_samples",
            "must be at least 1",
            "remove it",
        ),
        (values["lora_rank"] < 1, "lora_rank", "must be at least 1", "set it to 8"),
    ]


def _of_data(values: Values, verb: str) -> list[Rule]:
    stage, streams = values["stage"], values["streaming"]
    names, probabilities = values["dataset"] or [], values["interleave_probs"]
    size = values["val_size"]
    return [
        (verb == "train" and not names, "dataset", "there is no dataset to train on", "add `dataset: NAME`"),
        *(
            (bool(values[key]) and stage != "sft", key, f"only with `stage: sft`, not {stage}", "remove it")
            for key in ("neat_packing", "train_on_prompt", "mask_history", "predict_with_generate")
        ),
        (
            values["mask_history"] and values["train_on_prompt"],
            "mask_history",
            "it trains on the last answer alone, train_on_prompt on everything",
            "remove one of them",
        ),
        (streams and values["max_steps"] < 1, "streaming", "it needs max_steps", "add `max_steps: N`"),
        (streams and 0 < size < 1, "val_size", "with streaming a number of rows", "set it to a whole number"),
        (
            streams and values["max_samples"] is not None,
            "max_samples",
            "not with streaming",
            "remove one of them",
        ),
        (
            probabilities is not None and values["mix_strategy"] == "concat",
            "interleave_probs",
            "only with an interleaving mix_strategy",
            "set mix_strategy to interleave_under, interleave_over or interleave_once",
        ),
        (
            probabilities is not None
            and values["mix_strategy"] != "concat"
            and len(probabilities) != len(names),
            "interleave_probs",
            f"{len(probabilities or [])} probabilities for {len(names)} datasets",
            "set one for each dataset",
        ),
        (
            values["train_sampling_strategy"] == "sequential",
            "train_sampling_strategy",
            "rows are shuffled in each epoch",
            "remove it",
        ),
        (
            isinstance(values["accelerator_config"], dict)
            and bool(values["accelerator_config"].get("split_batches")),
            "accelerator_config",
            "split_batches divides a batch over the ranks, and batches are per rank here",
            "remove it, and set per_device_train_batch_size",
        ),
        (bool(size) and not names, "val_size", "there is no dataset to split", "add `dataset: NAME`"),
        (size < 0, "val_size", "must be a share or a number of rows", "set it to 0.1"),
    ]


def _of_evaluation(values: Values, verb: str) -> list[Rule]:
    has_eval = bool(values["eval_dataset"]) or bool(values["val_size"])
    strategy, keeps_best = values["eval_strategy"], values["load_best_model_at_end"]
    by_best = values["save_strategy"] == "best"
    steps, save_steps = values["eval_steps"] or values["logging_steps"], values["save_steps"]
    set_keys = [key for key in ("do_eval", "do_predict", "predict_with_generate") if values[key]]
    uneven = strategy == "steps" and bool(steps) and save_steps / steps % 1 > 1e-9
    return [
        (
            bool(values["eval_dataset"]) and bool(values["val_size"]),
            "val_size",
            "eval_dataset is set, too",
            "remove one of them",
        ),
        (
            strategy != "no" and not has_eval,
            "eval_strategy",
            "there are no rows to evaluate on",
            "add `eval_dataset: NAME` or `val_size: 0.1`",
        ),
        *(
            (
                strategy == "no" and not has_eval,
                key,
                "there are no rows for it",
                "add `eval_dataset: NAME` or `val_size: 0.1`",
            )
            for key in set_keys[:1]
        ),
        (
            values["do_predict"] and values["stage"] == "sft" and not values["predict_with_generate"],
            "do_predict",
            "predictions are generated",
            "add `predict_with_generate: true`",
        ),
        (
            verb in ("predict", "chat")
            and values["num_beams"] > 1
            and values["do_sample"]
            and values["temperature"] > 0,
            "num_beams",
            "beam search does not sample",
            "add `do_sample: false`, or remove it",
        ),
        *(
            (values[key] <= low, key, f"must be above {low:g}", "remove it")
            for key, low in (("num_beams", 0), ("repetition_penalty", 0.0))
        ),
        (
            values["predict_with_generate"] and values["compute_accuracy"],
            "compute_accuracy",
            "not with predict_with_generate",
            "remove one of them",
        ),
        (
            keeps_best and not by_best and strategy != values["save_strategy"],
            "load_best_model_at_end",
            f"save_strategy is {values['save_strategy']}, and eval_strategy {strategy}",
            "set both to steps or to epoch",
        ),
        (
            keeps_best and not by_best and strategy == values["save_strategy"] and uneven,
            "load_best_model_at_end",
            f"save_steps {save_steps:g} is not a multiple of eval_steps {steps:g}",
            "save where it is evaluated",
        ),
        (
            values["early_stopping_steps"] is not None and strategy == "no",
            "early_stopping_steps",
            "it counts evaluations, and there are none",
            "set eval_strategy",
        ),
        (
            verb == "train" and values["infer_backend"] != "huggingface",
            "infer_backend",
            "another engine cannot train",
            "remove it",
        ),
    ]
