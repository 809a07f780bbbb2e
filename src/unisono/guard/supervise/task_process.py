"""Runs tasks (prepare, preview, generate, chat, eval, export) as processes, and raises their
refusals as errors.
"""

import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Self, cast

from unisono.base.causes import Verdict
from unisono.base.child import TEMPLATE_HAS_NO_END, TOKENIZER_HAS_NO_END
from unisono.base.errors import (
    DataError,
    Disagreed,
    EndedByVerdict,
    IntegrityError,
    Problem,
    RankDied,
    UnfitError,
    UnisonoError,
    UsageError,
    storage_remedy,
)
from unisono.base.events import own_frame
from unisono.base.messages import CrashedMessage, Message, RefusedMessage, StartRefusedMessage, fields_of
from unisono.base.text import one_line, show_seconds
from unisono.base.user_code import MODEL_CODE
from unisono.guard.facts import no_gpus, read_environment, read_machine
from unisono.guard.supervise.child_process import ChildProcess, Programs, child_environment, task_command
from unisono.guard.supervise.codec import encode
from unisono.guard.supervise.task_requests import Result_co, TaskRequest

_BY_EXIT_CODE: dict[int, type[UnisonoError]] = {
    2: UsageError,
    3: Disagreed,
    4: EndedByVerdict,
    5: RankDied,
    6: UnfitError,
    7: IntegrityError,
}
_TAIL_BYTES = 8_000


def run_task(
    name: str,
    request: Mapping[str, object],
    *,
    on_message: Callable[[Message], None] | None = None,
    programs: Programs | None = None,
    silence_s: float | None = None,
) -> dict[str, object]:
    """The fields of a task's `result` message, after running it to its end.

    Args:
        name: one of `unisono.trainer.task.entry.TASKS`.
        request: for the task's `run`.
        on_message: gets every message before the last.
        programs: to start; tests pass different ones.
        silence_s: seconds without a message after which the task is ended; None: no limit.

    Raises:
        UnisonoError: the task's refusal, in the class of its exit code.
        UnfitError: if the task was silent for too long.
        RankDied: if the task crashed or was killed.
    """
    with TaskProcess(name, request, programs=programs) as task:
        last: Message | None = None
        for message in task.messages(silence_s=silence_s):
            last = message
            if message["kind"] != "result" and on_message is not None:
                on_message(message)
    return fields_of(last) if last is not None else {}


def run_request(
    request: TaskRequest[Result_co],
    *,
    on_message: Callable[[Message], None] | None = None,
    programs: Programs | None = None,
    silence_s: float | None = None,
) -> Result_co:
    """The result of a task, as `run_task`, of the type that its request names."""
    body, name = encode(request), request.task
    result = run_task(name, body, on_message=on_message, programs=programs, silence_s=silence_s)
    return cast("Result_co", result)


