"""The reference pages whose Chinese is in the catalogue of texts, besides those of causes.

Used by scripts/make_reference.py, and by scripts/make_catalogue.py, which collects their texts.
"""

from check_pages import agreement_page, doctor_page, variables_page
from config_page import config_page
from memory_page import memory_page
from models_page import models_page
from page_parts import Translate
from python_page import python_page
from tool_pages import axolotl_page, llamafactory_page, sd_scripts_page, trl_page

_PAGES = {
    "config.md": config_page,
    "python.md": python_page,
    "memory.md": memory_page,
    "models.md": models_page,
    "llamafactory.md": llamafactory_page,
    "axolotl.md": axolotl_page,
    "trl.md": trl_page,
    "sd-scripts.md": sd_scripts_page,
    "doctor.md": doctor_page,
    "variables.md": variables_page,
    "agreement.md": agreement_page,
}


def translated_pages(t: Translate, language: str) -> dict[str, list[str]]:
    """The pages by their names below docs/reference, as lines."""
    return {name: page(t, language) for name, page in _PAGES.items()}
