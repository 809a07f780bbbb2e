"""The keys of `trl grpo` and `trl rloo`: rewards, how answers are sampled, and the loss on them."""

from pathlib import Path

from unisono.base.errors import Problem
from unisono.base.user_code import own_class
from unisono.trainer.readers.key_table import Draft

SAMPLED = ("grpo", "rloo")
"""Trainers on sampled answers."""
GROUP = "GRPOConfig"
"""The group of the table with the keys of these trainers alone."""
DEFAULTS: dict[str, dict[str, object]] = {
    "grpo": {"beta": 0.0, "loss_type": "dapo", "disable_dropout": False},
    "rloo": {"beta": 0.05, "num_generations": 2, "disable_dropout": False},
}
"""Defaults of these trainers that are not those of the table."""
_LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo")
_PROMPT_TOKENS = 1024
"""Tokens that are left for a prompt; TRL has no limit."""
_ABSENT = (
    *("max_length", "truncation_mode", "packing", "completion_only_loss", "assistant_only_loss"),
    "label_smoothing",
)
"""Keys that these trainers do not have."""
_THINK = r"(?s)\A<think>(?!.*<think>).*?</think>"
"""The pattern of `trl.rewards.think_format_reward`."""


def fill_sampled(draft: Draft, trainer: str) -> None:
    """The sections `rewards`, `rollout` and `grpo`."""
    for key in _ABSENT:
        draft.ignore(key, f"`trl {trainer}` does not have it")
    _batch(draft)
    _rewards(draft)
    _rollout(draft)
    _loss(draft, trainer)
    values = draft.values
    draft.put("grpo.beta", values["beta"], "beta")
    if trainer == "rloo" and values["beta"]:
        draft.warnings.append(
            "beta: TRL takes the divergence from the rewards; here it is a term of the loss"
        )
    masks = values["mask_truncated_completions"]
    draft.put("grpo.truncated", "mask" if masks else "keep", "mask_truncated_completions")


def _batch(draft: Draft) -> None:
    """`batch.global`, which counts answers over all ranks, whose number a file does not say."""
    values = draft.values
    draft.drop("batch.per_rank", "batch.accumulate")
    answers = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    draft.put("batch.global", answers, "per_device_train_batch_size", "gradient_accumulation_steps")
    draft.warnings.append(
        f"per_device_train_batch_size: batch.global={answers} is that of one process; multiply it by their number"
    )
    if values["use_peft"] and values["lora_dropout"]:
        draft.put("adapter.dropout", 0.0, "lora_dropout")
        draft.warnings.append(
            "lora_dropout: 0, since answers would have other probabilities than in sampling"
        )


def _rewards(draft: Draft) -> None:
    values, rewards = draft.values, []
    model = values["reward_model_name_or_path"]
    if model is not None and (Path(model) / "plan.json").is_file():
        rewards.append({"use": "model", "path": model})
    elif model is not None:
        why, fix = (
            "a reward model here is a run with `objective: reward`",
            "train one, and name its directory",
        )
        draft.refuse("reward_model_name_or_path", why, fix)
    rewards += [_reward(draft, name) for name in values["reward_funcs"] or []]
    weights = values["reward_weights"]
    if not rewards and model is None:
        problem = Problem("the key `reward_funcs` is missing", draft.name, "it has no default", "add it")
        draft.problems.append(problem)
    if weights is not None and len(weights) != len(rewards):
        draft.refuse("reward_weights", f"there are {len(rewards)} rewards", "give one weight for each")
    elif weights is not None:
        rewards = [reward | {"weight": weight} for reward, weight in zip(rewards, weights, strict=True)]
    draft.put("rewards", rewards, "reward_funcs", "reward_model_name_or_path", "reward_weights")


