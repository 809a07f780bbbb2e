"""The chat template that a run was trained with, and the tokens that end its answers: the same in
every file that the run leaves.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unisono.trainer.config.named_templates import named_template
from unisono.trainer.config.sections import lf_name
from unisono.trainer.data.template import ChatTemplate, choose_template, fallback_template, known_stop_ids
from unisono.trainer.plan import RunPlan


def trained_template(plan: RunPlan, tokenizer: Any, directories: Iterable[Path]) -> ChatTemplate | None:
    """The chat template of a run; None for a tokenizer without one that was trained on plain text.

    Args:
        plan: of the run.
        tokenizer: of transformers; a template of LLaMA-Factory changes it.
        directories: whose generation_config.json may name stop tokens.

    Raises:
        DataError: if the template is not valid.
    """
    stops = known_stops(tokenizer, directories)
    if plan.config.objective == "pretrain":
        return choose_template(tokenizer, None, stops=stops)
    file = plan.config.data.template
    named = named_template(file, system=plan.config.data.system)
    if named is not None:
        template: ChatTemplate = named.chat_template(tokenizer, thinking=plan.config.data.thinking)
        return template
    is_unknown = lf_name(file) is not None  # then rows were rendered with the tokenizer's own
    if file is not None and (is_unknown or (not Path(file).is_file() and tokenizer.chat_template)):
        file = None  # if it was a file, it is gone; the result has its text
    chosen = choose_template(tokenizer, file, stops=stops)
    if chosen is None and plan.data.template.startswith("ChatML"):
        return fallback_template(tokenizer)
    return chosen


def stop_ids_of(
    plan: RunPlan | None, tokenizer: Any, template: ChatTemplate | None, directories: Iterable[Path]
) -> set[int]:
    """The tokens that end an answer: those of tokenizer and generation_config.json, and the
    template's end-of-turn token.

    Args:
        plan: of the run that trained the model, if one did.
        tokenizer: of transformers, adapted to the template.
        template: of the answers.
        directories: whose generation_config.json may name stop tokens.
    """
    stop_ids = {number for directory in directories for number in known_stop_ids(tokenizer, directory)}
    words = () if template is None else template.stop_words
    if plan is not None and plan.config.objective == "pretrain":
        named = named_template(plan.config.data.template)
        words += (named.end_of_text(tokenizer),) if named is not None else ()
    numbers = (tokenizer.convert_tokens_to_ids(word) for word in words if word is not None)
    return stop_ids | {number for number in numbers if number is not None}


def known_stops(tokenizer: Any, directories: Iterable[Path]) -> tuple[str, ...]:
    """The stop tokens of tokenizer and generation_config.json, as text."""
    stop_ids = {number for directory in directories for number in known_stop_ids(tokenizer, directory)}
    return tuple(str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(stop_ids) if i < len(tokenizer))
