"""Makes what the comparison trains on: a tokenizer, two random Llama models (12 M and 135 M
parameters), Alpaca-like rows, pairs.

Row lengths are lognormal, as those of instruction data are; both answers of a pair have a length of
their own. Everything follows from a seed.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor"
    " %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MODELS = {
    "m15": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "m135": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip


class Writer:
    """Writes words that occur with Zipf's frequencies."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        onsets = [
            "b",
            "c",
            "d",
            "f",
            "g",
            "h",
            "j",
            "k",
            "l",
            "m",
            "n",
            "p",
            "r",
            "s",
            "t",
            "v",
            "w",
            "z",
            "ch",
            "sh",
            "th",
            "st",
            "tr",
            "pl",
        ]
        syllables = [c + v for c in onsets for v in ["a", "e", "i", "o", "u", "ai", "ou", "ea"]]
        self.words = [
            "".join(self.random.choices(syllables, k=self.random.choice([1, 2, 2, 3, 3, 4])))
            for _ in range(20_000)
        ]
        frequencies = 1 / np.arange(1, 20_001)
        self.frequencies = frequencies / frequencies.sum()

    def text(self, n_words: int) -> str:
        """Sentences of `n_words` words."""
        words = []
        for i, index in enumerate(self.numpy.choice(20_000, size=n_words, p=self.frequencies)):
            word = self.words[index]
            if i % 11 == 0:
                word = word.capitalize()
            elif i % 11 == 10:
                word += self.random.choice(".,.,?;")
            words.append(word)
        return " ".join(words)

    def length(self, median: float, sigma: float, low: int, high: int) -> int:
        """A lognormal length in tokens."""
        return int(np.clip(self.numpy.lognormal(np.log(median), sigma), low, high))


def make(
    out: Path, *, rows: int = 2000, seed: int = 0, shapes: dict[str, dict[str, Any]] | None = None
) -> None:
    """Writes a model for each of the shapes (m15/ and m135/), tokenizer/, alpaca.jsonl and
    pairs.jsonl into `out`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    writer = Writer(seed)
    corpus = [writer.text(200) for _ in range(8000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
        pad_token="<|pad|>",
        model_max_length=2048,
    )
    fast.chat_template = CHATML
    fast.save_pretrained(out / "tokenizer")
    for name, shape in (MODELS if shapes is None else shapes).items():
        torch.manual_seed(seed)
        config = LlamaConfig(
            **shape, max_position_embeddings=2048, bos_token_id=0, eos_token_id=2, pad_token_id=3
        )
        LlamaForCausalLM(config).save_pretrained(out / name)
        fast.save_pretrained(out / name)
    tokens_per_word = len(tokenizer.encode(corpus[0]).ids) / 200
    with (out / "alpaca.jsonl").open("w") as file:
        for _ in range(rows):
            prompt, answer = writer.length(55, 0.7, 20, 300), writer.length(70, 0.95, 5, 400)
            has_input = writer.random.random() < 0.4
            row = {
                "instruction": writer.text(max(3, int(prompt * (0.4 if has_input else 1) / tokens_per_word))),
                "input": writer.text(max(3, int(prompt * 0.6 / tokens_per_word))) if has_input else "",
                "output": writer.text(max(2, int(answer / tokens_per_word))),
            }
            file.write(json.dumps(row) + "\n")
    with (out / "pairs.jsonl").open("w") as file:
        for _ in range(rows):
            asked = writer.text(max(3, int(writer.length(55, 0.7, 20, 300) / tokens_per_word)))
            chosen, rejected = (
                writer.text(max(2, int(writer.length(70, 0.95, 5, 400) / tokens_per_word))) for _ in range(2)
            )
            file.write(json.dumps({"prompt": asked, "chosen": chosen, "rejected": rejected}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)
