"""The templates of LLaMA-Factory: their names, their pieces, their changes to a tokenizer, and
their form as a chat template.

`data.template: lf:NAME` selects one. Its table, templates.toml, has the slots; `encoder` makes
tokens of them.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from unisono.base.errors import DataError
from unisono.base.text import nearest
from unisono.trainer.config.sections import LF_PREFIX

CONTENT = "{{content}}"
_THOUGHT = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True, slots=True)
class TokenSlot:
    """A slot of one token: `name` in the vocabulary, or `bos` or `eos` of the tokenizer."""

    name: str
    special: bool = False


Slot = str | TokenSlot
Slots = tuple[Slot, ...]


@dataclass(frozen=True)
class LfTemplate:
    """One template. The fields are explained in templates.toml."""

    name: str
    user: Slots
    assistant: Slots
    system: Slots
    function: Slots
    observation: Slots
    prefix: Slots = ()
    default_system: str = ""
    stop_words: tuple[str, ...] = ()
    thought: tuple[str, str] = _THOUGHT
    tool_format: str = "default"
    efficient_eos: bool = False
    replace_eos: bool = False
    system_in_user: bool = False
    reasoning: bool = False

    @cached_property
    def thought_pattern(self) -> re.Pattern[str]:
        """Matches a thought; its group is the text between begin and end."""
        begin, end = map(re.escape, self.thought)
        return re.compile(f"{begin}(.*?){end}", re.DOTALL)

    @property
    def empty_thought(self) -> str:
        """A thought without text."""
        return "".join(self.thought)

    def without_thought(self, content: str) -> str:
        """An answer without its thoughts, and without the line ends before it."""
        return self.thought_pattern.sub("", content).lstrip("\n")

    def has_thought(self, content: str) -> bool:
        """Whether an answer has the begin or the end of a thought."""
        return any(word.strip() in content for word in self.thought)


@cache
def _table() -> dict[str, dict[str, object]]:
    return tomllib.loads(
        files("unisono.trainer.readers.llamafactory").joinpath("templates.toml").read_text(encoding="utf-8")
    )


def template_names() -> list[str]:
    """The names of all templates."""
    return list(_table())


def find_lf_template(name: str) -> LfTemplate | None:
    """The template of a name; None if there is none whose name is similar.

    Raises:
        DataError: if the name is nearly that of a template.
    """
    table = _table()
    if name in table:
        return _template(name, table[name])
    near = nearest(name, list(table))
    if near is not None:
        raise DataError.of(
            f"there is no template {LF_PREFIX}{name}",
            where="data.template",
            why=f"the nearest is {LF_PREFIX}{near}; there are {', '.join(table)}",
            fix=f"set data.template: {LF_PREFIX}{near}, or a file with a chat template",
        )
    return None


def _template(name: str, entry: Mapping[str, object]) -> LfTemplate:
    fields: dict[str, Any] = dict(entry)
    user = _slots(fields.pop("user", [CONTENT]))
    bare: list[Any] = [CONTENT] if entry.get("efficient_eos") else [CONTENT, {"special": "eos"}]
    assistant = _slots(fields.pop("assistant", bare))
    return LfTemplate(
        name,
        user=user,
        assistant=assistant,
        system=_slots(fields.pop("system", [CONTENT])),
        function=_slots(fields.pop("function")) if "function" in fields else assistant,
        observation=_slots(fields.pop("observation")) if "observation" in fields else user,
        prefix=_slots(fields.pop("prefix", [])),
        stop_words=tuple(fields.pop("stop_words", ())),
        thought=tuple(fields.pop("thought", _THOUGHT)),
        **fields,
    )


def _slots(values: list[Any]) -> Slots:
    return tuple(
        (
            value
            if isinstance(value, str)
            else TokenSlot(value["token"])
            if "token" in value
            else TokenSlot(value["special"], special=True)
        )
        for value in values
    )


def adapt_tokenizer(tokenizer: Any, template: LfTemplate) -> list[str]:
    """Changes a tokenizer of transformers as the template needs it; gives warnings.

    The end of sequence may be replaced; stop words become special tokens, and are added if they are
    not in the vocabulary; a tokenizer without padding pads with the end of sequence.
    """
    vocabulary = tokenizer.get_vocab()
    absent = [word for word in template.stop_words if word not in vocabulary]
    stop_words = list(template.stop_words)
    if template.replace_eos:
        _set_eos(tokenizer, stop_words.pop(0))
    if tokenizer.eos_token_id is None:
        _set_eos(tokenizer, "<|endoftext|>")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if stop_words:
        tokenizer.add_tokens(stop_words, special_tokens=True)
    if not absent:
        return []
    return [
        f"{LF_PREFIX}{template.name} ends answers with {' and '.join(absent)}, which"
        f" {'is not one token' if len(absent) == 1 else 'are not one token each'} of the tokenizer: template"
        " and model are of different families. Added to the tokenizer; the model has not learned it"
    ]


def _set_eos(tokenizer: Any, word: str) -> None:
    if tokenizer.eos_token != word:
        tokenizer.add_special_tokens({"eos_token": word})


def stop_ids(tokenizer: Any, template: LfTemplate) -> set[int]:
    """The tokens that end an answer, of an adapted tokenizer."""
    return {tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(word) for word in template.stop_words)}


def end_of_text(tokenizer: Any, template: LfTemplate) -> str:
    """What ends a text in pretraining; Llama 3 has a token of its own for this."""
    return "<|end_of_text|>" if template.name == "llama3" else str(tokenizer.eos_token)
