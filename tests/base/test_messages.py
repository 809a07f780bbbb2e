"""What arrives of a message that is damaged, or of a different version.

Run: pytest tests/base/test_messages.py
"""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.base.events import Reporter
from unisono.base.messages import Message, StepMessage, check_message, fields_of, message_of, read_message
from unisono.front.api.front import event_of
from unisono.front.cli.output import Output
from unisono.front.cli.screen import RunOutput, Screen
from unisono.guard.supervise.local_ranks import RankEnd
from unisono.guard.supervise.node_messages import decode_news

KINDS = [name for kind in get_args(Message) for name in get_args(kind.__annotations__["kind"])]
SHOWN = ("phase", "eval", "sample", "checkpoint", "warning", "note", "refused", "result")
"""Kinds that the screen shows also without any field."""


def test_each_kind_has_one_class() -> None:
    assert len(KINDS) == len(set(KINDS)) > 30


@given(
    st.sampled_from([*KINDS, "of_a_newer_version"]),
    st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.integers() | st.text(max_size=8)),
)
def test_a_line_arrives_with_the_fields_that_it_has(kind: str, fields: dict[str, Any]) -> None:
    line = {**fields, "kind": kind}
    assert read_message(json.dumps(line)) == line


@pytest.mark.parametrize(
    "line",
    ["", "noise", '{"kind": "st', '["kind"]', '{"step": 1}', '{"kind": 5}', '{"kind": null}', "[" * 9999],
)
def test_torn_and_foreign_lines_are_no_messages(line: str) -> None:
    assert read_message(line) is None


@pytest.mark.parametrize("value", [None, "note", ["note"], {}, {"kind": 5}])
def test_a_value_without_a_kind_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not a message"):
        check_message(value)


@pytest.mark.parametrize("kind", [*SHOWN, "of_a_newer_version"])
def test_screens_and_events_show_what_lacks_fields(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = check_message({"kind": kind, "time": 1.0, "step": 3})
    screen, output = Screen(Output()), RunOutput(Output())
    screen.show(message)
    screen.close()
    output.show(message)
    capsys.readouterr()
    assert (event_of(message) is None) == (kind in ("refused", "result", "of_a_newer_version"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_rank_said_reaches_the_head_with_what_it_has(kind: str) -> None:
    message = {"kind": kind, "more": [1]}
    news: Any = decode_news({"kind": "rank_said", "rank": 1, "message": message})
    assert news.message == message
    end = RankEnd(1, 5, None, "train", 3).to_json()
    assert RankEnd.from_json({**end, "last": message}).last == message


def test_a_reporter_sets_the_time_of_what_it_passes_on(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with path.open("wb") as file:
        Reporter(file.fileno()).send(message_of(StepMessage, {"time": 1.0, "step": 4, "reward": 0.5}))
    message: Any = read_message(path.read_text())
    assert list(message) == ["kind", "time", "step", "reward"]
    assert message["time"] > 1.0
    assert fields_of(message) == {"step": 4, "reward": 0.5}
    assert "step=4" in shown_without_a_front()


def shown_without_a_front() -> str:
    stream = io.StringIO()
    Reporter(None, fallback=stream).send({"kind": "step", "step": 4})
    return stream.getvalue()


def test_sending_and_reading_need_no_pydantic() -> None:
    """Ranks and programs send; their start must not wait for it."""
    code = "import sys, unisono.base.messages as m; m.read_message('{}'); print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
