"""Reads configs of other tools, with the encoders of their templates; unisono's own configs do not
pass through it.

A process that encodes rows or prompts calls `register_templates` at its start.
"""

from unisono.trainer.config.named_templates import TemplateFamily, register_family
from unisono.trainer.config.sections import LF_PREFIX


def register_templates() -> None:
    """Registers all families; none is imported before a config names one of its templates."""
    register_family(LF_PREFIX, _llamafactory)


def _llamafactory() -> TemplateFamily:
    from unisono.trainer.readers.llamafactory.encoder import VERSION, lf_named_template

    return TemplateFamily(f"LLaMA-Factory's {VERSION}", lf_named_template)
