"""Wherever a path is given, what is no file of its kind is refused within seconds and by name: a
pipe, a device, a directory.

Keys and options are found by what they take: a new one has to be listed below, with what makes it
read, or as no path. Run: .venv/bin/python -m pytest tests/front/cli/test_paths.py
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.front_server import start
from unisono.base.errors import DataError, UnisonoError
from unisono.front.cli.app import parser
from unisono.guard.facts.limits import memory_limited
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.config.sections import DiffusionSection, Section
from unisono.trainer.families.pictures.picture_folders import read_folder
from unisono.trainer.readers.key_table import Key
from unisono.trainer.readers.llamafactory.keys import KEYS as LF_KEYS
from unisono.trainer.readers.llamafactory.reader import translate
from unisono.trainer.readers.sd_scripts.keys import KEYS as SD_KEYS
from unisono.trainer.readers.sd_scripts.reader import read_sd_scripts

LIMIT_S = 60.0  # of a command on a busy machine; one that waits for a writer would never end
TOGETHER = 4
KINDS = ("pipe", "zero", "directory", *(["forbidden"] if os.geteuid() else []))
"""Root may read every file."""

NO_PATHS = {
    "overrides", "template", "command", "prompt", "name", "repo", "faults", "shell", "--line", "--breaks", "--allow", "--devices",
    "--nodes", "--head", "--hosts", "--nnodes", "--nproc-per-node", "--master-addr", "--rdzv-endpoint", "--launcher", "--ray-address",
    "--partition", "--time", "--reason", "--system", "--stop", "--size", "--negative", "--host", "--format", "--quantize", "--revision",
    "--symptom", "--image-hosts", "--proxy",
}  # fmt: skip
"""Arguments and options of text that is not the name of a file."""
GIVEN = {
    "config": "c.yaml", "target": "builtin:tiny", "out": "new", "run": "run", "runs": "run", "repo": "a/b", "command": "true", "prompt": "hi",
}  # fmt: skip
"""Arguments that a command needs before it reads the one that is tried."""
ALSO = {"board": ("runs",), "export": ("out",), "generate": ("prompt",)}
MORE = {
    "train": ["--dry-run"],
    "export": ["--format", "gguf"],
    "eval": ["--data", "rows.jsonl"],
    "generate": ["--max-tokens", "1"],
}
"""Options that a command needs, or that make it shorter."""
SEVERAL = ["--nodes", "2", "--node-rank", "0", "--head", "127.0.0.1:29911"]
DIRECTORIES = {
    "--root",
    "out",
    "--image-folders",
    "--adapter-folders",
    "--output-dir",
    "folders",
    "runs",
    "output_dir",
    "checkpoint.storage",
}
"""Where a directory is what is asked for."""

FUNCTIONS = {"--reward", "--metric"}
"""Options that take FILE.py:FUNCTION."""
SOURCES = [f"data.{part}[]." for part in ("train", "eval")]
CAPTION_TEXTS = (
    "caption_prefix",
    "caption_suffix",
    "keep_tokens_separator",
    "caption_separator",
    "secondary_separator",
)
NO_PATH_KEYS = {
    "model.revision", "adapter.targets", "adapter.modules_to_save", "freeze", "train_only.modules", "train_only.extra",
    "rewards", *(f"{functions}[].{name}" for functions in ("rewards", "eval.metrics") for name in ("column", "pattern", "tags")), "eval.metrics", "checkpoint.best", "classify.labels", "embed.query_prefix", "embed.document_prefix", "data.system", "data.ignore", "diffusion.prompts", *(source + name for source in SOURCES for name in ("split", "subset", "folder")),
    *(f"diffusion.{name}" for name in CAPTION_TEXTS),
    *(f"{source}pictures.{name}" for source in SOURCES for name in ("caption", *CAPTION_TEXTS)),
    *(f"{source}tags.{name}_tag" for source in SOURCES for name in
      ("role", "content", "user", "assistant", "observation", "function", "system")),
}  # fmt: skip
"""Keys of text that is not the name of a file."""
CONFIG_KEYS: dict[str, list[str]] = {
    "model.path": [], "model.tokenizer": [], "adapter.from": [], "adapter.merge": [], "data.train": [], "data.eval": [], "data.template": [],
    "objective": ["--trust-code"], "optim.kind": ["--trust-code"], "preference.reference": ["objective=dpo", "data.train=pairs.jsonl"], "output_dir": [],
    "rollout.environment": ["objective=grpo", "--trust-code"], "rollout.environment.use": ["objective=grpo", "--trust-code"],
    "checkpoint.storage": [], **{f"{source}path": [] for source in SOURCES},
}  # fmt: skip
"""Keys that name a file or a directory, and what else makes them read."""
OWN_CODE = ("objective", "optim.kind", "rollout.environment", "rollout.environment.use")
"""Those with a file of code, and a class in it."""
REWARD_KEYS: dict[str, tuple[str, str]] = {
    "rewards[].use": ("{0}.py:score", ".py"), "rewards[].schema": ("{0}", ""), "rewards[].path": ("{0}", ""),
    "eval.metrics[].use": ("{0}.py:score", ".py"), "eval.metrics[].schema": ("{0}", ""),
}  # fmt: skip
"""Keys of a reward or metric with the form of a path, and its suffix."""
FOLDER_KEYS = {"diffusion.prior", "data.media_dir", *(f"{source}media_dir" for source in SOURCES)}
"""Keys of folders of pictures: the first needs a pipeline before it is read, and the others may be
any directory.
"""
FORMS = ("{0}", ["{0}"], "{0}.py:A", "file://{0}", [{"path": "{0}"}])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a config and rows."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    Path("c.yaml").write_text(
        "model: builtin:tiny\nadapter: {rank: 4}\ndata: {train: rows.jsonl}\nduration: 1 steps\noutput_dir:"
        " out\ndevice: cpu\n"
    )
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8)
    Path("run").mkdir()
    Path("run/metrics.jsonl").touch()
    return tmp_path


def make(kind: str, path: Path) -> str:
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch(mode=0)
    return str(path)


def refused(commands: Iterable[tuple[list[str], str]]) -> None:
    """Runs commands, a few at a time; each has to refuse the path that it is given with."""
    running: deque[tuple[list[str], str, Any]] = deque()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(Path.cwd() / "cache")}
    faults = []

    def finish() -> None:
        words, path, process = running.popleft()
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out = "it did not end"
        name = Path(path).name
        code = 6 if name.endswith("checkpoint.storage") else 2  # an error of the storage
        if process.returncode != code or "Traceback" in out or name not in out.replace("\n", ""):
            faults.append(f"{' '.join(words)}: {process.returncode}\n{out[-600:]}")

    for words, path in commands:
        process = start(
            [sys.executable, "-m", "unisono", *words], env=env, cwd=Path.cwd(), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        running.append((words, path, process))
        if len(running) >= TOGETHER:
            finish()
    while running:
        finish()
    assert not faults, "\n".join(faults)


def texts_of(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Every argument and option that takes text, with its command."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from texts_of(inner, (*words, name))
    for param in [] if hasattr(command, "commands") else command.params:
        kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
        if kind in (str, Path, list[str], list[Path]):
            yield words, command, param


def command_line(words: tuple[str, ...], command: Any, tried: Any, path: str) -> list[str]:
    """A command with a path for the argument or option that is tried.

    Options come first, for `run` passes on what follows its program.
    """
    name = tried.opts[0]
    options = SEVERAL if name == "--token-file" else MORE.get(words[0], [])
    options = ["--trust-code"] if name == "--tasks" else options
    tried_option = [name, path] if name.startswith("-") else []
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    also = ALSO.get(words[0], ()) if name != "--file" else ()
    return [
        *words,
        *(options if name not in options else []),
        *tried_option,
        *(
            path if a is tried else GIVEN[a.name]
            for a in arguments
            if a is tried or a.required or a.name in also
        ),
    ]


@pytest.mark.slow
def test_every_path_on_a_command_line(place: Path) -> None:
    commands, seen = [], set()
    for words, command, param in texts_of(parser()):
        seen.add(param.opts[0])
        if param.opts[0] in NO_PATHS or words[:2] == ("checkpoint", "export"):  # which is `export`
            continue
        is_function = param.opts[0] in FUNCTIONS
        for kind in KINDS:
            if kind != "directory" or param.opts[0] not in DIRECTORIES:
                name = f"{kind}-{'-'.join(words)}-{param.opts[0].strip('-')}"
                suffix = ".py" if is_function else ".yaml" if param.opts[0] == "--tasks" else ""
                path = make(kind, place / f"{name}{suffix}")
                line = command_line(words, command, param, f"{path}:score" if is_function else path)
                commands.append(([*line, "--trust-code"] if is_function else line, path))
    assert seen >= NO_PATHS
    assert len(commands) > 60
    refused(commands)


def fields_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Key and type of every key of a section and of those in it, also in lists:
    `data.train[].path`.
    """
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        kind = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        yield key, kind
        for inner, is_list in sections_in(kind):
            yield from fields_of(inner, f"{key}[]." if is_list else f"{key}.")


