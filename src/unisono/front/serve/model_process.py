"""The model's side of a server: a task process that answers, the requests that wait for a place,
and what happens when it dies.
"""

import asyncio
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from unisono.base.causes import Verdict
from unisono.base.errors import RankDied, UnisonoError
from unisono.base.messages import Message, Show
from unisono.front.serve.adapter_folders import MOST_ADAPTERS
from unisono.front.serve.protocol import ApiError
from unisono.guard.facts import no_gpus, read_machine
from unisono.guard.facts.limits import oom_kills
from unisono.guard.facts.processes import read_stat, wait_channel
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.codec import decode_message, encode, encode_message
from unisono.guard.supervise.postmortem import name_task_death, name_task_hang
from unisono.guard.supervise.task_process import TaskProcess
from unisono.trainer.plan.talk_messages import (
    AdapterChanged,
    Answered,
    AnswerPiece,
    Ask,
    Begun,
    Drop,
    FailedAsk,
    LoadAdapter,
    Pieces,
    Ping,
    PromptRequest,
    Ready,
    RefusedAsk,
    ServeInput,
    ServeNews,
    TextsRequest,
    UnloadAdapter,
    Valued,
)
from unisono.trainer.plan.task_requests import NamedAdapter, RequestedModel, ServeRequest

ROWS = 48
"""Answers that are computed together."""
WAITING = 256
"""Requests that may wait for a place."""
STOPPED_S = 5.0
"""Seconds of silence of a stopped process, which is certain evidence."""
RESTARTS = 3
"""Restarts of the process within RESTARTS_WITHIN_S; after one more death the server ends."""
RESTARTS_WITHIN_S = 600.0
_TICK_S = 0.2  # between looks at a process whose pipe is silent
_ASK_S = 1.0  # of silence, after which the process is asked for a sign of life
_STACK_S = 1.0  # in which a process that hangs writes its stack
_PATIENCE_S = 60.0
_WHOLE_PROMPT = 10  # times as patient with a model that reads a long prompt in one forward
_USUAL_S = 5.0  # of an answer, before the first one has been timed
_NO_ADAPTER = "the directory is not an adapter of this model; the server's terminal has the reason"
_LABEL = "the process of the model"
_REMEDY = {
    "rank_killed": (
        (
            "find out who sent the signal: `journalctl -k` or `dmesg` shows kills by the kernel; a container,"
            " a service manager or `kill` are other senders"
        ),
    ),
    "host_oom_killed": (
        "give it more memory, or serve a smaller or a quantized model",
        "`unisono doctor` shows the memory limit of this container or service",
    ),
    "cuda_oom": (
        "free the GPU's memory (`nvidia-smi` shows who uses it), or serve a smaller or a quantized model",
    ),
    "rank_stopped": ("`kill -CONT PID` continues a stopped process; find out who stopped it",),
    "io_blocked": ("check the disk or network file system that holds the model",),
    "user_code_stuck": ("the stack shows where it hangs; report it with the versions of `unisono doctor`",),
    "user_code_error": (
        (
            "the evidence shows the exception; report it with the versions of `unisono doctor`, and the kind"
            " of request that was answered"
        ),
    ),
}
"""What helps a server, by cause."""
_STATUS = {"length": (413, "context_length_exceeded"), "model": (404, "model_not_found")}
"""HTTP status and code of a refusal of the task, by its problem; others are 400."""


@dataclass
class ModelSilence:
    """How long the process has been silent, and how long that may last. Pure.

    The process answers between two forwards of the model, so its longest silence is its longest
    forward.

    Attributes:
        least_s: how long it may last in any case.
        seconds: since its latest message, by the time in which this process ran: a front that was
            stopped has heard nothing either.
        longest_s: longest silence that ended with a message.
        is_asked: whether it has been asked for a sign of life since its latest message.
    """

    least_s: float
    seconds: float = 0.0
    longest_s: float = 0.0
    is_asked: bool = False

    def pass_time(self, seconds: float) -> None:
        """Notes the time since the last look. A longer one means that this process did not run."""
        self.seconds += min(seconds, 5 * _TICK_S)

    def end(self) -> None:
        """Notes a message."""
        self.longest_s = max(self.longest_s, self.seconds)
        self.seconds, self.is_asked = 0.0, False

    @property
    def limit_s(self) -> float:
        """Seconds of silence after which a process that is not stopped hangs."""
        return max(self.least_s, 10 * self.longest_s)


