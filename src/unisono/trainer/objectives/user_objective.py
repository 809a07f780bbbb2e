"""Objectives of the user's own, `FILE.py:CLASS`: loaded, checked, and named where they fail."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from unisono.base.errors import ConfigError
from unisono.base.user_code import OwnCode
from unisono.trainer.batches.source import BatchSource, Counts, Micro, SourceRank
from unisono.trainer.config.own_code import execute, refusing
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.model.forward import Forward, Rows
from unisono.trainer.objectives.objective import Objective, Part


def load_objective(code: OwnCode, config: RunConfig, digest: str) -> Objective:
    """An objective of the user's own.

    Raises:
        ConfigError: if its file does not give an objective; with the line in the file.
    """
    with refusing(code, "fix the file; `class NAME(unisono.Objective)` with a method `loss` is enough"):
        kind, source = execute(code, digest)
        _refuse_other(kind, code.path, source)
        inner = cast("type[Objective]", kind).of(config)
        # The attributes of the class, as that of our own objectives have them.
        given = {name: getattr(inner, name) for name in ("metrics", "sides", "first_sides")}
        return type(kind.__name__, (OwnObjective,), given)(inner, code.path)


class OwnObjective(Objective):
    """An objective of the user's own.

    An unusable result of its functions is an exception with their line.

    Attributes:
        where: file and line of its loss.
    """

    def __init__(self, inner: Objective, path: Path) -> None:
        self._inner = inner
        self._path = path
        self.where = f"{path}:{self._line('loss')}"

    def source(self, rows: BatchSource, forward: Forward, group: SourceRank) -> BatchSource:
        """Its own, checked."""
        result = self._call("source", rows, forward, group)
        self._require(isinstance(result, BatchSource), "source", result, "a BatchSource")
        return cast("BatchSource", result)

    def first(self, forward: Forward, micro: Micro) -> torch.Tensor:
        """Its own, checked."""
        result = self._call("first", forward, micro)
        self._require(_is_scalar(result), "first", result, "a scalar tensor")
        return cast("torch.Tensor", result)

    def loss(self, forward: Forward, micro: Micro, *, counts: Counts, known: float = 0.0) -> Part:
        """Its own, checked, with what the model gave to it."""
        watched = _WatchedForward(forward)
        part = self._call("loss", watched, micro, counts=counts, known=known)
        self._require(isinstance(part, Part), "loss", part, "unisono.Part(loss, sums)")
        has_gradient = _is_scalar(part.loss) and (part.loss.requires_grad or not torch.is_grad_enabled())
        self._require(has_gradient, "loss", part.loss, "a scalar tensor with a gradient as the loss")
        sums = 2 * len(self.metrics)
        fits = isinstance(part.sums, torch.Tensor) and part.sums.shape == (sums,)
        self._require(fits, "loss", part.sums, f"sums of shape ({sums},), two for each name in `metrics`")
        return OwnPart(part.loss, part.sums, watched)

    def figures(self, sums: list[float], *, known: float = 0.0) -> dict[str, float]:
        """Its own, checked."""
        result = self._call("figures", sums, known=known)
        fits = isinstance(result, dict) and all(isinstance(value, int | float) for value in result.values())
        self._require(fits, "figures", result, "a dict of numbers")
        return cast("dict[str, float]", result)

    def _call(self, name: str, *given: Any, **named: Any) -> Any:
        try:
            return getattr(self._inner, name)(*given, **named)
        except SystemExit as error:  # it would end the rank silently
            raise RuntimeError(f"{name} of the objective called sys.exit({error.code!r})") from error

    def _require(self, is_usable: bool, name: str, result: Any, expected: str) -> None:  # noqa: FBT001
        if is_usable:
            return
        shape = f" of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else ""
        graph = "" if not shape or result.requires_grad else " without a gradient"
        error = TypeError(
            f"{name} of the objective gives {type(result).__name__}{shape}{graph}, not {expected}"
        )
        # It has returned, so its frame is not in the traceback; verdicts look there for the origin.
        error.add_note(f'  File "{self._path}", line {self._line(name)}, in {name}')
        raise error

    def _line(self, name: str) -> int:
        code = getattr(inspect.unwrap(getattr(type(self._inner), name)), "__code__", None)
        return code.co_firstlineno if code is not None and code.co_filename == str(self._path) else 1


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


MODEL, OBJECTIVE = 1, 2
"""The origin of NaN or infinity: the model's outputs had it, or only the loss, or its gradient by
them, did.
"""


class _WatchedForward(Forward):
    """A forward that notes whether its outputs, and the loss's gradient by them, are finite.

    It does not wait for the device.
    """

    def __init__(self, forward: Forward) -> None:
        vars(self).update(vars(forward))
        self.given: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []

    def loss(self, rows: Rows, *, count: int, smoothing: float = 0.0) -> torch.Tensor:
        return self._noted(super().loss(rows, count=count, smoothing=smoothing))

    def log_probs(self, rows: Rows, *, temperature: float = 1.0) -> torch.Tensor:
        return self._noted(super().log_probs(rows, temperature=temperature))

    def _noted(self, values: torch.Tensor) -> torch.Tensor:
        self.given.append(values.detach().isfinite().all())
        if values.requires_grad:
            values.register_hook(lambda gradient: self.gradients.append(gradient.isfinite().all()))
        return values


@dataclass(frozen=True)
class OwnPart(Part):
    """The part of an objective of the user's own, with what the model gave to it."""

    forward: _WatchedForward

    def origin_of_nan(self) -> torch.Tensor:
        """A scalar, after the backward pass: MODEL or OBJECTIVE, if there is NaN or infinity; 0 if
        nothing was noted.
        """
        if not self.forward.given:
            return self.loss.new_zeros(())
        given = torch.stack(self.forward.given).all()
        made = ~torch.stack([self.loss.detach().isfinite(), *self.forward.gradients]).all()
        return torch.where(given & made, OBJECTIVE, MODEL)


def _refuse_other(kind: Any, path: Path, source: bytes) -> None:
    """Refuses a class without the interface of an objective, or with rows that its runs do not
    have.

    Raises:
        ConfigError: with its line in the file.
    """
    text = source.decode("utf-8", "replace").splitlines()
    line = next((n for n, words in enumerate(text, 1) if words.startswith(f"class {kind.__name__}")), 1)
    if not issubclass(kind, Objective):
        what, fix = "is not an objective", f"write `class {kind.__name__}(unisono.Objective)`"
    elif kind.__abstractmethods__:
        what, fix = f"has no {', '.join(sorted(kind.__abstractmethods__))}", f"define it: {_LOSS}"
    elif kind.uses_reference or {*kind.sides, *kind.first_sides} - {0}:
        what = "needs pairs or a reference model"
        fix = "your own objective reads the rows of sft: `sides` is (0,)"
    else:
        try:
            inspect.signature(kind.loss).bind(None, None, None, counts=None, known=0.0)
        except TypeError as error:
            line = kind.loss.__code__.co_firstlineno
            what, fix = f"has a loss with other arguments: {error}", f"define it as {_LOSS}"
        else:
            return
    raise ConfigError.of(f"{kind.__name__} {what}", where=f"{path}:{line}", fix=fix)


_LOSS = "loss(self, forward, micro, *, counts, known=0.0)"
