"""What doctor gives: a table to paste, JSON, one page; quickly.

Run: pytest tests/front/checks/test_report.py
"""

import html.parser
import json
import os
import resource
from pathlib import Path

from tests.front.checks.doctor_process import doctor
from unisono.front.checks.check import Finding
from unisono.front.checks.examination import Examination, html_page, redacted, report_lines

_BAD = [
    Finding("system.shm", "pass", ("fine",), ("never shown",)),
    Finding("system.output", "fail", ("<script>alert(1)</script> & more", "second line"), ("`df -h`",)),
    Finding("settings.left_over", "warn", ("RANK",), where="node 1 (b)"),
    Finding("config.hub", "unknown", ("?",)),
]


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def test_json_has_what_the_contract_says_and_nothing_else_is_on_stdout(tmp_path: Path) -> None:
    seen = doctor(tmp_path)
    body = json.loads(seen.out)
    assert body.keys() == {"schema", "checks"}
    for finding in body["checks"]:
        assert finding.keys() == {"id", "status", "evidence", "fix"}
        assert finding["status"] in ("pass", "warn", "fail", "unknown")
        assert finding["evidence"]


def test_table_names_fixes_only_for_problems_and_counts_the_checks() -> None:
    text = "\n".join(report_lines(Examination("h", _BAD)))
    assert "FAIL   system.output" in text
    assert "fix: `df -h`" in text
    assert "never shown" not in text
    assert "node 1 (b): RANK" in text
    assert text.endswith("4 checks: 1 passed, 1 warn, 1 failed, 1 unknown")


def test_exit_codes_are_those_of_the_contract() -> None:
    codes = {
        status: Examination("h", [Finding("a.b", status, ("x",))])
        for status in ("pass", "warn", "fail", "unknown")
    }
    assert [codes[status].exit_code(strict=False) for status in ("pass", "warn", "fail", "unknown")] == [
        0,
        0,
        6,
        0,
    ]
    assert [codes[status].exit_code(strict=True) for status in ("pass", "warn", "fail", "unknown")] == [
        0,
        6,
        6,
        6,
    ]


def test_page_is_one_file_without_scripts_or_links_and_escapes_quotations(tmp_path: Path) -> None:
    text = html_page(Examination("<h>", _BAD), made="now")
    reader = _Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert (reader.links, "<script>" in text, "&lt;script&gt;" in text) == ([], False, True)
    seen = doctor(tmp_path, "--report", str(tmp_path / "r.html"), as_json=False)
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert "the same as one page" in seen.err


def test_a_report_that_cannot_be_written_is_refused_with_its_path(tmp_path: Path) -> None:
    seen = doctor(tmp_path, "--report", "/proc/nowhere/r.html", as_json=False)
    assert seen.code == 2
    assert "--report /proc/nowhere/r.html" in seen.err


def test_what_is_shown_has_no_secrets_and_steers_no_terminal() -> None:
    token = "hf_" + "abcdefghij" * 3
    [found] = redacted(
        [Finding("a.b", "warn", (f"\x1b[31mToken: {token}\u202e",), (f"export HF_TOKEN={token}",))]
    )
    assert token not in str(found)
    assert "\x1b" not in found.evidence[0]


def test_a_look_at_one_machine_costs_seconds_of_cpu_not_more(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    doctor(tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 5.0, f"{used:.1f} s of CPU on {os.cpu_count()} cores"