@dataclass
class RestartLimit:
    """How often a process may be started again. Pure.

    Attributes:
        most: restarts within `within_s` seconds.
    """

    most: int
    within_s: float
    _deaths: deque[float] = field(default_factory=deque)

    def admit(self, now: float) -> bool:
        """Notes a death at `now`, in seconds of any clock; whether the process may be started
        again.
        """
        self._deaths.append(now)
        while now - self._deaths[0] > self.within_s:
            self._deaths.popleft()
        return len(self._deaths) <= self.most


@dataclass(eq=False)
class PendingAsk:
    """One prompt, and what has come of it.

    Attributes:
        question: for the task.
        id: of the task's messages.
        messages: `Begun`, then pieces of the answer, then `Answered`; or `Valued`; or an ApiError.
    """

    question: PromptRequest | TextsRequest
    id: int
    messages: "asyncio.Queue[Begun | AnswerPiece | Answered | Valued | ApiError]" = field(
        default_factory=asyncio.Queue
    )
    since: float = field(default_factory=time.monotonic)

    async def begin(self) -> Begun:
        """What is known of its prompt, once it is being answered.

        Raises:
            ApiError: if there will be no answer.
        """
        begun = await self._next()
        assert isinstance(begun, Begun)
        return begun

    async def valued(self) -> Valued:
        """The values of its texts.

        Raises:
            ApiError: if there will be none.
        """
        valued = await self._next()
        assert isinstance(valued, Valued)
        return valued

    async def _next(self) -> Begun | AnswerPiece | Answered | Valued:
        message = await self.messages.get()
        if isinstance(message, ApiError):
            raise message
        return message

    async def pieces(self) -> AsyncIterator[AnswerPiece | Answered]:
        """The pieces of the answer, and what ends it.

        Raises:
            ApiError: if there will be no answer.
        """
        while True:
            message = await self._next()
            assert isinstance(message, AnswerPiece | Answered)
            yield message
            if isinstance(message, Answered):
                return


