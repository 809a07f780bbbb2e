"""Templates of families that people fine-tune, from TRL, and small models that have them.

All share one vocabulary, in which the special tokens of all families are single tokens; each has
its own beginning and end of sequence.
"""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

POSITIONS = 2048
_TRL = Path(transformers.__file__).parent.with_name("trl") / "chat_templates"  # importing TRL takes seconds
_WORDS = [
    "the",
    "a",
    "red",
    "blue",
    "dog",
    "cat",
    "tree",
    "house",
    "runs",
    "sleeps",
    "near",
    "under",
    "old",
    "big",
    "fast",
    "slow",
    "happy",
]


@dataclass(frozen=True)
class Family:
    """A chat template.

    Attributes:
        template: its name in TRL.
        stop: the token that ends an answer.
        eos: the end of sequence, if it is a different token.
        bos: the beginning of sequence, if the template writes one.
        tail: what the template writes after the stop token of the last answer: TRL counts it in the
            loss, and the model never writes it.
    """

    template: str
    stop: str
    eos: str = ""
    bos: str | None = None
    tail: str = ""

    @property
    def text(self) -> str:
        """The template."""
        return (_TRL / f"{self.template}.jinja").read_text(encoding="utf-8")


FAMILIES = {
    "qwen2.5": Family("qwen2_5", "<|im_end|>", tail="\n"),
    "qwen3": Family("qwen3", "<|im_end|>", tail="\n"),
    "llama3.1": Family("llama3_1", "<|eot_id|>", bos="<|begin_of_text|>"),
    "gemma": Family("gemma", "<end_of_turn>", eos="<eos>", bos="<bos>", tail="\n"),
    "gemma3": Family("gemma3", "<end_of_turn>", eos="<eos>", bos="<bos>", tail="\n"),
    "phi3": Family("phi3", "<|end|>", eos="<|endoftext|>", tail="\n<|endoftext|>"),
    "deepseek-v3": Family("deepseekv3", "<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
    "gpt-oss": Family("gptoss", "<|return|>"),
    "command": Family("cohere2", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "lfm2.5": Family("lfm2_2_5", "<|im_end|>", bos="<|startoftext|>", tail="\n"),
}
_OTHERS = (
    "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>", "<|system|>",
    "<｜User｜>", "<｜Assistant｜>", "<|start|>", "<|channel|>", "<|message|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|pad|>",
)  # fmt: skip


def texts(number: int, *, seed: int) -> list[str]:
    """Short texts."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS, k=draw.randint(1, 7))) for _ in range(number)]


def write_models(folder: Path) -> tuple[Path, Path]:
    """A language model and a reward model, without a chat template."""
    ends = {token for one in FAMILIES.values() for token in (one.stop, one.eos, one.bos) if token}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[*sorted(ends), *_OTHERS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator([*texts(60, seed=0), *(one.text for one in FAMILIES.values())], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, pad_token_id=tokenizer.pad_token_id, num_labels=1,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    found = []
    for kind in (LlamaForCausalLM, LlamaForSequenceClassification):
        found.append(folder / kind.__name__)
        kind(config).save_pretrained(found[-1])
        tokenizer.save_pretrained(found[-1])
    return found[0], found[1]


def of_family(model: Path, folder: Path, family: Family) -> Path:
    """The model with the template and the tokens of a family."""
    shutil.copytree(model, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        model, eos_token=family.eos or family.stop, bos_token=family.bos
    )
    tokenizer.chat_template = family.text
    tokenizer.save_pretrained(folder)
    settings = {"eos_token_id": tokenizer.convert_tokens_to_ids([family.stop, family.eos or family.stop])}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
