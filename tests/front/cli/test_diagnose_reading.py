"""What is shown while logs are read. Run: pytest tests/front/cli/test_diagnose_reading.py"""

import pytest

from unisono.front.cli.terminal import ReadingLine


def test_progress_is_an_occasional_line_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 100.0
    line = ReadingLine(400_000_000, clock=lambda: now)
    for seconds in range(25):
        now = 100.0 + seconds
        line.show(seconds * 10_000_000)
    line.close()
    printed = capsys.readouterr().err.splitlines()
    assert printed == [
        "reading 100 of 400 MB · 10 MB/s · 30 s left",
        "reading 200 of 400 MB · 10 MB/s · 20 s left",
    ]


def test_of_stdin_only_what_was_read_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    line = ReadingLine(0, clock=lambda: now)
    now = 20.0
    line.show(40_000_000)
    assert capsys.readouterr().err == "reading 40 MB · 2 MB/s\n"


def test_what_is_read_at_once_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line = ReadingLine(10)
    line.show(10)
    line.close()
    assert capsys.readouterr().err == ""
