"""Our config of a LLaMA-Factory file while its keys are read: where each value comes from, and what became of the keys."""

from typing import Any

from unisono.config.llamafactory_keys import Fate, Values
from unisono.errors import Problem

PREFERENCE_STAGES = ("rm", "dpo", "kto")
"""LLaMA-Factory's stages on rows of preferences."""


class Draft:
    """Our config, as it is filled key by key.

    Attributes:
        values: of the file.
        name: of the file.
        verb: what it is for.
        config: in our schema; `?` for what is required and missing.
        origins: our dotted key: where the value comes from.
        names: our dotted key: the key of the file.
        fates: of keys whose fate depends on values, with a note.
        eval_sources: the sources of eval_dataset.
    """

    def __init__(self, values: Values, name: str, *, verb: str) -> None:
        self.values, self.name, self.verb = values, name, verb
        self.config: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.fates: dict[str, tuple[Fate, str]] = {}
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.eval_sources: list[dict[str, Any]] = []

    def drop(self, *ours: str) -> None:
        """Takes keys back, e.g. since an override of ours says the same in another way."""
        for key in ours:
            section, _, name = key.partition(".")
            del self.config[section][name], self.origins[key]

    def put(self, ours: str, value: Any, *keys: str) -> None:
        """Sets one of our keys; `keys` are those of the file that decide it, the first given one is its origin."""
        *sections, last = ours.split(".")
        target = self.config
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
        given = next((key for key in keys if key in self.values.given), None)
        default = f"{self.name}: LLaMA-Factory's default"
        self.origins[ours] = self.values.places[given] if given else default
        if given:
            self.names[ours] = given

    def put_if_set(self, ours: str, key: str) -> None:
        """Carries a value that is not LLaMA-Factory's default."""
        if self.values.is_set(key):
            self.put(ours, self.values[key], key)

    def refuse(self, key: str, why: str, fix: str) -> None:
        """A problem with the value of a key that has other values that are fine."""
        value = self.values[key]
        shown = ", ".join(value) if isinstance(value, list) else value
        place = self.values.place(key)
        self.problems.append(Problem(f"`{key}: {shown}` is not available", place, why, fix))
        self.fates[key] = ("refused", fix)

    def ignore(self, key: str, note: str) -> None:
        """Marks a key that has no effect beside the others of this file."""
        self.fates[key] = ("ignored", note)
