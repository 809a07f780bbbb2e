"""loss.svg is a function of its points. Run: pytest tests/trainer/track/test_curve.py"""

import math
import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from unisono.jobs.runs.curve_drawing import draw_curve, smoothed, ticks

POINTS = st.lists(st.tuples(st.integers(0, 10**6), st.floats(width=32)), max_size=50)


def places(svg: str, name: str) -> list[tuple[float, float]]:
    found = re.search(rf'<polyline class="{name}" points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found[1].split())] if found else []


@given(POINTS, POINTS, st.text())
def test_it_is_always_well_formed_and_inside_its_frame(
    train: list[tuple[int, float]], evaluation: list[tuple[int, float]], title: str
) -> None:
    svg = draw_curve(train, evaluation, title=title)
    root = ET.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for name in ("raw", "smooth", "eval"):
        for x, y in places(svg, name):
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_text_is_escaped_and_loses_control_characters() -> None:
    svg = draw_curve([(1, 1.0)], title='<script>alert("x")</script>\x1b[31m&')
    assert "<script>" not in svg
    assert "\x1b" not in svg
    ET.fromstring(svg)


def test_both_series_and_the_smoothed_line_are_drawn() -> None:
    svg = draw_curve([(1, 3.0), (2, 2.0), (3, 1.0)], [(2, 2.5), (3, 1.5)])
    assert len(places(svg, "raw")) == len(places(svg, "smooth")) == 3
    assert len(places(svg, "eval")) == 2
    assert svg.count("<circle") == 2


def test_what_is_not_a_number_is_left_out() -> None:
    assert len(places(draw_curve([(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)]), "raw")) == 2


def test_a_long_run_is_thinned_and_keeps_its_last_point() -> None:
    svg = draw_curve([(step, 1.0 / step) for step in range(1, 100_001)])
    assert len(svg) < 100_000
    assert places(svg, "raw")[-1][0] == 800.0


def test_colours_follow_the_viewers_scheme_and_no_background_is_painted() -> None:
    svg = draw_curve([(1, 1.0), (2, 0.5)])
    assert "prefers-color-scheme:dark" in svg
    assert "<rect" not in svg


def test_smoothing_keeps_a_constant_and_is_not_pulled_by_the_first_value() -> None:
    assert smoothed([(step, 2.0) for step in range(200)])[-1][1] == 2.0
    fallen = smoothed([(0, 100.0), *((step, 1.0) for step in range(1, 1_000))])
    assert abs(fallen[-1][1] - 1.0) < 1e-6


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 14
    slack = width * 1e-6 + abs(low) * 1e-9
    assert all(low - slack <= value <= low + width + slack for value in found)
