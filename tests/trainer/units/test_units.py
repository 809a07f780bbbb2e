"""Quantities carry their unit, read back as they were shown, and refuse what is none.

Run: pytest tests/units
"""

import math
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.text import (
    Duration,
    Warmup,
    parse_bytes,
    parse_seconds,
    show_bytes,
    show_count,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("3 epochs", 3, "epochs"), ("1 epoch", 1, "epochs"), ("0.5 epochs", 0.5, "epochs"), ("500 steps", 500, "steps"),
        ("500steps", 500, "steps"), ("10_000 steps", 10_000, "steps"), ("2M tokens", 2_000_000, "tokens"),
        ("1.5k steps", 1500, "steps"), ("2e6 tokens", 2_000_000, "tokens"), ("1B TOKENS", 10**9, "tokens"),
    ],
)  # fmt: skip
def test_durations_are_read_as_people_write_them(text: str, amount: float, unit: str) -> None:
    assert Duration.parse(text) == Duration(amount, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "3", "epochs", "3 moons", "-1 steps", "0 steps", "1.5 steps", "1e999 steps", "3 % steps", "٣ steps", "nan steps"]
)  # fmt: skip
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Duration.parse(text)


@given(st.integers(1, 10**12), st.sampled_from(["steps", "epochs", "tokens"]))
def test_a_duration_reads_back_as_it_is_shown(amount: int, unit: str) -> None:
    duration = Duration(amount, unit)  # type: ignore[arg-type]
    assert Duration.parse(str(duration)) == duration


@given(st.text(max_size=30))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (Duration.parse, Warmup.parse, parse_seconds):
        try:
            parse(text)
        except ValueError:
            continue


def test_a_long_run_of_blanks_does_not_take_long() -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="not an amount with a unit"):
        Duration.parse("3" + " " * 20_000 + "!")
    assert time.process_time() - began < 1


@given(st.floats(0, 100), st.integers(1, 10**6))
def test_a_warm_up_in_percent_never_exceeds_the_run_and_grows_with_it(percent: float, total: int) -> None:
    warmup = Warmup(percent, "%")
    steps = warmup.steps(total)
    assert 0 <= steps <= total
    assert steps >= total * percent / 100 or math.isclose(steps, total * percent / 100)
    assert warmup.steps(total + 1) >= steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [("3%", 3), ("0%", 0), ("100%", 100), ("10 steps", 10), ("999 steps", 100), ("0.5%", 1)],
)
def test_warm_ups_of_a_run_of_a_hundred_steps(text: str, steps: int) -> None:
    assert Warmup.parse(text).steps(100) == steps


@pytest.mark.parametrize("text", ["101%", "-1%", "3", "3 epochs", "1.5 steps"])
def test_what_is_not_a_warm_up_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Warmup.parse(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("25 seconds", 25), ("25 s", 25), ("2 minutes", 120), ("1.5 min", 90), ("1 hour", 3600), ("2h", 7200)],
)
def test_times_are_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("1 GB", 10**9), ("50 MB", 50_000_000), ("1.5kB", 1500), ("2TB", 2 * 10**12)]
)
def test_sizes_are_read_in_bytes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "1", "1 G", "0 MB", "-1 GB", "5 steps", "500 B"])
def test_sizes_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"amount with a unit|not a valid size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (12_345_678, "12.3 MB"),
        (999_600, "1 MB"),
        (1.5e12, "1.5 TB"),
        (2e15, "2,000 TB"),
    ],
)
def test_bytes_are_shown_in_decimal_units_with_three_digits(n_bytes: float, text: str) -> None:
    assert show_bytes(n_bytes) == text


@given(st.floats(0, 1e18))
def test_numbers_are_never_shown_in_exponent_form(number: float) -> None:
    assert "e" not in show_bytes(number) + show_count(number)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (100, "1 min 40 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_times_are_shown_for_people(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (1234, "1,234"),
        (12_345, "12.3 k"),
        (999_999, "1 M"),
        (1_230_000, "1.23 M"),
        (4.56e9, "4.56 G"),
    ],
)
def test_counts_are_shown_for_people(n: float, text: str) -> None:
    assert show_count(n) == text
