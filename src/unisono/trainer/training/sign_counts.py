"""Signs of trouble that last: a warning, or the end of the run. Pure."""

from collections.abc import Sequence

from unisono.trainer.objectives.objective import Sign


class SignCounts:
    """For how many steps in a row each cause has shown."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def lasting(self, signs: Sequence[Sign]) -> list[Sign]:
        """The signs of a step that have lasted just as long as they may; each is given once until
        it has disappeared.
        """
        by_cause = {sign.cause: sign for sign in signs}
        self._steps = {cause: self._steps.get(cause, 0) + 1 for cause in by_cause}
        return [sign for cause, sign in by_cause.items() if self._steps[cause] == sign.steps]
