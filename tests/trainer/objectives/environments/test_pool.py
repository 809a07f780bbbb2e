"""Environments in their processes: what methods get and give, what ends an episode, and what is
known then.

Run: pytest tests/trainer/objectives/environments/test_pool.py
"""

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.objectives.environments import shop
from unisono.base.errors import ConfigError
from unisono.trainer.config.rollout_sections import EnvironmentSection
from unisono.trainer.objectives.environments.episode_calls import Given, MethodCall
from unisono.trainer.objectives.environments.pool import KEY, EnvironmentPool, OpenEpisode

FILE = Path(shop.__file__)
LIMIT_S = 60.0  # of a wait; a test that works needs a second or two
Open = Callable[..., EnvironmentPool]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Pools for a class, which end with the test."""
    pools: list[EnvironmentPool] = []

    def make(name: str = "Odd", *, source: str | None = None, **settings: Any) -> EnvironmentPool:
        file = FILE
        if source is not None:
            file = tmp_path / "own.py"
            file.write_text(source)
        section = EnvironmentSection(use=f"{file}:{name}", **settings)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        pool = EnvironmentPool(section, {KEY: digest}, said.append)
        pools.append(pool)
        return pool.start()

    said: list[str] = []
    vars(make)["said"] = said
    yield make
    for pool in pools:
        pool.close()


def call(pool: EnvironmentPool, episode: OpenEpisode, method: str, **arguments: Any) -> Given | None:
    request: MethodCall = {"method": method, "arguments": arguments}
    (given,) = pool.call([(episode, request)])
    return given


def begun(pool: EnvironmentPool, **row: Any) -> OpenEpisode:
    episode = pool.begin("train.jsonl:7")
    assert call(pool, episode, "reset", **row) is not None
    return episode


def test_tools_are_the_documented_public_methods(opened: Open) -> None:
    pool = opened()
    assert [tool["function"]["name"] for tool in pool.tools] == ["add", "fails", "later"]  # type: ignore[index]
    schema: Any = pool.tools[0]["function"]
    assert schema["description"] == "Adds."
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "a number"}
    assert schema["parameters"]["required"] == ["a"]
    assert pool.has_reward
    line = FILE.read_text().splitlines()[int(pool.where.rpartition(":")[2]) - 1]
    assert "def reset" in line


def test_each_episode_is_a_process_with_its_own_instance(opened: Open) -> None:
    pool = opened("Shop")
    one, other = begun(pool, item="tea"), begun(pool, item="milk")
    assert call(pool, one, "price", item="tea") == Given("7")
    assert call(pool, one, "reward") == Given(1.0)
    assert call(pool, other, "reward") == Given(0.0)
    assert one.process is not None
    assert other.process is not None
    assert one.process.pid != other.process.pid


def test_random_numbers_of_an_episode_are_those_of_its_seed(opened: Open) -> None:
    pool, drawn = opened(), []
    for seed in (3, 3, 4):
        episode = pool.begin("row")
        pool.call([(episode, {"method": "reset", "arguments": {}, "seed": seed})])
        given = call(pool, episode, "later", words=[])
        assert given is not None
        drawn.append(str(given.value).partition("drawn")[2])
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("method", "arguments", "told"),
    [
        ("add", {"a": 3}, "4"),
        ("add", {"a": "3", "b": 4}, "7"),  # a model that writes a number as text
        ("add", {"a": "x"}, "error: a: Input should be a valid integer"),
        ("add", {}, "error: a: Missing required argument"),
        ("add", {"a": 1, "c": 2}, "error: c: Unexpected keyword argument"),
        ("ad", {}, "error: there is no tool ad; did you mean add?"),
        ("undocumented", {}, "error: there is no tool undocumented"),
        ("__init__", {}, "error: there is no tool __init__"),
        ("reward", {}, None),
        ("fails", {"how": "raises"}, "error: KeyError: 'raises'"),
        ("later", {"words": ["ä", "b"]}, '{"words": ["ä", "b"], "who"'),
    ],
)
def test_what_a_tool_gives_or_why_it_does_not_is_told_to_the_model(
    opened: Open, method: str, arguments: dict[str, Any], told: str | None
) -> None:
    pool = opened()
    given = call(pool, begun(pool), method, **arguments)
    assert given is not None
    assert given.is_refused == (told is not None and told.startswith("error"))
    if told is not None:
        assert str(given.value).startswith(told)


@pytest.mark.parametrize(
    ("reset", "messages"),
    [
        (None, None),
        ("hello", [{"role": "user", "content": "hello"}]),
        ([{"role": "system", "content": "x"}], [{"role": "system", "content": "x"}]),
        ("a set", [{"role": "user", "content": "x", "tags": "{1}"}]),
    ],
)
def test_messages_of_reset(opened: Open, reset: Any, messages: Any) -> None:
    pool = opened()
    assert call(pool, pool.begin("row"), "reset", reset=reset) == Given(messages)


@pytest.mark.parametrize(
    ("method", "arguments", "kind", "text"),
    [
        ("reset", {"reset": "raises"}, "error", "ValueError: the row has no item"),
        ("reset", {"reset": "number"}, "value", "it gives 7; give None, a text, or messages"),
        ("reset", {"reset": "hangs"}, "timeout", "it gave nothing within 1 seconds"),
        ("reward", {"reward": "much"}, "value", "it gives 'much', where a number is expected"),
        ("reward", {"reward": True}, "value", "it gives True: give 1.0 or 0.0"),
        ("fails", {"how": "hangs"}, "timeout", "it gave nothing within 1 seconds"),
        ("fails", {"how": "exits"}, "died", "its process ended"),
        ("fails", {"how": "sys.exit"}, "error", "SystemExit: no"),
        ("fails", {"how": "memory"}, "memory", "MemoryError"),
    ],
)
def test_what_ends_an_episode_and_no_other(
    opened: Open, method: str, arguments: dict[str, Any], kind: str, text: str
) -> None:
    pool = opened(deadline="1 seconds")
    row = arguments if method != "fails" else {}
    other, episode = begun(pool), pool.begin("train.jsonl:7")
    if method != "reset":
        call(pool, episode, "reset", **row)
    requests: list[tuple[OpenEpisode, MethodCall]] = [
        (other, {"method": "add", "arguments": {"a": 1}}),
        (episode, {"method": method, "arguments": arguments}),
    ]
    assert pool.call(requests) == [Given("2"), None]
    failure = episode.failure
    assert failure is not None
    assert (failure.row, failure.method, failure.kind) == ("train.jsonl:7", method, kind)
    assert failure.text.startswith(text)
    path, line = failure.where.rsplit(":", 1)
    assert path == str(FILE)
    assert FILE.read_text().splitlines()[int(line) - 1].strip()
    assert call(pool, episode, "add", a=1) is None
    assert call(pool, other, "add", a=1) == Given("2")


def test_the_line_that_hangs_is_named(opened: Open) -> None:
    pool = opened(deadline="2 seconds")
    episode = begun(pool)
    call(pool, episode, "fails", how="hangs")
    assert episode.failure is not None
    line = int(episode.failure.where.rpartition(":")[2])
    assert FILE.read_text().splitlines()[line - 1].strip() == "time.sleep(1e6)"
    assert any("Odd.fails on train.jsonl:7 for 1 s" in text for text in vars(opened)["said"])


def test_no_process_stays(opened: Open) -> None:
    pool = opened()
    pids = [one.process.pid for one in (begun(pool), begun(pool)) if one.process is not None]
    pool.close()
    for pid in pids:
        await_end(pid)


def await_end(pid: int) -> None:
    until = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_process_of_the_class_is_replaced(opened: Open) -> None:
    pool = opened()
    episode = begun(pool)
    assert episode.process is not None
    parent = int(Path(f"/proc/{episode.process.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    await_end(episode.process.pid)  # its episodes end with it
    assert call(pool, episode, "add", a=1) is None
    assert episode.failure is not None
    assert episode.failure.kind == "died"
    assert call(pool, begun(pool), "add", a=1) == Given("2")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("class A:\n    def add(self, a: int):\n        'Adds.'\n", "has no method `reset`"),
        ("class A:\n    def reset(self, row): pass\n", "no method of the environment A is a tool"),
        (
            "class A:\n    def reset(self, row): pass\n    def add(self, a):\n        'Adds.'\n",
            "the tool add cannot be described to the model",
        ),
        (
            "class A:\n    def reset(self, row): pass\n    def add(self, a: Nothing):\n        'Adds.'\n",
            "cannot be made: NameError",
        ),
        (
            "class A:\n    def reset(self, row): pass\n    def add(self, a: 'Nothing'):\n        'Adds.'\n",
            "cannot be made: NameError",
        ),
        ("import nothing_of_that_name\nclass A: pass\n", "cannot be made: ModuleNotFoundError"),
        ("import os\nos._exit(3)\nclass A: pass\n", "the environment own.py:A was not loaded"),
    ],
)
def test_a_class_that_cannot_be_an_environment_is_refused(opened: Open, source: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        opened("A", source=source)
    assert "own.py" in error.value.problems[0].where
    assert error.value.problems[0].fix


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    section = EnvironmentSection(use=f"{FILE}:Odd")
    with pytest.raises(ConfigError, match="has changed since the plan was made"):
        EnvironmentPool(section, {KEY: "0" * 16}, lambda text: None).start()
