"""Adafactor (arXiv:1804.04235) of transformers."""

from transformers.optimization import Adafactor

from unisono.trainer.checkpoint.state import ParamGroup


class SteadyAdafactor(Adafactor):
    """Adafactor whose state keeps its tensors from step to step: the norm of a parameter, which
    each step computes anew before it uses it, is not kept.
    """

    def __init__(self, groups: list[ParamGroup], **arguments: object) -> None:
        super().__init__(groups, **arguments)

    def step(self, closure: None = None) -> None:
        """Updates every parameter that has a gradient."""
        super().step(closure)
        for state in self.state.values():
            state["RMS"] = 0.0
