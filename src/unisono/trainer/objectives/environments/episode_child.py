"""The processes of an environment: `python -m …environments.episode_child FD PID`.

The first one loads the class. Each answer is an episode of its own, so each gets a process forked
from that one, and no episode sees, delays or ends another. The first process reads a `Setup` from
its socket, and then the sockets of episodes (SCM_RIGHTS), which it answers with the process; an
episode answers each `MethodCall` with a `MethodReply`. All are lines of JSON.
"""

import faulthandler
import functools
import inspect
import json
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.base.errors import ConfigError
from unisono.base.text import nearest, one_line, redact
from unisono.base.user_code import OwnCode, execute_source
from unisono.trainer.config.own_code import refusing
from unisono.trainer.objectives.environments.episode_calls import (
    RESET,
    REWARD,
    EnvironmentLoaded,
    EnvironmentSetup,
    LoadReply,
    MethodCall,
    MethodReply,
    as_messages,
)
from unisono.trainer.objectives.rewards.child import (
    MOST_BYTES,
    bound_memory,
    end_with,
    failure_in,
    number_of,
    result_of,
    where_defined,
)

_FIX = "fix the file: a process of the environment loads it at the start of the run"
_MOST_TEXT = 500  # characters of an exception


@dataclass(frozen=True)
class _Environment:
    """The loaded class.

    Attributes:
        kind: the class.
        path: of its file.
        tools: methods by name.
    """

    kind: type
    path: str
    tools: Mapping[str, Callable[..., Any]]

    @classmethod
    def load(cls, setup: EnvironmentSetup) -> "_Environment":
        """From its source.

        Raises:
            ConfigError: if it cannot be loaded, or has no tools.
        """
        code = OwnCode("rollout.environment.use", "environment", Path(setup["path"]), setup["name"])
        sys.path.insert(0, str(code.path.parent.absolute()))
        with refusing(code, _FIX):
            module = execute_source(code, setup["source"].encode("latin-1"))
            kind = getattr(module, code.name)
            if not inspect.isclass(kind):
                raise TypeError(f"{code.name} is {type(kind).__name__}, and not a class")
            tools = {
                name: _as_called(kind, name)
                for name, method in inspect.getmembers(kind, inspect.isroutine)
                if not name.startswith("_") and name not in (RESET, REWARD) and inspect.getdoc(method)
            }
        problem = (
            f"the environment {code.name} has no method `reset`"
            if not callable(getattr(kind, RESET, None))
            else f"no method of the environment {code.name} is a tool"
            if not tools
            else None
        )
        if problem is not None:
            raise ConfigError.of(
                problem,
                where=where_defined(kind.__init__, setup["path"]),
                why="tools are the public methods with a docstring, beside reset and reward",
                fix="write `def reset(self, row)`, and e.g. `def search(self, text: str) -> str` with a docstring",
            )
        return cls(kind, setup["path"], tools)

    def describe(self) -> EnvironmentLoaded:
        """What the ranks need to know of it.

        Raises:
            ConfigError: if a tool has no type or description for an argument.
        """
        from pydantic import validate_call
        from transformers.utils.chat_template_utils import get_json_schema  # the form that templates expect

        tools: list[dict[str, object]] = []
        for name, method in self.tools.items():
            try:
                validate_call(method)
                tools.append(get_json_schema(method))
            except Exception as error:  # noqa: BLE001 - of two libraries, for any signature and docstring
                raise ConfigError.of(
                    f"the tool {name} cannot be described to the model",
                    where=where_defined(method, self.path),
                    why=one_line(str(error), limit=300),
                    fix="give each argument a type, and a line such as `text: what to find` below `Args:` in the"
                    " docstring",
                ) from None
        has_reward = callable(getattr(self.kind, REWARD, None))
        where = where_defined(getattr(self.kind, RESET), self.path)
        return {"tools": tools, "has_reward": has_reward, "where": where}


