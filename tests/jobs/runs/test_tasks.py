"""Tasks as processes: results, refusals as errors, deaths, conversations.

Run: pytest tests/jobs/runs/test_tasks.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import DataError, IntegrityError, RankDied, UnfitError, UsageError
from unisono.base.messages import RefusedMessage, fields_of, message_of
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.task_process import TaskProcess, refusal, run_task

SCRIPT = """
import json, os, signal, sys
from unisono.base.child import parse_child_arguments, run_child
from unisono.base.errors import *
arguments = parse_child_arguments(sys.argv[1:], named=True)
request = json.loads(arguments.file.read_text())
def body(report):
    report.phase("work", "working")
    if arguments.name == "refuse":
        raise DataError.of("row 3", where="f:3", why="no answer", fix="mend it")
    if arguments.name == "unfit":
        raise UnfitError.of("the disk is full")
    if arguments.name == "crash":
        print("printed before"); raise ZeroDivisionError("oh")
    if arguments.name == "kill":
        print("last words", flush=True); os.kill(os.getpid(), signal.SIGKILL)
    if arguments.name == "leave":
        os._exit(0)
    if arguments.name == "hang":
        os.mkfifo(request["fifo"]); open(request["fifo"])
    if arguments.name == "echo":
        for line in sys.stdin:
            report.send({"kind": "echo", "text": json.loads(line)["text"]})
    return {"answer": request.get("question"), "threads": os.environ["OMP_NUM_THREADS"], "rank": os.environ.get("RANK")}
sys.exit(run_child(body, arguments))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    script = tmp_path / "task.py"
    script.write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return Programs(task=(sys.executable, str(script)))


def test_a_task_gives_its_result_and_its_messages_on_the_way(programs: Programs) -> None:
    seen: list[Any] = []
    result = run_task("ask", {"question": "ü"}, on_message=seen.append, programs=programs)
    assert result["answer"] == "ü"
    assert [message["kind"] for message in seen] == ["phase"]


def test_one_that_hangs_is_not_waited_for_where_silence_has_a_limit(
    programs: Programs, tmp_path: Path
) -> None:
    """It opens a pipe to which nobody writes, as a dead network disk would hold it."""
    fifo = tmp_path / "fifo"
    with pytest.raises(UnfitError, match=r"nothing has moved for 3\.0 s"):
        run_task("hang", {"fifo": str(fifo)}, programs=programs, silence_s=3.0)
    assert fifo.exists()


def test_its_environment_has_threads_and_no_leftovers(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = run_task("ask", {}, programs=programs)
    assert (result["threads"], result["rank"]) == ("1", None)


@pytest.mark.parametrize(("name", "kind"), [("refuse", UsageError), ("unfit", UnfitError)])
def test_a_refusal_comes_back_in_the_class_of_its_exit_code(
    name: str, kind: type[Exception], programs: Programs
) -> None:
    with pytest.raises(kind) as caught:
        run_task(name, {}, programs=programs)
    if name == "refuse":
        assert caught.value.args == ("row 3",)


def test_a_crash_reports_the_exception_and_what_was_printed(programs: Programs) -> None:
    with pytest.raises(RankDied, match="ZeroDivisionError: oh") as caught:
        run_task("crash", {}, programs=programs)
    assert "printed before" in "\n".join(caught.value.lines())


def test_a_killed_task_reports_the_signal(programs: Programs) -> None:
    with pytest.raises(RankDied, match="SIGKILL") as caught:
        run_task("kill", {}, programs=programs)
    assert "last words" in "\n".join(caught.value.lines())


def test_task_without_a_result_blames_the_models_own_code_only_if_trusted(
    programs: Programs,
) -> None:
    """It ends with status 0."""
    for trusts, origin in ((True, True), (False, False)):
        request = {"config": {"model": {"trust_remote_code": trusts}}}
        with pytest.raises(RankDied, match="exit status 0, without a final message") as caught:
            run_task("leave", request, programs=programs)
        assert ("the model's own code" in caught.value.problems[0].fix) is origin


def test_a_conversation_goes_line_by_line_and_ends_with_its_input(programs: Programs) -> None:
    with TaskProcess("echo", {}, has_input=True, programs=programs) as task:
        messages = task.messages()
        assert next(messages)["kind"] == "phase"
        for word in ("one", "two\nlines"):
            task.send({"text": word})
            assert fields_of(next(messages)) == {"text": word}


def test_requests_are_gone_afterwards(programs: Programs, tmp_path: Path) -> None:
    run_task("ask", {"question": "private"}, programs=programs)
    with pytest.raises(RankDied):
        run_task("kill", {}, programs=programs)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("error", [DataError.of("a", where="b", why="c", fix="d"), IntegrityError.of("e")])
def test_a_refusal_survives_its_way_through_the_pipe(error: Any) -> None:
    again = refusal(message_of(RefusedMessage, error.to_json()))
    assert (again.exit_code, again.problems) == (error.exit_code, error.problems)
