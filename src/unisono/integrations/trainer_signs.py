"""What a callback says of its rank while it trains: phases, steps and losses, for those who watch. Without a watch nobody is told."""

import logging
import math
from typing import Any, Protocol

from unisono.errors import Disagreed
from unisono.integrations.inside.here import here
from unisono.integrations.trainer_facts import TrainerFacts
from unisono.integrations.trainer_meeting import find_world, meet


class Recorder(Protocol):
    """Who is told. Phases are those of unisono.watch.beat."""

    def phase(self, name: str) -> None:
        """The rank does something else from here on."""

    def step(self, step: int) -> None:
        """It works on this optimizer step, from 1."""

    def tell(self, kind: str, **fields: Any) -> None:
        """An event, as unisono.events has them."""


class Unwatched:
    """Tells nobody: there is no front."""

    def phase(self, name: str) -> None:
        """Nothing."""

    def step(self, step: int) -> None:
        """Nothing."""

    def tell(self, kind: str, **fields: Any) -> None:
        """Nothing."""


def find_recorder() -> Recorder:
    """This process at the border of `unisono run`; elsewhere one that tells nobody."""
    return here() or Unwatched()


class Signs:
    """The part of all callbacks that knows no trainer."""

    def __init__(self) -> None:
        self._recorder = find_recorder()

    def begin(self, facts: TrainerFacts) -> None:
        """Agrees with the other ranks on what is about to be trained; all ranks must call it. Alone it only tells.

        Raises:
            Disagreed: on every rank, with the same words.
        """
        self._recorder.tell("facts", facts=facts.to_json())
        world = find_world()
        if world is None:
            return
        self.phase("agree.ranks")
        try:
            meet(world, facts, say=logging.getLogger("unisono").warning)
        except Disagreed as error:
            verdict = error.verdict.to_json() if error.verdict else None
            self._recorder.tell("refused", text=str(error), exit_code=error.exit_code, verdict=verdict)
            raise

    def phase(self, name: str) -> None:
        """What the rank does from here on; saying it again is a sign of life."""
        self._recorder.phase(name)

    def step(self, step: int) -> None:
        """The optimizer step that it works on, from 1."""
        self._recorder.step(step)

    def loss(self, step: int, loss: object) -> None:
        """A loss that the trainer has already brought to the host; nothing else is read from the device."""
        if isinstance(loss, int | float) and not isinstance(loss, bool):
            self._recorder.tell("step", step=step, loss=loss if math.isfinite(loss) else str(loss))