def _as_called(kind: type, name: str) -> Callable[..., Any]:
    """A method without `self`, with name, documentation and types as the model calls it."""
    method = getattr(kind, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    functools.update_wrapper(call, method)
    del vars(call)["__wrapped__"]
    signature = inspect.signature(method, eval_str=True)
    parameters = list(signature.parameters.values())
    if inspect.isfunction(inspect.getattr_static(kind, name)):  # neither static nor of the class
        del parameters[:1]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    types = {one.name: one.annotation for one in parameters} | {"return": signature.return_annotation}
    call.__annotations__ = {key: value for key, value in types.items() if value is not signature.empty}
    call.__doc__ = inspect.getdoc(method)
    return call


class _Episode:
    """An answer's own instance of the class."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    @cached_property
    def _instance(self) -> Any:
        return self._environment.kind()

    def reply(self, call: MethodCall) -> MethodReply:
        """What comes of a call."""
        method, arguments = call["method"], call["arguments"]
        try:
            if method == RESET:
                return self._reset(arguments, call.get("seed", 0))
            if method == REWARD:
                value = result_of(self._instance.reward())
                number = None if value is None else number_of(value)
                return (
                    _failed("value", number, self._where(REWARD))
                    if isinstance(number, str)
                    else {"value": number}
                )
            return self._call(method, arguments)
        except BaseException as error:  # noqa: BLE001 - sys.exit in a method must not end the process
            return failure_in(error, path=self._environment.path, where=self._where(method))

    def _where(self, method: str) -> str:
        return where_defined(getattr(self._environment.kind, method), self._environment.path)

    def _reset(self, row: Mapping[str, object], seed: int) -> MethodReply:
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)
        value = result_of(self._instance.reset(dict(row)))
        messages = None if value is None else as_messages(value)
        if value is not None and messages is None:
            shown = one_line(repr(value), limit=60)
            text = f"it gives {shown}; give None, a text, or messages with role and content"
            return _failed("value", text, self._where(RESET))
        return {"value": messages}

    def _call(self, name: str, arguments: Mapping[str, object]) -> MethodReply:
        from pydantic import ValidationError, validate_call

        tools = self._environment.tools
        if name not in tools:
            near = nearest(name, list(tools))
            hint = f"did you mean {near}?" if near else f"there are {', '.join(tools)}"
            return {"told": f"error: there is no tool {one_line(name, limit=60)}; {hint}"}
        try:
            value = result_of(validate_call(getattr(self._instance, name))(**arguments))
        except ValidationError as error:
            return {"told": f"error: {_wrong_arguments(error)}"}
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the model may do better with its next call
            return {
                "told": f"error: {one_line(redact(f'{type(error).__name__}: {error}'), limit=_MOST_TEXT)}"
            }
        if isinstance(value, str):
            return {"value": value}
        return {"value": "" if value is None else json.dumps(value, ensure_ascii=False, default=str)}


def _wrong_arguments(error: Any) -> str:
    """What pydantic says of arguments, on a line."""
    problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
    return one_line("; ".join(problems), limit=_MOST_TEXT)


def _failed(kind: Any, text: str, where: str) -> MethodReply:
    return {"kind": kind, "text": text, "where": where}


def _encoded(reply: LoadReply | MethodReply) -> bytes:
    line = json.dumps(reply, default=str).encode() + b"\n"  # messages of `reset` may hold anything
    if len(line) <= MOST_BYTES:
        return line
    return _encoded(_failed("value", f"it gives {len(line):,} bytes, more than {MOST_BYTES:,}", ""))


def _serve(environment: _Environment, connection: socket.socket, memory_bytes: int) -> None:
    """The body of an episode's process."""
    os.setsid()  # its own processes end with it
    fd = connection.fileno()
    faulthandler.enable(file=fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=False)
    bound_memory(memory_bytes)
    episode = _Episode(environment)
    for line in connection.makefile("rb"):
        connection.sendall(_encoded(episode.reply(json.loads(line))))


def main(words: Sequence[str]) -> None:
    """Forks episodes until the socket is closed."""
    fd, parent = map(int, words)
    os.set_inheritable(fd, False)
    end_with(parent)
    connection = socket.socket(fileno=fd)
    setup: EnvironmentSetup = json.loads(connection.makefile("rb", buffering=0).readline())
    try:
        environment = _Environment.load(setup)
        loaded = environment.describe()
    except ConfigError as error:
        connection.sendall(_encoded({"refused": [asdict(problem) for problem in error.problems]}))
        return
    connection.sendall(_encoded(loaded))
    while True:
        data, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if not data:
            return
        if not fds:
            _reap()
            continue
        (theirs,) = fds
        pid = os.fork()
        if pid == 0:
            try:
                connection.close()
                end_with(os.getppid())
                _serve(environment, socket.socket(fileno=theirs), setup["memory_bytes"])
            finally:
                os._exit(0)
        os.close(theirs)
        connection.sendall(_encoded({"pid": pid}))


def _reap() -> None:
    """Removes what ended episodes have left; until then no process gets the number of one, which
    the rank may still kill.
    """
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(sys.argv[1:])
