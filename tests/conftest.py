"""Runs whole plans in this process, on a random model of 30,000 parameters, so that one import of
torch serves many runs.
"""

import gc
import json
import random
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer

from tests import needs
from tests.jobs.nodes.network_namespaces import Ground, Loopback, Namespaces, why_no_namespaces
from tests.needs import pytest_addoption, pytest_sessionfinish
from tests.processes import mark, pytest_runtest_protocol, refuse_processes
from tests.session_server import (
    pytest_collection_finish,
    pytest_configure,
    pytest_terminal_summary,
    pytest_unconfigure,
)
from tests.sharing import Sharing, announce_bytecode, is_long, pytest_configure_node, wait_for_bytecode
from unisono.base.child import loading_modules
from unisono.base.events import Reporter
from unisono.base.messages import Message
from unisono.trainer.config import RunConfig
from unisono.trainer.readers import register_templates
from unisono.trainer.worker.injected_faults import faults_of

with loading_modules():
    import torch
    from hypothesis import HealthCheck, settings
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from unisono.guard.places.ranks import DeviceChoice
    from unisono.trainer.config.own_code import own_code_digests
    from unisono.trainer.plan import DataSummary, ModelFacts, PlanInputs, ResumePoint, RunPlan, resolve_plan
    from unisono.trainer.plan.task_requests import PrepareRequest
    from unisono.trainer.task import data_tasks
    from unisono.trainer.training.front_io import StopRequest
    from unisono.trainer.training.rank_run import run_plan

register_templates()  # as each task and rank does at its start

__all__ = [  # hooks of files beside this one
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_unconfigure",
]

# How long an example takes says how busy the machine is. What is checked before a change lands is
# the same each time; `make test-long` draws anew.
_TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("landing", _TIMELESS, derandomize=True)
settings.register_profile("drawn", _TIMELESS)
settings.load_profile("landing")

# A shell without job control starts `make test &` with SIGINT and SIGQUIT ignored, and nohup
# ignores SIGHUP. Programs that the tests start would inherit that, and tests of these signals fail.
# A handler is reset when a program is started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)

_NODES = 4
_WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "four",
    "cat",
    "dog",
    "bird",
    "sings",
    "runs",
    "sleeps",
    "under",
    "over",
    "the",
    "a",
    "house",
    "tree",
]
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class Trained:
    """What a run left."""

    directory: Path
    plan: RunPlan
    result: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics if "loss" in line]

    def weights(self) -> dict[str, torch.Tensor]:
        """The final weights that were written."""
        (file,) = [*self.directory.glob("adapter/*.safetensors"), *self.directory.glob("model/*.safetensors")]
        return load_file(file)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == kind]


