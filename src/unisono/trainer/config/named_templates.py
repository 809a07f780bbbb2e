"""Templates that `data.template` names instead of a file, as `lf:qwen3`: a seam for the room that
brings their encoder.

The rooms that encode rows and prompts know this protocol only. A process that does either registers
the families at its start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Protocol

from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import LF_PREFIX, Thinking, lf_name

NO_TOKEN = -1
"""In place of a template's token that the tokenizer does not have."""


class NamedTemplate(Protocol):
    """How rows and prompts become tokens, and what this changes in a tokenizer.

    `Any` stands for types of transformers, and of `data`, which is above this room.
    """

    def adapt(self, tokenizer: Any) -> list[str]:
        """Changes a tokenizer of transformers as the template needs it; gives warnings."""
        ...

    def stop_ids(self, tokenizer: Any) -> set[int]:
        """The tokens that end an answer, of an adapted tokenizer."""
        ...

    def end_of_text(self, tokenizer: Any) -> str:
        """What ends a text in pretraining."""
        ...

    def encoder(self, config: RunConfig, tokenizer: Any, *, pictures: Any | None = None) -> Any:
        """The data.encode.RowEncoder of a config; it adapts the tokenizer. `pictures` is a
        data.pictures.store.PictureStore.
        """
        ...

    def chat_template(self, tokenizer: Any, *, thinking: Thinking) -> Any:
        """A data.template.ChatTemplate with the encoder's prompts; it adapts the tokenizer."""
        ...


@dataclass(frozen=True)
class TemplateFamily:
    """All templates behind one prefix.

    Attributes:
        version: a part of the cache's key, e.g. `LLaMA-Factory's 3`.
        find: from a name and `data.system` to the template; None if there is none whose name is
            similar. Raises DataError if the name is nearly that of a template.
    """

    version: str
    find: Callable[[str, str | None], NamedTemplate | None]


_FAMILIES: dict[str, Callable[[], TemplateFamily]] = {}


def register_family(prefix: str, load: Callable[[], TemplateFamily]) -> None:
    """Registers a family; `load` is called when a config names one of its templates."""
    _FAMILIES[prefix] = load


def lf_version() -> str:
    """The version of the family `lf:`, for the cache's key.

    Raises:
        KeyError: if the process has not registered it.
    """
    return _FAMILIES[LF_PREFIX]().version


def named_template(template: str | None, *, system: str | None = None) -> NamedTemplate | None:
    """The template that data.template names; None if it selects a file, or the tokenizer's own.

    Args:
        template: data.template.
        system: data.system, in place of the template's own default.

    Raises:
        DataError: if the name is nearly that of a template.
        KeyError: if the process has not registered the family.
    """
    name = lf_name(template)
    return None if name is None else _FAMILIES[LF_PREFIX]().find(name, system)


def local_day() -> date:
    """Today, in the time zone of this machine: templates write it, so that it is a part of the
    cache's key.
    """
    return datetime.now().astimezone().date()
