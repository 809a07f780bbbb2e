"""The processes that score answers, and the calls that wait for them."""

import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from unisono.base.errors import ConfigError, Problem
from unisono.base.files import parse_json
from unisono.base.text import parse_seconds, why_unreadable
from unisono.base.user_code import OwnCode, own_class
from unisono.trainer.config.answer_functions import FUNCTIONS, AnswerFunction, function_names
from unisono.trainer.config.own_code import agreed_source, schema_file
from unisono.trainer.config.reward_models import MODEL, reward_model
from unisono.trainer.config.rollout_sections import RewardSection
from unisono.trainer.objectives.rewards.calls import (
    CallReply,
    CallRequest,
    FailureKind,
    Function,
    FunctionResult,
    Reply,
    RewardCall,
    RewardError,
    RewardFailure,
    Scored,
    Setup,
    combined,
    cut,
)
from unisono.trainer.objectives.rewards.process import RewardModelProcess, RewardProcess, encoded

PROCESSES = 2
"""That call functions; each reward model has one more for itself."""
MEMORY_BYTES = 4 << 30
"""That a process may map beside what its functions have loaded."""
LOAD_S = 600.0
"""In which a process loads its functions."""
_TICK_S = 0.25  # between looks at processes that are silent
_TOLD_S = 1.0  # between calls of `on_wait`
_END_S = 1.0  # for the own end of a process
_LEAST_COST = 1 / 16  # of a deadline, that the end of a process costs: it has to load again


@dataclass(eq=False)
class _GroupScoring:
    """One function on one group.

    Attributes:
        index: of the function.
        left_s: time that it has left. The calls for single answers together have one deadline more.
        first: the failure of the call for the whole group, which is tried for single answers.
        open: answers for which the function is still to be called alone.
    """

    call: RewardCall
    index: int
    left_s: float
    result: FunctionResult
    first: RewardFailure | None = None
    open: int = 0


@dataclass(eq=False)
class _Attempt:
    """A call of a function, for all answers of a group or for one."""

    scoring: _GroupScoring
    answer: int | None = None

    @property
    def answers(self) -> range:
        """For which the function is called."""
        if self.answer is not None:
            return range(self.answer, self.answer + 1)
        return range(len(self.scoring.call.completions))

    def request(self, function: int) -> CallRequest:
        """The message to a process; `function` is the index in its setup."""
        call = self.scoring.call
        return {
            "function": function,
            "prompt": call.prompt,
            "completions": [call.completions[answer] for answer in self.answers],
            "completion_ids": [list(call.completion_ids[answer]) for answer in self.answers],
            "columns": dict(call.columns),
        }


@dataclass(frozen=True)
class _Role:
    """What processes are for.

    Attributes:
        functions: that they call, by their index in the config.
        setup: the first line for them.
        processes: how many there are.
        process: of what kind they are.
        environment: changes of theirs.
    """

    functions: Sequence[int]
    setup: bytes
    processes: int = 1
    process: type[RewardProcess] = RewardProcess
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> RewardProcess:
        """A process."""
        return self.process(self.setup, environment=self.environment)


@dataclass(eq=False)
class _Worker:
    """A process with what it does.

    Attributes:
        since: when it began that, by the monotonic clock.
        attempt: that it works on.
    """

    role: _Role
    process: RewardProcess
    since: float = field(default_factory=time.monotonic)
    is_loading: bool = True
    attempt: _Attempt | None = None


def _weight(entry: AnswerFunction) -> float:
    """Its factor in the sum of a group."""
    return entry.weight if isinstance(entry, RewardSection) else 1.0


