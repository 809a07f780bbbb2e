"""On a terminal nothing breaks inside a word, and the live line keeps its time left.

Run: pytest tests/front/cli/test_terminal_width.py
"""

import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.front.cli.test_screen import in_terminal
from unisono.base.text import columns, fitting, shortened, wrapped

CASES = Path(__file__).parents[2] / "guard" / "diagnosis" / "cases" / "written.jsonl"
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
PROSE = st.text("ab cd-äé漢.3s", max_size=200)


@given(PROSE, st.integers(20, 120))
def test_a_wrapped_text_has_the_same_words_in_lines_that_fit(text: str, width: int) -> None:
    lines = wrapped(text, width).split("\n")
    assert " ".join(lines).split() == text.split()
    assert all(columns(line) <= width or len(line.split()) == 1 for line in lines if line.strip())


def test_the_lines_after_a_label_start_below_its_text() -> None:
    assert (
        wrapped("FIX       free the disk, or use another output_dir", 40)
        == "FIX       free the disk, or use another\n          output_dir"
    )
    assert (
        wrapped("  fix:   free the disk, or use another output_dir", 40).splitlines()[1]
        == " " * 9 + "output_dir"
    )


def test_a_number_stays_with_its_unit() -> None:
    assert wrapped("the checkpoint was written in 3.1 s", 33) == "the checkpoint was written in\n  3.1 s"


@given(PROSE, st.integers(2, 60))
def test_a_shortened_text_fits(text: str, width: int) -> None:
    short = shortened(text, width)
    assert columns(short) <= width
    assert short == text or short.endswith("…")


def test_parts_in_the_middle_give_way_from_the_right() -> None:
    text = "step 38/380 · loss 0.5461 · eval_loss 8.482 · 7,069 tokens/s · 1.51 steps/s · 3 min 47 s left"
    assert fitting(text, 100) == text
    assert (
        fitting(text, 80) == "step 38/380 · loss 0.5461 · eval_loss 8.482 · 7,069 tokens/s · 3 min 47 s left"
    )
    assert fitting(text, 50) == "step 38/380 · loss 0.5461 · 3 min 47 s left"


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_the_live_line_keeps_its_time_left(width: int) -> None:
    script = (
        "from unisono.front.cli.output import Output\nfrom unisono.front.cli.screen import Screen\nimport"
        " itertools\nscreen = Screen(Output(), clock=itertools.count(step=7).__next__)\nscreen.show({'kind':"
        " 'eval', 'step': 0, 'eval_loss': 8.4821})\nfor n in (1, 2): screen.show({'kind': 'step', 'step': n,"
        " 'loss': 1.2345, 'tokens_per_second': 123456.0})\nscreen._line.show('step 12,345/123,456 · loss"
        " 0.5461 · eval_loss 8.482 · 7,069 tokens/s · 1.51 steps/s · 3 min 47 s left',"
        " share=1.0)\nscreen.close()\n"
    )
    text = ESCAPE.sub("", in_terminal([sys.executable, "-c", script], width=width))
    last = [part for part in re.split(r"[\r\n]", text) if "12,345/" in part][-1]
    assert last.rstrip().endswith("3 min 47 s left")
    assert columns(last) <= width
    assert ("steps/s" in last) == (width == 200)


def test_a_sample_is_cut_between_words_to_one_line() -> None:
    script = (
        "from unisono.front.cli.output import Output\nfrom unisono.front.cli.screen import Screen\nscreen ="
        " Screen(Output())\nscreen.show({'kind': 'sample', 'step': 1, 'prompt': 'wonderful ' * 20, 'text':"
        " 'marvellous ' * 20})\n"
    )
    (line,) = in_terminal([sys.executable, "-c", script]).split("\r\n")[:-1]
    assert columns(line) <= 80
    assert set(line.split()) <= {"wonderful", "wonderful…", "→", "marvellous", "marvellous…"}


def test_an_answer_breaks_between_words() -> None:
    words = [f"word{n}" for n in range(40)]
    script = (
        "from unisono.front.cli.generate import AnswerWriter\n"
        "answer = AnswerWriter()\n"
        f"for piece in {' '.join(words)!r}: answer.write(piece)\n"
        "answer.end()\n"
    )
    text = in_terminal([sys.executable, "-c", script], width=50)
    assert text.split() == words
    assert all(len(line) <= 50 for line in text.split("\r\n"))
    assert len(text.split("\r\n")) > 4


def test_a_preview_breaks_rows_between_words() -> None:
    words = " ".join(f"word{n}" for n in range(60))
    row = {
        "row": "a:1",
        "tokens": 60,
        "loss_tokens": 30,
        "runs": [{"text": words, "tokens": 60, "loss": True, "weight": 1.0}],
    }
    split = {
        "rows": 1,
        "sequences": 1,
        "tokens": 60,
        "loss_tokens": 30,
        "longest_row": 60,
        "longest_sequence": 60,
    }
    ledger = {"bad": 0, "dropped": 0, "cut": 0, "split": 0, "not_rendered": 0}
    found = {
        "rows": [row], "lengths": [{"first": 1, "last": 64, "rows": 1}], "ledger": {"sources": []}, "notes": [],
        "data": {
            "formats": ["text"], "template": "none", "train": split, "eval": None, "cache_hit": True, "cache_reason": "", "ledger": ledger,
            "cache_dir": "", "total_steps": 1, "digest": "",
        },
    }  # fmt: skip
    script = f"from unisono.front.cli.init import _show\n_show({found!r})\n"
    text = ESCAPE.sub("", in_terminal([sys.executable, "-c", script], width=60))
    assert set(words.split()) <= set(text.split())
    assert all(columns(line) <= 60 for line in text.split("\r\n"))


@pytest.mark.parametrize("words", [("train", "--help"), ("drill", "--list"), ("explain", "rank_stopped")])
def test_a_narrow_terminal_gets_the_same_words(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "unisono", *words]
    narrow, wide = (in_terminal(command, width=width) for width in (60, 300))
    assert all(columns(line) <= 60 for line in narrow.split("\r\n"))
    assert set(re.findall(r"[\w-]+", narrow)) <= set(re.findall(r"[\w-]+", wide))


def test_a_verdict_on_a_narrow_terminal_has_whole_words(tmp_path: Path) -> None:
    case = json.loads(CASES.read_text("utf-8").splitlines()[0])
    for name, text in case["files"].items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "unisono", "diagnose", str(tmp_path)]
    narrow, wide = (in_terminal(command, width=width) for width in (60, 1000))
    assert narrow.split() == wide.split()
    assert narrow.startswith("WHAT      ")
