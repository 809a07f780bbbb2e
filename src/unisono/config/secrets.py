"""Finds what must not stand in a config, since a config is kept with the results and shown to others."""

import re
from typing import Any

from unisono.config.places import Places
from unisono.config.yaml_file import KeyPath
from unisono.errors import Problem
from unisono.facts.redaction import is_secret

_SECRET_KEY = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|access_?key)s?$", re.IGNORECASE)
_WHY = "a config is kept with the results and shown to others"


def find_secrets(value: Any, places: Places, key: KeyPath = ()) -> dict[KeyPath, Problem]:
    """A problem for every secret in a tree of values; none of them is repeated in the message."""
    if not isinstance(value, dict | list):
        problem = _judge(value, places, key)
        return {key: problem} if problem else {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        k: found for name, inner in items for k, found in find_secrets(inner, places, (*key, name)).items()
    }


def _judge(value: Any, places: Places, key: KeyPath) -> Problem | None:
    name = ".".join(map(str, key))
    if is_secret(value):
        what = "a URL with credentials" if "://" in value else "what looks like an access token"
        fix = "leave it out, and set it in the environment that the storage's package reads (for s3: AWS_ACCESS_KEY_ID …)"
        return Problem(f"{name} holds {what}", places.of(key), _WHY, fix)
    if isinstance(value, str) and value and key and _SECRET_KEY.search(str(key[-1])):
        fix = "remove it, and set it in the environment (for the hub: HF_TOKEN)"
        return Problem(f"{name} looks like a secret", places.of(key), _WHY, fix)
    return None
