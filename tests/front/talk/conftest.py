"""Tiny models and tokenizers for the tests of this room: random weights in float32, words as
tokens.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.session_server import cache_with_kernels
from unisono.base.events import Reporter
from unisono.base.files import write_json
from unisono.base.messages import Message
from unisono.guard.places.ranks import DeviceChoice
from unisono.trainer.config import RunConfig
from unisono.trainer.config.own_code import own_code_digests
from unisono.trainer.plan import DataSummary, ModelFacts, PlanInputs, RunPlan, resolve_plan
from unisono.trainer.plan.task_requests import PrepareRequest
from unisono.trainer.task import data_tasks
from unisono.trainer.training.front_io import StopRequest
from unisono.trainer.training.rank_run import run_plan

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what day is it today",
    "call me on tuesday at five please",
]


def _tokenizer() -> Any:
    """A byte-level tokenizer of 300 tokens with a chat template; `<|end|>` ends an answer."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXT * 4, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|end|>", additional_special_tokens=special[2:]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _model(*, seed: int = 0, tied: bool = True, vocabulary: int = 300) -> Any:
    """A Llama of two layers whose answers differ from prompt to prompt."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.3,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    torch.set_rng_state(state)
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Makes a model: `seed`, `tied`, `vocabulary`."""
    return _model


@pytest.fixture
def make_tokenizer() -> Callable[[], Any]:
    """Makes a tokenizer."""
    return _tokenizer


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model with its tokenizer in the Hugging Face layout."""
    directory = tmp_path / "tiny"
    _model().save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


class Listening(Reporter):
    """A reporter that keeps its messages."""

    def __init__(self) -> None:
        super().__init__(None)
        self.messages: list[dict[str, Any]] = []

    def send(self, message: Message) -> None:
        self.messages.append({**message})

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == kind]


@pytest.fixture
def listening() -> Listening:
    return Listening()


@dataclass
class Trained:
    """A run in its directory, as the front and the worker leave it."""

    directory: Path
    plan: RunPlan
    result: dict[str, Any]
    rows: Path

    def unfinish(self) -> None:
        """Makes it look as if it had been killed after its last checkpoint."""
        (self.directory / "result.json").unlink()


@pytest.fixture(autouse=True, scope="session")
def own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The key that signs checkpoints is one of the tests, not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        patch.setenv("XDG_CACHE_HOME", str(cache_with_kernels(tmp_path_factory.mktemp("cache"))))
        yield


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """Twenty-four rows with answers."""
    draw = random.Random(0)
    words = " ".join(TEXT).split()
    rows = [
        {
            "prompt": f"{i} {' '.join(draw.choices(words, k=draw.randint(1, 6)))}",
            "completion": " ".join(draw.choices(words, k=3)),
        }
        for i in range(24)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def train_here(model_dir: Path, rows_file: Path, tmp_path: Path) -> Callable[..., Trained]:
    """A function that trains four steps in this process, with checkpoints at 2 and 4; sections as
    keywords.
    """
    runs = iter(range(100))

    def train(**sections: Any) -> Trained:
        out = tmp_path / f"run-{next(runs)}"
        out.mkdir()
        raw: dict[str, Any] = {
            "model": {"path": str(model_dir), "dtype": "float32"}, "adapter": {"rank": 4, "alpha": 8},
            "data": {"train": str(rows_file), "max_length": 64}, "optim": {"lr": 2e-2}, "duration": "4 steps",
            "batch": {"global": 8}, "checkpoint": {"every": "2 steps"}, "device": "cpu", "output_dir": str(out),
        }  # fmt: skip
        config = RunConfig.model_validate(raw | sections)
        prepared = data_tasks.prepare(PrepareRequest(config, tmp_path / "cache", str(out)), Listening())
        plan = resolve_plan(
            PlanInputs(
                config=config, run_id="test", output_dir=str(out), host="here", threads=1, threads_origin="test",
                device=DeviceChoice(kind="cpu", name="cpu", memory_bytes=10**10, bfloat16=True),
                model=ModelFacts.model_validate(prepared["model"]), data=DataSummary.model_validate(prepared["data"]),
                resume=None, resume_reason="", code_digests=own_code_digests(config),
            )
        )  # fmt: skip
        result = run_plan(plan, Listening(), StopRequest())
        write_json(out / "plan.json", plan.to_json())
        write_json(out / "config.yaml", {})
        write_json(out / "result.json", {"schema": 1, "outcome": result["outcome"]})
        return Trained(out, plan, result, rows_file)

    return train