class TaskProcess:
    """A running task: start it as a context, `send` to it, read its `messages`.

    Attributes:
        crash: the message of the exception that ended it; None if there was none.
    """

    def __init__(
        self,
        name: str,
        request: Mapping[str, object],
        *,
        has_input: bool = False,
        programs: Programs | None = None,
        environment: dict[str, str] | None = None,
        printed: Path | None = None,
    ) -> None:
        """Starts the task.

        Args:
            name: one of `unisono.trainer.task.entry.TASKS`.
            request: for the task's `run`.
            has_input: whether `send` will be used.
            programs: to start; tests pass different ones.
            environment: all of it; by default this process's, without misleading variables.
            printed: a new file for its output; by default one that is removed with the task.
        """
        self.name = name
        self.crash: CrashedMessage | None = None
        # The folder has mode 0700: requests hold prompts.
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-")
        path = Path(self._folder.name) / "request.json"
        text = json.dumps(request, ensure_ascii=False)
        self._trusts_code = '"trust_remote_code": true' in text
        path.write_text(text, encoding="utf-8")
        self._printed: IO[bytes] = (printed or Path(self._folder.name) / "printed").open("w+b")
        started = programs or Programs()
        variables = environment or _environment()
        self._child = ChildProcess(
            lambda fd: task_command(started, name, request=path, report_fd=fd),
            environment=variables,
            output=self._printed,
            has_input=has_input,
            fork_server=started.fork_server,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def messages(self, *, silence_s: float | None = None) -> Iterator[Message]:
        """Every message until the task has ended; the last is `result`.

        Args:
            silence_s: seconds without a message that are too long; None: no limit.

        Raises:
            UnisonoError: what the task refused, in the class of its exit code.
            UnfitError: if it was silent for too long.
            RankDied: if it crashed or was killed.
        """
        last_message_at = time.monotonic()
        while not self._child.ended:
            batch = self._child.read()
            last_message_at = time.monotonic() if batch else last_message_at
            if silence_s is not None and time.monotonic() - last_message_at > silence_s:
                raise UnfitError.of(f"nothing has moved for {show_seconds(silence_s)}", where=self.name)
            for message in batch:
                yield self._checked(message)
                if message["kind"] == "result":
                    return
        raise self._ended()

    def new_messages(self) -> list[Message]:
        """The messages that have arrived, without waiting.

        `result` is the last one; do not call it after that.

        Raises:
            UnisonoError: what the task refused, in the class of its exit code.
            RankDied: if it crashed or was killed.
        """
        messages = [self._checked(message) for message in self._child.read(0)]
        if not messages and self._child.ended:
            raise self._ended()
        return messages

    def _checked(self, message: Message) -> Message:
        if message["kind"] == "refused":
            raise refusal(message)
        if message["kind"] == "crashed":
            self.crash = message
            raise self._died(
                f"{message['error']} ({message.get('where', '')})", str(message.get("traceback"))
            )
        return message

    @property
    def fileno(self) -> int | None:
        """The pipe of its messages, readable also when it ends; None once that is closed."""
        return self._child.fileno

    @property
    def returncode(self) -> int | None:
        """None until it has ended; negative: the signal that ended it."""
        return self._child.returncode

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def tail(self) -> str:
        """The end of its output."""
        return tail_of(self._printed)

    @property
    def unsent_fileno(self) -> int | None:
        """The task's stdin while it has not taken all that was sent; else None."""
        return self._child.unsent_fileno

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a JSON line to the task's stdin; needs `has_input=True`."""
        self._child.send(message)

    def interrupt(self) -> None:
        """Sends SIGINT, e.g. to end an answer early."""
        self._child.signal(signal.SIGINT)

    def dump_stacks(self) -> None:
        """Makes a task that has registered faulthandler for SIGUSR2 write its stacks to its
        output.
        """
        self._child.signal(signal.SIGUSR2)

    def close(self, *, patience_s: float = 2.0) -> None:
        """Closes the task's stdin, and ends the task if it does not exit by itself."""
        self._child.close_input()
        self._child.end(patience_s=patience_s)
        self._printed.close()
        self._folder.cleanup()

    def _ended(self) -> UnisonoError:
        if self._child.returncode == -TEMPLATE_HAS_NO_END:
            return DataError.of(
                "the chat template does not terminate",
                where="data.template, or the tokenizer's chat template",
                why=(
                    "rendering one conversation used up its CPU time within a single operation, which cannot"
                    " be interrupted"
                ),
                fix="fix the template, or set data.template to a file with a different one",
            )
        if self._child.returncode == -TOKENIZER_HAS_NO_END:
            return _bad_tokenizer("does not terminate", "encoding a text used up its CPU time")
        # In Rust's words, before a long stack.
        memory = re.search(r"memory allocation of \d+ bytes failed", tail_of(self._printed, most=1 << 17))
        if self._child.returncode == -signal.SIGABRT and memory:
            return _bad_tokenizer("needs too much memory", memory[0])
        return self._died(how_it_ended(self._child.returncode or 0))

    def _died(self, how: str, traceback: str = "") -> RankDied:
        origin = own_frame(traceback or tail_of(self._printed), MODEL_CODE)
        if not (origin or traceback) and self._trusts_code and (self._child.returncode or 0) >= 0:
            (origin,) = MODEL_CODE.values()  # nothing of ours ends without a last message
        return RankDied.of(
            f"the task {self.name} ended: {one_line(how, limit=300)}",
            why=one_line(tail_of(self._printed), limit=2000),
            fix=(
                f"fix its likely origin, {origin}"
                if origin
                else "run it again with --debug, and report it unless memory or disk is the cause"
            ),
        )


def _bad_tokenizer(what: str, why: str) -> DataError:
    """The refusal of a tokenizer on which a task has ended."""
    return DataError.of(
        f"the tokenizer {what}",
        where="model.tokenizer, or the model's own tokenizer.json",
        why=why,
        fix="use the files of the original model",
    )


def _environment() -> dict[str, str]:
    environment = read_environment()
    threads = environment.omp_num_threads or read_machine(no_gpus).cores
    return child_environment(threads=threads, without=environment.leftovers)


def refusal(message: RefusedMessage | StartRefusedMessage) -> UnisonoError:
    """The error of a `refused` message, in the class of its exit code."""
    kind = _BY_EXIT_CODE.get(int(message.get("exit_code", 1)), UnisonoError)
    fields = ("what", "where", "why", "fix")
    problems = [
        Problem(**{f: str(p.get(f, "")) for f in fields})
        for p in message.get("problems") or [{"what": "refused"}]
    ]
    verdict = message.get("verdict")
    return kind(*problems, verdict=Verdict.from_json(verdict) if verdict else None)


def cannot_start(name: str, error: OSError) -> RankDied:
    """The error for a task that the system cannot start."""
    prefix = f"{error.filename}: " if error.filename else ""
    return RankDied.of(
        f"the task {name} cannot be started: {prefix}{error.strerror or error}",
        fix=storage_remedy(error, else_="check the limits of memory and processes"),
    )


def how_it_ended(returncode: int) -> str:
    """`killed by SIGKILL` or `exit status 3, without a final message`."""
    if returncode < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-returncode).name}"
        return f"killed by signal {-returncode}"
    return f"exit status {returncode}, without a final message"


def tail_of(printed: IO[bytes], *, most: int = _TAIL_BYTES) -> str:
    """The end of a child's output, at most `most` bytes of it."""
    size = os.fstat(printed.fileno()).st_size
    return os.pread(printed.fileno(), most, max(0, size - most)).decode("utf-8", "replace")
