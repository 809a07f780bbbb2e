"""Rows with several answers in the chat templates of Phi-3, gpt-oss (harmony) and GLM-4.5: each
answer is located, with its end.

Run: .venv/bin/python -m pytest tests/trainer/data/test_model_templates.py
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unisono.trainer.data import Conversation, Message, ToolCall
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.token_table import Encoded
from unisono.trainer.data.tokenizer import load_tokenizer

_TRL = Path(transformers.__file__).parent.with_name("trl") / "chat_templates"  # importing TRL takes seconds
_HARMONY = ("<|return|>", "<|call|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>")
_GLM = ("<|endoftext|>", "<|user|>", "<|observation|>", "[gMASK]", "<sop>", "<|assistant|>", "<|system|>")
_PHI = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


@dataclass(frozen=True)
class Model:
    """A template in TRL's package.

    Attributes:
        special: special tokens; the first is the end of sequence.
        stops: how many of them generation_config.json lists, as that of the model does.
        answer: what the model writes before a text.
        end: after the last answer.
        earlier_end: after an earlier answer.
    """

    special: tuple[str, ...]
    stops: int
    answer: str
    end: str
    earlier_end: str


MODELS = {
    "phi3": Model(_PHI, 1, "", "<|end|>", "<|end|>"),
    "phi3_5": Model(_PHI, 1, "", "<|end|>", "<|end|>"),
    "glm4moe": Model(_GLM, 3, "\n<think></think>\n", "<|user|>", "<|user|>"),
    "glm4moe_training": Model(_GLM, 3, "\n<think></think>\n", "<|user|>", "<|user|>"),
    "gptoss": Model(_HARMONY, 3, "<|channel|>final<|message|>", "<|return|>", ""),
    "gptoss_training": Model(_HARMONY, 3, "<|start|>assistant<|channel|>final<|message|>", "<|return|>", ""),
}

MakeEncoder = Callable[..., Encoder]


@pytest.fixture(scope="module")
def make_encoder(tmp_path_factory: pytest.TempPathFactory) -> MakeEncoder:
    """Gives an encoder with the template and the special tokens of a model, and a token for each
    byte.
    """
    folders: dict[str, Path] = {}

    def make(name: str, **settings: Any) -> Encoder:
        if name not in folders:
            folders[name] = _save_tokenizer(tmp_path_factory.mktemp(name), name)
        tokenizer = load_tokenizer(folders[name], trust_remote_code=False)
        return Encoder(tokenizer, directory=folders[name], **settings)

    return make


def _save_tokenizer(folder: Path, name: str) -> Path:
    model = MODELS[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=model.special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": list(model.special)})
    tokenizer.chat_template = (_TRL / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    stops = tokenizer.convert_tokens_to_ids(list(model.special[: model.stops]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
    return folder


def turns(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def trained(encoder: Encoder, messages: list[Message], tools: list[Any] | None = None) -> list[str]:
    """The text of each stretch of loss tokens; the tokens of the row are those of
    apply_chat_template, up to a stop token at the end.
    """
    (row,) = encoder.encode([Conversation(messages, tools)])
    assert isinstance(row, Encoded), row
    text = encoder.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    ids = row.ids.tolist()
    assert encoder.tokenizer.decode(ids, skip_special_tokens=False).startswith(text)
    parts: list[list[int]] = []
    for place, target in enumerate(row.targets.tolist()):
        if target and not row.targets[place - 1]:
            parts.append([])
        if target:
            parts[-1].append(ids[place])
    return [encoder.tokenizer.decode(part, skip_special_tokens=False) for part in parts]


@pytest.mark.parametrize("name", MODELS)
def test_each_answer_of_a_row_is_found_and_ends_as_the_model_should_end_it(
    make_encoder: MakeEncoder, name: str
) -> None:
    model, messages = MODELS[name], turns("hello", "there there", "and?", "fine", "really?", "yes")
    encoder = make_encoder(name)
    earlier, last = model.earlier_end, model.end
    expected = [f"there there{earlier}", f"fine{earlier}", f"yes{last}"]
    assert trained(encoder, messages) == [model.answer + text for text in expected]
    assert bool(encoder.warnings) is (earlier != last)
    assert trained(make_encoder(name, loss_on="last-answer"), messages) == [f"{model.answer}yes{last}"]


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_answer_whose_thought_harmony_drops_does_not_count(make_encoder: MakeEncoder, name: str) -> None:
    """The thought of the last answer is rendered, and counts."""
    messages = turns("hello", "there", "and?", "fine", "so?", "yes")
    messages[3]["thinking"], messages[5]["thinking"] = "hm", "well"
    begin = MODELS[name].answer
    thought = begin.replace("final<|message|>", "analysis<|message|>well<|end|>")
    last = f"{thought}<|start|>assistant<|channel|>final<|message|>yes<|return|>"
    assert trained(make_encoder(name), messages) == [f"{begin}there", last]
    assert trained(make_encoder(name, thoughts="ignore"), messages) == [f"{begin}there", f"{begin}fine", last]


CALL: ToolCall = {"type": "function", "function": {"name": "weather", "arguments": {"city": "K"}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize(
    ("name", "call", "answer"),
    [
        (
            "gptoss",
            ' to=functions.weather<|channel|>commentary json<|message|>{"city": "K"}<|call|>',
            "12 °C",
        ),
        (
            "glm4moe",
            "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>K</arg_value>\n</tool_call><|observation|>",
            "12 °C",
        ),
    ],
)
def test_a_call_ends_with_the_stop_token_of_calls(
    make_encoder: MakeEncoder, name: str, call: str, answer: str
) -> None:
    messages: list[Message] = [
        {"role": "user", "content": "how warm?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": answer},
    ]
    model = MODELS[name]
    assert trained(make_encoder(name), messages, TOOLS) == [call, f"{model.answer}{answer}{model.end}"]


@pytest.mark.parametrize(
    ("name", "opening"), [("glm4moe", ["[gMASK]", "<sop>"]), ("phi3", []), ("gptoss", [])]
)
def test_the_opening_is_the_special_tokens_before_the_first_message(
    make_encoder: MakeEncoder, name: str, opening: list[str]
) -> None:
    encoder = make_encoder(name)
    assert encoder.tokenizer.convert_ids_to_tokens(list(encoder.opening)) == opening
    (row,) = encoder.encode([Conversation(turns("hello", "there"))])
    assert isinstance(row, Encoded)
    assert tuple(row.ids[: len(opening)].tolist()) == encoder.opening
