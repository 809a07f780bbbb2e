"""The episodes of a rank: each in a process of its own, and calls of many of them at a time."""

import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from unisono.base.errors import ConfigError, Problem
from unisono.base.text import parse_seconds
from unisono.base.user_code import OwnCode, own_class
from unisono.trainer.config.own_code import agreed_source
from unisono.trainer.config.rollout_sections import EnvironmentSection
from unisono.trainer.objectives.environments.episode_calls import (
    RESET,
    EnvironmentFailure,
    EnvironmentLoaded,
    EnvironmentSetup,
    Given,
    MethodCall,
    MethodReply,
)
from unisono.trainer.objectives.environments.process import EnvironmentProcess, EpisodeProcess
from unisono.trainer.objectives.rewards.calls import FailureKind
from unisono.trainer.objectives.rewards.pool import LOAD_S, MEMORY_BYTES
from unisono.trainer.objectives.rewards.process import encoded, has_ended

KEY = "rollout.environment.use"
"""Of the config, and of the digest of its file."""
_AT_ONCE = 16  # calls: most wait for something else than a core
_TICK_S = 0.25  # between looks at processes that are silent
_TOLD_S = 1.0  # between calls of `on_wait`


@dataclass(eq=False)
class OpenEpisode:
    """An answer's process.

    Attributes:
        row: that its prompt is from, e.g. `train.jsonl:17`.
        process: None if it could not be started.
        failure: what ended it before its end.
    """

    row: str
    process: EpisodeProcess | None
    failure: EnvironmentFailure | None = None


@dataclass(eq=False)
class _Running:
    """A call that runs; `number` among those that were given together."""

    number: int
    episode: OpenEpisode
    process: EpisodeProcess
    method: str
    since: float


