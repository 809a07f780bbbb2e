"""Parts of other packages. Run: pytest tests/base/test_extensions.py"""

import math
from importlib.metadata import EntryPoint

import pytest

from unisono.base.errors import UsageError
from unisono.base.extensions import CONFIG_READERS, SCHEDULES, extensions, load_extension


def test_an_entry_point_is_loaded() -> None:
    assert load_extension(EntryPoint("sqrt", "math:sqrt", SCHEDULES)) is math.sqrt


@pytest.mark.parametrize("value", ["no_such_module:reader", "math:no_such_reader"])
def test_unimportable_extension_is_refused_with_its_package_and_the_fix(value: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_extension(EntryPoint("axolotl", value, CONFIG_READERS))
    text = "\n".join(refused.value.lines())
    assert "config reader axolotl cannot be imported" in text
    assert value in text
    assert "reinstall its package" in text


def test_a_group_that_nobody_fills_is_empty() -> None:
    assert extensions("unisono.nothing") == {}
