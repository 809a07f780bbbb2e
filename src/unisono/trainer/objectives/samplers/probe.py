"""Whether a server samples with the weights that it was given. Pure.

After each sync the server writes short answers to the same prompts with the same random numbers.
Their log-probabilities are compared with those that the present weights here give to the same
tokens, and with those that the model without its adapter and earlier versions gave. Distances are
root mean squares over tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BOUNDS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""How far correct implementations may be from each other, by the dtype of the computation here;
measured in bench/results/vllm_sampler.md.
"""
_LEAST_CHANGE = {"float32": 1e-5, "bfloat16": 1e-3, "float16": 1e-3}
"""Smaller changes of log-probabilities between two versions may be rounded away."""
_LEAST_TOKENS = 8  # on which versions are compared


@dataclass(frozen=True)
class ProbeAnswer:
    """A short answer of the server.

    Attributes:
        tokens: of the answer.
        served: the server's log-probability of each of them.
        expected: that of the weights here.
        bare: that of the model without its adapter; empty: not known.
    """

    tokens: Sequence[int]
    served: Sequence[float]
    expected: Sequence[float]
    bare: Sequence[float] = ()


@dataclass(frozen=True)
class Probe:
    """The short answers of a version, in the order of the prompts."""

    version: int
    answers: Sequence[ProbeAnswer]

    @property
    def tokens(self) -> int:
        """Their number."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def distance(self) -> float:
        """That of the log-probabilities of the server from those here."""
        return _distance(
            [value for answer in self.answers for value in answer.served],
            [value for answer in self.answers for value in answer.expected],
        )

    @property
    def farthest(self) -> tuple[int, float, float]:
        """The token that differs most, its log-probability on the server, and that here."""
        values = [
            one
            for answer in self.answers
            for one in zip(answer.tokens, answer.served, answer.expected, strict=True)
        ]
        return max(values, key=lambda one: abs(one[1] - one[2]))


@dataclass(frozen=True)
class ProbeFinding:
    """What is wrong with a server's weights.

    Attributes:
        kind: other values than here; those of the model without its adapter; those of an older
            version.
        distance: from the present weights.
        nearest: from the weights that it seems to have.
        version: that it seems to have.
    """

    kind: Literal["mismatch", "unbound", "stale"]
    distance: float
    nearest: float = 0.0
    version: int = 0


def judge(probe: Probe, earlier: Sequence[Probe], *, dtype: str) -> ProbeFinding | None:
    """What a probe shows; None: the server has the present weights, as far as can be measured.

    Args:
        probe: of the present version.
        earlier: those of versions before, in order.
        dtype: of the computation here.
    """
    bound = BOUNDS[dtype]
    findings = [_bare_finding(probe)]
    findings += [_version_finding(probe, other, least_change=_LEAST_CHANGE[dtype]) for other in earlier]
    others = [one for one in findings if one is not None and one.nearest <= bound]
    if others:
        # Version 0 of a new adapter changes nothing: that nothing is bound tells more.
        return min(others, key=lambda one: one.nearest / (2 if one.kind == "unbound" else 1))
    return None if probe.distance <= bound else ProbeFinding("mismatch", probe.distance)


def _bare_finding(probe: Probe) -> ProbeFinding | None:
    """Whether the server's values are much nearer to those without the adapter."""
    if not all(answer.bare for answer in probe.answers):
        return None
    near = _distance(
        [value for answer in probe.answers for value in answer.served],
        [value for answer in probe.answers for value in answer.bare],
    )
    return ProbeFinding("unbound", probe.distance, near) if near < probe.distance / 2 else None


def _version_finding(probe: Probe, other: Probe, *, least_change: float) -> ProbeFinding | None:
    """Whether the server has another version.

    That is seen on answers whose tokens are the same in both: they have exactly the values of
    then, though those here have changed; or their values are much nearer to those of then.
    """
    pairs = [
        (now, then)
        for now, then in zip(probe.answers, other.answers, strict=True)
        if list(now.tokens) == list(then.tokens)
    ]
    served = [value for now, _ in pairs for value in now.served]
    before = [value for _, then in pairs for value in then.served]
    expected = [value for now, _ in pairs for value in now.expected]
    expected_then = [value for _, then in pairs for value in then.expected]
    if len(served) < _LEAST_TOKENS or _distance(expected, expected_then) < least_change:
        return None
    distance, near = _distance(served, expected), _distance(served, expected_then)
    is_other = served == before or near < distance / 2
    return ProbeFinding("stale", distance, near, other.version) if is_other else None


def is_same(before: Sequence[ProbeAnswer], after: Sequence[ProbeAnswer], *, dtype: str) -> bool:
    """Whether a server that has loaded the same version again gives the same answers, up to the
    bound; of answers of which a token differs, the beginnings are compared.
    """
    served, again = [], []
    for one, other in zip(before, after, strict=True):
        for token, new, value, new_value in zip(
            one.tokens, other.tokens, one.served, other.served, strict=False
        ):
            if token != new:
                break
            served.append(value)
            again.append(new_value)
    least = min(_LEAST_TOKENS, sum(len(one.tokens) for one in before) // 2)
    return len(served) >= least and _distance(served, again) <= BOUNDS[dtype]


def _distance(values: Sequence[float], others: Sequence[float]) -> float:
    squares = [(value - other) ** 2 for value, other in zip(values, others, strict=True)]
    return math.sqrt(math.fsum(squares) / len(squares)) if squares else 0.0
