"""Values of keys that some objectives do not take."""

from dataclasses import dataclass
from functools import reduce
from operator import attrgetter
from typing import get_args

from unisono.trainer.config.answer_functions import function_names
from unisono.trainer.config.heads import CLASSIFY, EMBED
from unisono.trainer.config.sections import DIFFUSION, GRPO, PREFERENCE, RATINGS, Objective, Section, rows_of
from unisono.trainer.config.yaml_file import words_in

OBJECTIVES: tuple[str, ...] = get_args(Objective)
_TEXT = tuple(name for name in OBJECTIVES if name != DIFFUSION)
_NO_TARGETS = (*PREFERENCE, GRPO, CLASSIFY, EMBED, DIFFUSION)  # of tokens
_NO_PAIRS = ("sft", "pretrain", *RATINGS, GRPO, CLASSIFY, EMBED, DIFFUSION)
_NO_CLASSES = tuple(name for name in OBJECTIVES if name != CLASSIFY)
_NO_RANKS = tuple(name for name in OBJECTIVES if name not in (CLASSIFY, EMBED))
_NO_GRPO = tuple(name for name in OBJECTIVES if name != GRPO)


@dataclass(frozen=True, slots=True)
class Limit:
    """Values that some objectives do not take: `values`, or if it is empty all but the default.
    `why` is a sentence without `; `.
    """

    objectives: tuple[str, ...]
    key: str
    why: str
    values: tuple[str | None, ...] = ()


_LANGUAGE = "it is for language models"
LIMITS = (
    Limit(_TEXT, "adapter.targets", "it names modules of image models", ("unet", "unet+text")),
    Limit(_NO_PAIRS, "checkpoint.best", "it compares the answers of pairs", ("reward_accuracy",)),
    Limit(_NO_GRPO, "checkpoint.best", "it applies to sampled answers", ("reward",)),
    Limit(_NO_CLASSES, "checkpoint.best", "it compares labels", ("f1",)),
    Limit(_NO_RANKS, "checkpoint.best", "it compares labels, or similar texts", ("accuracy",)),
    Limit((GRPO,), "checkpoint.best", "prompts have no answers to compute it on", ("eval_loss",)),
    Limit(("pretrain",), "data.loss_on", "pretraining counts all tokens", ("last-answer",)),
    Limit(PREFERENCE, "data.loss_on", "the tokens of the answers count", ("all",)),
    Limit(PREFERENCE, "data.too_long", "whole answers are compared", ("split",)),
    Limit(_NO_TARGETS, "optim.label_smoothing", "its loss has no token targets"),
    Limit(_NO_TARGETS, "optim.loss_weight", "its loss has no weights of tokens"),
    Limit(_NO_TARGETS, "eval.exact_match", "there is no single right answer (`eval.samples` shows some)"),
    Limit(_NO_TARGETS, "eval.metrics", "there is no single right answer (`eval.samples` shows some)"),
    Limit(("reward",), "eval.samples", "a reward model writes no answers"),
    Limit((EMBED,), "eval.samples", "an embedding model writes no answers"),
    Limit((EMBED,), "data.loss_on", "a row has one loss, of its texts"),
    Limit((EMBED,), "data.too_long", "a text has one embedding", ("split", "keep-answer", "balanced")),
    Limit((EMBED,), "adapter.dropout", "a text is embedded twice, and must have the same embedding"),
    Limit((EMBED,), "model.embedding_noise", "a text is embedded twice, and must have the same embedding"),
    Limit((EMBED,), "optim.router_loss", "its loss is computed over a whole step"),
    Limit((CLASSIFY,), "eval.samples", "a classifier writes no answers"),
    Limit((CLASSIFY,), "data.loss_on", "a row has one loss, of its labels"),
    Limit((CLASSIFY,), "data.too_long", "a row has one label", ("split", "keep-answer", "balanced")),
    Limit((GRPO,), "eval.samples", "answers are in the rollouts, and evaluated by their rewards"),
    Limit((GRPO,), "data.loss_on", "the tokens of sampled answers count"),
    Limit((GRPO,), "data.too_long", "a prompt is not changed", ("cut", "split", "keep-answer", "balanced")),
    Limit(
        (GRPO,), "adapter.dropout", "answers would have different probabilities than when they were sampled"
    ),
    Limit((GRPO,), "model.embedding_noise", "answers would have different probabilities than when sampled"),
    Limit((DIFFUSION,), "adapter", "image models are trained with LoRA only", (None,)),
    Limit((DIFFUSION,), "adapter.kind", "image models are trained with LoRA only"),
    Limit((DIFFUSION,), "adapter.init", _LANGUAGE),
    Limit((DIFFUSION,), "adapter.from", _LANGUAGE),
    Limit((DIFFUSION,), "adapter.merge", _LANGUAGE),
    Limit((DIFFUSION,), "adapter.modules_to_save", _LANGUAGE),
    Limit((DIFFUSION,), "model.embedding_noise", _LANGUAGE),
    Limit((DIFFUSION,), "model.quantize", _LANGUAGE),
    Limit((DIFFUSION,), "optim.router_loss", _LANGUAGE),
    Limit((DIFFUSION,), "model.weights", "a LoRA needs a trained model"),
    Limit((DIFFUSION,), "data.mix.strategy", "pictures are repeated by the names of their folders"),
    Limit((DIFFUSION,), "parallel.strategy", "each rank trains a LoRA of the whole image model", ("fsdp",)),
)


def refused_values(config: Section, objective: str) -> list[str]:
    """The values that the objective does not take, each as `key: problem; why; remedy`."""
    name = rows_of(objective)
    best, metrics = attrgetter("checkpoint.best")(config), attrgetter("eval.metrics")(config)
    # A function of `eval.metrics` may have the name of a figure of another objective.
    limits = [one for one in LIMITS if one.key != "checkpoint.best" or best not in function_names(metrics)]
    refused = (_refusal(limit, config, objective) for limit in limits if name in limit.objectives)
    return [text for text in refused if text]


def accepting_objectives(key: str, value: object) -> list[str]:
    """The objectives that take a value which is not the default."""
    limits = [limit for limit in LIMITS if limit.key == key and (not limit.values or value in limit.values)]
    refusing = {name for limit in limits for name in limit.objectives}
    return [name for name in OBJECTIVES if name not in refusing]


def _refusal(limit: Limit, config: Section, objective: str) -> str:
    """What is wrong with the value of a config; empty: nothing."""
    *sections, last = limit.key.split(".")
    section = reduce(getattr, sections, config)
    if section is None:
        return ""
    name = "from_" if last == "from" else last
    field, value = type(section).model_fields[name], getattr(section, name)
    if value not in limit.values if limit.values else value == field.default:
        return ""
    words = words_in(field.annotation)
    others = [f"`{word}`" for word in words if word not in (*limit.values, value)] if limit.values else []
    remedy = f"set it to {', '.join(others)}" if others else "remove it"
    accepting = ", ".join(accepting_objectives(limit.key, value))
    what = f"{limit.key}: objective {objective} does not use it"
    if value in (None, *words):
        what = f"{limit.key}: objective {objective} does not take {value or 'null'}"
    return "; ".join((what, limit.why, f"{remedy} (accepted by: {accepting})"))
