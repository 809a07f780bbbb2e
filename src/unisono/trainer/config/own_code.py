"""Code that a config names: classes in files of the user's own (`FILE.py:CLASS`), and parts of
other packages.

Reading and executing it.
"""

import ast
import hashlib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from unisono.base import extensions
from unisono.base.errors import ConfigError, storage_words
from unisono.base.files import SOURCE_BYTES, read_bytes
from unisono.base.text import nearest, one_line
from unisono.base.user_code import FUNCTIONS_OF, OwnCode, execute_source, own_code
from unisono.trainer.config.answer_functions import AnswerFunction
from unisono.trainer.config.reward_models import reward_models_of
from unisono.trainer.config.schema import RunConfig

_REWARDS = "rewards"
_METRICS = ["eval", "metrics"]


def own_code_of(config: RunConfig) -> list[OwnCode]:
    """The user's own classes and functions that a config names."""
    environment = config.rollout.environment
    return own_code(
        objective=config.objective,
        optimizer=config.optim.kind,
        rewards=[reward.use for reward in config.rewards],
        metrics=[metric.use for metric in config.eval.metrics],
        environment="" if environment is None else environment.use,
    )


def own_classes_of(config: RunConfig) -> list[OwnCode]:
    """Those that ranks execute themselves; functions have processes of their own."""
    return [code for code in own_code_of(config) if code.what not in FUNCTIONS_OF]


def with_code_path(config: RunConfig, code: OwnCode, path: str) -> RunConfig:
    """A config with a different path of a file."""
    *sections, last = code.key.split(".")
    value: object = f"{path}:{code.name}"
    if sections == [_REWARDS]:
        return config.model_copy(update={"rewards": _with_use(config.rewards, int(last), value)})
    if sections == _METRICS:
        metrics = _with_use(config.eval.metrics, int(last), value)
        section = config.eval.model_copy(update={"metrics": metrics})
        return config.model_copy(update={"eval": section})
    owners = list(accumulate(sections, getattr, initial=config))
    for owner, key in zip(reversed(owners), reversed([*sections, last]), strict=True):
        value = owner.model_copy(update={key: value})
    assert isinstance(value, RunConfig)
    return value


def _with_use(functions: Sequence[AnswerFunction], index: int, use: object) -> list[AnswerFunction]:
    """The functions, one of them by a different name."""
    return [
        one.model_copy(update={"use": use}) if number == index else one
        for number, one in enumerate(functions)
    ]


def put_path(body: dict[str, Any], code: OwnCode, path: str) -> None:
    """Replaces the path of a file in a config as a dict."""
    *sections, last = code.key.split(".")
    owner: Any = body
    for section in sections:
        owner = owner[section]
    if code.what in FUNCTIONS_OF:  # of a list of sections
        owner[int(last)]["use"] = f"{path}:{code.name}"
        return
    owner[last] = f"{path}:{code.name}"


def own_code_digests(config: RunConfig) -> dict[str, str]:
    """What decides which code a config executes, by key: of files and reward models their digest,
    of other packages name and version.

    Nothing is executed.

    Raises:
        ConfigError: if a file cannot be read, is not Python, or has no such class; or as
            `reward_models_of`.
    """
    digests = {code.key: _digest(code) for code in own_code_of(config)} | _schema_digests(config)
    digests |= {model.key: model.digest for model in reward_models_of(config.rewards)}
    for key, group, name in (
        ("optim.kind", extensions.OPTIMIZERS, config.optim.kind),
        ("optim.schedule", extensions.SCHEDULES, config.optim.schedule),
    ):
        entry = None if key in digests else extensions.extensions(group).get(name)
        if entry is not None:
            digests[key] = extensions.version_of(entry)
    return digests


def schema_file(path: Path, key: str) -> OwnCode:
    """The file that the reward of a key compares answers with."""
    return OwnCode(f"{key}.schema", "reward json_schema", path, "")