class ModelProcess:
    """A model in a task process. All methods are called in the event loop.

    Attributes:
        adapters: that are served beside the model; those that have been loaded while it runs are
            the last.
        facts: of the task's message `ready`.
        is_ending: whether new requests are refused.
        failure: why it has ended for good, once `ended` is set.
    """

    def __init__(
        self,
        model: RequestedModel,
        *,
        adapters: Sequence[NamedAdapter] = (),
        takes_adapters: bool = False,
        prompt_cache_bytes: int = 256_000_000,
        answers: bool = False,
        on_message: Show,
        on_failure: Callable[[FailedAsk], None],
        on_restart: Callable[[RankDied], None],
        programs: Programs | None = None,
        patience_s: float = _PATIENCE_S,
        restarts: int = RESTARTS,
    ) -> None:
        """A process that is started with `start`.

        Args:
            model: what to load.
            adapters: of the model.
            takes_adapters: whether `load` may add others.
            prompt_cache_bytes: of memory for earlier prompts.
            answers: whether a model that writes no answers is refused.
            on_message: gets the messages while it is loaded.
            on_failure: gets requests that failed.
            on_restart: gets the reason of a restart.
            programs: to start; tests pass different ones.
            patience_s: of silence that is no hang in any case.
            restarts: at most, within RESTARTS_WITHIN_S.
        """
        self._patience_s = patience_s
        self._load_s: float | None = None
        self.adapters = tuple(adapters)
        self._request = ServeRequest(
            model, ROWS, self.adapters, takes_adapters, prompt_cache_bytes, answers=answers
        )
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._changing: set[str] = set()  # names of adapters
        self._freed = asyncio.Event()  # since it was cleared, an answer has ended
        self._on_message = on_message
        self._on_failure = on_failure
        self._on_restart = on_restart
        self._programs = programs
        self._restarts = RestartLimit(restarts, RESTARTS_WITHIN_S)
        self._numbers = itertools.count(1)
        self._waiting: deque[PendingAsk] = deque()
        self._running: dict[int, PendingAsk] = {}
        self._answer_s = _USUAL_S
        self._is_ready = False
        self.facts = Ready("", "")
        self.is_ending = False
        self.failure: UnisonoError | None = None
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    def start(self) -> None:
        """Starts the process."""
        self._is_ready = False
        # The first load may take any time: the user sees its progress. After a restart, clients
        # wait for it.
        patience_s = math.inf if self._load_s is None else max(self._patience_s, 10 * self._load_s)
        self._silence = ModelSilence(patience_s)
        self._started_at = self._looked_at = time.monotonic()
        self._kills_before = oom_kills() or 0
        # Adapters that came later may be gone, which must not end the server: `_take` adds them.
        named = tuple(adapter for adapter in self.adapters if adapter in self._request.adapters)
        request = encode(replace(self._request, adapters=named))
        self._task = TaskProcess("serve", request, has_input=True, programs=self._programs)
        self._fd = self._task.fileno
        self._writer_fd: int | None = None
        loop = asyncio.get_running_loop()
        if self._fd is not None:
            loop.add_reader(self._fd, self._read)
        self._timer = loop.call_later(_TICK_S, self._tick)

    def close(self) -> None:
        """Ends the process; requests that are still open get 503."""
        self._stop_reading()
        self._refuse_all(_ending())
        self._task.close(patience_s=0.5)

    def submit(self, questions: Sequence[PromptRequest | TextsRequest]) -> list[PendingAsk]:
        """Queues prompts.

        Raises:
            ApiError: if the server ends, or too many wait.
        """
        if self.is_ending or self.failure is not None:
            raise _ending()
        free = ROWS - len(self._running) if self._is_ready else ROWS
        if len(self._waiting) + len(questions) > WAITING + max(0, free):
            raise ApiError(
                429,
                f"{len(self._waiting)} requests wait already, and at most {WAITING} may; try again later",
                code="queue_full",
                retry_after_s=self._wait_s(),
            )
        asks = [PendingAsk(question, next(self._numbers)) for question in questions]
        self._waiting += asks
        self.idle.clear()
        self._fill()
        return asks

    def drop(self, asks: list[PendingAsk]) -> None:
        """Frees the places of prompts whose client has gone, or has its answer."""
        for ask in asks:
            if ask in self._waiting:
                self._waiting.remove(ask)
            elif self._running.pop(ask.id, None) is not None:
                self._send(Drop(ask.id))
        self._freed.set()
        self._fill()

    async def load(self, adapter: NamedAdapter) -> None:
        """Puts an adapter on the model, between two tokens of running answers.

        Raises:
            ApiError: if its name is taken, or the process refuses it.
        """
        self._refuse_name(adapter.name)
        if any(one.name == adapter.name for one in self.adapters):
            raise ApiError(400, "an adapter with this name is loaded", param="lora_name", code="name_taken")
        if len(self.adapters) + len(self._changing) >= MOST_ADAPTERS:
            what = f"{MOST_ADAPTERS} adapters are loaded already; unload one"
            raise ApiError(400, what, param="lora_name", code="too_many_adapters")
        self._changing.add(adapter.name)
        try:
            await self._change(LoadAdapter(next(self._numbers), adapter))
            self.adapters = (*self.adapters, adapter)
        finally:
            self._changing.discard(adapter.name)

    async def unload(self, name: str) -> None:
        """Takes an adapter off the model, after its last answer; there are no new ones from now on.

        Raises:
            ApiError: if there is no such adapter, or the process of the model ends.
        """
        self._refuse_name(name)
        self._changing.add(name)
        try:
            self.adapters = tuple(one for one in self.adapters if one.name != name)
            while any(one.question.adapter == name for one in (*self._running.values(), *self._waiting)):
                self._freed.clear()
                await self._freed.wait()
            if self._is_ready and self.failure is None:  # one that is started again does not have it
                await self._change(UnloadAdapter(next(self._numbers), name))
        finally:
            self._changing.discard(name)

    def _refuse_name(self, name: str) -> None:
        if self.is_ending or self.failure is not None:
            raise _ending()
        if name in self._changing:
            what = "an adapter with this name is being loaded or unloaded"
            raise ApiError(409, what, param="lora_name", code="busy")

    async def _change(self, message: LoadAdapter | UnloadAdapter) -> None:
        change = self._changes[message.id] = asyncio.get_running_loop().create_future()
        self._send(message)
        await change

    def _changed(self, number: int, error: ApiError | None = None) -> None:
        """Notes that an adapter has been loaded or unloaded, or why not."""
        change = self._changes.pop(number)
        if change.done():
            return
        if error is None:
            change.set_result(None)
        else:
            change.set_exception(error)

    def _refuse_adapter(self, news: RefusedAsk | FailedAsk) -> None:
        """Passes a refusal on: to the operator in full, to the client if it has no path."""
        if isinstance(news, FailedAsk):
            self._on_failure(news)
            self._changed(news.id, ApiError(500, "the adapter could not be loaded", code="model_error"))
            return
        self._on_failure(FailedAsk(news.id, f"{news.text}: {news.fix}", ""))
        text = _NO_ADAPTER if "/" in news.text else news.text
        self._changed(news.id, ApiError(400, text, param="lora_path", code="invalid_adapter"))

    def _load_again(self) -> None:
        """Loads the adapters that a process which is started again does not have."""
        for adapter in self.adapters:
            if adapter not in self._request.adapters:
                message = LoadAdapter(next(self._numbers), adapter)
                change = self._changes[message.id] = asyncio.get_running_loop().create_future()
                change.add_done_callback(partial(self._forget_lost, adapter))
                self._send(message)

    def _forget_lost(self, adapter: NamedAdapter, change: "asyncio.Future[None]") -> None:
        if change.exception() is not None:
            self.adapters = tuple(one for one in self.adapters if one != adapter)

    def end(self) -> None:
        """Refuses new requests and those that wait; answers that are being computed are
        continued.
        """
        self.is_ending = True
        while self._waiting:
            self._waiting.popleft().messages.put_nowait(_ending())
        self._fill()

    def _wait_s(self) -> int:
        """Seconds until a request that is sent now could begin, by the time of the latest
        answers.
        """
        return max(1, math.ceil(self._answer_s * len(self._waiting) / ROWS))

    def _fill(self) -> None:
        """Gives free places to requests that wait."""
        while self._is_ready and self._waiting and len(self._running) < ROWS:
            ask = self._waiting.popleft()
            self._running[ask.id] = ask
            ask.since = time.monotonic()
            self._send(Ask(ask.id, ask.question))
        if not self._running and not self._waiting:
            self.idle.set()

    def _send(self, message: ServeInput) -> None:
        """Sends a message.

        What the process does not take at once, e.g. of a prompt of megabytes, it gets as soon as it
        does.
        """
        self._task.send(encode_message(message))
        if self._writer_fd is None and (fd := self._task.unsent_fileno) is not None:
            self._writer_fd = fd
            asyncio.get_running_loop().add_writer(fd, self._write)

    def _write(self) -> None:
        if self._read() and self._task.unsent_fileno is None:  # reading sends, too
            self._stop_writing()

    def _stop_writing(self) -> None:
        if self._writer_fd is not None:
            with contextlib.suppress(OSError, ValueError):  # the pipe may be closed already
                asyncio.get_running_loop().remove_writer(self._writer_fd)
            self._writer_fd = None

    def _tick(self) -> None:
        """Looks at the process even if its pipe is silent."""
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        now = time.monotonic()
        self._silence.pass_time(now - self._looked_at)
        self._looked_at = now
        if self._read():
            self._look_at_silence()

    def _read(self) -> bool:
        """Takes the messages that have arrived; False if the process has ended."""
        try:
            for message in self._task.new_messages():
                self._silence.end()
                self._take(message)
        except UnisonoError as error:
            self._died(error, self._verdict_on_death() if isinstance(error, RankDied) else None)
            return False
        return True

    def _look_at_silence(self) -> None:
        """Asks a silent process for a sign of life, and ends one that hangs."""
        silence = self._silence
        if silence.seconds < _ASK_S:
            return
        if self._is_ready and not silence.is_asked:
            silence.is_asked = True
            self._send(Ping())
        stat = read_stat(self._task.pid)
        if stat is None:
            return
        if stat.state == "T" and silence.seconds >= STOPPED_S:
            self._hangs(stat.state)
        elif stat.state != "T" and silence.seconds >= silence.limit_s:
            self._timer.cancel()
            self._task.dump_stacks()
            self._timer = asyncio.get_running_loop().call_later(_STACK_S, self._hangs, stat.state)

    def _hangs(self, state: str) -> None:
        """Ends a process that hangs, as if it had died."""
        if self._silence.seconds < _ASK_S:  # it has answered after all
            self._tick()
            return
        hang = name_task_hang(
            "serve",
            label=_LABEL,
            state=state,
            waits_in=wait_channel(self._task.pid),
            silent_s=self._silence.seconds,
            printed=self._task.tail,
            host=read_machine(no_gpus).host,
        )
        verdict = _of_serving(hang)
        self._died(RankDied.of(verdict.summary, fix=verdict.fix[0] if verdict.fix else ""), verdict)

    def _take(self, message: Message) -> None:
        news: ServeNews | None = decode_message(message, ServeNews)
        match news:
            case Ready():
                self.facts, self._is_ready = news, True
                self._load_s = self._load_s or time.monotonic() - self._started_at
                self._silence = ModelSilence(self._patience_s * (1 if news.in_parts else _WHOLE_PROMPT))
                self.ready.set()
                self._load_again()
                self._fill()
            case Pieces(pieces):
                for piece in pieces:
                    if piece.id in self._running:
                        self._running[piece.id].messages.put_nowait(piece)
            case Begun() if news.id in self._running:
                self._running[news.id].messages.put_nowait(news)
            case AdapterChanged():
                self._changed(news.id)
            case RefusedAsk() | FailedAsk() if news.id in self._changes:
                self._refuse_adapter(news)
            case Answered() | Valued() | RefusedAsk() | FailedAsk():
                self._finish(news)
            case None if not self.ready.is_set():
                self._on_message(message)

    def _finish(self, news: Answered | Valued | RefusedAsk | FailedAsk) -> None:
        ask = self._running.pop(news.id, None)
        if ask is None:
            return
        match news:
            case Answered() | Valued():
                self._answer_s += 0.2 * (time.monotonic() - ask.since - self._answer_s)
                ask.messages.put_nowait(news)
            case FailedAsk(_, text):
                self._on_failure(news)
                ask.messages.put_nowait(ApiError(500, text, code="model_error"))
            case RefusedAsk(_, problem, text, fix):
                status, code = _STATUS.get(problem, (400, "invalid_value"))
                param = problem if status == 400 else ask.question.part
                text = f"{text}; {fix}" if fix else text
                ask.messages.put_nowait(ApiError(status, text, param=param, code=code))
        self._freed.set()
        self._fill()

    def _died(self, error: UnisonoError, verdict: Verdict | None) -> None:
        """Restarts the process, unless it dies too often or refused the model: then the server
        ends.
        """
        self._stop_reading()
        died = RankDied(*error.problems, verdict=verdict) if verdict is not None else None
        self._task.close(patience_s=0)
        running, self._running = list(self._running.values()), {}
        for ask in running:
            ask.messages.put_nowait(_lost())
        for number in list(self._changes):
            self._changed(number, _lost())
        self._freed.set()
        if (
            died is not None
            and self.ready.is_set()
            and not self.is_ending
            and self._restarts.admit(time.monotonic())
        ):
            self._on_restart(died)
            self.start()
            return
        self.failure = died or error
        self._refuse_all(_lost())
        self.ended.set()

    def _verdict_on_death(self) -> Verdict:
        verdict = name_task_death(
            "serve",
            label=_LABEL,
            returncode=self._task.returncode or 0,
            crash=self._task.crash,
            tail=self._task.tail,
            oom_killed=(oom_kills() or 0) > self._kills_before,
            host=read_machine(no_gpus).host,
        )
        return _of_serving(verdict)

    def _refuse_all(self, error: ApiError) -> None:
        for ask in (*self._running.values(), *self._waiting):
            ask.messages.put_nowait(error)
        self._running.clear()
        self._waiting.clear()
        self._freed.set()
        self.idle.set()

    def _stop_reading(self) -> None:
        self._timer.cancel()
        self._stop_writing()
        if self._fd is not None:
            with contextlib.suppress(OSError, ValueError):  # the pipe may be closed already
                asyncio.get_running_loop().remove_reader(self._fd)
            self._fd = None


def _of_serving(verdict: Verdict) -> Verdict:
    """The verdict on a process that serves: that of a task has the remedies of training, which has
    rows and steps.
    """
    return verdict.model_copy(update={"fix": _REMEDY.get(verdict.cause, verdict.fix)})


def _ending() -> ApiError:
    return ApiError(503, "the server is ending; send the request to a different one", code="ending")


def _lost() -> ApiError:
    return ApiError(
        503,
        "the process of the model ended or hung while it answered; send the request again",
        code="model_lost",
    )