class Listening(Reporter):
    """A reporter that keeps its messages."""

    def __init__(self, on_message: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__(None)
        self.messages: list[dict[str, Any]] = []
        self._on_message = on_message

    def send(self, message: Message) -> None:
        self.messages.append({**message})
        if self._on_message is not None:
            self._on_message(self.messages[-1])


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a chat template of its own."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(_WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = _TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=fast.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty rows of different lengths."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(low, high)))

    rows = [{"prompt": f"{i} {text(1, 12)}", "completion": text(1, 9)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def pair_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Forty pairs to train on and twelve others; chosen answers end with a word that the rejected
    ones lack.
    """
    draw, folder = random.Random(3), tmp_path_factory.mktemp("pairs")

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(low, high)))

    for name, count in (("train", 40), ("unseen", 12)):
        rows = [
            {"prompt": f"{i} {text(1, 9)}", "chosen": f"{text(1, 6)} tree", "rejected": f"{text(1, 6)} dog"}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl", folder / "unseen.jsonl"


@pytest.fixture(scope="session")
def rated_files(pair_files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The prompts of these pairs with one rated answer each: two of three are the chosen one, and
    desirable.
    """
    folder = tmp_path_factory.mktemp("rated")
    for file in pair_files:
        pairs = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [
            {
                "prompt": pair["prompt"],
                "completion": pair["chosen" if i % 3 else "rejected"],
                "label": bool(i % 3),
            }
            for i, pair in enumerate(pairs)
        ]
        (folder / file.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl", folder / "unseen.jsonl"


@pytest.fixture(scope="session")
def image_sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The sections of a config for six steps on twelve pictures, with a tiny Stable Diffusion
    pipeline.
    """
    needs.package("diffusers")
    needs.package("PIL")
    from tests.trainer.diffusion.making import write_pictures, write_pipeline

    root = tmp_path_factory.mktemp("images")
    sizes = ((32, 32), (48, 24), (24, 48), (40, 32))
    write_pictures(root / "pictures" / "1_tile", ["red", "blue", "green"], sizes)
    return {
        "objective": "diffusion", "model": {"path": str(write_pipeline(root)), "dtype": "float32"},
        "adapter": {"rank": 4, "alpha": 2, "targets": "unet"}, "data": {"train": str(root / "pictures"), "resolution": 32},
        "diffusion": {"bucket_step": 8, "min_side": 16, "max_side": 64, "caption_dropout": 0.3}, "batch": {"global": 6},
        "duration": "6 steps", "device": "cpu",
    }  # fmt: skip


@pytest.fixture
def train_here(model_dir: Path, rows_file: Path, tmp_path: Path) -> Callable[..., Trained]:
    """A function that trains in this process: config sections as keywords, laid over a small
    default.
    """
    return training_in(tmp_path, model_dir=model_dir, rows_file=rows_file)


@pytest.fixture(scope="session")
def train_in(model_dir: Path, rows_file: Path) -> Callable[[Path], Callable[..., Trained]]:
    """The same for fixtures that are made once: it takes their folder."""
    return lambda folder: training_in(folder, model_dir=model_dir, rows_file=rows_file)


def training_in(folder: Path, *, model_dir: Path, rows_file: Path) -> Callable[..., Trained]:
    """The same for a folder of one's own, which may outlive a test."""
    runs = iter(range(1000))

    def train(
        *,
        faults: dict[str, Any] | None = None,
        resume: tuple[int, Path] | None = None,
        directory: Path | None = None,
        on_message: Callable[[dict[str, Any], StopRequest], None] | None = None,
        snapshot_fd: int | None = None,
        **sections: Any,
    ) -> Trained:
        out = directory or folder / f"run-{next(runs)}"
        out.mkdir(exist_ok=True)
        raw: dict[str, Any] = {
            "model": {"path": str(model_dir), "dtype": "float32"},
            "adapter": {"rank": 4, "alpha": 8},
            "data": {"train": str(rows_file), "max_length": 64},
            "optim": {"lr": 1e-2},
            "duration": "6 steps",
            "batch": {"global": 8},
            "device": "cpu",
            "output_dir": str(out),
        }
        for key, value in sections.items():
            raw[key] = (
                {**raw[key], **value} if isinstance(value, dict) and isinstance(raw.get(key), dict) else value
            )
        config = RunConfig.model_validate(raw)
        stop = StopRequest()
        report = Listening((lambda message: on_message(message, stop)) if on_message else None)
        prepared = data_tasks.prepare(PrepareRequest(config, folder / "cache", str(out)), report)
        plan = resolve_plan(
            PlanInputs(
                config=config, run_id="test", output_dir=str(out), host="here", threads=1, threads_origin="test",
                device=DeviceChoice(kind="cpu", name="cpu", memory_bytes=10**10, bfloat16=True),
                model=ModelFacts.model_validate(prepared["model"]), data=DataSummary.model_validate(prepared["data"]),
                resume=ResumePoint(step=resume[0], path=str(resume[1])) if resume else None, resume_reason="",
                faults=faults or {}, code_digests=own_code_digests(config),
            )
        )  # fmt: skip
        result = run_plan(plan, report, stop, snapshot_fd=snapshot_fd, hooks=faults_of(plan))
        return Trained(out, plan, result, report.messages)

    return train


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Namespaces, or loopback where they cannot be had."""
    made: Ground = (
        Loopback() if why_no_namespaces() else Namespaces(_NODES, tmp_path_factory.mktemp("ground"))
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the places of all jobs keep, each for itself: prepared data, and the user's key."""
    return tmp_path_factory.mktemp("caches")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing:
    """Whole files are given to a process, and some files together."""
    return Sharing(config, log)


@pytest.hookimpl(tryfirst=True)  # before a selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side (`-n`), files with what takes long begin first, so that no process is left alone
    with one at the end.
    """
    mark(items)
    if "not processes" in str(config.getoption("-m")):
        refuse_processes()
    if not hasattr(config, "workerinput"):
        return
    torch.set_num_threads(1)  # more would only wait for each other
    dear = {
        item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("ranks")
    }
    items.sort(key=lambda item: (not is_long(item.nodeid), item.path not in dear))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Python's garbage collector never looks at the million objects of modules and tests; and each
    test is compiled once.
    """
    wait_for_bytecode(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        announce_bytecode(session.config)
        gc.freeze()
        gc.enable()
