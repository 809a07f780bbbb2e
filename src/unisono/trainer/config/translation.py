"""A file of another tool in our terms, as a reader of its format gives it; each reader has a class
of its own.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from unisono.base.errors import Problem

Fate = Literal["carried", "translated", "ignored", "refused"]
Verb = Literal["train", "preview", "init", "predict", "export", "chat"]
"""What a file is for, and what it is read for."""


@dataclass(frozen=True)
class KeyFate:
    """What became of one key of the file, or of an override."""

    key: str
    value: Any
    fate: Fate
    ours: str
    note: str

    def to_json(self) -> dict[str, object]:
        """The entry in the list of `unisono init --json`."""
        return {"key": self.key, "value": self.value, "fate": self.fate, "ours": self.ours, "note": self.note}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A file of another tool in our terms.

    Attributes:
        name: of the file, as it was given.
        values: each key with the file's value, or the tool's default.
        keys: of the file and the overrides, in their order, each with its fate.
        config: in our schema; without `data` if the file names no dataset.
        origins: our dotted key: the place of the key that sets it, e.g. `x.yaml:7`.
        names: our dotted key: the key of the file.
        places: the key of the file: `x.yaml:7`, or the command line.
        warnings: lines about what differs.
        problems: all that is wrong with it, for any verb.
        our_overrides: those of our own keys, to be laid over `config`.
    """

    name: str
    values: Mapping[str, Any]
    keys: list[KeyFate]
    config: dict[str, object]
    origins: dict[str, str]
    names: dict[str, str]
    places: dict[str, str]
    warnings: list[str]
    problems: list[Problem]
    our_overrides: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether any key is refused, or contradicts another."""
        return bool(self.problems) or any(key.fate == "refused" for key in self.keys)

    @property
    def lacks_config(self) -> bool:
        """Whether there is no dataset, so that nothing can be trained or previewed."""
        return "data" not in self.config

    @property
    def overwrites_output(self) -> bool:
        """Whether a finished or a different run in `output_dir` is renamed, and a new one
        begins.
        """
        return False

    def to_json(self) -> dict[str, object]:
        """The keys with their fates, and the config."""
        return {"keys": [key.to_json() for key in self.keys], "config": self.config}

    def refusals(self, verb: Verb) -> list[Problem]:
        """Why the file cannot be used for `verb`; empty if it can."""
        del verb
        return []

    def notes(self, variables: Collection[str] = ()) -> list[str]:
        """What people are told once: that a file of another tool was read, what was ignored, and
        what differs.

        Args:
            variables: the names of those that are set in the environment.
        """
        del variables
        return [*self.ignored(), *self.warnings]

    def ignored(self) -> list[str]:
        """A line that lists the ignored keys; none if there are none."""
        ignored = [key.key for key in self.keys if key.fate == "ignored"]
        return [f"ignored, since they change nothing here: {', '.join(ignored)}"] if ignored else []

    @property
    def epoch_ends(self) -> str:
        """What differs at the end of an epoch, whatever the number of rows; empty: nothing that is
        known.
        """
        return ""

    def fewer_steps(self, epochs: float, *, sequences: int, global_batch: int) -> str:
        """The numbers of steps there and here if they are known and differ, else empty.

        Args:
            epochs: the duration of the run.
            sequences: of an epoch, one for each row.
            global_batch: sequences of a step.
        """
        del epochs, sequences, global_batch
        return ""

    def count(self, fate: Fate) -> int:
        """The number of keys with this fate."""
        return sum(key.fate == fate for key in self.keys)

    def in_its_names(self, problems: Iterable[Problem]) -> list[Problem]:
        """Problems of our config with the file's names of the keys in front, without those of keys
        that are refused anyway.
        """
        refused = {key.key for key in self.keys if key.fate == "refused"}
        named = []
        for problem in problems:
            ours = re.sub(r"(\.\d+(\.\w+)*)?:.*", "", problem.what)  # `data.train.0.rows: …` is `data.train`
            name = self.names.get(ours)
            if name is None:
                named.append(problem)
            elif name not in refused:
                named.append(replace(problem, what=f"{name} → {problem.what}"))
        return named
