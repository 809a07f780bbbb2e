"""The text of a config that was translated from a file of LLaMA-Factory: each value with the key that it comes from."""

from typing import Any

import yaml

from unisono.config import LoadedConfig
from unisono.config.llamafactory import Translation

_COMMENT_AT = 48  # the column of comments


def config_text(translation: Translation, loaded: LoadedConfig) -> str:
    """YAML in our keys, and only those; a comment names the key of the file, or LLaMA-Factory's default."""
    assert loaded.translation is translation
    ignored = [key.key for key in translation.keys if key.fate == "ignored"]
    lines = [f"# Translated from {translation.name}, a file of LLaMA-Factory."]
    if ignored:
        lines.append(f"# Ignored, since they change nothing here: {', '.join(ignored)}.")
    return "\n".join([*lines, *_lines(translation.config, "", translation)]) + "\n"


def _lines(section: dict[str, Any], prefix: str, translation: Translation) -> list[str]:
    found: list[str] = []
    indent = "  " * prefix.count(".")
    for name, value in section.items():
        key = prefix + name
        if isinstance(value, dict) and key not in translation.origins:
            found += [f"{indent}{name}:", *_lines(value, f"{key}.", translation)]
            continue
        text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=1000)
        first, *rest = text.rstrip("\n").split("\n")
        comment = f"# {translation.names.get(key, 'the default there')}"
        found += [f"{indent + first:<{_COMMENT_AT}} {comment}", *(indent + line for line in rest)]
    return found
