"""The keys of sd-scripts and LoRA-Scripts, as `keys.toml` lists them, and how one mapping of a file
is read.
"""

from collections.abc import Mapping
from typing import Any

from unisono.base.errors import Problem
from unisono.trainer.config.schedules import SCHEDULES
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces
from unisono.trainer.readers.key_table import Key, KeyTable
from unisono.trainer.readers.reading import Reading

TOOL = "sd-scripts"
_SCHEDULES = tuple(name for schedule in SCHEDULES.values() for name in schedule.sd_scripts)
KEYS = KeyTable("unisono.trainer.readers.sd_scripts", words={"lr_scheduler": _SCHEDULES})
"""By name, in groups."""
PAGE = "docs/reference/sd-scripts.md"
_UNKNOWN = ("it is a key of neither sd-scripts' train_network.py nor LoRA-Scripts", PAGE)
_NUMBERS = ("int", "float", "numbers", "number")
_SECRETS = ("wandb_api_key", "huggingface_token")


def resolved(name: str) -> Key | None:
    """The key of a name; of an old name or a variable of train.sh the key that it stands for; None
    if there is none.
    """
    key = KEYS.get(name)
    return KEYS[key.same_as] if key is not None and key.same_as else key


def is_off(key: Key, value: Any) -> bool:
    """Whether a value means there that the key is not given: empty, false where no true can be, and
    zero where the table says it.
    """
    if value is None or value in ("", [], {}):
        return True
    if value is False:
        return key.type != "bool" or bool(key.words)
    if _is_zero(value, of_number=key.type in _NUMBERS):
        return key.zero == "off" or (not key.zero and key.type != "bool" and key.type not in _NUMBERS)
    return False


def _is_zero(value: Any, *, of_number: bool) -> bool:
    """Whether a value is the number 0; a text is one only for a key of numbers."""
    if isinstance(value, str) and of_number:
        try:
            return float(value) == 0
        except ValueError:
            return False
    return isinstance(value, int | float) and value == 0


def read_mapping(raw: Mapping[str, object], places: KeyPlaces, name: str, *, inside: KeyPath = ()) -> Reading:
    """The keys of a mapping, each converted and with its fate as far as the table tells it.

    Args:
        raw: the mapping.
        places: of its keys.
        name: of the file.
        inside: where the mapping is in the file.
    """
    reading = Reading(places, name, keys=KEYS, tool=TOOL, unknown=_UNKNOWN, inside=inside)
    for raw_key, value in raw.items():
        key = resolved(raw_key)
        if key is not None and is_off(key, value):
            reading.leave_out(raw_key, value, "off: as if it were not given")
            continue
        if raw_key in _SECRETS and key is not None:
            what = f"{raw_key} is a secret, and the config is kept with the results"
            reading.problems.append(
                Problem(what, places.of((*inside, raw_key)), "", f"remove it; {key.note}")
            )
            reading.read(raw_key, "…", is_secret=True)
        elif key is not None and key.type == "bool" and value in (0, 1, "0", "1"):
            reading.read(raw_key, bool(int(value)), is_secret=False)
        else:
            reading.read(raw_key, value, is_secret=False)
    return reading
