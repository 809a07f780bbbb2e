"""The pages for those who come from other tools name keys that our config has, with values that it
takes.

Run: pytest tests/docs/test_pages_from_other_tools.py
"""

import re
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import ConfigError
from unisono.trainer.config import RunConfig, build_config
from unisono.trainer.config.yaml_file import all_keys

PAGES = sorted((Path(__file__).parents[2] / "docs" / "how-to").glob("from-*.md"))
BASE: dict[str, Any] = {
    "model": {"path": "m"}, "data": {"train": "d.jsonl", "eval": 0.1}, "adapter": {"kind": "lora"}, "output_dir": "o",
}  # fmt: skip
OF_REWARDS: dict[str, Any] = {"objective": "grpo", "rewards": ["exact"]}
OF_PAIRS: dict[str, Any] = {"objective": "dpo", "data": BASE["data"] | {"format": "preference"}}
OF_PICTURES: dict[str, Any] = {"objective": "diffusion"}
_SPAN = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*)(?:: ([^`]+))?`")


def named_keys(page: Path) -> list[tuple[str, str | None]]:
    """Each of our keys in the second column of the tables, with its value if the page gives one."""
    found = []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) > 1 and not set(cells[0]) <= set("- "):
            found += [
                (m[1], m[2]) for m in _SPAN.finditer(cells[1]) if m[1].split(".")[0] in RunConfig.model_fields
            ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_of_ours_is_in_the_schema(page: Path) -> None:
    keys = named_keys(page)
    assert len(keys) > 10
    assert {key for key, _ in keys} <= set(all_keys(RunConfig))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_value_of_our_keys_is_taken(page: Path) -> None:
    values = [(key, value) for key, value in named_keys(page) if value and not re.search(r"[…A-Z]", value)]
    assert values
    for key, value in values:
        accepted = [
            is_taken(base, f"{key}={value}")
            for base in (BASE, BASE | OF_PAIRS, BASE | OF_PICTURES, BASE | OF_REWARDS)
        ]
        assert any(accepted), (key, value)


def is_taken(base: dict[str, Any], override: str) -> bool:
    try:
        build_config(base, lines={}, name="page", overrides=(override,))
    except ConfigError:
        return False
    return True