def sections_in(kind: Any, *, is_list: bool = False) -> Iterator[tuple[type[Section], bool]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind, is_list
    for inner in get_args(kind):
        yield from sections_in(inner, is_list=is_list or get_origin(kind) is list)


def path_form(kind: Any) -> Any:
    """How a value of a type holds a path; None if it cannot."""
    for form in FORMS:
        with contextlib.suppress(ValidationError):
            TypeAdapter(kind).validate_python(filled(form, "/a/b-c"), strict=True)
            return form
    return None


def filled(form: Any, path: str) -> Any:
    if isinstance(form, list):
        return [filled(item, path) for item in form]
    if isinstance(form, dict):
        return {key: filled(value, path) for key, value in form.items()}
    return form.format(path)


@pytest.mark.slow
def test_every_path_in_a_config(place: Path) -> None:
    forms = {key: path_form(kind) for key, kind in fields_of(RunConfig)}
    assert {key for key, form in forms.items() if form is not None} == {
        *CONFIG_KEYS,
        *NO_PATH_KEYS,
        *FOLDER_KEYS,
        *REWARD_KEYS,
    }
    commands = []
    for key, (form, suffix) in REWARD_KEYS.items():
        for kind in KINDS:
            path = make(kind, place / f"{kind}-{key}{suffix}")
            functions, _, name = key.partition("[].")
            entry = {"use": "model" if name == "path" else "json_schema"} | {
                name: form.format(path.removesuffix(suffix))
            }
            objective = ["objective=grpo"] if functions == "rewards" else ["data.eval=1"]
            overrides = [*objective, f"{functions}={json.dumps([entry])}", "data.train=rows.jsonl"]
            commands.append((["train", "c.yaml", *overrides, "--trust-code", "--dry-run"], path))
    for key, more in CONFIG_KEYS.items():
        source, is_source, _ = key.partition("[].")
        for kind in KINDS:
            if kind == "directory" and key in DIRECTORIES:
                continue
            suffix = ".py" if key in OWN_CODE else ""
            path = make(kind, place / f"{kind}-{key}{suffix}")
            usual: Any = [{"path": "{0}"}] if is_source else forms[key]
            value = filled("{0}.py:A" if key in OWN_CODE else usual, path.removesuffix(suffix))
            commands.append((["train", "c.yaml", f"{source}={json.dumps(value)}", *more, "--dry-run"], path))
    refused(commands)


@pytest.mark.parametrize("kind", ["pipe", "zero", "forbidden"])
def test_every_folder_of_pictures(kind: str, tmp_path: Path) -> None:
    """Whose keys are all read by one function."""
    with pytest.raises(DataError, match=f"{kind} is not a folder"):
        read_folder(
            make(kind, tmp_path / kind), DiffusionSection(), source=0, is_prior=True, key="", decoded={}
        )


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A context that no reader of a pipe or a device can stay in."""

    def end(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(int(LIMIT_S))
    try:
        with memory_limited(1 << 30):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


LF: dict[str, Any] = {
    "model_name_or_path": "builtin:tiny", "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "d", "template": "qwen",
    "output_dir": "out",
}  # fmt: skip
SD: dict[str, Any] = {
    "pretrained_model_name_or_path": "m", "train_data_dir": "d", "output_dir": "o", "network_module": "networks.lora",
    "sample_every_n_steps": 1,
}  # fmt: skip
READ = {
    "deepspeed",
    "fsdp_config",
    "dataset_dir",
    "dataset_config",
    "sample_prompts",
    "prompt_file",
    "positive_prompts",
}
"""Keys whose files are read when the file of another tool is translated."""


@pytest.mark.parametrize("table", [LF_KEYS, SD_KEYS], ids=["llamafactory", "sd-scripts"])
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_every_key_of_other_tools(table: Mapping[str, Key], kind: str, place: Path) -> None:
    """Whatever they hold, nothing waits; a file that would be read is refused by its name."""
    del place
    names = {name for name, key in table.items() if not key.words and key.type in ("text", "list", "any")}
    assert READ & names
    for name in sorted(names):
        suffix = {"dataset_dir": "", "dataset_config": ".toml"}.get(
            name, ".txt" if "prompt" in name else ".json"
        )
        path = make(kind, Path(f"{kind}-{name}{suffix}"))
        with limited():
            problems = problems_of(
                table, {name: path} | ({"fsdp": "full_shard"} if name == "fsdp_config" else {})
            )
        assert name not in READ or any(name in what for what in problems), (name, problems)


def problems_of(table: Mapping[str, Key], keys: dict[str, Any]) -> list[str]:
    try:
        if table is LF_KEYS:
            return [problem.what for problem in translate(LF | keys, {}, "x.yaml").problems]
        lines = (f"{name} = {json.dumps(value)}" for name, value in (SD | keys).items())
        Path("x.toml").write_text("\n".join(lines))
        return [problem.what for problem in read_sd_scripts(Path("x.toml")).problems]
    except UnisonoError as error:
        return [f"{problem.what} {problem.where} {problem.why}" for problem in error.problems]
