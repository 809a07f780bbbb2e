"""Tiny models and tokenizers for the tests of this room: random weights in float32, words as tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
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
