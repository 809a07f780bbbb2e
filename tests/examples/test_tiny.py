"""The built-in model is small, whole, and loads as any other.

Run: pytest tests/examples/test_tiny.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from make_tiny import CHAT_TEMPLATE, EOS, MODEL
from unisono.trainer.model.directory import locate_model

TINY = locate_model("builtin:tiny")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype="auto").eval()


def test_all_of_it_is_at_most_eight_megabytes() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 8_000_000


def test_it_is_the_model_that_its_script_describes(model: Any) -> None:
    settings = json.loads((TINY / "config.json").read_text("utf-8"))
    assert {key: settings[key] for key in MODEL} == MODEL
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 4_000_000


def test_its_card_reports_how_it_was_made() -> None:
    card = (TINY / "README.md").read_text("utf-8")
    assert "python scripts/make_tiny.py" in card
    assert "scripts/pretraining_text.py" in card
    assert (Path(__file__).parents[2] / "scripts" / "pretraining_text.py").is_file()


def test_its_chat_template_ends_each_answer_with_the_end_token(tokenizer: Any) -> None:
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    assert tokenizer.get_chat_template() == CHAT_TEMPLATE
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == f"one\ntwo{EOS}three\n"


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = 'Grüße, 世界! {"a": [1.5, "\\n"]}\t~'
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text


def test_it_has_learned_to_copy(model: Any, tokenizer: Any) -> None:
    prompt = 'say: golden river tent. said: "'
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(written[0, ids.shape[1] :]) == 'golden river tent"'
