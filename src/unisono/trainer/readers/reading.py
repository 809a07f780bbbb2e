"""Reads the keys of a foreign file one by one, and decides the fate of each."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.base.errors import Problem
from unisono.base.text import nearest, one_line
from unisono.trainer.config.translation import Fate, KeyFate, Verb
from unisono.trainer.config.yaml_file import KeyPath, KeyPlaces
from unisono.trainer.readers.key_table import Key, Values, convert


class Reading:
    """The keys of a file, read one by one, each with its entry in the table of its tool."""

    def __init__(
        self,
        places: KeyPlaces,
        name: str,
        *,
        keys: Mapping[str, Key],
        tool: str,
        unknown: tuple[str, str],
        inside: KeyPath = (),
    ) -> None:
        self._places, self._name, self._inside = places, name, inside
        self._keys, self._tool = keys, tool
        self._unknown, self._page = unknown
        self.values: dict[str, object] = {}
        self.places: dict[str, str] = {}
        self.fates: list[KeyFate] = []
        self.problems: list[Problem] = []

    def leave_out(self, name: str, value: Any, note: str) -> None:
        """Lists a key whose value means the same as none."""
        self.fates.append(KeyFate(name, value, "ignored", "", note))

    def read(self, name: str, value: Any, *, is_secret: bool) -> None:
        """Converts one value, and decides the fate of its key as far as the table tells it."""
        where = self._places.of((*self._inside, name))
        known = self._keys.get(name)
        if known is None:
            near = _near(name, self._keys, self._page)
            self._refuse(
                name, value, Problem(f"unknown key `{name}`", where, self._unknown, near), "unknown key"
            )
            return
        key = self._keys[known.same_as] if known.same_as else known
        if is_secret:
            self.fates.append(KeyFate(name, value, "refused", "", key.note))
            return
        if value is None and not key.null:
            note = f"null is {self._tool}'s default"
            self.fates.append(KeyFate(name, None, "ignored", key.ours, note))
            return
        try:
            converted = convert(key, value)
        except ValueError as error:
            self._refuse(name, value, Problem(f"{name}: {error}", where), str(error))
            return
        if key.name in self.values:
            note = f"also given as `{key.name}`"
            self._refuse(name, value, Problem(f"{name}: {note}", where, "", "remove one of them"), note)
            return
        self.values[key.name], self.places[key.name] = converted, where
        if key.fate == "refused" and converted != key.default and converted not in key.harmless:
            problem = Problem(f"`{name}: {_shown(value)}` is not available", where, "", key.note)
            self._refuse(name, value, problem, key.note)
            return
        fate: Fate = "ignored" if key.fate == "refused" else key.fate
        note = f"{self._tool}'s default" if key.fate == "refused" else key.note
        if name != key.name:
            note = "; ".join(filter(None, (f"an old name of {key.name}", note)))
        self.fates.append(KeyFate(name, value, fate, key.ours, note))

    def _refuse(self, name: str, value: Any, problem: Problem, note: str) -> None:
        self.problems.append(problem)
        self.fates.append(KeyFate(name, value, "refused", "", note))


def _near(name: str, keys: Mapping[str, Key], page: str) -> str:
    near = nearest(name, list(keys))
    return (
        f"did you mean `{near}`?"
        if near
        else f"see {page}; our own keys follow the file, as in optim.lr=1e-4"
    )


def _shown(value: Any) -> str:
    words = {True: "true", False: "false"}
    return words[value] if isinstance(value, bool) else one_line(str(value), limit=60)


def with_effect(
    fate: KeyFate, values: Values, verb: Verb, changes: Mapping[str, tuple[Fate, str]]
) -> KeyFate:
    """The fate with what the other keys make of it."""
    known = values.table.get(fate.key)
    if known is None or fate.fate == "refused" or fate.value is None:
        return fate
    key = values.table[known.same_as] if known.same_as else known
    if key.name in changes:
        changed, note = changes[key.name]
        return replace(fate, fate=changed, note=note, ours=fate.ours if changed != "refused" else "")
    if not _is_met(key, values):
        return replace(fate, fate="ignored", note=f"no effect without `{key.needs}`")
    if key.verbs and verb not in key.verbs:
        commands = ", ".join(f"`unisono {_COMMANDS[verb]}`" for verb in key.verbs)
        return replace(fate, fate="ignored", note=f"only for {commands}")
    return fate


_COMMANDS = {"predict": "eval", "export": "export", "chat": "chat", "train": "train"}


def _is_met(key: Key, values: Values) -> bool:
    """Whether the other key that this one needs is set as needed."""
    other, colon, expected = key.needs.partition(": ")
    if not other:
        return True
    return str(values[other]) == expected if colon else bool(values[other])
