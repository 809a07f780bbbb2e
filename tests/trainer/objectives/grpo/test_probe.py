"""What a probe shows of the weights of a server.

Run: pytest tests/trainer/objectives/grpo/test_probe.py
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.trainer.objectives.samplers.probe import BOUNDS, Probe, ProbeAnswer, is_same, judge

_ANSWERS, _TOKENS = 8, 8
Values = list[list[float]]


def values(seed: int, spread: float = 1.0, around: Values | None = None) -> Values:
    """Log-probabilities of all answers, of other ones if `around` is given."""
    numbers = random.Random(seed)
    base = around or [[-3.0] * _TOKENS] * _ANSWERS
    return [[value + numbers.gauss(0, spread) for value in row] for row in base]


def probe_of(
    version: int, served: Values, expected: Values, bare: Values, tokens: Sequence[int] = ()
) -> Probe:
    return Probe(
        version,
        [ProbeAnswer(tokens or range(_TOKENS), *rows) for rows in zip(served, expected, bare, strict=True)],
    )


BARE = values(0)


@given(st.integers(0, 1000), st.floats(1e-7, 0.3), st.floats(0, 3e-5))
def test_the_present_weights_are_taken_as_such_whatever_they_changed_by(
    seed: int, change: float, noise: float
) -> None:
    before = values(seed, 0.1, BARE)
    now = values(seed + 1, change, before)
    earlier = [probe_of(1, values(seed + 2, noise, before), before, BARE)]
    probe = probe_of(2, values(seed + 3, noise, now), now, BARE)
    # Exactly the values of before are those of before, even if they are also nearly those of now.
    assert judge(probe, earlier, dtype="float32") is None


@given(st.integers(0, 1000), st.floats(5e-5, 0.3), st.floats(0, 1e-5))
def test_an_older_version_is_found_even_below_the_bound(seed: int, change: float, noise: float) -> None:
    versions = [values(seed, 0.1, BARE)]
    for number in range(3):
        versions.append(values(seed + number + 1, change, versions[-1]))
    earlier = [probe_of(number, one, one, BARE) for number, one in enumerate(versions[:3])]
    for older in range(3):
        served = values(seed + 9, noise, versions[older])
        finding = judge(probe_of(3, served, versions[3], BARE), earlier, dtype="float32")
        assert finding is not None
        assert (finding.kind, finding.version) == ("stale", older)


def test_the_same_values_as_before_are_stale_in_bfloat16_below_its_noise() -> None:
    before, served = BARE, values(1, 0.02, BARE)
    now = values(2, 0.005, before)
    earlier = [probe_of(1, served, before, values(5))]
    finding = judge(probe_of(2, served, now, values(5)), earlier, dtype="bfloat16")
    assert finding is not None
    assert finding.kind == "stale"
    assert judge(probe_of(2, values(3, 0.005, served), now, values(5)), earlier, dtype="bfloat16") is None


def test_an_adapter_that_changes_nothing_is_named_and_not_version_0() -> None:
    now = values(1, 0.1, BARE)
    earlier = [probe_of(0, BARE, BARE, BARE)]
    finding = judge(probe_of(1, values(2, 1e-6, BARE), now, BARE), earlier, dtype="float32")
    assert finding is not None
    assert finding.kind == "unbound"


@pytest.mark.parametrize("dtype", BOUNDS)
def test_other_values_than_those_of_any_version_do_not_match(dtype: str) -> None:
    now = values(1, 0.1, BARE)
    earlier = [probe_of(0, BARE, BARE, BARE)]
    finding = judge(probe_of(1, values(2, 3 * BOUNDS[dtype], now), now, values(7)), earlier, dtype=dtype)
    assert finding is not None
    assert finding.kind == "mismatch"
    assert finding.distance > BOUNDS[dtype]


def test_the_first_version_of_a_new_adapter_has_nothing_to_compare_with() -> None:
    assert judge(probe_of(0, values(1, 1e-6, BARE), BARE, BARE), [], dtype="float32") is None


def test_a_restarted_server_is_the_same_up_to_the_bound() -> None:
    before = probe_of(1, BARE, BARE, BARE).answers
    close = probe_of(1, values(1, 1e-5, BARE), BARE, BARE).answers
    far = probe_of(1, values(1, 0.1, BARE), BARE, BARE).answers
    other = probe_of(1, BARE, BARE, BARE, tokens=range(50, 50 + _TOKENS)).answers
    assert is_same(before, close, dtype="float32")
    assert not is_same(before, far, dtype="float32")
    assert not is_same(before, other, dtype="float32")