class EnvironmentPool:
    """The class of a run in a process, from which those of episodes are forked; a context manager.

    It starts no thread, and is to be used in one: its processes end with the thread that started
    them.
    """

    def __init__(
        self,
        section: EnvironmentSection,
        digests: Mapping[str, str],
        on_wait: Callable[[str], None],
        *,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """A pool whose process starts with `start`.

        Args:
            section: of the config.
            digests: of the files of the user's own, by key.
            on_wait: called about every second with what is being waited for, e.g.
                `env.py:Shop.search on train.jsonl:17 for 8 s`; what it raises ends `call`.
            memory_bytes: address space of an episode beside what the class has loaded.
        """
        parts = own_class(section.use)
        assert parts is not None, "the config was checked"
        self._code = OwnCode(KEY, "environment", *parts)
        self._section, self._digest, self._on_wait = section, digests.get(KEY, ""), on_wait
        self._memory_bytes, self._deadline_s = memory_bytes, parse_seconds(section.deadline)
        self._process: EnvironmentProcess | None = None
        self._loaded: EnvironmentLoaded = {"tools": [], "has_reward": False, "where": ""}
        self._episodes: set[OpenEpisode] = set()
        self._setup, self._told = b"", 0.0

    @property
    def name(self) -> str:
        """Of the class, and of its reward."""
        return self._code.name

    @property
    def label(self) -> str:
        """Of the class, for people: `env.py:Shop`."""
        return f"{self._code.path.name}:{self._code.name}"

    @property
    def tools(self) -> list[dict[str, object]]:
        """Their schemas, as chat templates expect them."""
        return self._loaded["tools"]

    @property
    def where(self) -> str:
        """`FILE.py:LINE` of the method `reset`."""
        return self._loaded["where"]

    @property
    def has_reward(self) -> bool:
        """Whether the class rates answers."""
        return self._loaded["has_reward"]

    def __enter__(self) -> Self:
        """See `start`."""
        return self.start()

    def start(self) -> Self:
        """Starts the process, and waits until the class is loaded.

        Raises:
            ConfigError: if the file has changed since the plan was made, or cannot be loaded, or
                its class is not an environment.
        """
        source = agreed_source(self._code, self._digest)
        setup: EnvironmentSetup = {
            "path": str(self._code.path),
            "name": self._code.name,
            "source": source.decode("latin-1"),
            "memory_bytes": self._memory_bytes,
        }
        # The file is read once: it may be edited while the run uses it.
        self._setup = encoded(setup)
        self._launch()
        return self

    def _launch(self) -> None:
        """Starts the process, as `start`."""
        try:
            self._process = EnvironmentProcess(self._setup)
            self._loaded = self._await_loaded(self._process)
        except BaseException:  # also Ctrl-C: no process may stay
            self.close()
            raise

    def _await_loaded(self, process: EnvironmentProcess) -> EnvironmentLoaded:
        began = self._told = time.monotonic()
        while (seconds := time.monotonic() - began) < LOAD_S:
            try:
                replies = process.next_messages(_TICK_S)
            except EOFError:
                raise self._not_loaded(
                    f"its process ended {_how_it_ended(process.end(patience_s=1.0))}"
                ) from None
            for reply in replies:
                if "refused" in reply:
                    raise ConfigError(*(_problem(one) for one in reply["refused"]))
                loaded: EnvironmentLoaded = reply
                return loaded
            self._tell(f"loading {self.label} for {seconds:.0f} s")
        raise self._not_loaded(f"that takes longer than {LOAD_S:.0f} s")

    def _not_loaded(self, why: str) -> ConfigError:
        return ConfigError.of(
            f"the environment {self.label} was not loaded",
            where=str(self._code.path),
            why=why,
            fix="import the file with Python: the log has what it printed",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes."""
        self.end_all()
        if self._process is not None:
            self._process.end()
            self._process = None

    # ---- episodes

    def begin(self, row: str) -> OpenEpisode:
        """A new episode, in which `reset` is to be called first.

        Args:
            row: that its prompt is from.
        """
        try:
            process = self._fork()
        except (EOFError, ConfigError) as error:
            text = str(error) or "no process can be started for it"
            return OpenEpisode(
                row, None, EnvironmentFailure(row, RESET, "died", 0.0, text, self._loaded["where"])
            )
        episode = OpenEpisode(row, process)
        self._episodes.add(episode)
        return episode

    def _fork(self) -> EpisodeProcess:
        """A process for an episode.

        Raises:
            EOFError: if there is none.
            ConfigError: if the class cannot be loaded again.
        """
        if self._process is not None:
            try:
                return self._process.fork()
            except EOFError:  # it was killed, as by a lack of memory; its episodes ended with it
                self._process.end()
        self._launch()
        assert self._process is not None, "it was started"
        return self._process.fork()

    def end_all(self) -> None:
        """Ends all episodes."""
        for episode in self._episodes:
            if episode.process is not None:
                episode.process.end()
        if self._process is not None and self._episodes:
            self._process.reap()
        self._episodes.clear()

    def call(self, calls: Sequence[tuple[OpenEpisode, MethodCall]]) -> list[Given | None]:
        """Calls a method in each of some episodes, many at a time.

        Returns:
            what each gave; None for an episode that has failed, see `OpenEpisode.failure`.
        """
        waiting = deque(enumerate(calls))
        running: dict[int, _Running] = {}
        given: list[Given | None] = [None] * len(calls)
        self._told = time.monotonic()
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                number, (episode, call) = waiting.popleft()
                if episode.process is not None and episode.failure is None:
                    running[number] = _Running(
                        number, episode, episode.process, call["method"], time.monotonic()
                    )
                    episode.process.send(call)
            self._await(running)
            for one in list(running.values()):
                if self._look_at(one, given):
                    del running[one.number]
            if oldest := min(running.values(), key=lambda one: one.since, default=None):
                seconds = time.monotonic() - oldest.since
                self._tell(f"{self.label}.{oldest.method} on {oldest.episode.row} for {seconds:.0f} s")
        return given

    def _await(self, running: Mapping[int, _Running]) -> None:
        """Waits until something has arrived, or a deadline is over."""
        if not running:
            return
        readable = select.poll()
        for one in running.values():
            readable.register(one.process, one.process.events)
        now = time.monotonic()
        left = [max(0.0, one.since + self._deadline_s - now) for one in running.values()]
        readable.poll(1000 * min([_TICK_S, *left]))

    def _look_at(self, one: _Running, given: list[Given | None]) -> bool:
        """Takes what a call gave; whether it is over."""
        process, seconds = one.process, time.monotonic() - one.since
        try:
            replies: list[MethodReply] = process.receive()
        except EOFError:
            where = process.line_in(str(self._code.path))
            has_ended(process.pid, wait_s=1.0)
            self._fail(one, "died", "its process ended", seconds, where)
            return True
        for reply in replies:
            if "kind" in reply:
                self._fail(one, reply["kind"], reply["text"], seconds, reply["where"])
            else:
                given[one.number] = (
                    Given(reply["told"], is_refused=True) if "told" in reply else Given(reply["value"])
                )
            return True
        if seconds > self._deadline_s:
            where = process.line_in(str(self._code.path))
            self._fail(one, "timeout", f"it gave nothing within {self._section.deadline}", seconds, where)
            return True
        return False

    def _fail(self, one: _Running, kind: FailureKind, text: str, seconds: float, where: str) -> None:
        """Notes why an episode has failed, and ends its process."""
        episode = one.episode
        episode.failure = EnvironmentFailure(
            episode.row, one.method, kind, round(seconds, 3), text, where or self._loaded["where"]
        )
        one.process.end()

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told >= _TOLD_S:
            self._told = now
            self._on_wait(text)


def _problem(fields: Mapping[str, object]) -> Problem:
    return Problem(**{name: str(fields.get(name, "")) for name in ("what", "where", "why", "fix")})


def _how_it_ended(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