def _schema_digests(config: RunConfig) -> dict[str, str]:
    """The digests of the files that rewards and metrics compare answers with, by key.

    Raises:
        ConfigError: if one cannot be read.
    """
    entries: list[tuple[str, AnswerFunction]] = [
        (f"{_REWARDS}.{number}", one) for number, one in enumerate(config.rewards)
    ]
    entries += [(f"eval.metrics.{number}", one) for number, one in enumerate(config.eval.metrics)]
    files = [schema_file(Path(one.schema_), key) for key, one in entries if one.schema_ is not None]
    return {file.key: _hashed(_read(file)) for file in files}


def _hashed(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def _read(code: OwnCode) -> bytes:
    try:
        return read_bytes(code.path, most_bytes=SOURCE_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(code, error) from None


def _unreadable(code: OwnCode, error: OSError | ValueError) -> ConfigError:
    return ConfigError.of(
        f"the file of the {code.what} cannot be read",
        where=str(code.path),
        why=error.strerror or str(error) if isinstance(error, OSError) else str(error),
        fix=f"check the path in `{code.key}`",
    )


def _digest(code: OwnCode) -> str:
    path, what, source = code.path, code.what, _read(code)
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        raise ConfigError.of(
            f"the {what} is not Python: {error.msg}",
            where=f"{path}:{error.lineno}",
            fix="fix the file: each rank would fail to import it",
        ) from None
    except (RecursionError, MemoryError):  # what Python raises for thousands of brackets or terms
        raise ConfigError.of(
            f"the {what} is nested too deeply for Python",
            where=str(path),
            fix="write it with fewer brackets and shorter sums",
        ) from None
    except ValueError as error:
        raise _unreadable(code, error) from None
    kinds: tuple[type[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef], ...] = (ast.ClassDef,)
    kind = "class"
    if code.what in FUNCTIONS_OF:
        kind, kinds = "function", (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [node.name for node in tree.body if isinstance(node, kinds)]
    if code.name not in names:
        near = nearest(code.name, names)
        raise ConfigError.of(
            f"the file of the {what} has no {kind} {code.name}",
            where=str(path),
            why=f"it has {', '.join(names)}" if names else f"it has no {kind} at its top level",
            fix=f"did you mean `{path.name}:{near}`?"
            if near
            else f"name a {kind} of the file, as FILE.py:{kind.upper()}",
        )
    return _hashed(source)


def agreed_source(code: OwnCode, digest: str) -> bytes:
    """The source of a file, if its content is that on which the nodes agreed.

    Raises:
        ConfigError: if it is not.
    """
    path, what = code.path, code.what
    try:
        source = read_bytes(path, most_bytes=SOURCE_BYTES)
    except OSError as error:
        raise ConfigError.of(
            f"the file of the {what} cannot be read",
            where=str(path),
            why=storage_words(error),
            fix="restore the file that the plan was made with, on all nodes",
        ) from None
    if _hashed(source) != digest:
        raise ConfigError.of(
            f"the file of the {what} has changed since the plan was made",
            where=str(path),
            fix="start again, with the same file on all nodes",
        )
    return source


def execute(code: OwnCode, digest: str) -> tuple[Any, bytes]:
    """The class and the source of its file, which is executed if its content is that on which the
    nodes agreed.

    Raises:
        ConfigError: if it is not.
        Exception: what the file raises; see `refusing`.
    """
    source = agreed_source(code, digest)
    return getattr(execute_source(code, source), code.name), source


@contextmanager
def refusing(code: OwnCode, fix: str) -> Iterator[None]:
    """Makes what the user's code raises a refusal with its line: it must not end a rank silently.

    Raises:
        ConfigError: instead of any other exception.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(code.path)]
        raise ConfigError.of(
            f"the {code.what} cannot be made: {one_line(f'{type(error).__name__}: {error}', limit=300)}",
            where=f"{code.path}:{lines[-1]}" if lines else str(code.path),
            fix=fix,
        ) from error
