"""The chat template that a run was trained with, and the tokens that end its answers: the same in
every file that the run leaves.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unisono.trainer.config.lf_template import adapt_tokenizer, end_of_text, lf_name, lf_template_of
from unisono.trainer.data.lf_encoder import LfChatTemplate, lf_chat_template
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
    layout = lf_template_of(file, system=plan.config.data.system)
    if layout is not None:
        adapt_tokenizer(tokenizer, layout)
        return lf_chat_template(tokenizer, layout, thinking=plan.config.data.thinking)
    is_unknown = lf_name(file) is not None  # then rows were rendered with the tokenizer's own
    if file is not None and (is_unknown or (not Path(file).is_file() and tokenizer.chat_template)):
        file = None  # if it was a file, it is gone; the result has its text
    found = choose_template(tokenizer, file, stops=stops)
    if found is None and plan.data.template.startswith("ChatML"):
        return fallback_template(tokenizer)
    return found


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
    found = {number for directory in directories for number in known_stop_ids(tokenizer, directory)}
    words: tuple[str | None, ...] = ()
    if isinstance(template, LfChatTemplate):
        words = template.known_stops
    elif template is not None:
        words = (template.end_of_turn,)
    if plan is not None and plan.config.objective == "pretrain":
        layout = lf_template_of(plan.config.data.template)
        words += (end_of_text(tokenizer, layout),) if layout is not None else ()
    numbers = (tokenizer.convert_tokens_to_ids(word) for word in words if word is not None)
    return found | {number for number in numbers if number is not None}


def known_stops(tokenizer: Any, directories: Iterable[Path]) -> tuple[str, ...]:
    """The stop tokens of tokenizer and generation_config.json, as text."""
    found = {number for directory in directories for number in known_stop_ids(tokenizer, directory)}
    return tuple(str(tokenizer.convert_ids_to_tokens(i)) for i in sorted(found) if i < len(tokenizer))
