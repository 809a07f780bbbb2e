"""What becomes of a caption in a use: lines, alternatives, separators, and the order of its parts,
beside a list of all that sd-scripts can make of it.

Run: pytest tests/trainer/diffusion/test_captions.py
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.trainer.config.sections import DiffusionSection
from unisono.trainer.families.pictures.captions import (
    captions_vary,
    longest_caption,
    plain_caption,
    split_parts,
    varied_caption,
)

SEPARATED: dict[str, Any] = {"keep_tokens_separator": "|||", "secondary_separator": ";;;"}
CHANGING = {"shuffle_captions": True, "tag_dropout": 0.4, "wildcards": True, **SEPARATED}


def _varied(written: str, section: DiffusionSection, *, uses: int, **more: float) -> list[str]:
    return [varied_caption(written, section, drop=0.99, order=n / uses, **more) for n in range(uses)]


def _resolved(text: str) -> Iterator[str]:
    """All texts that the alternatives of a line make, by the rules of sd-scripts: doubled braces
    first, then `{a|b}`.
    """
    pieces = re.split(r"(\{[^}]+\})", text.replace("{{", "\x00").replace("}}", "\x01"))
    choices = [piece[1:-1].split("|") if piece.startswith("{") and piece.endswith("}") and len(piece) > 2 else [piece] for piece in pieces]  # fmt: skip
    for chosen in product(*choices):
        yield "".join(chosen).replace("\x00", "{").replace("\x01", "}")


def _all_captions(written: str, section: DiffusionSection) -> set[str]:
    """Everything that sd-scripts' process_caption can give, in its order of operations."""
    lines = written.split("\n") if section.wildcards else [written]
    texts = [text for line in lines for text in (_resolved(line) if section.wildcards else [line])]
    if not (section.shuffle_captions or section.tag_dropout):
        return {text.replace(";;;", ",") for text in texts}
    found = set()
    for text in texts:
        if "|||" in text:
            first, _, rest = text.partition("|||")
            middle, _, last = rest.partition("|||")
            kept, free, end = ([t.strip() for t in part.split(",") if t.strip()] for part in (first, middle, last))  # fmt: skip
        else:
            tokens = [t.strip() for t in text.strip().split(",")]
            kept, free, end = tokens[: section.keep_tokens], tokens[section.keep_tokens :], []
        sizes = range(len(free) + 1) if section.tag_dropout else [len(free)]
        orders = [order for size in sizes for order in permutations(free, size)] if section.shuffle_captions else [
            tuple(part for part, stays in zip(free, mask, strict=True) if stays) for mask in product([True, False], repeat=len(free))
        ]  # fmt: skip
        found |= {", ".join([*kept, *order, *end]).replace(";;;", ",") for order in orders}
    return found


@pytest.mark.parametrize(
    ("written", "sections"),
    [
        ("a, b ||| c, d, e ||| f, g", {"shuffle_captions": True}),
        ("a, b ||| c, d, e", {"shuffle_captions": True, "keep_tokens": 1}),
        ("a, b ||| c, d ||| e ||| f", {"shuffle_captions": True, "tag_dropout": 0.3}),
        ("a,b , , c, d", {"shuffle_captions": True, "keep_tokens": 1}),
        ("a, b;;;c;;;d, e", {"shuffle_captions": True, "tag_dropout": 0.5}),
        ("a, b;;;c, d", {"tag_dropout": 0.5, "keep_tokens": 1}),
        ("a;;;b, c", {}),
        ("a {b|c} {d|e|f}, {{g}}", {"wildcards": True}),
        ("{ a | b}, {}, {c}, }d{, {{{e|f}}}, {g|", {"wildcards": True}),
        ("{a|b}, c\nd, {e|f}\n{{{g}, h", {"wildcards": True, "shuffle_captions": True}),
        ("x ||| a, {b|c ||| d}\nb;;;c", {"wildcards": True, "shuffle_captions": True, "tag_dropout": 0.4}),
        ("x ||| a, b;;;c , y ||| z", {"shuffle_captions": True, "tag_dropout": 0.1, "wildcards": True}),
    ],
)
def test_every_caption_variant_of_sd_scripts_is_made_and_no_other(
    written: str, sections: dict[str, Any]
) -> None:
    section = DiffusionSection(**{**SEPARATED, **sections})
    assert set(_varied(written, section, uses=4000)) == _all_captions(written, section)


def test_the_example_of_the_document() -> None:
    section = DiffusionSection(**CHANGING | {"tag_dropout": 0.0})
    written = (
        "1girl, hatsune miku, vocaloid ||| sky;;;cloud;;;day, {simple|white} background , anime screencap |||"
        " masterpiece, rating: general"
    )
    found = _varied(written, section, uses=500)
    begin, end = "1girl, hatsune miku, vocaloid, ", ", masterpiece, rating: general"
    assert all(one.startswith(begin) and one.endswith(end) and "sky,cloud,day" in one for one in found)
    assert len(set(found)) == 3 * 2 * 2
    plain = "sky,cloud,day, simple background, anime screencap"
    assert plain_caption(written, section) == begin + plain + end