def _reward(draft: Draft, name: str) -> dict[str, object]:
    """An entry of `rewards` for a name of TRL's, or the import path of a function."""
    module, _, function = name.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    if name == "think_format_reward":
        return {"use": "regex", "pattern": _THINK}
    if name == "accuracy_reward":
        draft.warnings.append(
            "reward_funcs: accuracy_reward reads LaTeX alone in an answer; `math` reads other forms, too"
        )
        return {"use": "math", "column": "solution", "on_error": "skip"}
    if own_class(name) is None and not (module and Path(file).is_file()):
        at = f"there is no file {file} here" if module else f"{name} is not a reward here"
        fix = f"import it into a file, and name that: reward_funcs: [rewards.py:{function}]"
        draft.refuse("reward_funcs", at, fix)
    return {"use": name if own_class(name) else f"{file}:{function}"}


def _rollout(draft: Draft) -> None:
    values = draft.values
    draft.put("rollout.group", values["num_generations"], "num_generations")
    if values["max_completion_length"] is None:
        draft.refuse("max_completion_length", "rollout.max_new_tokens is a number", "set it")
    most = values["max_completion_length"] or 1
    draft.put("rollout.max_new_tokens", most, "max_completion_length")
    prompt = values["max_prompt_length"] or _PROMPT_TOKENS
    draft.put("data.max_length", most + prompt, "max_prompt_length", "max_completion_length")
    if values["max_prompt_length"] is None:
        draft.warnings.append(
            f"max_completion_length: data.max_length leaves {prompt:,} tokens for a prompt; a longer one is an error"
        )
    for key in ("temperature", "top_p", "top_k"):
        draft.put_if_set(f"rollout.{key}", key)
    _steps(draft)
    if values["use_vllm"] and values["vllm_mode"] == "server":
        url = values["vllm_server_base_url"]
        host = str(values["vllm_server_host"]).replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - where TRL's client looks
        draft.put("rollout.engine", "vllm", "use_vllm", "vllm_mode")
        url = url or f"http://{host}:{values['vllm_server_port']}"
        draft.put("rollout.url", url, "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    elif values["use_vllm"]:
        draft.warnings.append("vllm_mode: colocate: each rank samples with its own model")


def _steps(draft: Draft) -> None:
    """`rollout.steps`: optimizer steps for the same answers."""
    values, key = draft.values, "steps_per_generation"
    micro = values["gradient_accumulation_steps"]
    steps, left = divmod(values[key] or micro, micro)
    if left or not steps:
        draft.refuse(key, f"it is not a multiple of gradient_accumulation_steps: {micro}", "make it one")
    draft.put("rollout.steps", max(steps, 1), key)


def _loss(draft: Draft, trainer: str) -> None:
    values = draft.values
    loss, is_of_answers = values["loss_type"], values["importance_sampling_level"] == "sequence"
    if trainer == "rloo":
        loss, is_of_answers = "rloo", False
    elif loss not in _LOSSES:
        draft.refuse("loss_type", f"the losses of grpo here are {', '.join(_LOSSES)}", "use one of these")
    elif is_of_answers and loss != "grpo":
        draft.refuse(
            "importance_sampling_level", "ratios of answers are those of gspo", "set loss_type: grpo"
        )
    draft.put("grpo.loss", "gspo" if is_of_answers else loss, "importance_sampling_level", "loss_type")
    low, high = values["epsilon"], values["epsilon_high"]
    high = low if high is None else high
    if loss == "cispo":
        low, high = 1.0, high - 1  # TRL's bound is of the ratio, and it has no lower one
    if high < 0:
        draft.refuse("epsilon_high", "with cispo it is the largest ratio", "set it to 1 or more, e.g. 1.28")
    draft.put("grpo.clip", [low, max(high, 0.0)], "epsilon_high", "epsilon")
    draft.put_if_set("grpo.dual_clip", "delta")
    if trainer == "grpo":
        scale = str(values["scale_rewards"]).lower()
        draft.put("grpo.scale", {"true": "group", "false": "none"}.get(scale, scale), "scale_rewards")
    has_server = draft.config["rollout"].get("engine") == "vllm"
    if has_server and values["vllm_importance_sampling_correction"] and draft.config["rollout"]["steps"] == 1:
        for ours, key in (("correction", "mode"), ("correction_cap", "clip_max")):
            name = f"vllm_importance_sampling_{key}"
            draft.put(f"grpo.{ours}", values[name], name)
