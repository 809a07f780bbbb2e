"""Tokenizers that the tests of the data room make themselves, and what they share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>",
)  # fmt: skip
_TEXT = [
    "remind me on Tuesday at five to call the dentist", "what is the weather in Łódź?\n\nIt is 12 °C.", "<think>\nwell\n</think>",
    "There there, how are you today? I am fine. assistant user system tool\n", "日本語の文字 and emoji 🙂🙃",
]  # fmt: skip

MakeTokenizer = Callable[..., Any]


def save_tokenizer(
    folder: Path,
    *,
    template: str | None,
    eos: str | None = "<|im_end|>",
    trim: bool = False,
    vocab: int = 600,
) -> Path:
    """Writes a byte-level BPE tokenizer to a folder, with `template` as its chat template."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, additional_special_tokens=list(SPECIAL)
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the folder of a tokenizer with one of our templates (or None); made once a session."""
    made: dict[tuple[object, ...], Path] = {}

    def make(template: str | None = "chatml_tools", **settings: Any) -> Path:
        key = (template, *sorted(settings.items()))
        if key not in made:
            text = None if template is None else read_template(template)
            made[key] = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), template=text, **settings)
        return made[key]

    return make