@given(
    st.text("ab,|;{} \n", max_size=40),
    st.fixed_dictionaries(
        {
            "shuffle_captions": st.booleans(), "wildcards": st.booleans(), "tag_dropout": st.sampled_from([0.0, 0.5]),
            "keep_tokens": st.integers(0, 3), "keep_tokens_separator": st.sampled_from(["", "|||"]),
            "secondary_separator": st.sampled_from(["", ";"]), "caption_separator": st.sampled_from([",", ";", " "]),
        }
    ),
    st.floats(0, 1, exclude_max=True),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_a_use_depends_on_its_draws_alone_and_nothing_is_invented(
    written: str, sections: dict[str, Any], order: float
) -> None:
    section = DiffusionSection(**sections)
    found = varied_caption(written, section, drop=0.5, order=order)
    assert found == varied_caption(written, section, drop=0.1, order=order)
    if not captions_vary(section):
        assert found == plain_caption(written, section)
    if not section.wildcards and not section.secondary_separator:
        parts = split_parts(written, section)
        whole = Counter([*parts.first, *parts.free, *parts.last])
        if section.shuffle_captions and section.caption_separator == ",":
            used = Counter(split_parts(found, DiffusionSection()).free)
            lost = whole - used
            assert not used - whole - Counter([""])  # all parts may be omitted
            assert section.tag_dropout or not +lost - Counter([""])


def test_parts_of_captions_are_omitted_but_those_that_are_kept() -> None:
    section = DiffusionSection(tag_dropout=0.5, keep_tokens=1)
    found = _varied(", ".join("abcdefghij"), section, uses=200)
    assert all(one.startswith("a") and one.split(", ") == sorted(one.split(", ")) for one in found)
    assert (
        4.5 < sum(len(one.split(", ")) - 1 for one in found) / 200 * 10 / 9 < 5.5
    )  # half of the nine others
    assert len(set(found)) > 100


@pytest.mark.parametrize("written", ["a, b, c", "{x|y|z}", "x\ny\nz"])
def test_orders_lines_and_alternatives_are_equally_frequent(written: str) -> None:
    section = DiffusionSection(shuffle_captions=True, wildcards=True)
    counts = Counter(_varied(written, section, uses=6000))
    assert len(counts) == (6 if "," in written else 3)
    expected = 6000 / len(counts)
    assert (
        sum((count - expected) ** 2 / expected for count in counts.values()) < 20.5
    )  # chi-square, 0.1 % of five


@given(st.integers(0, 9), st.integers(0, 12), st.floats(0, 1, exclude_max=True))
def test_the_parts_grow_from_the_smallest_number_to_all(least: int, count: int, warm: float) -> None:
    """As sd-scripts counts them: floor(step · (parts - least) / steps) + least."""
    section = DiffusionSection(tag_warmup="10 steps", tag_warmup_min=least, keep_tokens=1)
    parts = [f"p{n}" for n in range(count + 1)]
    (found,) = _varied(", ".join(parts), section, uses=1, warm=warm)
    grown = int(warm * (count - least) // 1) + least
    assert found.split(", ") == [parts[0], *parts[1:][:grown]]
    assert _varied(", ".join(parts), section, uses=1, warm=1.0) == [", ".join(parts)]


def test_only_what_changes_captions_needs_text_encoders() -> None:
    assert not captions_vary(DiffusionSection(**SEPARATED, caption_dropout=0.5, flip=True, keep_tokens=2))
    for key, value in (("shuffle_captions", True), ("tag_dropout", 0.1), ("wildcards", True), ("tag_warmup", "3%")):  # fmt: skip
        assert captions_vary(DiffusionSection.model_validate({key: value})), key


def test_the_longest_caption_has_the_longest_line_and_alternatives() -> None:
    section = DiffusionSection(**CHANGING)
    assert longest_caption("a ||| {b|ccc}, d\nee, {f|gggg|h}, i;;;j", section) == "ee, gggg, i,j"


def test_a_separator_is_removed_where_nothing_is_drawn() -> None:
    section = DiffusionSection(**SEPARATED, caption_dropout=0.5)
    assert plain_caption("a,b ||| c;;;d ||| e", section) == "a, b, c,d, e"
    assert varied_caption("a,b ||| c;;;d ||| e", section, drop=0.6, order=0.3) == "a, b, c,d, e"
    assert plain_caption("a,b  c", section) == "a,b  c"  # others stay as they are
    assert varied_caption("a", section, drop=0.4, order=0.3) == ""
