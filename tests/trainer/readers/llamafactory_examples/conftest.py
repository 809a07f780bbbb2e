"""A working directory as users of LLaMA-Factory have one: its data, and tiny random models under
the names of its examples.
"""

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests import front_server
from tests.session_server import cache_with_kernels

EXAMPLES = Path(__file__).parent / "examples"
GOLDEN = Path(__file__).parents[1] / "llamafactory" / "golden"
QWEN3, LLAMA3 = "Qwen/Qwen3-4B-Instruct-2507", "meta-llama/Meta-Llama-3-8B-Instruct"
MODELS: dict[str, tuple[Any, Any]] = {
    QWEN3: (Qwen3Config, Qwen3ForCausalLM),
    LLAMA3: (LlamaConfig, LlamaForCausalLM),
    "Qwen/Qwen2-1.5B-Instruct": (Qwen2Config, Qwen2ForCausalLM),
    "models/llama3-8b-instruct-pro": (LlamaConfig, LlamaForCausalLM),
}
# As in LLaMA-Factory's own file of datasets, for the files that it ships.
DATASETS: dict[str, dict[str, Any]] = {
    "identity": {"file_name": "identity.json"},
    "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
    "glaive_toolcall_en_demo": {
        "file_name": "glaive_toolcall_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "tools": "tools"},
    },
    "dpo_en_demo": {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "kto_en_demo": {
        "file_name": "kto_en_demo.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
}

_SHORTENED = ("dpo_en_demo", "kto_en_demo")
"""Of these, tests/trainer/data has the whole rows."""
_MOST_CHARACTERS = 300


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Workspace:
    """A working directory."""

    root: Path

    def run(self, *words: str, given: str | None = None, **variables: str) -> Done:
        """Runs unisono in it."""
        done = front_server.run(
            [sys.executable, "-m", "unisono", *words],
            cwd=self.root,
            env=os.environ | {"XDG_CACHE_HOME": str(cache_with_kernels(self.root / ".cache")), **variables},
            input=given,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def must(self, *words: str, given: str | None = None) -> Done:
        """Runs unisono, which must end with 0."""
        done = self.run(*words, given=given)
        assert done.code == 0, done.stderr + done.stdout
        return done

    def example(self, name: str) -> str:
        """The path of an example file, from the working directory."""
        return f"examples/{name}.yaml"

    def lines(self, file: str) -> list[dict[str, Any]]:
        """A file of JSON lines."""
        return [json.loads(line) for line in (self.root / file).read_text(encoding="utf-8").splitlines()]


def write_rows(folder: Path) -> None:
    """The rows of LLaMA-Factory's demos that its golden cases have, with dataset_info.json."""
    folder.mkdir(parents=True)
    with gzip.open(GOLDEN / "golden.json.gz") as stream:
        rows = json.load(stream)["rows"]
    for name, entry in DATASETS.items():
        if name in _SHORTENED:
            rows[name] = _shortened(rows[name])
        path = folder / entry["file_name"]
        text = (
            "".join(json.dumps(row) + "\n" for row in rows[name])
            if path.suffix == ".jsonl"
            else json.dumps(rows[name])
        )
        path.write_text(text, encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps(DATASETS, indent=2))


def _shortened(value: Any) -> Any:
    """The same rows with less text: a step on thousands of tokens is most of what a short run
    costs.
    """
    if isinstance(value, dict):
        return {key: _shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner) for inner in value]
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


def write_model(folder: Path, name: str) -> None:
    """A random model of two layers, with the tokenizer of the golden cases."""
    settings, model = MODELS[name]
    torch.manual_seed(1)
    config = settings(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=16 if "pro" in name else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    model(config).save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(GOLDEN / "tokenizer").save_pretrained(folder / name)


@pytest.fixture(scope="session")
def prototype(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, models and examples; to be copied, not to be used."""
    root = tmp_path_factory.mktemp("llamafactory")
    shutil.copytree(EXAMPLES, root / "examples")
    write_rows(root / "data")
    for name in MODELS:
        write_model(root, name)
    return root


@pytest.fixture
def workspace(prototype: Path, tmp_path: Path) -> Workspace:
    """A fresh working directory."""
    shutil.copytree(prototype, tmp_path / "work")
    return Workspace(tmp_path / "work")


@pytest.fixture(scope="session")
def trained(prototype: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Workspace]:
    """A working directory in which an example has trained, for tests that only read there."""
    known: dict[str, Workspace] = {}

    def train(name: str) -> Workspace:
        if name not in known:
            root = tmp_path_factory.mktemp("trained") / "work"
            shutil.copytree(prototype, root)
            known[name] = Workspace(root)
            known[name].must("train", known[name].example(name))
        return known[name]

    return train