class RewardPool:
    """Processes that call all functions of a run; a context manager.

    It starts no thread, and is to be used in one: its processes end with the thread that started
    them.
    """

    def __init__(
        self,
        entries: Sequence[AnswerFunction],
        digests: Mapping[str, str],
        on_wait: Callable[[str], None] | None = None,
        *,
        key: str = "rewards",
        processes: int = PROCESSES,
        memory_bytes: int = MEMORY_BYTES,
        threads: int = 1,
    ) -> None:
        """A pool whose processes start with its context.

        Args:
            entries: of `rewards` or `eval.metrics`.
            digests: of the files of the user's own and of reward models, by key, e.g. `rewards.0`.
            on_wait: called about every second with what is being waited for, e.g.
                `rewards.py:exact on train.jsonl:17 for 8 s`; what it raises ends the call of
                `score`.
            key: of the config that has the entries.
            processes: that call functions at the same time.
            memory_bytes: address space of such a process beside what its functions have loaded.
            threads: that all reward models together compute with, which the caller does not need
                while it waits.
        """
        self._entries, self._digests, self._on_wait, self._key = list(entries), digests, on_wait, key
        self._what = key.rpartition(".")[2]
        self._processes, self._memory_bytes, self._threads = processes, memory_bytes, threads
        self._roles: list[_Role] = []
        self.names = function_names(entries)
        self._deadlines = [parse_seconds(entry.deadline) for entry in entries]
        self._wheres = [""] * len(self._entries)
        self._workers: list[_Worker] = []
        self._queue: deque[_Attempt] = deque()
        self._scorings: list[_GroupScoring] = []
        self._is_open = False
        self._told = 0.0

    def __enter__(self) -> Self:
        """See `start`."""
        return self.start()

    def start(self) -> Self:
        """Starts the processes, and waits until all functions are loaded.

        Raises:
            ConfigError: if a file or a reward model has changed since the plan was made, cannot be
                loaded, or has no such function; or if a package is missing.
        """
        # The files are read once: they may be edited while the run uses them.
        self._roles = self._make_roles()
        try:
            self._told = time.monotonic()
            self._fill_up()
            while any(worker.is_loading for worker in self._workers):
                self._turn()
        except BaseException:  # also Ctrl-C: no process may stay
            self.close()
            raise
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(patience_s=_END_S)

    def close(self, *, patience_s: float = 0.0) -> None:
        """Ends all processes.

        Args:
            patience_s: time for each process's own end.
        """
        self._is_open = False
        while self._workers:
            worker = self._workers.pop()
            worker.process.end(patience_s=0.0 if worker.is_loading else patience_s)

    def score(self, calls: Sequence[RewardCall]) -> list[Scored]:
        """Scores groups, several at a time; the results are in the order of `calls`.

        Raises:
            RewardError: if a function fails whose `on_error` is `error`; calls that run are ended.
        """
        self._scorings = [
            _GroupScoring(call, index, deadline, FunctionResult([None] * len(call.completions)))
            for call in calls
            for index, deadline in enumerate(self._deadlines)
        ]
        self._queue = deque(_Attempt(scoring) for scoring in self._scorings if scoring.call.completions)
        self._told = time.monotonic()
        try:
            # A process that ended since the latest call fails no function.
            for worker in list(self._workers):
                self._look_at(worker)
            self._fill_up()
            while self._queue or any(worker.attempt for worker in self._workers):
                self._turn()
        except BaseException:  # also Ctrl-C, and what `on_wait` raises: a call must not go on
            self._end_running()
            raise
        weights = dict(zip(self.names, map(_weight, self._entries), strict=True))
        size = len(self._entries)
        return [
            combined(
                {self.names[s.index]: s.result for s in self._scorings[n * size : (n + 1) * size]},
                weights,
                count=len(call.completions),
            )
            for n, call in enumerate(calls)
        ]

    # ---- what the processes load

    def _make_roles(self) -> list[_Role]:
        models = [index for index, entry in enumerate(self._entries) if entry.use == MODEL]
        functions = [index for index in range(len(self._entries)) if index not in models]
        roles = []
        if functions:
            setup: Setup = {
                "functions": [self._function(index, self._entries[index]) for index in functions],
                "memory_bytes": self._memory_bytes,
            }
            roles.append(_Role(functions, encoded(setup), self._processes))
        threads = max(1, self._threads // max(1, len(models)))
        return roles + [self._role_of_model(index, threads) for index in models]

    def _role_of_model(self, index: int, threads: int) -> _Role:
        """A process for a reward model alone, with torch.

        Raises:
            ConfigError: if the model has changed, or is refused.
        """
        entry = self._entries[index]
        assert isinstance(entry, RewardSection), "no other section has models"
        model = reward_model(Path(entry.path or ""), f"{self._key}.{index}.path", device=entry.device)
        if model.digest != self._digests.get(model.key):
            raise ConfigError.of(
                f"the reward model {model.path} has changed since the plan was made",
                where=model.key,
                fix="start again, with the same reward model on all nodes",
            )
        setup: Setup = {
            "functions": [{"use": entry.use, "run": str(model.path), "threads": threads}],
            "memory_bytes": 0,  # its batches are bounded
        }
        hidden = {} if entry.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **hidden}
        return _Role((index,), encoded(setup), process=RewardModelProcess, environment=environment)

    def _function(self, index: int, entry: AnswerFunction) -> Function:
        """What a process needs to load a function.

        Raises:
            ConfigError: if a file cannot be read, or has changed.
        """
        key = f"{self._key}.{index}"
        if parts := own_class(entry.use):
            code = OwnCode(key, "reward", *parts)
            source = agreed_source(code, self._digests.get(key, ""))
            path = str(code.path)
            return {"use": entry.use, "path": path, "name": code.name, "source": source.decode("latin-1")}
        if entry.use not in entry.kinds:
            raise ConfigError.of(
                f"there is no reward {entry.use}",
                where=key,
                why=f"built in are {', '.join(name for name in FUNCTIONS if name in entry.kinds)}",
                fix="name one of these, or FILE.py:FUNCTION",
            )
        settings = {name: getattr(entry, name) for name in entry.keys if name != "schema"}
        if "schema" in entry.keys:
            settings |= {"path": entry.schema_, "schema": self._schema(Path(entry.schema_ or ""), key)}
        return {"use": entry.use, "settings": settings}

    def _schema(self, path: Path, key: str) -> Mapping[str, object]:
        """The JSON Schema in a file.

        Raises:
            ConfigError: if it cannot be read, or has changed.
        """
        code, why = schema_file(path, key), "it is not an object"
        try:
            schema = parse_json(agreed_source(code, self._digests.get(code.key, "")))
        except ValueError as error:
            schema, why = None, why_unreadable(error)
        if isinstance(schema, dict):
            return schema
        raise ConfigError.of(
            f"the file of the {code.what} is not a JSON Schema",
            where=str(path),
            why=why,
            fix=f"check the path in `{code.key}`",
        )

    def _label(self, index: int) -> str:
        entry = self._entries[index]
        parts = own_class(entry.use)
        if parts:
            return f"{parts[0].name}:{parts[1]}"
        path = entry.path if isinstance(entry, RewardSection) else None
        return f"{entry.use} {Path(path).name}" if path else entry.use

    # ---- one look at the processes

    def _fill_up(self) -> None:
        for role in self._roles:
            present = sum(worker.role is role for worker in self._workers)
            for _ in range(role.processes - present):
                self._workers.append(_Worker(role, role.start()))

    def _turn(self) -> None:
        """Gives work to idle processes, waits for a moment, and takes what they have done."""
        for worker in self._workers:
            if not worker.is_loading and worker.attempt is None:
                self._begin_next(worker)
        readable = select.poll()
        for worker in self._workers:
            readable.register(worker.process, worker.process.events)
        readable.poll(1000 * min([_TICK_S, *self._remaining()]))
        for worker in list(self._workers):
            self._look_at(worker)
        self._fill_up()
        self._tell()

    def _remaining(self) -> list[float]:
        """Seconds up to the deadlines of the calls that run."""
        now = time.monotonic()
        return [max(0.0, w.since + w.attempt.scoring.left_s - now) for w in self._workers if w.attempt]

    def _begin_next(self, worker: _Worker) -> None:
        """Gives a process the first call that it can make, if there is one."""
        functions = worker.role.functions
        attempt = next((one for one in self._queue if one.scoring.index in functions), None)
        if attempt is not None:
            self._queue.remove(attempt)
            worker.attempt, worker.since = attempt, time.monotonic()
            worker.process.send(attempt.request(functions.index(attempt.scoring.index)))

    def _look_at(self, worker: _Worker) -> None:
        try:
            for message in worker.process.receive():
                self._take(worker, message)
        except EOFError:
            self._take_death(worker)
            return
        seconds = time.monotonic() - worker.since
        if worker.is_loading and seconds > LOAD_S:
            self._refuse(self._loads_too_long(worker.role))
        if worker.attempt and seconds > worker.attempt.scoring.left_s:
            self._take_timeout(worker, worker.attempt)

    def _take(self, worker: _Worker, message: Reply) -> None:
        if "refused" in message:
            fields = ("what", "where", "why", "fix")
            self._refuse(*(Problem(**{f: str(p.get(f, "")) for f in fields}) for p in message["refused"]))
        elif "ready" in message:
            worker.is_loading = False
            for index, where in zip(worker.role.functions, message["ready"], strict=True):
                self._wheres[index] = where
        elif worker.attempt is not None:
            attempt, seconds = worker.attempt, time.monotonic() - worker.since
            worker.attempt = None
            if "kind" in message:
                self._fail(attempt, message["kind"], message["text"], seconds=seconds, where=message["where"])
            else:
                self._succeed(attempt, message, seconds=seconds)
            self._spend(attempt, seconds)

    def _take_timeout(self, worker: _Worker, attempt: _Attempt) -> None:
        where, seconds = self._line_of(worker), time.monotonic() - worker.since
        self._end(worker)
        self._fail(attempt, "timeout", self._late_words(attempt.scoring), seconds=seconds, where=where)
        self._spend(attempt, seconds)

    def _take_death(self, worker: _Worker) -> None:
        attempt, seconds = worker.attempt, time.monotonic() - worker.since
        where = self._line_of(worker)
        code = self._end(worker, patience_s=_END_S)
        words = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if worker.is_loading:
            self._refuse(self._died_loading(worker.role, words))
        if attempt is not None:
            self._fail(attempt, "died", f"its process ended {words}", seconds=seconds, where=where)
            self._spend(attempt, max(seconds, self._deadlines[attempt.scoring.index] * _LEAST_COST))

    def _loads_too_long(self, role: _Role) -> Problem:
        names = ", ".join(map(self._label, role.functions))
        fix = "load less in the file" if role.process is RewardProcess else "use a smaller reward model"
        return Problem(f"the {self._what} were not loaded within {LOAD_S:.0f} s", names, fix=fix)

    def _died_loading(self, role: _Role, words: str) -> Problem:
        """The problem of a process that ended before it was ready."""
        entries = [self._entries[index] for index in role.functions]
        if role.process is RewardModelProcess:
            return Problem(
                f"the process of a reward model ended {words} while it loaded the model",
                self._label(role.functions[0]),
                fix="check that the memory suffices: the log has what it printed",
            )
        return Problem(
            f"a process of the {self._what} ended {words} while it loaded its functions",
            "; ".join(entry.use for entry in entries),
            fix="import the file with Python: the log has what it printed",
        )

    def _line_of(self, worker: _Worker) -> str:
        """Where the function is that a process calls; empty for a built-in one."""
        path = self._wheres[worker.attempt.scoring.index].rpartition(":")[0] if worker.attempt else ""
        return worker.process.line_in(path) if path else ""

    def _spend(self, attempt: _Attempt, seconds: float) -> None:
        """Takes the time of a call for a single answer from what the others have."""
        scoring = attempt.scoring
        if attempt.answer is None:
            return
        scoring.left_s -= seconds
        if scoring.left_s <= 0.0:
            late = [other for other in self._queue if other.scoring is scoring]
            self._queue = deque(other for other in self._queue if other.scoring is not scoring)
            for other in late:
                self._fail(other, "timeout", self._late_words(scoring), seconds=0.0)

    def _refuse(self, *problems: Problem) -> NoReturn:
        """Raises ConfigError before the first call, and RewardError for a process that replaces
        another.
        """
        error = ConfigError(*problems)
        if not self._is_open:
            raise error
        names = ", ".join(self.names)
        raise RewardError(RewardFailure("", None, names, "died", 0.0, str(error), problems[0].where))

    def _end(self, worker: _Worker, *, patience_s: float = 0.0) -> int:
        self._workers.remove(worker)
        return worker.process.end(patience_s=patience_s)

    def _end_running(self) -> None:
        for worker in [worker for worker in self._workers if worker.attempt]:
            self._end(worker)
        self._queue.clear()

    def _late_words(self, scoring: _GroupScoring) -> str:
        return f"no reward within {self._entries[scoring.index].deadline}"

    def _tell(self) -> None:
        now = time.monotonic()
        if self._on_wait is None or now - self._told < _TOLD_S:
            return
        self._told = now
        busy = [worker for worker in self._workers if worker.attempt or worker.is_loading]
        if oldest := min(busy, key=lambda worker: (worker.is_loading, worker.since), default=None):
            seconds = f"for {now - oldest.since:.0f} s"
            if attempt := oldest.attempt:
                self._on_wait(f"{self._label(attempt.scoring.index)} on {attempt.scoring.call.row} {seconds}")
            else:
                self._on_wait(f"loading {', '.join(map(self._label, oldest.role.functions))} {seconds}")

    # ---- what comes of a call

    def _succeed(self, attempt: _Attempt, reply: CallReply, *, seconds: float) -> None:
        unusable = attempt.scoring.result.add(attempt.answers, reply)
        for answer, text in unusable:
            self._note(self._failure(attempt, "value", text, seconds=seconds, answer=answer), attempt.scoring)
        self._close_answer(attempt)

    def _fail(
        self, attempt: _Attempt, kind: FailureKind, text: str, *, seconds: float, where: str = ""
    ) -> None:
        """Notes a failure, or has the function called for each answer alone, to know which of them
        fails.
        """
        scoring, group = attempt.scoring, attempt.answers
        answer = attempt.answer if len(group) > 1 or attempt.answer is not None else group[0]
        failure = self._failure(attempt, kind, text, seconds=seconds, answer=answer, where=where)
        if len(group) == 1 or kind in ("timeout", "value"):
            self._note(failure, scoring)
            self._close_answer(attempt)
            return
        scoring.first, scoring.open = failure, len(group)
        scoring.left_s = self._deadlines[scoring.index]
        self._queue.extendleft(_Attempt(scoring, answer) for answer in reversed(group))

    def _failure(
        self,
        attempt: _Attempt,
        kind: FailureKind,
        text: str,
        *,
        seconds: float,
        answer: int | None,
        where: str = "",
    ) -> RewardFailure:
        call, index = attempt.scoring.call, attempt.scoring.index
        return RewardFailure(
            call.row,
            answer,
            self.names[index],
            kind,
            round(seconds, 3),
            text,
            where or self._wheres[index],
            cut(call.prompt),
            "" if answer is None else cut(call.completions[answer]),
        )

    def _close_answer(self, attempt: _Attempt) -> None:
        """After the last answer alone: if none failed, which of them does is unknown, and all
        do.
        """
        scoring = attempt.scoring
        if attempt.answer is not None:
            scoring.open -= 1
            if scoring.open == 0 and scoring.first is not None and not scoring.result.failures:
                self._note(scoring.first, scoring)

    def _note(self, failure: RewardFailure, scoring: _GroupScoring) -> None:
        on_error = self._entries[scoring.index].on_error
        if on_error == "error":
            earlier = [failure for scoring in self._scorings for failure in scoring.result.failures]
            raise RewardError(failure, [*earlier, failure])
        scoring.result.fail(failure, on_error)
