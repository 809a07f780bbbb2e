"""The keys of TRL, as `keys.toml` lists them, and those of Hugging Face's TrainingArguments."""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from functools import cached_property

from unisono.trainer.readers.key_table import Key, KeyTable
from unisono.trainer.readers.llamafactory.keys import KEYS as LLAMAFACTORY_KEYS

TOOL = "TRL"
PAGE = "docs/how-to/from-trl.md"
OWN = KeyTable("unisono.trainer.readers.trl")
_SHARED = "Seq2SeqTrainingArguments"


class _WithTrainingArguments(Mapping[str, Key]):
    """TRL's own keys, and those of TrainingArguments that it has not changed."""

    @cached_property
    def _keys(self) -> dict[str, Key]:
        shared = {name: key for name, key in LLAMAFACTORY_KEYS.items() if key.group == _SHARED}
        return shared | dict(OWN)

    def __getitem__(self, name: str) -> Key:
        return self._keys[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


KEYS = _WithTrainingArguments()
WITH_DEFAULTS = ChainMap(dict[str, Key](), KEYS, LLAMAFACTORY_KEYS)  # type: ignore[arg-type]
"""With LLaMA-Factory's keys, at whose defaults its part for TrainingArguments reads them."""
